"""Rules for trees, proved by enumeration: every tree that a drafter may draw, every outcome, float64."""

import json
import math
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from cases import every
from torch import Tensor

from draftwire.checking.all_blocks import sparse_rows
from draftwire.checking.all_trees import AllTrees, all_trees, stated_tree_emissions, walked_tree_emissions
from draftwire.checking.emissions import completed_law, largest_deviation, sequence_law
from draftwire.checking.toy_models import Pair, adversarial_pairs, random_pairs, random_table
from draftwire.errors import InvalidRequestError
from draftwire.method.distributions import DenseRows
from draftwire.method.keys import DrawKey
from draftwire.method.randomness import exponentials
from draftwire.options.trees import traversal
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.traversal import TraversalRule
from draftwire.options.trees.tree_rule import TreeLawRule, TreeRule, verify_trees
from draftwire.options.trees.trees import NOTHING, TreeBatch, cut_undrawable
from draftwire.options.trees.walk import CoupledWalkRule, TargetOnlyRule
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import (
    RULES,
    TREE_RULES,
    BlockBatch,
    FixedNoise,
    KeyedNoise,
    LawRule,
    tree_rule_for,
    tree_rule_named,
    verify,
)
from examples.rules.k_seq import KSeqRule
from examples.rules.multi_round import MultiRoundRule, WithoutReplacementRule

torch.set_num_threads(1)

BOUND = 1e-9
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "tree.json").read_text())
STATED: dict[str, TreeLawRule] = {
    rule.name: rule for rule in (TraversalRule(), MultiRoundRule(), WithoutReplacementRule())
}
WALKS: dict[str, TreeRule] = {rule.name: rule for rule in (TargetOnlyRule(), CoupledWalkRule())}
ALL_RULES: dict[str, TreeRule] = {**STATED, **WALKS}
SHAPES = [
    TokenTree(parents)
    for parents in (
        (),
        (-1, 0, 1),
        (-1, -1),
        (-1, -1, -1),
        (-1, 0, -1, 0),
        (-1, -1, 0, 1, 1),
        (-1, 0, 0, 1, 1, 2, 2),
        (-1, -1, 0, 2, 0, 1, 3),
    )
]
"""Of up to seven nodes; in the last two nodes with both early and late siblings that have children, and a long path."""
LAYOUTS = every("rows_of", [DenseRows, sparse_rows])
KEY = bytes(range(16))
CPU = torch.device("cpu")


@cache
def pairs(count: int) -> tuple[Pair, ...]:
    """Returns models: all, or a few of them for large trees, of which there are many."""
    models = (random_pairs(3)[2], adversarial_pairs(3)[2], random_pairs(3)[0], adversarial_pairs(3)[0])
    return models[:1] if count > 5 else models if count > 3 else random_pairs(3) + adversarial_pairs(3)


def deviation_of(emissions_of: object, trees: AllTrees) -> float:
    """Returns by how much the law of one round, continued by the target, differs from the target's."""
    reference = sequence_law(trees.pair.target, trees.shape.depth + 1)
    return largest_deviation(completed_law(emissions_of, reference), reference)


# The law


@every(
    ("name", "is_distinct"),
    [("traversal", True), ("traversal", False), ("multi_round", False), ("without_replacement", True)],
)
def test_text_has_the_targets_law_whatever_the_shape_of_the_tree(name: str, is_distinct: bool) -> None:
    for shape in (*SHAPES[:-2], SHAPES[-1 if is_distinct else -2]):
        for pair in pairs(len(shape)):
            for rows_of in (DenseRows, sparse_rows) if len(shape) < 5 else (sparse_rows,):
                trees = all_trees(pair, shape, is_distinct, rows_of)
                deviation = deviation_of(stated_tree_emissions(STATED[name], trees), trees)
                assert deviation < BOUND, f"{shape}, {pair.name}, {rows_of.__name__}"


