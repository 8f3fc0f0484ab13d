"""Encoding of token trees."""

from typing import Any

from draftwire.errors import BlockViolationError, InvalidRequestError
from draftwire.method.rounds import DraftTree
from draftwire.method.tree_limits import MAX_TREE_NODES
from draftwire.options.trees.token_tree import TokenTree
from draftwire.v1 import drafter_pb2


def fields_of(tree: DraftTree) -> dict[str, Any]:
    """Returns the fields of a tree to draft."""
    return {"num_nodes": tree.num_nodes, "parent_indices": () if tree.shape is None else tree.shape.parents}


def tree_from_proto(message: drafter_pb2.DraftTree) -> DraftTree:
    """Decodes a tree to draft.

    Raises:
        InvalidRequestError: it is too large, or its parents are none.
    """
    num_nodes, parents = message.num_nodes, message.parent_indices
    if not 1 <= num_nodes <= MAX_TREE_NODES:
        raise InvalidRequestError(f"a tree to draft has 1 to {MAX_TREE_NODES} tokens, not {num_nodes}")
    if not parents:
        return DraftTree(num_nodes)
    try:
        shape = TokenTree.of(parents, num_nodes)
    except BlockViolationError as violation:
        raise InvalidRequestError(f"a tree to draft: {violation}") from None
    if list(parents) != sorted(parents):
        raise InvalidRequestError("a tree to draft: its parents are not in order, depth by depth")
    return DraftTree(num_nodes, shape)
