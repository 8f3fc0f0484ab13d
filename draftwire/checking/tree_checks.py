"""Checks a rule for trees on many small models and shapes, exactly."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from draftwire.checking.all_blocks import RowsOf, sparse_rows
from draftwire.checking.all_trees import AllTrees, all_trees, stated_tree_emissions, walked_tree_emissions
from draftwire.checking.emissions import completed_law, largest_deviation, sequence_law
from draftwire.checking.report import Findings, Kind, TreeReport
from draftwire.checking.toy_models import Pair, adversarial_pairs, random_pairs
from draftwire.method.distributions import DenseRows
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.tree_rule import TreeLawRule, TreeRule, verify_trees
from draftwire.options.trees.trees import TreeBatch
from draftwire.verification.rule import FixedNoise

TOLERANCE = 1e-9
"""Allowed deviation of exact laws."""

PATHS = tuple(map(TokenTree, ((), (-1,), (-1, 0, 1), (-1, -1), (-1, -1, 0, 1), (-1, -1, -1, 0, 1, 2))))
"""Shapes of which the root alone has several children."""

SHAPES = (*PATHS, *map(TokenTree, ((-1, -1, -1), (-1, 0, -1, 0), (-1, -1, 0, 1, 1), (-1, 0, 0, 1, 1, 2, 2))))
"""All shapes that are enumerated."""

COMPARED_SHAPES = {
    "6": TokenTree.chain(6),
    "2 x 3": TokenTree((-1, -1, 0, 1, 2, 3)),
    "3 x 2": TokenTree((-1, -1, -1, 0, 1, 2)),
    "2, 2": TokenTree((-1, -1, 0, 0, 1, 1)),
}
"""Shapes of six draft tokens for which the report has the mean number of accepted tokens: a chain, paths, and a tree
of two children of each token."""

MANY_NODES = 4
"""Trees of more nodes are enumerated for few models."""

NUM_SAMPLES = 50_000
"""Samples of the noise of coupled trees, from which their mean number of accepted tokens is estimated."""


def check_trees(rule: TreeRule, shapes: Sequence[TokenTree] = SHAPES) -> TreeReport:
    """Checks a rule and returns the report. A rule that raises fails the check; `check_trees` itself does not raise."""
    findings = Findings()
    for shape in filter(partial(_is_taken, rule), shapes):
        for pair in _pairs(len(shape)):
            for is_distinct in _schemes(rule):
                with findings.recording_errors():
                    _check_law(rule, all_trees(pair, shape, is_distinct, _layout(shape)), findings)
    accepted: list[float | None] = []
    for shape in COMPARED_SHAPES.values():
        if not _is_taken(rule, shape):
            accepted.append(None)
            continue
        mean = float("nan")
        with findings.recording_errors():
            pairs = random_pairs(3)
            mean = sum(_accepted(rule, pair, shape) for pair in pairs) / len(pairs)
        accepted.append(mean)
    method = "stated" if isinstance(rule, TreeLawRule) else "walked"
    found = findings.num_laws, findings.deviation, findings.failures
    return TreeReport(rule.name, rule.is_lossless, method, *found, tuple(accepted))


def _pairs(num_nodes: int) -> tuple[Pair, ...]:
    few = (random_pairs(3)[1], adversarial_pairs(3)[2])
    return few if num_nodes > MANY_NODES else random_pairs(3) + adversarial_pairs(3)


def _schemes(rule: TreeRule) -> tuple[bool, ...]:
    """Returns how siblings may be drawn: whether without replacement; what the report has first."""
    return rule.sibling_schemes if isinstance(rule, TreeLawRule) else (True, False)


def _is_taken(rule: TreeRule, shape: TokenTree) -> bool:
    """Whether a rule decides about trees of a shape."""
    is_paths = all(len(shape.children(node)) <= 1 for node in range(len(shape)))
    return is_paths or not (isinstance(rule, TreeLawRule) and rule.takes_paths_alone)


def _layout(shape: TokenTree) -> RowsOf:
    return sparse_rows if len(shape) % 2 else DenseRows


def _check_law(rule: TreeRule, trees: AllTrees, findings: Findings) -> None:
    """Compares the law of one round, continued by the target, with the target's, and decisions with the law."""
    pair, shape = trees.pair, trees.shape
    where = f"{pair.name}, {pair.vocab_size} tokens, parents {shape.parents}"
    if isinstance(rule, TreeLawRule):
        emissions = stated_tree_emissions(rule, trees)
        law = rule.tree_law(trees.batch)
        wrong = torch.maximum(-law.stop_probs.min(), (law.stop_probs.sum(dim=1) - 1.0).abs().max())
        findings.require(Kind.NO_LAW, float(wrong), TOLERANCE, where)
        findings.require(Kind.DRAWING, _wrong_draws(rule, trees.batch), 0.0, where)
    else:
        walked = walked_tree_emissions(rule, trees)
        emissions = walked.emissions
        findings.require(Kind.NOISE, float(not walked.is_targets_own), 0.0, f"not the target's own text; {where}")
    reference = sequence_law(pair.target, shape.depth + 1)
    deviation = largest_deviation(completed_law(emissions, reference), reference)
    findings.judge(deviation, TOLERANCE, pair, rule.is_lossless, where)


