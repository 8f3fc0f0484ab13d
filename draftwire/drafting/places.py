"""Applies the target's sampling parameters to the next place of a block that is being drafted."""

from collections.abc import Callable, Sequence
from operator import is_

import numpy as np
from numpy.typing import NDArray

from draftwire.drafting.drawing import Drawer
from draftwire.drafting.strategy import DraftRequest
from draftwire.errors import InvalidRequestError
from draftwire.method.sampling import Span, TokenEdits, first_penalized
from draftwire.requests.parameters import SamplingParams


class KeptEdits:
    """The edits of the latest request. Those of a session share their parameters."""

    def __init__(self) -> None:
        self._parameters: tuple[SamplingParams, frozenset[int]] | None = None
        self._edits = TokenEdits(SamplingParams())

    def of(self, request: DraftRequest) -> TokenEdits:
        """Returns the edits of a request."""
        parameters = request.sampling, request.stop_token_ids
        if self._parameters is None or not all(map(is_, self._parameters, parameters)):  # which may be long to compare
            self._parameters, self._edits = parameters, TokenEdits(*parameters)
        return self._edits


def span_of_next(
    drawer: Drawer,
    index: int,
    request: DraftRequest,
    committed: Sequence[int],
    edits: Callable[[DraftRequest], TokenEdits],
) -> Span:
    """Returns the span of a block's next place.

    Args:
        drawer: draws the block.
        index: of the block in the drawer.
        request: the block's.
        committed: all tokens before the block; read only if penalties or a form look at them.
        edits: returns those of a request.
    """
    first = first_penalized(request.sampling, request.prompt_len)
    text = [*committed[first:], *drawer.token_ids(index)] if request.sampling.penalizes else ()
    prompt_len, text_len = request.prompt_len - first, drawer.position(index) - first
    mask = mask_after(request, committed, drawer.token_ids(index)) if request.automaton is not None else None
    return Span(request.sampling, 1, text, prompt_len, request.stop_token_ids, text_len, mask, edits(request))


def mask_after(request: DraftRequest, committed: Sequence[int], drawn: Sequence[int]) -> NDArray[np.uint8] | None:
    """Returns the mask of the token after committed and drawn ones; None, which allows all, without a form or if it
    cannot be followed.
    """
    if request.automaton is None:
        return None
    try:
        return request.automaton.last_mask(committed[request.prompt_len :], drawn)
    except InvalidRequestError:  # the form may need tokens that only the target's larger vocabulary has
        return None
