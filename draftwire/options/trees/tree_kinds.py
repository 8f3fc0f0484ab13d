"""Choices of the children of a node in a drafted token tree, by the rule that will decide about it.

Rules that walk a tree look the target's own tokens up in it, whatever it is: the children are the tokens that come
first in the race of their position, under a coupled rule, or the likeliest ones of a greedy text. Which they are, and
whether some are left out, may depend on anything (`RankedTree`), and so may the shape (`BestFirstTree`).

Rules that read distributions judge a token by the one that it was drawn from. Children are drawn without replacement
from the integer weights of one row, which is sent; how many there are, and where, is fixed in advance (`DrawnTree`).
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.drafting.strategy import Draft
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.method.devices import upload
from draftwire.method.distributions import quantize
from draftwire.method.encoding import DraftDistributions, Supports, encode_sparse
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.randomness import exponentials, uniforms
from draftwire.options.trees.growth_plan import GrowthPlan, WantedTree, is_walked
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.tree_drafting import GrowingTree, ReadTree, TreeStart
from draftwire.options.trees.tree_growth import BestFirstGrowth, log_race_chances

SHARPNESS = 1.25
"""Sharpness of `log_race_chances` in trees that grow under a coupled rule: between those that `calibrate` of
benchmarks/tree_efficiency.py finds for the embedded pair at temperatures 0.6 and 1."""


class ShapedTree(GrowingTree):
    """A tree whose shape is given, depth by depth. Its tokens stay on the device."""

    def __init__(self, start: TreeStart, shape: TokenTree) -> None:
        """Starts without tokens; `shape` has nodes, whose parents are ascending."""
        super().__init__(start)
        assert sorted(shape.parents) == [*shape.parents], "depth by depth"
        self.shape = shape
        self._tokens: list[Tensor] = []
        self._is_possible: list[Tensor] = []
        self._cut: list[int] = []  # the nodes that got no children because the block was cut

    @abstractmethod
    def chosen(self, nodes: Sequence[int], probs: Tensor, depth: int, most: int) -> tuple[Tensor, Tensor]:
        """Returns what the children of nodes may be, `[nodes, most] int64`, `most` of any of them, and whether they can
        be that. Other arguments are as in `expand`.
        """

    @override
    def inner(self, depth: int) -> list[int]:
        if self._cut:
            return []
        depths = (0, *self.shape.depths)
        nodes = [node for node in self.shape.inner_nodes if depths[node + 1] == depth]
        if depth and nodes and self.start.request.is_cut():
            self._cut, nodes = nodes, []
        return nodes

    @override
    def parent(self, node: int) -> int:
        return self.shape.parents[node]

    @override
    def tokens(self, nodes: Sequence[int], depth: int) -> Tensor:
        tokens, first = self._tokens[depth - 1], self.shape.depths.index(depth)
        return tokens[upload([node - first for node in nodes], tokens.device, torch.int64)]

    @override
    def path(self, node: int) -> list[int]:
        known = self._token_ids() if node != ROOT else []
        return [known[each] for each in self.shape.path_to(node)]

    @override
    def expand(self, nodes: Sequence[int], probs: Tensor, depth: int) -> None:
        counts = [len(self.shape.children(node)) for node in nodes]
        tokens, is_possible = self.chosen(nodes, probs, depth, min(max(counts), probs.shape[1]))
        missing = max(counts) - tokens.shape[1]  # of a vocabulary smaller than the tree is wide
        if missing:
            tokens = torch.nn.functional.pad(tokens, (0, missing))
            is_possible = torch.nn.functional.pad(is_possible, (0, missing))
        self._tokens.append(torch.cat([row[:count] for row, count in zip(tokens, counts, strict=True)]))
        self._is_possible.append(torch.cat([row[:count] for row, count in zip(is_possible, counts, strict=True)]))

    @override
    def draft(self) -> Draft | DraftwireError:
        possible = torch.cat(self._is_possible).tolist()
        kept: list[int] = []
        for node, (parent, is_possible) in enumerate(zip(self.shape.parents, possible, strict=False)):
            if is_possible and (parent == ROOT or parent in kept):
                kept.append(node)
        if not kept:
            return UnavailableError("the draft model gave no finite logits")
        tokens, shape = self._token_ids(), self.shape.cut(kept)
        parents = [ROOT if node == ROOT else kept[node] for node in shape.inner_nodes]
        token_ids, is_whole = [tokens[node] for node in kept], set(kept).isdisjoint(self._cut)
        return Draft(token_ids, self.stated(parents), parents=shape.compact_parents, is_whole=is_whole)

    def stated(self, nodes: Sequence[int]) -> DraftDistributions:
        """Returns what is sent of the distributions after nodes, all those that have children."""
        return DraftDistributions(Encoding.NONE, self.start.vocab_size)

    @override
    def read_tree(self) -> ReadTree:
        return ReadTree(self.shape, self._token_ids(), self.read)

    def _token_ids(self) -> list[int]:
        """Returns the tokens of the nodes so far. Waits for the device."""
        return [int(token) for token in torch.cat(self._tokens).tolist()]


class RankedTree(ShapedTree):
    """A tree of the first racers, or of the likeliest tokens."""

    @override
    def chosen(self, nodes: Sequence[int], probs: Tensor, depth: int, most: int) -> tuple[Tensor, Tensor]:
        scores = probs.double()
        if is_raced(self.start):
            scores = scores / race_times(self.start, depth, probs)
        ranked = scores.topk(most, dim=1)
        return ranked.indices, ranked.values > 0.0


class DrawnTree(ShapedTree):
    """A tree of tokens that are drawn without replacement, with their distributions."""

    def __init__(self, start: TreeStart, shape: TokenTree, quantization: Quantization) -> None:
        """Starts without tokens; `quantization` is sparse."""
        super().__init__(start, shape)
        assert quantization.encoding is Encoding.SPARSE_UINT16, "a row of integers"
        self._quantization = quantization
        self._numbers = uniforms([start.request.key], len(shape))[0]  # one for each node
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    @override
    def chosen(self, nodes: Sequence[int], probs: Tensor, depth: int, most: int) -> tuple[Tensor, Tensor]:
        is_good = (probs.sum(dim=1) > 0.0).unsqueeze(1)
        probs[:, 0].masked_fill_(~is_good.squeeze(1), 1.0)
        quantized = quantize(probs, self._quantization)
        numbers = torch.zeros(len(nodes), most, dtype=torch.float64)
        for row, node in enumerate(nodes):
            own = self.shape.children(node)[:most]
            numbers[row, : len(own)] = self._numbers[own[0] : own[-1] + 1]
        tokens = quantized.draw_distinct(numbers.to(probs.device))
        self._rows.update(zip(nodes, zip(quantized.token_ids, quantized.weights, strict=True), strict=True))
        return tokens.clamp(min=0), (tokens >= 0) & is_good

    @override
    def stated(self, nodes: Sequence[int]) -> DraftDistributions:
        rows = [self._rows[node] for node in nodes]
        token_ids, weights = (torch.stack(parts).cpu().numpy() for parts in zip(*rows, strict=True))
        supports = Supports(token_ids, weights, self.start.vocab_size)
        return encode_sparse(supports, [len(nodes)])[0]


class BestFirstTree(GrowingTree):
    """A tree whose shape is found by the drafter's estimate of how likely each token is accepted."""

    def __init__(self, start: TreeStart, plan: GrowthPlan) -> None:
        """Starts without tokens; `plan` reads each depth in one pass."""
        super().__init__(start)
        self._growth = BestFirstGrowth(plan)
        self._device = torch.device("cpu")
        self._is_cut = False

    @override
    def inner(self, depth: int) -> list[int]:
        nodes = [] if self._is_cut else self._growth.frontier()
        if depth and nodes and self.start.request.is_cut():
            self._is_cut, nodes = True, []
        return nodes

    @override
    def parent(self, node: int) -> int:
        return self._growth.parent(node)

    @override
    def tokens(self, nodes: Sequence[int], depth: int) -> Tensor:
        return upload([self._growth.token(node) for node in nodes], self._device, torch.int64)

    @override
    def path(self, node: int) -> list[int]:
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self._growth.token(node))
            node = self._growth.parent(node)
        return tokens[::-1]

    @override
    def expand(self, nodes: Sequence[int], probs: Tensor, depth: int) -> None:
        self._device = probs.device
        chances = probs.double().log()
        if is_raced(self.start):
            chances = log_race_chances(chances, race_times(self.start, depth, probs), SHARPNESS)
        self._growth.expand(nodes, torch.where(probs > 0.0, chances, -torch.inf))

    @override
    def draft(self) -> Draft | DraftwireError:
        grown = self._growth.grown()
        if not grown.token_ids:
            return UnavailableError("the draft model gave no finite logits")
        nothing = DraftDistributions(Encoding.NONE, self.start.vocab_size)
        parents = TokenTree(grown.parents).compact_parents
        return Draft(grown.token_ids, nothing, parents=parents, is_whole=not self._is_cut)

    @override
    def read_tree(self) -> ReadTree:
        found = self._growth.found()
        return ReadTree(TokenTree(found.parents), found.token_ids, self.read)


def is_raced(start: TreeStart) -> bool:
    """Whether the target's tokens win the race of their position."""
    return start.request.is_coupled and not start.request.sampling.greedy


def race_times(start: TreeStart, depth: int, probs: Tensor) -> Tensor:
    """Returns the noise of the position after nodes of a depth, `[1, vocab] float64`: they share it."""
    words = upload([start.request.key.text_words], probs.device)
    return exponentials(words, upload([len(start.committed) + depth], probs.device), probs.shape[1])


def tree_of(start: TreeStart, wanted: WantedTree, quantization: Quantization) -> GrowingTree:
    """Returns the tree that a request asks for."""
    if wanted.growth is not None:
        assert is_walked(start.request), "a tree that grows is not drawn"
        return BestFirstTree(start, wanted.growth)
    assert wanted.shape is not None, "a tree that does not grow has a shape"
    if is_walked(start.request):
        return RankedTree(start, wanted.shape)
    return DrawnTree(start, wanted.shape, quantization)