def _wrong_draws(rule: TreeLawRule, trees: TreeBatch) -> float:
    """Returns the share of decisions that differ from the stated law, in the middle of each range of uniforms."""
    law, count, wrong = rule.tree_law(trees), trees.batch_size, torch.zeros(())
    middles = law.stop_probs.cumsum(dim=1) - 0.5 * law.stop_probs
    for node in range(ROOT, trees.max_nodes):
        is_possible = law.stop_probs[:, node + 1] > TOLERANCE
        if not bool(is_possible.any()):
            continue
        last_nodes = torch.where(is_possible, node, ROOT)
        weights = rule.extra_weights(trees, law, last_nodes)
        weights = weights / weights.sum(dim=1, keepdim=True)
        tokens = weights.argmax(dim=1)
        second = (weights.cumsum(dim=1) - 0.5 * weights).gather(1, tokens.unsqueeze(1))
        outcome = rule.decide_trees(trees, FixedNoise(torch.cat([middles[:, node + 1 : node + 2], second], dim=1)))
        differs = (outcome.last_nodes != node) | (outcome.extra_tokens != tokens)
        wrong = wrong + (differs & is_possible).sum() / count
    return float(wrong)


def _accepted(rule: TreeRule, pair: Pair, shape: TokenTree) -> float:
    """Returns the mean number of accepted tokens at the start of a text, with the drafts that are made for the rule."""
    if isinstance(rule, TreeLawRule):
        emissions = stated_tree_emissions(rule, all_trees(pair, shape, _schemes(rule)[0]))
        return float(emissions.expected_accepted()[-1])
    generator = torch.Generator().manual_seed(0)
    noise = (NUM_SAMPLES, shape.depth + 1, pair.vocab_size)
    times = torch.empty(noise, dtype=torch.float64).exponential_(generator=generator)
    uniforms = torch.rand(noise[:2], generator=generator, dtype=torch.float64)
    ranked = pair.drafter.unsqueeze(0) / (times.unsqueeze(2) if rule.is_coupled else torch.ones(1, 1, 1, 1))
    order = ranked.expand(*noise[:2], *pair.drafter.shape).argsort(dim=3, descending=True)
    trees = _best_first(pair, shape, order)
    return float(depths_of(trees, verify_trees(rule, trees, FixedNoise(uniforms, times)).last_nodes).mean())


def _best_first(pair: Pair, shape: TokenTree, order: Tensor) -> TreeBatch:
    """Returns trees whose nodes' children are the first tokens in an order, `[trees, depths, contexts, vocab] int64`:
    of the tokens after each context at each depth.
    """
    count = len(order)
    before = torch.full((count, len(shape) + 1), pair.vocab_size)
    for node in (ROOT, *range(len(shape))):
        depth = len(shape.path_to(node))
        for rank, child in enumerate(shape.children(node)):
            before[:, child + 1] = order[torch.arange(count), depth, before[:, node + 1], rank]
    parents = before[:, [parent + 1 for parent in shape.parents]]
    return TreeBatch(pair.target, DenseRows(pair.drafter), before[:, 1:], (shape,) * count, before, parents)


def depths_of(trees: TreeBatch, last_nodes: Tensor) -> Tensor:
    """Returns how many tokens are accepted, `[batch] float64`."""
    depths = [len(shape.path_to(node)) for shape, node in zip(trees.shapes, last_nodes.tolist(), strict=True)]
    return torch.tensor(depths, dtype=torch.float64)