@every("name", WALKS)
def test_walk_emits_the_targets_own_text_whatever_the_tree(name: str) -> None:
    """Even for trees in which a token is there twice among siblings."""
    for shape in SHAPES[:-2]:
        for pair in pairs(len(shape)):
            trees = all_trees(pair, shape, is_distinct=False)
            walked = walked_tree_emissions(WALKS[name], trees)
            assert walked.is_targets_own
            assert deviation_of(walked.emissions, trees) < BOUND


def test_vectors_of_another_implementation_are_met() -> None:
    """Each node that may be the last one, and the law of the token there."""
    assert len(VECTORS) == 40
    for case in VECTORS:
        tokens, parents = flattened(case["tree"])
        shape = TokenTree(tuple(parents))
        table, draft = (torch.tensor(case[key], dtype=torch.float64) for key in ("target_table", "draft_table"))
        before = torch.tensor([[case["vocab"], *tokens]])
        rows = before, before[:, [parent + 1 for parent in parents]]
        for name, outcomes in case["outcomes"].items():
            layouts = (DenseRows(draft), sparse_rows(draft))
            for own in layouts:
                trees = TreeBatch(table, own, torch.tensor([tokens]), (shape,), *rows, not case["replacement"])
                law = STATED[name].tree_law(trees)
                found: dict[tuple[int, ...], Tensor] = {}
                for node in range(ROOT, len(shape)):
                    weights = STATED[name].extra_weights(trees, law, torch.tensor([node]))[0]
                    path = tuple(tokens[step] for step in shape.path_to(node))
                    part = law.stop_probs[0, node + 1] * weights / weights.sum()
                    found[path] = found.get(path, torch.zeros_like(part)) + part
                expected: dict[tuple[int, ...], Tensor] = {}
                for outcome in outcomes:
                    part = outcome["mass"] * torch.tensor(outcome["next_token_probs"], dtype=torch.float64)
                    path = tuple(outcome["path"])
                    expected[path] = expected.get(path, torch.zeros_like(part)) + part
                for path in found.keys() | expected.keys():
                    nothing = torch.zeros(case["vocab"], dtype=torch.float64)
                    difference = found.get(path, nothing) - expected.get(path, nothing)
                    assert difference.abs().max() < 1e-12, f"{case['name']}, {name}, {path}"


def flattened(tree: list) -> tuple[list[int], list[int]]:
    """Returns the tokens and parents of nested lists of [token, children], level by level."""
    tokens: list[int] = []
    parents: list[int] = []
    level = [(ROOT, own) for own in tree]
    while level:
        following = []
        for parent, (token, children) in level:
            following += [(len(tokens), child) for child in children]
            tokens.append(token)
            parents.append(parent)
        level = following
    return tokens, parents


@every("name", [*STATED, "coupled", "target_only"])
def test_expected_number_of_accepted_tokens_grows_with_the_tree(name: str) -> None:
    """From one path of two to seven nodes; traversal accepts no less than multi-round."""
    means = []
    for shape in (TokenTree((-1, 0)), TokenTree((-1, -1, 0, 1)), TokenTree((-1, -1, 0, 0, 1))):
        total = 0.0
        for pair in random_pairs(3):
            trees = all_trees(pair, shape, name != "multi_round")
            if name in STATED:
                law = STATED[name].tree_law(trees.batch)
                total += float((trees.probs * law.expected_accepted(trees.batch)).sum())
                emitted = stated_tree_emissions(STATED[name], trees)
                assert float(emitted.expected_accepted().sum()) == pytest.approx(
                    float((trees.probs * law.expected_accepted(trees.batch)).sum())
                )
            else:
                total += float(walked_tree_emissions(WALKS[name], trees).emissions.expected_accepted().sum())
        means.append(total)
    assert means == sorted(means)
    assert means[0] < means[1] < means[2]


