"""Every tree of one shape that a drafter may draw, after every context, and the law of what a rule makes of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwire.checking.all_blocks import RowsOf, digits, rows_along
from draftwire.checking.coupling import LEAST_CELL
from draftwire.checking.cube import LAST
from draftwire.checking.emissions import Emissions
from draftwire.checking.toy_models import Pair
from draftwire.method.distributions import DenseRows
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.tree_rule import TreeLawRule, TreeRule, verify_trees
from draftwire.options.trees.trees import NOTHING, TreeBatch
from draftwire.verification.rule import FixedNoise


@dataclass(frozen=True, slots=True)
class AllTrees:
    """The trees of one shape that have a positive probability. Where siblings are drawn without replacement and no
    token is left for one, it is not there, and nothing that would follow it.
    """

    pair: Pair
    shape: TokenTree
    contexts: Tensor
    """`[trees] int64`: the row of the tables that each tree begins with."""
    tokens: Tensor
    """`[trees, nodes] int64`: the token of each node of the shape; 0 for nodes that are not there."""
    probs: Tensor
    """`[trees] float64`: the probability of drawing the tree after its context."""
    batch: TreeBatch
    numbers: Tensor
    """`[trees, nodes + 1] int64`: what the batch calls the root, then each node; `NOTHING` for those not there."""

    def prefixes(self, node: int) -> Tensor:
        """Returns the number of each tree's context and path to a node, read as digits in base `vocab`, `[trees]`."""
        numbers = self.contexts
        for step in self.shape.path_to(node):
            numbers = numbers * self.pair.vocab_size + self.tokens[:, step]
        return numbers

    def repeated(self, times: int) -> "AllTrees":
        """Returns each tree so many times in succession."""
        batch, index = self.batch, torch.arange(len(self.contexts)).repeat_interleave(times)
        shapes = tuple(shape for shape in batch.shapes for _ in range(times))
        rows = batch.target_rows[index], batch.draft_rows[index]
        batch = TreeBatch(batch.target_probs, batch.draft, batch.draft_tokens[index], shapes, *rows, batch.is_distinct)
        numbers = self.contexts[index], self.tokens[index], self.probs[index]
        return AllTrees(self.pair, self.shape, *numbers, batch, self.numbers[index])


def all_trees(pair: Pair, shape: TokenTree, is_distinct: bool, rows_of: RowsOf = DenseRows) -> AllTrees:
    """Returns the trees of a shape with target and draft distributions, in float64. If `is_distinct`, siblings are
    drawn without replacement.
    """
    vocab_size, count = pair.vocab_size, len(shape)
    contexts, tokens = digits(torch.arange((vocab_size + 1) * vocab_size**count), count, vocab_size)
    before = torch.cat([contexts.unsqueeze(1), tokens], dim=1)
    probs = torch.ones(len(contexts), dtype=torch.float64)
    is_there = torch.ones(len(contexts), count + 1, dtype=torch.bool)
    for node in (ROOT, *range(count)):
        left = pair.drafter[before[:, node + 1]]
        for child in shape.children(node):
            own, total = tokens[:, child : child + 1], left.sum(dim=1)
            is_there[:, child + 1] = is_there[:, node + 1] & (total > 0.0)
            drawn = left.gather(1, own).squeeze(1) / torch.where(total > 0.0, total, 1.0)
            probs *= torch.where(is_there[:, child + 1], drawn, (own.squeeze(1) == 0).to(torch.float64))
            if is_distinct:
                left = left.scatter(1, own, 0.0)
    index = (probs > 0.0).nonzero().squeeze(1)
    before, is_there = before[index], is_there[index]
    parents = before[:, [parent + 1 for parent in shape.parents]]
    whole = (shape,) * len(index)
    batch = TreeBatch(pair.target, rows_of(pair.drafter), tokens[index], whole, before, parents, is_distinct)
    if not bool(is_there.all()):
        batch = batch.cut([tuple(own.nonzero().squeeze(1).tolist()) for own in is_there[:, 1:]])
    numbers = torch.where(is_there, is_there.to(torch.int64).cumsum(dim=1) - 2, NOTHING)
    return AllTrees(pair, shape, contexts[index], tokens[index], probs[index], batch, numbers)


