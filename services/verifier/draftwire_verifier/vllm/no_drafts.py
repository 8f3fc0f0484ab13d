"""The drafter that vLLM is given: it makes vLLM reserve room for draft tokens, and drafts nothing. No vLLM here."""

from collections.abc import Sequence
from typing import Any


class NoDrafts:
    """`speculative_config.model` of the engine."""

    def __init__(self, config: Any) -> None:
        """Takes vLLM's configuration."""

    def load_model(self, model: Any) -> None:
        """Has no weights."""

    def propose(self, sampled_token_ids: Sequence[Any], *arguments: Any, **options: Any) -> list[list[int]]:
        """Returns no tokens for each request."""
        return [[] for _ in sampled_token_ids]
