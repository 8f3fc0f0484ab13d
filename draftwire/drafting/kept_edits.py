"""Edits of the logits by a session's requests, kept from one draft block to the next."""

from operator import is_

from draftwire.drafting.strategy import DraftRequest
from draftwire.method.sampling import TokenEdits
from draftwire.requests.parameters import SamplingParams


class KeptEdits:
    """The edits of the latest request. Those of a session share their parameters."""

    def __init__(self) -> None:
        """Keeps nothing yet."""
        self._parameters: tuple[SamplingParams, frozenset[int]] | None = None
        self._edits = TokenEdits(SamplingParams())

    def of(self, request: DraftRequest) -> TokenEdits:
        """Returns the edits of a request."""
        parameters = request.sampling, request.stop_token_ids
        if self._parameters is None or not all(map(is_, self._parameters, parameters)):  # which may be long to compare
            self._parameters, self._edits = parameters, TokenEdits(*parameters)
        return self._edits
