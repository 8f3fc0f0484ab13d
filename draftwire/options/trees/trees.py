"""Input of tree rules: trees of draft tokens of different shapes with target and draft distributions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from draftwire.method.devices import upload
from draftwire.method.distributions import DenseRows, DraftRows, SparseRows, joined
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.verification.blocks import BlockBatch

NOTHING = -2
"""Placeholder where there is no node; `ROOT` is -1."""


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """Nodes of a batch that have children and are judged together, those with the most children first."""

    blocks: Tensor
    """`[inner] int64`: the tree of each."""
    nodes: Tensor
    """`[inner] int64`: their nodes, or `ROOT`."""
    children: Tensor
    """`[inner, width] int64`: children in draft order; `NOTHING` where there are fewer."""
    counts: tuple[int, ...]
    """How many of them, all at the front, have a first child, a second, and so on."""


@dataclass(frozen=True)  # no slots: cached_property needs __dict__
class TreeBatch:
    """Trees of different shapes. Numbers per draft token are padded to the largest tree; rows over the vocabulary,
    which are large, are neither padded nor copied, but looked up by index.
    """

    target_probs: Tensor
    """`[any, vocab]` float: the target's distributions."""
    draft: DraftRows
    """The distributions that the draft tokens were drawn from; may be empty for rules that do not read them."""
    draft_tokens: Tensor
    """`[batch, max_nodes] int64`, each below `vocab`; any valid id in the padding."""
    shapes: tuple[TokenTree, ...]
    """The shape of each tree."""
    target_rows: Tensor
    """`[batch, max_nodes + 1] int64`: row in `target_probs` of the distribution after the committed tokens, then after
    each node; any valid row in the padding."""
    draft_rows: Tensor
    """`[batch, max_nodes] int64`: row in `draft` of the distribution of each draft token, the same for siblings, except
    where several drafters drew them, whose rows are dense; any valid row in the padding, any number if `draft` is
    empty."""
    is_distinct: bool = True
    """Whether siblings were drawn without replacement: each from the distribution without the tokens of its earlier
    siblings, normalised. If not, they were drawn independently, and a token may be there twice."""

    @classmethod
    def packed(
        cls,
        target_probs: Tensor,
        drafts: Sequence[DraftRows],
        draft_tokens: Sequence[list[int]],
        shapes: Sequence[TokenTree],
        target_starts: Sequence[int],
        is_distinct: bool = True,
    ) -> "TreeBatch":
        """Returns the batch of trees of different shapes, on the device of `target_probs`, which are not copied.

        Args:
            target_probs: `[any, vocab]`.
            drafts: for each tree one row for each of `TokenTree.inner_nodes`, in that order, all dense or all sparse;
                or no rows.
            draft_tokens: for each tree the token of each node.
            shapes: of the trees.
            target_starts: each tree's first row in `target_probs`, of as many consecutive ones as it has nodes, and one
                more.
            is_distinct: see the attribute.
        """
        batch, max_nodes = len(shapes), max(map(len, shapes), default=0)
        numbers = np.zeros((batch, 3 * max_nodes + 1), dtype=np.int64)  # one transfer for all
        draft_start = 0
        for block, (tokens, shape, start) in enumerate(zip(draft_tokens, shapes, target_starts, strict=True)):
            count = len(shape)
            numbers[block, :count] = tokens
            numbers[block, max_nodes : 2 * max_nodes + 1] = start + np.minimum(np.arange(max_nodes + 1), count)
            numbers[block, 2 * max_nodes + 1 : 2 * max_nodes + 1 + count] = draft_start + np.array(shape.drawn_from)
            draft_start += shape.num_distributions
        device = target_probs.device
        tokens_of, target_rows, draft_rows = upload(numbers, device).split((max_nodes, max_nodes + 1, max_nodes), dim=1)
        rows = joined(drafts).to(device)
        return cls(target_probs, rows, tokens_of, tuple(shapes), target_rows, draft_rows, is_distinct)

    @classmethod
    def of_chains(cls, blocks: BlockBatch) -> "TreeBatch":
        """Returns blocks as trees of one path each."""
        shapes = tuple(TokenTree.chain(length) for length in blocks.lengths.tolist())
        rows = blocks.target_rows, blocks.draft_rows
        return cls(blocks.target_probs, blocks.draft, blocks.draft_tokens, shapes, *rows)

    @property
    def batch_size(self) -> int:
        """Number of trees."""
        return len(self.shapes)

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree, padding included."""
        return self.draft_tokens.shape[1]

    @cached_property
    def depth(self) -> int:
        """Draft tokens on the longest path of any tree."""
        return max((shape.depth for shape in self.shapes), default=0)

    @cached_property
    def parents(self) -> Tensor:
        """`[batch, max_nodes] int64`: the parent of each node; `NOTHING` in the padding."""
        return self._padded([shape.parents for shape in self.shapes], NOTHING)

    @cached_property
    def inside(self) -> Tensor:
        """`[batch, max_nodes] bool`: False in the padding."""
        return self.parents > NOTHING

    @cached_property
    def post_order(self) -> Tensor:
        """`[batch, max_nodes] int64`: all nodes, each after its children, siblings in draft order, and those of the
        padding last.
        """
        orders = [(*shape.post_order, *range(len(shape), self.max_nodes)) for shape in self.shapes]
        return self._padded(orders, 0)

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """The nodes with children, from the root downwards."""
        members: dict[TokenTree, list[int]] = {}
        for block, shape in enumerate(self.shapes):
            members.setdefault(shape, []).append(block)
        return tuple(self._level(members, depth) for depth in range(self.depth))

    def _level(self, members: dict[TokenTree, list[int]], depth: int) -> TreeLevel:
        return self._joined(
            [
                (blocks, node, shape.children(node))
                for shape, blocks in members.items()
                for node in shape.inner_nodes
                if (0 if node == ROOT else shape.depths[node]) == depth
            ]
        )

    def level_of(self, nodes: Sequence[int]) -> TreeLevel:
        """Returns one node of each tree, or `ROOT`, as a level; those without children are left out."""
        pairs = enumerate(zip(self.shapes, nodes, strict=True))
        entries = [([block], node, shape.children(node)) for block, (shape, node) in pairs]
        return self._joined([entry for entry in entries if entry[2]])

    def _joined(self, entries: list[tuple[list[int], int, tuple[int, ...]]]) -> TreeLevel:
        """Returns the level of some nodes: for each the trees that it belongs to, its number, and its children."""
        width = max((len(children) for _, _, children in entries), default=0)
        parts = [np.zeros((0, 2 + width), dtype=np.int64)]
        for blocks, node, children in sorted(entries, key=lambda entry: -len(entry[2])):
            part = np.full((len(blocks), 2 + width), NOTHING, dtype=np.int64)
            part[:, 0], part[:, 1], part[:, 2 : 2 + len(children)] = blocks, node, children
            parts.append(part)
        numbers = np.concatenate(parts)
        counts = tuple((numbers[:, 2:] != NOTHING).sum(axis=0).tolist())
        moved = upload(numbers, self.target_probs.device)
        return TreeLevel(moved[:, 0], moved[:, 1], moved[:, 2:], counts)

    def child_with(self, blocks: Tensor, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Returns the first child of some nodes that is a token, `[any] int64`; `NOTHING` where no child is.

        Args:
            blocks: `[any] int64`, the trees.
            nodes: `[any] int64`, their nodes, or `ROOT`.
            tokens: `[any] int64`.
        """
        is_child = (self.parents[blocks] == nodes.unsqueeze(1)) & (self.draft_tokens[blocks] == tokens.unsqueeze(1))
        if not self.max_nodes:
            return torch.full_like(nodes, NOTHING)
        numbers = torch.arange(self.max_nodes, device=nodes.device)
        first = torch.where(is_child, numbers, self.max_nodes).amin(dim=1)
        return torch.where(first < self.max_nodes, first, NOTHING)

    def chosen(self, blocks: Sequence[int]) -> "TreeBatch":
        """Returns some of the trees."""
        index = upload(blocks, self.target_probs.device, torch.int64)
        return replace(
            self,
            draft_tokens=self.draft_tokens[index],
            shapes=tuple(self.shapes[block] for block in blocks),
            target_rows=self.target_rows[index],
            draft_rows=self.draft_rows[index],
        )

    def cut(self, kept: Sequence[Sequence[int]]) -> "TreeBatch":
        """Returns the trees of some nodes of each, ascending and with the parent of each, renumbered."""
        shapes = tuple(shape.cut(own) for shape, own in zip(self.shapes, kept, strict=True))
        nodes = self._padded([tuple(own) for own in kept], 0)[:, : max(map(len, kept), default=0)]
        after = torch.cat([torch.zeros_like(self.target_rows[:, :1]), nodes + 1], dim=1)
        return replace(
            self,
            draft_tokens=self.draft_tokens.gather(1, nodes),
            shapes=shapes,
            target_rows=self.target_rows.gather(1, after),
            draft_rows=self.draft_rows.gather(1, nodes),
        )

    def chains(self) -> BlockBatch:
        """Returns trees of one path each as blocks."""
        assert all(shape.is_chain for shape in self.shapes), "only chains are blocks"
        lengths = upload([len(shape) for shape in self.shapes], self.target_probs.device, torch.int64)
        rows = self.target_rows, self.draft_rows
        return BlockBatch(self.target_probs, self.draft, self.draft_tokens, lengths, *rows)

    def drawn_one_by_one(self, block: int) -> BlockBatch:
        """Returns the nodes of one tree, each as a block of one token with the distribution that it was drawn from:
        that of its parent without the tokens of its earlier siblings, normalised.

        Args:
            block: a tree of the batch, whose draft distributions were given.
        """
        shape, count = self.shapes[block], len(self.shapes[block])
        tokens, rows = self.draft_tokens[block, :count], self.draft_rows[block, :count]
        sparse = self.draft if isinstance(self.draft, SparseRows) else None
        probs = (self.draft.probs if sparse is None else sparse.probs)[rows]
        ids = None if sparse is None else sparse.token_ids[rows]
        for nodes, earlier in self._earlier_siblings(shape, probs.device) if self.is_distinct else ():
            if ids is None:
                probs[nodes, tokens[earlier]] = 0.0
            else:
                probs[nodes] = torch.where(ids[nodes] == tokens[earlier].unsqueeze(1), 0.0, probs[nodes])
        probs /= probs.sum(dim=1, keepdim=True)
        own = DenseRows(probs) if sparse is None or ids is None else SparseRows(ids, probs, sparse.vocab_size)
        parents = self.parents[block, :count] + 1
        target_rows = self.target_rows[block, parents].unsqueeze(1).expand(-1, 2)
        numbers = torch.arange(count, device=probs.device).unsqueeze(1)
        return BlockBatch(self.target_probs, own, tokens.unsqueeze(1), torch.ones_like(rows), target_rows, numbers)

    @staticmethod
    def _earlier_siblings(shape: TokenTree, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields nodes and siblings that were drafted before them, `[any] int64` each; no node twice at once."""
        earlier: dict[int, list[tuple[int, int]]] = {}
        for parent in shape.inner_nodes:
            own = shape.children(parent)
            for rank, node in enumerate(own):
                for before, sibling in enumerate(own[:rank]):
                    earlier.setdefault(before, []).append((node, sibling))
        for pairs in earlier.values():
            nodes, siblings = upload(np.array(pairs, dtype=np.int64), device).unbind(dim=1)
            yield nodes, siblings

    def _padded(self, rows: Sequence[tuple[int, ...]], filler: int) -> Tensor:
        """Returns numbers per node as a tensor, `[batch, max_nodes] int64`."""
        numbers = np.full((len(rows), self.max_nodes), filler, dtype=np.int64)
        for own, row in zip(numbers, rows, strict=True):
            own[: len(row)] = row
        return upload(numbers, self.target_probs.device)


def cut_undrawable(trees: TreeBatch) -> tuple[TreeBatch, list[tuple[int, ...]] | None]:
    """Cuts each tree before nodes that no honest drafter can have drawn, with all that follows them: tokens of draft
    probability 0, and among distinct siblings a token that is there already.

    Returns:
        The trees; the nodes that were kept of each, None if all were.
    """
    if not trees.max_nodes:
        return trees, None
    is_wrong = (trees.draft.probs_of(trees.draft_rows, trees.draft_tokens) <= 0.0) & trees.inside
    if trees.is_distinct:
        is_again = (trees.parents.unsqueeze(2) == trees.parents.unsqueeze(1)).tril_(-1)
        is_again &= trees.draft_tokens.unsqueeze(2) == trees.draft_tokens.unsqueeze(1)
        is_wrong |= is_again.any(dim=2) & trees.inside
    if not bool(is_wrong.any()):
        return trees, None
    kept = []
    for shape, wrong in zip(trees.shapes, is_wrong.cpu().numpy(), strict=True):
        is_lost = (shape.is_ancestor & wrong[: len(shape)]).any(axis=1)
        kept.append(tuple(np.flatnonzero(~is_lost).tolist()))
    return trees.cut(kept), kept
