"""Trees of draft tokens: several continuations of one text, in one block. No torch here.

A tree is given by `parents`, one entry for each draft token, its *node*: the index of the token that it follows, or
`ROOT` for a token that follows the last committed one. A parent comes before its children; siblings are in the order in
which they were drafted. No entries at all mean a chain, where each token follows the one before it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwire.errors import BlockViolationError, Violation
from draftwire.method.block_shape import CHAIN

ROOT = -1
"""Parent of the nodes that follow the last committed token."""

DECIDER = "draftwire.options.trees.tree_decider"
"""Module that decides about trees: loaded with the first, since it needs torch."""


@dataclass(frozen=True)  # no slots: cached_property needs __dict__
class TokenTree:
    """The shape of a tree of draft tokens. Nodes are numbered from 0; `ROOT` stands for the last committed token.

    Raises:
        BlockViolationError: an entry is not `ROOT` or an earlier node.
    """

    parents: tuple[int, ...]
    """The parent of each node."""

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise BlockViolationError(Violation.ENCODING, f"parent of draft token {node} does not come before it")

    @classmethod
    def of(cls, parents: Sequence[int], num_nodes: int) -> "TokenTree":
        """Returns the tree of a block of `num_nodes` draft tokens.

        Args:
            parents: one for each of them, or none for a chain.
            num_nodes: draft tokens of the block.

        Raises:
            BlockViolationError: the parents do not fit the tokens, or do not come before them.
        """
        if not parents:
            return cls.chain(num_nodes)
        if len(parents) != num_nodes:
            raise BlockViolationError(Violation.ENCODING, "as many parents as draft tokens are needed")
        return cls(tuple(parents))

    @classmethod
    def chain(cls, num_nodes: int) -> "TokenTree":
        """Returns the tree in which each token follows the one before it."""
        return cls(tuple(range(ROOT, num_nodes - 1)))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def compact_parents(self) -> tuple[int, ...]:
        """The parents, or `CHAIN` where they are those of a chain: the form in which trees travel."""
        return CHAIN if self.is_chain else self.parents

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Draft tokens on the path to each node, itself included: 1 or more."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Draft tokens on the longest path; 0 without nodes."""
        return max(self.depths, default=0)

    def children(self, node: int) -> tuple[int, ...]:
        """Returns the nodes that follow a node, or `ROOT`, in draft order."""
        return self._children[node + 1]

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        """Children of the root, then of each node."""
        children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def inner_nodes(self) -> tuple[int, ...]:
        """Nodes with children, ascending; `ROOT` first. A block states one draft distribution for each, in this order,
        which all its children were drawn from.
        """
        return tuple(node - 1 for node, own in enumerate(self._children) if own)

    def path_to(self, node: int) -> tuple[int, ...]:
        """Returns the nodes from a child of the root to `node`, itself included; none for `ROOT`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    @cached_property
    def is_ancestor(self) -> NDArray[np.bool_]:
        """`[nodes, nodes] bool`: whether the second node is on the path to the first; each is on its own."""
        table = np.eye(len(self.parents), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                table[node] |= table[parent]
        return table

    @cached_property
    def post_order(self) -> tuple[int, ...]:
        """All nodes, each after its children, siblings in draft order."""
        order: list[int] = []  # backwards: each node before its children, the last child first
        left = list(self._children[0])
        while left:
            order.append(left.pop())
            left.extend(self.children(order[-1]))
        return tuple(reversed(order))

    def ended_at(self, ends: Collection[int]) -> tuple[int, ...]:
        """Returns the nodes that are left, ascending, if nothing may follow some nodes."""
        lost: set[int] = set()
        for node, parent in enumerate(self.parents):
            if parent in ends or parent in lost:
                lost.add(node)
        return tuple(node for node in range(len(self.parents)) if node not in lost)

    def cut(self, kept: Sequence[int]) -> "TokenTree":
        """Returns the tree of some of the nodes, ascending and with the parent of each, renumbered."""
        number = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
        return TokenTree(tuple(number[self.parents[node]] for node in kept))

    # As a `BlockShape`

    @property
    def num_distributions(self) -> int:
        """Number of nodes with children, the root included."""
        return len(self.inner_nodes)

    @property
    def drawn_from(self) -> list[int]:
        """Place of each node's parent among `inner_nodes`."""
        return self.distributions_along(self.parents)[1:]

    @property
    def decider(self) -> Any:
        """The `ShapeDecider` of trees."""
        return import_module(DECIDER).TREE_DECIDER

    def texts(self, token_ids: Sequence[int]) -> list[list[int]]:
        """Returns the tokens on the way to the root, then to each node."""
        return [[token_ids[each] for each in self.path_to(node)] for node in range(ROOT, len(self))]

    def distributions_along(self, path: Sequence[int]) -> list[int]:
        """Returns the places of the root and of the nodes of a path among `inner_nodes`, for those that are there."""
        place_of = {node: place for place, node in enumerate(self.inner_nodes)}
        return [place_of[node] for node in (ROOT, *path) if node in place_of]

    def check(self, most_tokens: int, most_depth: int) -> None:
        """Checks the size.

        Raises:
            BlockViolationError: the tree is larger.
        """
        sizes = (("draft tokens", len(self), most_tokens), ("draft tokens on a path", self.depth, most_depth))
        for what, size, most in sizes:
            if size > most:
                raise BlockViolationError(Violation.LENGTH, f"{size} {what}, at most {most} are accepted")