def test_children_of_several_drafters_are_verified_by_multi_round() -> None:
    """SpecInfer's case: each child of the root, and the child behind the second, from a drafter of its own."""
    shape = TokenTree((-1, -1, 1))
    for first, second, third in zip(pairs(0), pairs(0)[1:], pairs(0)[2:], strict=False):
        drafters = [first.drafter, second.drafter, third.drafter]
        pair = Pair("of the first drafter", first.target, torch.full((4, 3), 1 / 3, dtype=torch.float64))
        trees = all_trees(pair, shape, is_distinct=False)
        before = torch.stack([trees.contexts, trees.contexts, trees.tokens[:, 1]], dim=1)
        rows = before + torch.tensor([0, 4, 8])
        probs = torch.cat(drafters)[rows, trees.tokens].prod(dim=1)
        kept = (probs > 0.0).nonzero().squeeze(1)
        batch = trees.batch.chosen(kept.tolist())
        batch = replace(batch, draft=DenseRows(torch.cat(drafters)), draft_rows=rows[kept])
        parts = trees.contexts[kept], trees.tokens[kept], probs[kept], batch, trees.numbers[kept]
        own = AllTrees(pair, shape, *parts)
        assert deviation_of(stated_tree_emissions(STATED["multi_round"], own), own) < BOUND


K_SEQ = KSeqRule()


@pytest.mark.slow
def test_k_seq_is_exact_on_independent_paths_and_is_token_on_one() -> None:
    for shape in (SHAPES[0], SHAPES[1], SHAPES[3], TokenTree((-1, -1, 0, 1)), TokenTree((-1, 0, -1, -1, 3))):
        for pair in pairs(len(shape)):
            trees = all_trees(pair, shape, is_distinct=False)
            assert deviation_of(stated_tree_emissions(K_SEQ, trees), trees) < BOUND
    for pair in pairs(0):
        trees = all_trees(pair, TokenTree.chain(3), is_distinct=False)
        token = RULES["token"]
        assert isinstance(token, LawRule)
        expected = token.stop_law(trees.batch.chains()).accepted_probs
        assert (K_SEQ.tree_law(trees.batch).stop_probs - expected).abs().max() < 1e-12


def test_k_seq_accepts_at_a_node_what_its_paper_states() -> None:
    """At least 1 - 1/e of the chance that the target's token is among the drafts, and no less than one path."""
    for pair in random_pairs(3):
        overlap = torch.minimum(pair.target, pair.drafter).sum(dim=1)
        for count in (1, 2, 4):
            trees = all_trees(pair, TokenTree((-1,) * count), is_distinct=False)
            accepted = stated_tree_emissions(K_SEQ, trees).expected_accepted()
            best = torch.minimum(pair.target, 1.0 - (1.0 - pair.drafter) ** count).sum(dim=1)
            assert (accepted >= (1.0 - math.exp(-1.0)) * best - 1e-12).all()
            assert (accepted >= overlap - 1e-12).all()
            assert (accepted <= best + 1e-12).all()


def test_k_seq_refuses_trees_that_are_no_independent_paths() -> None:
    for shapes, is_distinct in (((SHAPES[4],), False), ((SHAPES[2],), True), ((SHAPES[1], SHAPES[2]), False)):
        trees, _ = drawn(torch.Generator().manual_seed(1), list(shapes), 5, DenseRows, torch.float64)
        with pytest.raises(ValueError, match="k_seq needs"):
            K_SEQ.tree_law(replace(trees, is_distinct=is_distinct))


# Which rule decides


def test_session_with_trees_uses_the_tree_rule_that_fits_its_own() -> None:
    block, token, coupled, typical = (RULES[name] for name in ("block", "token", "coupled", "typical"))
    drawn, greedy = SamplingParams(1.0), SamplingParams(0.0)
    assert tree_rule_for(block, drawn) is TREE_RULES["traversal"]
    assert tree_rule_for(coupled, drawn) is TREE_RULES["coupled"]
    for rule in (block, token, typical):
        assert tree_rule_for(rule, greedy).name == "target_only"
    for rule in (token, typical):
        with pytest.raises(InvalidRequestError, match="takes no token trees"):
            tree_rule_for(rule, drawn)
    for name in TREE_RULES:
        assert tree_rule_named(name) is TREE_RULES[name]
    with pytest.raises(InvalidRequestError, match=r"traversal, coupled, target_only$"):
        tree_rule_named("block")


