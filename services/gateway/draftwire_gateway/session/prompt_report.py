"""Progress of a prompt's log-probabilities, which continues when the session moves to another verifier."""

from draftwire.errors import ProtocolViolationError
from draftwire.requests.logprobs import PromptPart


class PromptReport:
    """Reports each token of a prompt once: a verifier that takes over starts again at the first token."""

    def __init__(self, prompt_ids: list[int], is_wanted: bool) -> None:
        """Starts at the second token: the first one of a prompt has no log-probability."""
        self._prompt_ids = prompt_ids
        self._position = 1 if is_wanted else len(prompt_ids)

    @property
    def is_missing(self) -> bool:
        """Whether log-probabilities are missing."""
        return self._position < len(self._prompt_ids)

    def take(self, part: PromptPart) -> PromptPart | None:
        """Returns the new tokens of a part; None if all were reported before.

        Raises:
            ProtocolViolationError: tokens are missing, or are not those of the prompt.
        """
        start = part.first_position
        expected = self._prompt_ids[start : start + len(part.tokens)]
        if start > self._position or [token.token_id for token in part.tokens] != expected:
            raise ProtocolViolationError("log-probabilities of other tokens than the prompt's next ones")
        first, self._position = self._position, max(self._position, start + len(part.tokens))
        new = part.tokens[first - start :]
        return PromptPart(first, new) if new else None
