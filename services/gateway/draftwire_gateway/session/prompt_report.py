"""How far the log-probabilities of a prompt have come. Survives the verifiers that compute them."""

from draftwire.errors import ProtocolViolationError
from draftwire.requests.logprobs import PromptPart


class PromptReport:
    """Puts parts together, each token once: a verifier that takes over from another one begins anew."""

    def __init__(self, prompt_ids: list[int], is_wanted: bool) -> None:
        """Has nothing yet.

        Args:
            prompt_ids: the prompt. Of its first token nothing is said.
            is_wanted: whether anything is to be reported.
        """
        self._prompt_ids = prompt_ids
        self._position = 1 if is_wanted else len(prompt_ids)

    @property
    def is_missing(self) -> bool:
        """Whether tokens are to come."""
        return self._position < len(self._prompt_ids)

    def take(self, part: PromptPart) -> PromptPart | None:
        """Returns what is new in a part; None if nothing is.

        Raises:
            ProtocolViolationError: tokens are left out, or are not the prompt's.
        """
        start = part.first_position
        expected = self._prompt_ids[start : start + len(part.tokens)]
        if start > self._position or [token.token_id for token in part.tokens] != expected:
            raise ProtocolViolationError("log-probabilities of other tokens than the prompt's next ones")
        first, self._position = self._position, max(self._position, start + len(part.tokens))
        new = part.tokens[first - start :]
        return PromptPart(first, new) if new else None
