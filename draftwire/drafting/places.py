"""What the target's sampling parameters make of the next place of a block that is being drafted."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from draftwire.drafting.drawing import Drawer
from draftwire.drafting.strategy import DraftRequest
from draftwire.errors import InvalidRequestError
from draftwire.method.sampling import Span, TokenEdits


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
    text = [*committed, *drawer.token_ids(index)] if request.sampling.penalizes else ()
    position = drawer.position(index)
    mask = mask_after(request, committed, drawer.token_ids(index)) if request.automaton is not None else None
    stops = request.stop_token_ids
    return Span(request.sampling, 1, text, request.prompt_len, stops, position, mask, edits(request))


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
