"""Masks of a form at the positions of a block: made in the block's step or, where they are slow, before it."""

from collections.abc import Sequence

from draftwire.errors import DraftwireError, InvalidRequestError
from draftwire.method.block_shape import BlockShape
from draftwire.requests.automaton import Automaton, BlockMasks
from draftwire.verification.deciding import ShapeDecider

MadeMasks = BlockMasks | DraftwireError
"""Masks at the positions of a block, or why the text fails."""


def make_masks(
    automaton: Automaton, generated_ids: Sequence[int], draft_tokens: Sequence[int], tree: BlockShape | None = None
) -> MadeMasks:
    """Returns the masks after the generated tokens and after each draft token, or the error that ends the text.

    Args:
        automaton: of the form. Used on one thread at a time.
        generated_ids: the committed tokens without the prompt.
        draft_tokens: of the block; none for plain decoding.
        tree: the shape of the block, if it is no chain.
    """
    try:
        if tree is None:
            return automaton.along(generated_ids, draft_tokens)
        decider: ShapeDecider = tree.decider
        return decider.masks(automaton, generated_ids, draft_tokens, tree)
    except InvalidRequestError as error:
        return error
