"""How large a token tree may be. Imports nothing: the command line names the limit."""

MAX_TREE_NODES = 64
"""Draft tokens of a tree at most: as many as recorded steps take."""
NODES_PER_PASS = 10
"""Nodes of each depth that get children where a tree is looked for, as in EAGLE-2."""


def num_read_nodes(max_tree_nodes: int, depth: int) -> int:
    """Returns how many nodes of a tree the drafter may have in its KV cache: when it grows, also some that it drops.

    Args:
        max_tree_nodes: draft tokens of a tree; 0 if there are none.
        depth: draft tokens on a path.
    """
    return max(max_tree_nodes, NODES_PER_PASS * max(0, depth - 1)) if max_tree_nodes else 0
