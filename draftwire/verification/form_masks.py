"""Masks of a form at the positions of a block: made in the block's step or, where they are slow, before it."""

from collections.abc import Sequence

from draftwire.errors import DraftwireError, InvalidRequestError
from draftwire.method.token_tree import TokenTree
from draftwire.requests.automaton import Automaton, BlockMasks, TreeMasks

FormMasks = BlockMasks | TreeMasks
"""Masks at the positions of a block."""
MadeMasks = FormMasks | DraftwireError
"""The same, or why the text fails."""


def make_masks(
    automaton: Automaton, generated_ids: Sequence[int], draft_tokens: Sequence[int], tree: TokenTree | None = None
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
        leaves = [node for node in tree.post_order if not tree.children(node)]
        return automaton.along_paths(generated_ids, draft_tokens, [tree.path_to(leaf) for leaf in leaves])
    except InvalidRequestError as error:
        return error
