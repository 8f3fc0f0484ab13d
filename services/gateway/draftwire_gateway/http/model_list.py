"""GET /v1/models: the target, under each of its names. Drafters only draft, and are no models of their own here."""

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.refusal import RefusedError

ListDrafters = Callable[[], Collection[str]]
"""Returns the names of the models of the connected drafters."""


class ModelList:
    """The models that can be asked."""

    def __init__(self, core: GatewayCore, drafters: ListDrafters) -> None:
        """The current time becomes the models' creation time."""
        self._core = core
        self._drafters = drafters
        self._since = int(time.time())

    def all(self) -> dict[str, Any]:
        """Returns all models."""
        return {"object": "list", "data": list(self._objects())}

    def one(self, name: str) -> dict[str, Any]:
        """Returns the model of a name.

        Raises:
            RefusedError: there is no model of this name.
        """
        for model in self._objects():
            if model["id"] == name:
                return model
        raise RefusedError(404, "there is no such model here", code="model_not_found", param="model")

    def _objects(self) -> Iterator[dict[str, Any]]:
        core, target = self._core, self._core.description
        own = {
            "vocab_size": target.vocab_size,
            "dtype": target.dtype,
            "revision": target.revision,
            "num_speculative_tokens": core.defaults.num_speculative_tokens,
            "max_speculative_tokens": core.defaults.max_speculative_tokens,
            "rejection_sample_method": core.defaults.rule,
            "drafters": sorted(self._drafters()),
        }
        for name in core.model_names:
            yield {
                "id": name,
                "object": "model",
                "created": self._since,
                "owned_by": "draftwire",
                "root": target.name,
                "max_model_len": target.context_length,
                "draftwire": own,
            }