def stated_tree_emissions(rule: TreeLawRule, trees: AllTrees) -> Emissions:
    """Returns the emissions of rounds that draft trees, from the law that a rule states."""
    law, result = rule.tree_law(trees.batch), _no_emissions(trees)
    for node in (ROOT, *range(len(trees.shape))):
        numbers = trees.numbers[:, node + 1]
        last_nodes = numbers.clamp(min=ROOT)
        weights = rule.extra_weights(trees.batch, law, last_nodes).to(torch.float64)
        stops = law.stop_probs.gather(1, last_nodes.unsqueeze(1) + 1).squeeze(1)
        reach = torch.where(numbers == NOTHING, 0.0, trees.probs * stops).unsqueeze(1)
        contributions = torch.where(reach == 0.0, 0.0, reach * weights / weights.sum(dim=1, keepdim=True))
        result[len(trees.shape.path_to(node))].index_add_(0, trees.prefixes(node), contributions)
    return _as_emissions(trees, result)


@dataclass(frozen=True, slots=True)
class WalkedEmissions:
    """The law of what a walk makes of all trees."""

    emissions: Emissions
    is_targets_own: bool
    """Whether each text that was emitted is the beginning of the one that the target draws by itself."""


def walked_tree_emissions(rule: TreeRule, trees: AllTrees) -> WalkedEmissions:
    """Returns the emissions of rounds that draft trees, for a rule that walks: one whose random numbers matter through
    the token that the target draws at each depth alone. All texts that it may draw are tried with every tree, in the
    middle of their range of uniforms, or with exponentials of which the token is the winner.
    """
    pair, vocab_size, length = trees.pair, trees.pair.vocab_size, trees.shape.depth + 1
    count, num_texts = len(trees.contexts), vocab_size**length
    _, texts = digits(torch.arange(num_texts), length, vocab_size)
    trees, texts = trees.repeated(num_texts), texts.repeat(count, 1)
    rows = rows_along(pair.target, trees.contexts, texts)[:, :-1]
    probs = rows.gather(2, texts.unsqueeze(2)).squeeze(2)
    uniforms = rows.cumsum(dim=2).gather(2, texts.unsqueeze(2)).squeeze(2) - 0.5 * probs
    is_winner = torch.nn.functional.one_hot(texts, vocab_size).bool()
    times = torch.where(is_winner, 0.5 * rows, 1.5 * rows).clamp(min=1e-300)
    outcome = verify_trees(rule, trees.batch, FixedNoise(uniforms.clamp(max=LAST), times))
    is_wide = (probs > LEAST_CELL).all(dim=1)  # others may be too narrow for float64 to hit
    masses, result, is_own = trees.probs * probs.prod(dim=1), _no_emissions(trees), True
    for node in (ROOT, *range(len(trees.shape))):
        depth = len(trees.shape.path_to(node))
        is_last = (trees.numbers[:, node + 1] == outcome.last_nodes) & is_wide
        prefixes, extra = trees.prefixes(node), outcome.extra_tokens
        own = prefixes * vocab_size + extra
        expected = trees.contexts
        for place in range(depth + 1):
            expected = expected * vocab_size + texts[:, place]
        is_own &= bool((own == expected)[is_last].all())
        result[depth].view(-1).index_add_(0, own[is_last], masses[is_last])
    return WalkedEmissions(_as_emissions(trees, result), is_own)


def _no_emissions(trees: AllTrees) -> list[Tensor]:
    """Returns zeros for the emissions of each number of tokens, `[contexts * vocab ** (tokens - 1), vocab]`."""
    size, depths = trees.pair.vocab_size, range(trees.shape.depth + 1)
    return [torch.zeros((size + 1) * size**depth, size, dtype=torch.float64) for depth in depths]


def _as_emissions(trees: AllTrees, masses: list[Tensor]) -> Emissions:
    return Emissions(tuple(emitted.reshape(trees.pair.vocab_size + 1, -1) for emitted in masses))