# On a chain


@LAYOUTS
@every("dtype", [torch.float32, torch.float64])
def test_traversal_of_a_chain_is_the_rule_block_to_the_bit(rows_of: type, dtype: torch.dtype) -> None:
    """Among other trees, with the same random numbers: the law, the weights of the extra token, the tokens."""
    generator, block, rule = torch.Generator().manual_seed(3), RULES["block"], STATED["traversal"]
    assert isinstance(block, LawRule)
    shapes = [TokenTree.chain(length) for length in (0, 1, 2, 3, 5)] * 3
    for index in (3, 7, 12):
        shapes[index] = SHAPES[6]
    trees, parts = drawn(generator, shapes, 6, rows_of, dtype)
    noise = KeyedNoise([DrawKey(KEY, index, 2) for index in range(len(shapes))], [5] * len(shapes), CPU)
    outcome, law = verify_trees(rule, trees, noise), rule.tree_law(trees)
    extra = rule.extra_weights(trees, law, outcome.last_nodes)
    for index, (shape, (target, draft, tokens)) in enumerate(zip(shapes, parts, strict=True)):
        if not shape.is_chain:
            continue
        blocks = BlockBatch.packed(target, [rows_of(draft)], [tokens], [0])
        alone = verify(block, blocks, KeyedNoise([DrawKey(KEY, index, 2)], [5], CPU))
        assert int(alone.num_accepted) == int(outcome.last_nodes[index]) + 1
        assert int(alone.extra_tokens) == int(outcome.extra_tokens[index])
        own = block.stop_law(blocks)
        assert torch.equal(own.accepted_probs[0], law.stop_probs[index, : len(shape) + 1])
        assert torch.equal(block.extra_weights(blocks, own, alone.num_accepted)[0], extra[index])
    assert len(outcome.last_nodes.unique()) > 3


def test_law_of_trees_on_a_chain_is_that_of_block_and_multi_round_is_token() -> None:
    """Computed as for trees of any shape; the rule itself takes the other way for chains."""
    for pair in pairs(0):
        trees = all_trees(pair, TokenTree.chain(3), is_distinct=True)
        blocks = trees.batch.chains()
        for law, name in (
            (traversal._law_of_trees(trees.batch), "block"),
            (STATED["multi_round"].tree_law(trees.batch), "token"),
        ):
            rule = RULES[name]
            assert isinstance(rule, LawRule)
            assert (law.stop_probs - rule.stop_law(blocks).accepted_probs).abs().max() < 1e-12


