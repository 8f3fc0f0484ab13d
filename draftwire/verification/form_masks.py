"""Masks of a form at the positions of a block: made in the block's step or, where they are slow, before it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwire.errors import DraftwireError, InvalidRequestError
from draftwire.method.token_tree import TokenTree
from draftwire.requests.automaton import Automaton, BlockMasks

MadeMasks = BlockMasks | DraftwireError
"""Masks at the positions of a block, or why the text fails."""


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
        return masks_along_paths(automaton, generated_ids, draft_tokens, [tree.path_to(leaf) for leaf in leaves])
    except InvalidRequestError as error:
        return error


def masks_along_paths(
    automaton: Automaton, generated_ids: Sequence[int], draft_tokens: Sequence[int], paths: Sequence[Sequence[int]]
) -> BlockMasks:
    """Returns the masks of a token tree, whose paths are followed one after the other; errors as `Automaton.along`.

    Args:
        automaton: of the form.
        generated_ids: as `Automaton.along`.
        draft_tokens: the token of each node.
        paths: nodes on the way to each leaf, from the root on; best depth first, since only what differs from the
            path before is followed anew.

    Raises:
        InvalidRequestError: as `Automaton.along`.
    """
    rows: NDArray[np.uint8] | None = None
    faults: dict[int, InvalidRequestError] = {}
    followed: set[int] = set()
    for path in paths or [()]:  # of a tree without nodes there is the first place
        places = [0, *(node + 1 for node in path)]
        shared = sum(node in followed for node in path)
        followed.update(path)
        if places[shared] in faults:  # what follows has no mask either
            faults.update(dict.fromkeys(places[shared + 1 :], faults[places[shared]]))
            continue
        first_place = 0 if rows is None else shared + 1
        own = automaton.along(generated_ids, [draft_tokens[node] for node in path], first_place)
        if rows is None:
            rows = np.full((len(draft_tokens) + 1, own.rows.shape[1]), 255, dtype=np.uint8)
        rows[places[first_place:]] = own.rows[first_place:]
        faults.update({places[row]: error for row, error in own.faults.items()})
    assert rows is not None, "there is at least one path"
    return BlockMasks(rows, faults)