@every("name", WALKS)
def test_walk_down_a_chain_decides_as_for_a_block(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = [TokenTree.chain(length) for length in (4, 0, 2, 1, 3)] * 40
    trees, parts = drawn(generator, shapes, 4, DenseRows, torch.float64)
    noise = KeyedNoise([DrawKey(KEY, index, 2) for index in range(len(shapes))], [5] * len(shapes), CPU)
    outcome = verify_trees(WALKS[name], trees, noise)
    blocks = BlockBatch.packed(
        torch.cat([target for target, _, _ in parts]),
        [DenseRows(draft) for _, draft, _ in parts],
        [tokens for _, _, tokens in parts],
        torch.tensor([0, *(len(target) for target, _, _ in parts)]).cumsum(0)[:-1].tolist(),
    )
    expected = verify(WALKS[name], blocks, noise)
    assert torch.equal(outcome.last_nodes + 1, expected.num_accepted)
    assert torch.equal(outcome.extra_tokens, expected.extra_tokens)
    assert len(outcome.last_nodes.unique()) > 3
    if expected.leads is not None:
        assert outcome.leads is not None
        assert torch.equal(outcome.leads, expected.leads)


# What a batch is


def drawn(
    generator: torch.Generator, shapes: list[TokenTree], vocab_size: int, rows_of: type, dtype: torch.dtype
) -> tuple[TreeBatch, list[tuple[Tensor, Tensor, list[int]]]]:
    """Returns random trees, drawn without replacement, as a packed batch; and the target rows, draft rows and tokens of
    each."""
    parts, starts, end = [], [], 0
    for shape in shapes:
        target = (1.5 * torch.randn(len(shape) + 1, vocab_size, generator=generator, dtype=dtype)).softmax(-1)
        inner = shape.inner_nodes
        draft = target[[node + 1 for node in inner]] + torch.rand(
            len(inner), vocab_size, generator=generator, dtype=dtype
        )
        draft /= draft.sum(dim=1, keepdim=True)
        tokens = [0] * len(shape)
        for row, node in enumerate(inner):
            children = shape.children(node)
            picked = torch.multinomial(draft[row], len(children), generator=generator).tolist()
            for child, token in zip(children, picked, strict=True):
                tokens[child] = token
        parts.append((target, draft, tokens))
        starts.append(end)
        end += len(target)
    rows = [rows_of(draft) for _, draft, _ in parts]
    targets = torch.cat([target for target, _, _ in parts])
    return TreeBatch.packed(targets, rows, [tokens for _, _, tokens in parts], shapes, starts), parts


@every("name", ALL_RULES)
@LAYOUTS
def test_tree_is_decided_alike_alone_and_among_others(name: str, rows_of: type) -> None:
    generator = torch.Generator().manual_seed(5)
    shapes = [*SHAPES, *SHAPES[::-1]] * 4
    trees, parts = drawn(generator, shapes, 5, rows_of, torch.float32)
    keys = [DrawKey(KEY, index, 7) for index in range(len(shapes))]
    together = verify_trees(ALL_RULES[name], trees, KeyedNoise(keys, [9] * len(keys), CPU))
    for index, (shape, (target, draft, tokens)) in enumerate(zip(shapes, parts, strict=True)):
        alone = TreeBatch.packed(target, [rows_of(draft)], [tokens], [shape], [0])
        outcome = verify_trees(ALL_RULES[name], alone, KeyedNoise(keys[index : index + 1], [9], CPU))
        assert int(outcome.last_nodes) == int(together.last_nodes[index])
        assert int(outcome.extra_tokens) == int(together.extra_tokens[index])
    assert len(together.last_nodes.unique()) > 3


@every("name", STATED)
def test_decisions_follow_the_stated_law(name: str) -> None:
    """The last node is a step function of one uniform, and the extra token of another: at the middle of each cell."""
    trees, _ = drawn(torch.Generator().manual_seed(6), [SHAPES[5]] * 20, 4, DenseRows, torch.float64)
    law = STATED[name].tree_law(trees)
    assert (law.stop_probs >= 0.0).all()
    assert (law.stop_probs.sum(dim=1) - 1.0).abs().max() < 1e-12
    middles = law.stop_probs.cumsum(dim=1) - 0.5 * law.stop_probs
    for node in range(ROOT, 5):
        last_nodes = torch.full((20,), node)
        weights = STATED[name].extra_weights(trees, law, last_nodes)
        weights = weights / weights.sum(dim=1, keepdim=True)
        for token in range(4):
            possible = (law.stop_probs[:, node + 1] > 1e-12) & (weights[:, token] > 1e-12)
            second = (weights.cumsum(dim=1) - 0.5 * weights)[:, token]
            uniforms = torch.stack([middles[:, node + 1], second], dim=1)
            outcome = STATED[name].decide_trees(trees, FixedNoise(uniforms))
            assert torch.equal(outcome.last_nodes[possible], last_nodes[possible])
            assert (outcome.extra_tokens[possible] == token).all()


def test_packed_trees_find_their_rows_and_a_cut_keeps_them() -> None:
    trees, parts = drawn(torch.Generator().manual_seed(8), SHAPES, 5, DenseRows, torch.float64)
    kept = [shape.ended_at((0,)) for shape in SHAPES]
    cut = trees.cut(kept)
    assert (cut.max_nodes, cut.depth) == (4, 2)
    for batch, nodes in ((trees, [tuple(range(len(shape))) for shape in SHAPES]), (cut, kept)):
        for index, (shape, own, (target, draft, tokens)) in enumerate(zip(SHAPES, nodes, parts, strict=True)):
            assert batch.inside[index].sum() == len(own)
            assert torch.equal(batch.target_probs[batch.target_rows[index, 0]], target[0])
            for number, node in enumerate(own):
                assert int(batch.draft_tokens[index, number]) == tokens[node]
                assert torch.equal(batch.target_probs[batch.target_rows[index, number + 1]], target[node + 1])
                row = draft[shape.inner_nodes.index(shape.parents[node])]
                assert torch.equal(batch.draft.dense()[batch.draft_rows[index, number]], row)


def test_levels_hold_every_inner_node_once_with_its_children_in_order() -> None:
    trees, _ = drawn(torch.Generator().manual_seed(8), [*SHAPES, *SHAPES[3:]], 5, DenseRows, torch.float64)
    found = []
    for level in trees.levels:
        assert list(level.counts) == sorted(level.counts, reverse=True)
        for block, node, children in zip(
            *(part.tolist() for part in (level.blocks, level.nodes, level.children)), strict=True
        ):
            found.append((block, node))
            own = tuple(child for child in children if child != NOTHING)
            assert own == trees.shapes[block].children(node)
            assert tuple(children[: len(own)]) == own
        for rank, count in enumerate(level.counts):
            assert (level.children[:count, rank] != NOTHING).all()
            assert (level.children[count:, rank] == NOTHING).all()
    expected = [(block, node) for block, shape in enumerate(trees.shapes) for node in shape.inner_nodes]
    assert sorted(found) == sorted(expected)


# Nodes that are not judged


@every("name", STATED)
@LAYOUTS
def test_tree_is_cut_before_tokens_that_cannot_have_been_drawn(name: str, rows_of: type) -> None:
    """A token of draft probability 0 and all behind it, and a token that an earlier sibling is; as if they were not
    there."""
    shape, tokens = TokenTree((-1, -1, -1, 0, 2)), [1, 2, 0, 3, 1]
    generator = torch.Generator().manual_seed(9)
    target, draft = random_table(4, 1.0, generator), random_table(4, 1.0, generator)
    draft[0, 0] = 0.0
    draft /= draft.sum(dim=1, keepdim=True)
    whole = TreeBatch.packed(target.repeat(2, 1)[:6], [rows_of(draft[:3])], [tokens], [shape], [0])
    cut, kept = cut_undrawable(whole)
    assert kept == [(0, 1, 3)]
    assert cut.shapes == (TokenTree((-1, -1, 0)),)
    again = TreeBatch.packed(target.repeat(2, 1)[:6], [rows_of(draft[1:4])], [[1, 2, 2, 3, 1]], [shape], [0])
    assert cut_undrawable(again)[1] == [(0, 1, 3)]
    assert cut_undrawable(replace(again, is_distinct=False))[1] is None
    for number in range(60):
        noise = KeyedNoise([DrawKey(KEY, number, 0)], [3], CPU)
        outcome, alone = verify_trees(STATED[name], whole, noise), verify_trees(STATED[name], cut, noise)
        node = int(alone.last_nodes)
        assert int(outcome.last_nodes) == (ROOT if node == ROOT else kept[0][node])
        assert torch.equal(outcome.extra_tokens, alone.extra_tokens)


@every("name", STATED)
@LAYOUTS
def test_subnormal_remainders_of_distributions_are_judged_by_their_law(name: str, rows_of: type) -> None:
    """What a first child leaves of the drafter's distribution, or of the target's, is 1e-40, whose inverse is infinite
    in float32. Two children are drawn without replacement here; the law is compared with that of twice the precision.
    """
    tiny, size = 1e-40, 300  # above `WHOLE_ROW`, where a sum that is no number draws an id beyond the vocabulary
    shape, spare = TokenTree((-1, -1)), [0.0] * (size - 3)
    drafts = {"drafter": [1.0, tiny, 0.0], "target": [0.5, 0.5, 0.0], "both": [1.0, tiny, 0.0]}
    targets = {"drafter": [0.25, 0.25, 0.5], "target": [0.5, 0.5, tiny], "both": [1.0, tiny, tiny]}
    for case, draft in drafts.items():
        laws = []
        for dtype in (torch.float32, torch.float64):
            rows = torch.tensor([[*draft, *spare]], dtype=dtype)
            target = torch.tensor([[*targets[case], *spare]] * 3, dtype=dtype)
            trees = TreeBatch.packed(target, [rows_of(rows)], [[0, 1]], [shape], [0])
            law = STATED[name].tree_law(trees)
            extra = STATED[name].extra_weights(trees, law, torch.tensor([ROOT])).to(torch.float64)
            laws.append((law.stop_probs, extra / extra.sum(dim=1, keepdim=True)))
            for number in range(8):
                outcome = verify_trees(STATED[name], trees, KeyedNoise([DrawKey(KEY, number, 0)], [3], CPU))
                assert 0 <= int(outcome.extra_tokens) < 3, case
        for single, double in zip(*laws, strict=True):
            assert torch.allclose(single, double, rtol=0.0, atol=1e-4), case


@every("name", ALL_RULES)
def test_path_ends_where_the_target_has_no_distribution_with_the_plain_law(name: str) -> None:
    """After token 1 there is none, wherever it stands: every tree is tried. A text that reaches it ends there."""
    pair, shape, bad = random_pairs(3)[1], TokenTree((-1, -1, 0, 0, 1)), 1
    rule = ALL_RULES[name]
    trees = all_trees(pair, shape, is_distinct=True)
    ends = [[node for node, token in enumerate(row) if token == bad] for row in trees.tokens.tolist()]
    length = shape.depth + 1
    generator = torch.Generator().manual_seed(12)
    # The law of the first `length` tokens, cut at the first bad one.
    expected: dict[tuple[int, ...], float] = {}
    for text in product(range(3), repeat=length):
        mass, before = 1.0, 3
        for token in text:
            mass *= float(pair.target[before, token])
            before = token
        cut = text[: text.index(bad) + 1] if bad in text else text
        expected[cut] = expected.get(cut, 0.0) + mass
    found: dict[tuple[int, ...], float] = {}

    def complete(text: tuple[int, ...], mass: float) -> None:
        if mass == 0.0:
            return
        if bad in text or len(text) >= length:
            cut = text[: text.index(bad) + 1] if bad in text else text
            found[cut] = found.get(cut, 0.0) + mass
            return
        for token in range(3):
            complete((*text, token), mass * float(pair.target[text[-1], token]))

    starts = (trees.contexts == 3).nonzero().squeeze(1).tolist()
    for index in starts:
        alone, own = trees.batch.chosen([index]), ends[index]
        kept = alone.shapes[0].ended_at(own)
        judged = alone.cut([kept])
        mass = float(trees.probs[index])
        if name in STATED:
            law = STATED[name].tree_law(judged)
            for number in range(ROOT, len(kept)):
                stop = mass * float(law.stop_probs[0, number + 1])
                node = kept[number] if number >= 0 else ROOT
                text = tuple(trees.tokens[index, step].item() for step in alone.shapes[0].path_to(node))
                if node in own:
                    complete(text, stop)
                    continue
                weights = STATED[name].extra_weights(judged, law, torch.tensor([number]))[0]
                for token, prob in enumerate((weights / weights.sum()).tolist()):
                    complete((*text, token), stop * prob)
        # What is decided: never a node behind a bad one.
        noise = FixedNoise(
            torch.rand(1, 8, generator=generator, dtype=torch.float64),
            torch.rand(1, 4, 3, generator=generator, dtype=torch.float64),
        )
        last = int(verify_trees(rule, alone, noise, [own]).last_nodes)
        path = alone.shapes[0].path_to(last)
        assert not set(path[:-1]) & set(own)
    if name in STATED:
        assert found.keys() == expected.keys()
        assert max(abs(found[text] - expected[text]) for text in expected) < BOUND


# Coupled trees


def test_text_of_coupled_trees_is_that_of_plain_draws_by_position() -> None:
    """Children are the first racers of the drafter, dropped and repeated at random; the text is the target's own. The
    lead of each token is that over the second in its race."""
    generator = torch.Generator().manual_seed(13)
    shapes = [SHAPES[index % len(SHAPES)] for index in range(200)]
    trees, parts = drawn(generator, shapes, 5, DenseRows, torch.float64)
    keys = [DrawKey(KEY, index, index % 3) for index in range(200)]
    outcome = verify_trees(WALKS["coupled"], trees, KeyedNoise(keys, [4] * 200, CPU))
    assert outcome.leads is not None
    for index, (shape, (target, _, tokens)) in enumerate(zip(shapes, parts, strict=True)):
        times = exponentials(torch.tensor([keys[index].text_words] * 4), 4 + torch.arange(4), 5)
        node, depth = ROOT, 0
        while True:
            ratios = (target[node + 1] / times[depth]).sort(descending=True)
            winner = int(ratios.indices[0])
            assert float(outcome.leads[index, depth]) == pytest.approx(
                float((ratios.values[0] / ratios.values[1]).log())
            )
            found = [child for child in shape.children(node) if tokens[child] == winner]
            if not found:
                break
            node, depth = found[0], depth + 1
        assert int(outcome.last_nodes[index]) == node
        assert int(outcome.extra_tokens[index]) == winner
        assert torch.isinf(outcome.leads[index, depth + 1 :]).all()


def test_greedy_target_is_followed_by_every_rule() -> None:
    """Its rows are one-hot; the path is that of its likeliest tokens, as far as they are drafted."""
    generator = torch.Generator().manual_seed(14)
    shapes = [SHAPES[index % len(SHAPES)] for index in range(100)]
    trees, parts = drawn(generator, shapes, 4, DenseRows, torch.float32)
    trees.target_probs.copy_(torch.nn.functional.one_hot(trees.target_probs.argmax(dim=1), 4))
    keys = [DrawKey(KEY, index, 0) for index in range(100)]
    for rule in ALL_RULES.values():
        outcome = verify_trees(rule, trees, KeyedNoise(keys, [0] * 100, CPU))
        for index, (shape, (target, _, tokens)) in enumerate(zip(shapes, parts, strict=True)):
            node = ROOT
            while True:
                best = int(target[node + 1].argmax())
                found = [child for child in shape.children(node) if tokens[child] == best]
                if not found:
                    break
                node = found[0]
            assert (int(outcome.last_nodes[index]), int(outcome.extra_tokens[index])) == (node, best)


# What must not be


def test_pruning_by_values_biases_rules_of_distributions_and_no_walk() -> None:
    """The last node is dropped if it is token 0. Dropped for its parent's token, with what would be drawn there, it
    biases nothing."""
    pair, shape = random_pairs(3)[1], TokenTree((-1, -1, 0))
    trees = all_trees(pair, shape, is_distinct=True)
    for node, is_biased in ((2, True), (0, False)):
        kept = [(0, 1) if row[node] == 0 else (0, 1, 2) for row in trees.tokens.tolist()]
        numbers = trees.numbers.clone()
        numbers[:, 3] = torch.where(trees.tokens[:, node] == 0, NOTHING, numbers[:, 3])
        pruned = replace(trees, batch=trees.batch.cut(kept), numbers=numbers)
        for rule in STATED.values():
            assert (deviation_of(stated_tree_emissions(rule, pruned), pruned) > 0.01) == is_biased
        for walk in WALKS.values():
            assert deviation_of(walked_tree_emissions(walk, pruned).emissions, pruned) < BOUND
