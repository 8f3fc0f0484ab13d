"""The rules, proved by enumeration: no sampling, float64, every outcome. Then their edges, in both layouts."""

import json
from fractions import Fraction
from itertools import pairwise, product
from math import prod
from pathlib import Path

import pytest
import torch
from cases import every
from enumeration import outcome_law, single_block
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftwire.checking.rules_to_check import load_rules
from draftwire.checking.toy_models import random_table
from draftwire.errors import InvalidRequestError
from draftwire.method.distributions import DenseRows, DraftRows, SparseRows
from draftwire.method.keys import DrawKey
from draftwire.method.sampling import probabilities
from draftwire.options.trees.walk import CoupledWalkRule
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire.verification import (
    RULES,
    BlockBatch,
    CoupledRule,
    FixedNoise,
    KeyedNoise,
    LawRule,
    TokenRule,
    TypicalRule,
    VerificationRule,
    new_rule,
    rule_named,
    verify,
)
from draftwire.verification.block import block_weights
from draftwire.verification.blocks import cut_impossible
from draftwire.verification.rule import facts_of
from draftwire.verification.rule_loading import load_rule, served_rules
from examples.rules.greedy_block import GreedyBlockRule

torch.set_num_threads(1)

CHAIN = json.loads((Path(__file__).parents[1] / "vectors" / "chain.json").read_text())
LAW_RULES = [name for name, rule in RULES.items() if isinstance(rule, LawRule)]
CHAINED = [name for name in LAW_RULES if RULES[name].is_lossless]
SERVED_AND_GREEDY_BLOCK = [*RULES, GreedyBlockRule.name]
LAYOUTS = every("layout", ["dense", "sparse"])
KEY = bytes(range(16))
CPU = torch.device("cpu")


def tensor(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def sparse(rows: Tensor, unused_id: int = 0) -> SparseRows:
    """Returns the same distributions in the sparse layout, with two places more than are used."""
    support = int((rows > 0.0).sum(dim=1).max()) + 2 if len(rows) else 1
    wide = torch.nn.functional.pad(rows, (0, max(0, support - rows.shape[1])))
    probs, ids = wide.sort(dim=1, descending=True, stable=True)
    probs, ids = probs[:, :support], ids[:, :support]
    return SparseRows(torch.where(probs > 0.0, ids, unused_id), probs, rows.shape[1])


def rows_in(layout: str, rows: Tensor, unused_id: int = 0) -> DraftRows:
    return DenseRows(rows) if layout == "dense" else sparse(rows, unused_id)


def many(target: Tensor, draft: Tensor, tokens: list[int], layout: str, count: int) -> BlockBatch:
    """Returns the same block many times over. What no rule may read, before and after its rows, is NaN."""
    nothing = torch.full((1, target.shape[1]), torch.nan, dtype=target.dtype)
    rows = rows_in(layout, draft, unused_id=tokens[0] if tokens else 0)
    return BlockBatch.packed(torch.cat([nothing, target, nothing]), [rows] * count, [tokens] * count, [1] * count)


def noise_of(count: int, first: int = 0) -> KeyedNoise:
    """Returns the noise of different completions of one request."""
    return KeyedNoise([DrawKey(KEY, first + number, 3) for number in range(count)], [9] * count, CPU)


def decided(name: str, blocks: BlockBatch, count: int) -> list[tuple[int, int]]:
    """Returns accepted tokens and extra token of each block."""
    outcome = verify(named(name), blocks, noise_of(count))
    return list(zip(outcome.num_accepted.tolist(), outcome.extra_tokens.tolist(), strict=True))


def decisions(
    name: str, target: Tensor, draft: Tensor, tokens: list[int], layout: str = "dense", count: int = 300
) -> set[tuple[int, int]]:
    """Returns all pairs of accepted tokens and extra token that come out under different noise."""
    return set(decided(name, many(target, draft, tokens, layout, count), count))


def named(name: str) -> VerificationRule:
    """Returns a rule of `SERVED_AND_GREEDY_BLOCK`."""
    return GreedyBlockRule() if name == GreedyBlockRule.name else rule_named(name)


def law_rule(name: str) -> LawRule:
    rule = named(name)
    assert isinstance(rule, LawRule)
    return rule


def random_blocks(
    generator: torch.Generator, lengths: list[int], vocab_size: int, layout: str, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[list[int]]]:
    """Returns target rows, draft rows and drawn tokens of random blocks. Some rows are one-hot, some equal."""
    targets, drafts, tokens = [], [], []
    for length in lengths:
        target = (2 * torch.randn(length + 1, vocab_size, generator=generator, dtype=dtype)).softmax(-1)
        draft = (2 * torch.randn(length, vocab_size, generator=generator, dtype=dtype)).softmax(-1)
        for row in range(length):
            kind = int(torch.randint(0, 6, (), generator=generator))
            if kind == 0:
                draft[row] = target[row]
            elif kind == 1:
                target[row] = torch.nn.functional.one_hot(target[row].argmax(), vocab_size)
            if kind == 2 or layout == "sparse":
                kept = draft[row].topk(int(torch.randint(1, 4, (), generator=generator)))
                draft[row] = torch.zeros_like(draft[row]).scatter_(0, kept.indices, kept.values / kept.values.sum())
        targets.append(target)
        drafts.append(draft)
        drawn = torch.multinomial(draft, 1, generator=generator).flatten().tolist() if length else []
        tokens.append(drawn)
    return targets, drafts, tokens


def packed(targets: list[Tensor], drafts: list[Tensor], tokens: list[list[int]], layout: str) -> BlockBatch:
    """Returns a batch whose target rows stand in the opposite order, with a row of NaN after each block."""
    nothing = torch.full((1, targets[0].shape[1]), torch.nan, dtype=targets[0].dtype)
    parts, starts, end = [], [], 0
    for target in reversed(targets):
        parts += [target, nothing]
        starts.append(end)
        end += len(target) + 1
    return BlockBatch.packed(torch.cat(parts), [rows_in(layout, draft) for draft in drafts], tokens, starts[::-1])


@LAYOUTS
@every("name", CHAINED)
def test_blocks_without_their_draft_tokens_are_decided_as_empty_ones(name: str, layout: str) -> None:
    """With the numbers and the row that plain decoding would use, whatever was drafted, impossible tokens included."""
    lengths = [3, 0, 1, 4, 2] * 40
    targets, drafts, tokens = random_blocks(torch.Generator().manual_seed(7), lengths, 6, layout, torch.float64)
    tokens[0] = [5, 5, 5]
    drafts[0][:, 5] = 0.0
    blocks, rule = packed(targets, drafts, tokens, layout), named(name)
    aside = verify(rule, blocks.cut(torch.zeros_like(blocks.lengths)), noise_of(len(lengths)))
    empty = packed([target[:1] for target in targets], [draft[:0] for draft in drafts], [[] for _ in tokens], layout)
    plain = verify(rule, empty, noise_of(len(lengths)))
    assert aside.num_accepted.tolist() == [0] * len(lengths)
    assert aside.extra_tokens.tolist() == plain.extra_tokens.tolist()
    assert len(set(plain.extra_tokens.tolist())) > 3


def test_served_rules_are_these() -> None:
    facts = [
        RuleFacts("block", takes_trees=True),
        RuleFacts("token"),
        RuleFacts("coupled", needs_draft_probs=False, is_coupled=True, takes_trees=True),
        RuleFacts("typical", is_lossless=False, needs_draft_probs=False),
    ]
    assert list(map(facts_of, RULES.values())) == facts
    assert list(RULES) == [each.name for each in facts]


def test_unknown_rule_is_refused_and_a_stateful_one_is_new_for_each_run() -> None:
    for find in (rule_named, new_rule):
        with pytest.raises(InvalidRequestError, match=r"block, token, coupled, typical$"):
            find("tokn")
    own = "examples.rules.greedy_block:GreedyBlockRule"
    assert isinstance(load_rule(own), GreedyBlockRule)
    assert load_rule(own) is not load_rule(own)
    assert all(new_rule(name) is load_rule(name) is rule for name, rule in RULES.items())


def test_rules_for_blocks_and_trees_are_told_apart_by_import_path_too() -> None:
    paths = ["examples.rules.exact_match.ExactMatchRule", "examples.rules.k_seq:KSeqRule"]
    rules, tree_rules = load_rules(["token", paths[0], "traversal", paths[1], "coupled", "token"])
    assert [rule.name for rule in rules] == ["token", "exact_match", "coupled"]
    assert [rule.name for rule in tree_rules] == ["traversal", "k_seq", "coupled"]
    both = load_rules([f"{__name__}:Walks"])
    assert [rule.name for own in both for rule in own] == ["walks", "walks"]
    for name, why in (
        (f"{__name__}:Coupled", "no distributions travel"),
        (f"{__name__}:Undeclared", "it has no is_lossless"),
        (f"{__name__}:KEY", r"has no method decide\(blocks, noise\)"),
        ("travrsal", "known: block, token, coupled, typical, traversal, target_only, or"),
    ):
        with pytest.raises(InvalidRequestError, match=why):
            load_rules(["block", name])


# What a batch is


@LAYOUTS
def test_packed_batch_finds_the_rows_of_each_block_wherever_they_stand(layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [0, 3, 1, 5, 0]
    targets, drafts, tokens = random_blocks(generator, lengths, 6, layout, torch.float64)
    blocks = packed(targets, drafts, tokens, layout)
    assert (blocks.batch_size, blocks.max_len) == (5, 5)
    assert blocks.lengths.tolist() == lengths
    assert blocks.inside.sum(dim=1).tolist() == lengths
    seen_target, seen_draft = blocks.padded_target_probs(), blocks.padded_draft_probs()
    of_drafts = blocks.target_probs_of_drafts(), blocks.draft_probs_of_drafts()
    for number, length in enumerate(lengths):
        assert torch.equal(seen_target[number, : length + 1], targets[number])
        assert torch.equal(seen_draft[number, :length], drafts[number])
        assert blocks.draft_tokens[number, :length].tolist() == tokens[number]
        for position, token in enumerate(tokens[number]):
            assert of_drafts[0][number, position] == targets[number][position, token]
            assert of_drafts[1][number, position] == drafts[number][position, token]


@LAYOUTS
def test_cut_leaves_what_is_before_it_and_copies_no_row_of_the_target(layout: str) -> None:
    generator = torch.Generator().manual_seed(2)
    targets, drafts, tokens = random_blocks(generator, [4, 4], 5, layout, torch.float64)
    drafts[1][2, tokens[1][2]] = 0.0
    cut = cut_impossible(packed(targets, drafts, tokens, layout))
    assert cut.lengths.tolist() == [4, 2]
    assert torch.equal(cut.padded_target_probs()[1, :3], targets[1][:3])
    rows = torch.full((4, 3), 1 / 3)
    assert BlockBatch.packed(rows, [DenseRows(rows[:1])] * 2, [[0], [1]], [0, 2]).target_probs is rows


# Laws, by enumeration


def test_laws_and_block_weights_equal_independently_computed_ones() -> None:
    for case in CHAIN:
        target, draft, tokens = tensor(case["target_probs"]), tensor(case["draft_probs"]), case["draft_tokens"]
        for name in CHAINED:
            law = outcome_law(RULES[name], target, draft, tokens)
            expected = tensor(case["outcomes"][name])
            assert (law - expected).abs().max() <= 1e-12, (name, case["name"])
            stated = law_rule(name).stop_law(cut_impossible(single_block(target, draft, tokens)))
            mean = (expected.sum(dim=1) * torch.arange(len(tokens) + 1)).sum()
            assert stated.expected_accepted()[0] == pytest.approx(float(mean), abs=1e-12)
        first = outcome_law(GreedyBlockRule(), target, draft, tokens)
        assert (first - tensor(case["outcomes"]["greedy_block_first_round"])).abs().max() <= 1e-12, case["name"]
        weights = block_weights(single_block(target, draft, tokens))[0]
        assert (weights - tensor(case["block_weights"])).abs().max() <= 1e-12, case["name"]


# What else is in the batch


@every("name", RULES)
@every("batch_size", [2, 17])
@every("dtype", [torch.float32, torch.float64])
@LAYOUTS
def test_result_for_a_block_does_not_depend_on_its_batch(
    name: str, batch_size: int, dtype: torch.dtype, layout: str
) -> None:
    generator = torch.Generator().manual_seed(batch_size)
    counts = set()
    for _ in range(40 // batch_size):
        lengths = torch.randint(0, 7, (batch_size,), generator=generator).tolist()
        targets, drafts, tokens = random_blocks(generator, lengths, 6, layout, dtype)
        keys = [DrawKey(KEY, *torch.randint(0, 99, (2,), generator=generator).tolist()) for _ in lengths]
        places = torch.randint(1, 999, (batch_size,), generator=generator).tolist()
        together = verify(RULES[name], packed(targets, drafts, tokens, layout), KeyedNoise(keys, places, CPU))
        for row, length in enumerate(lengths):
            one = slice(row, row + 1)
            blocks = packed(targets[one], drafts[one], tokens[one], layout)
            alone = verify(RULES[name], blocks, KeyedNoise(keys[one], places[one], CPU))
            accepted = int(alone.num_accepted[0])
            assert (accepted, int(alone.extra_tokens[0])) == (
                int(together.num_accepted[row]),
                int(together.extra_tokens[row]),
            )
            assert (alone.leads is None) == (together.leads is None) == (name != "coupled")
            if alone.leads is not None and together.leads is not None:
                assert torch.equal(alone.leads[0, : accepted + 1], together.leads[row, : accepted + 1])
            counts.add((length, accepted))
    assert len(counts) >= 8, "blocks were accepted in full, in part and not at all"


@every("name", SERVED_AND_GREEDY_BLOCK)
def test_sparse_rows_decide_what_the_same_dense_rows_decide(name: str) -> None:
    generator = torch.Generator().manual_seed(12)
    lengths = torch.randint(0, 7, (600,), generator=generator).tolist()
    batch = random_blocks(generator, lengths, 6, "sparse", torch.float64)
    dense, thin = (decided(name, packed(*batch, layout), 600) for layout in ("dense", "sparse"))
    assert dense == thin
    assert len({accepted for accepted, _ in dense}) >= 4


class OperationCounter(TorchDispatchMode):
    """Counts what torch is asked to compute; views, which compute nothing, do not count."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += "view" not in str(func)
        return func(*args, **(kwargs or {}))


@every("name", RULES)
@LAYOUTS
def test_number_of_operations_grows_with_neither_batch_nor_block_length(name: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(3)
    counts = set()
    for batch_size, length in ((2, 2), (64, 2), (2, 40), (33, 40)):
        blocks = packed(*random_blocks(generator, [length] * batch_size, 6, layout, torch.float32), layout)
        times = torch.rand(batch_size, length + 1, 6, generator=generator, dtype=torch.float64) + 0.1
        for noise in (FixedNoise(torch.rand(batch_size, 2, generator=generator).double(), times), noise_of(batch_size)):
            with OperationCounter() as operations:
                verify(RULES[name], blocks, noise)
            counts.add((type(noise), operations.count))
    assert len(counts) == 2, counts
    assert min(count for _, count in counts) > 5


# Edge cases


@every("name", SERVED_AND_GREEDY_BLOCK)
@LAYOUTS
def test_empty_block_is_plain_decoding(name: str, layout: str) -> None:
    """Each of 4,000 draws is expected at its probability within 5 standard deviations: 2 in a million runs fail, but
    for the seed, which is fixed."""
    target = tensor([[0.2, 0.5, 0.3, 0.0]])
    accepted, extra = zip(*decided(name, many(target, target[:0], [], layout, 4_000), 4_000), strict=True)
    assert set(accepted) == {0}
    shares = torch.bincount(torch.tensor(extra), minlength=4) / 4_000
    assert ((shares - target[0]).abs() <= 5 * (target[0] * (1 - target[0]) / 4_000).sqrt()).all()


@every("name", [*CHAINED, GreedyBlockRule.name])
@every("dtype", [torch.float32, torch.float64])
@LAYOUTS
def test_distributions_that_rounding_alone_tells_apart_accept_everything(
    name: str, dtype: torch.dtype, layout: str
) -> None:
    """Residuals of size 1e-8 meet block weights of 1 - 1e-8: no test may become NaN, negative or more than 1."""
    generator = torch.Generator().manual_seed(21)
    for case in range(30):
        size = (1 + case % 6) * torch.finfo(dtype).eps
        target = torch.randn(6, 50, generator=generator, dtype=torch.float64).softmax(-1)
        draft = (target[:5] * (1 + size * torch.randn(5, 50, generator=generator, dtype=torch.float64))).to(dtype)
        tokens = torch.multinomial(draft, 1, generator=generator).flatten().tolist()
        law = law_rule(name).stop_law(many(target.to(dtype), draft, tokens, layout, 1)).accepted_probs[0]
        assert (law >= 0.0).all()
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-9)
        assert float(law[:-1].sum()) < 200 * size


@every("name", SERVED_AND_GREEDY_BLOCK)
@LAYOUTS
def test_undrawable_token_cuts_the_block_before_it_if_distributions_count(name: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(11)
    target, draft = random_table(3, 0.3, generator), random_table(3, 1.0, generator)[:3]
    possible = decided(name, many(target, draft, [0, 2, 1], layout, 500), 500)
    draft[1, 2] = 0.0
    cut = decided(name, many(target, draft, [0, 2, 1], layout, 500), 500)
    assert max(possible)[0] == 3, "the block is not cut for another reason"
    if named(name).needs_draft_probs:
        assert cut == decided(name, many(target[:2], draft[:1], [0], layout, 500), 500)
        law = outcome_law(law_rule(name), target, draft, (0, 2, 1))
        assert (law[:2] - outcome_law(law_rule(name), target[:2], draft[:1], (0,))).abs().max() < 1e-15
        assert law[2:].sum() == 0.0
    else:
        assert cut == possible


@every("name", SERVED_AND_GREEDY_BLOCK)
@LAYOUTS
def test_masked_logits_are_never_emitted_and_make_no_number_undefined(name: str, layout: str) -> None:
    generator = torch.Generator().manual_seed(31)
    for case in range(20):
        logits = torch.randn(5, 8, generator=generator)
        logits[torch.rand(5, 8, generator=generator) < 0.5] = -torch.inf
        logits[:, case % 8] = 0.0
        target = probabilities(logits, SamplingParams(0.8))
        draft_logits = torch.randn(4, 8, generator=generator)
        draft_logits[torch.rand(4, 8, generator=generator) < 0.3] = -torch.inf
        draft_logits[:, (case + 1) % 8] = 0.0
        draft = probabilities(draft_logits, SamplingParams())
        tokens = torch.multinomial(draft, 1, generator=generator).flatten().tolist()
        for accepted, extra in decisions(name, target, draft, tokens, layout, 50):
            assert all(target[position, token] > 0.0 for position, token in enumerate(tokens[:accepted]))
            assert target[accepted, extra] > 0.0


@every("name", [*LAW_RULES, GreedyBlockRule.name])
@every("dtype", [torch.float32, torch.float64])
@LAYOUTS
def test_tails_of_1e_30_on_either_side_leave_every_number_a_probability(
    name: str, dtype: torch.dtype, layout: str
) -> None:
    """All 64 blocks at once."""
    tail, tokens = 1e-30, [list(each) for each in product(range(4), range(4), range(4))]
    target = torch.tensor([[tail, 0.6, 0.4, 0.0], [0.5, tail, 0.5, 0.0], [0.4, 0.3, 0.3, 0.0], [tail, 1.0, 0.0, 0.0]])
    draft = torch.tensor([[0.5, tail, 0.5, 0.0], [tail, 0.5, 0.25, 0.25], [0.2, 0.4, 0.4, tail]])
    target, rule = target.to(dtype), law_rule(name)
    rows = [rows_in(layout, draft.to(dtype), unused_id=first) for first, *_ in tokens]
    blocks = cut_impossible(BlockBatch.packed(target, rows, tokens, [0] * 64))
    law = rule.stop_law(blocks)
    assert torch.isfinite(law.accepted_probs).all()
    assert (law.accepted_probs >= 0.0).all()
    assert (law.accepted_probs.sum(dim=1) - 1.0).abs().max() < 1e-9
    for stop in range(4):
        reached = (stop <= blocks.lengths) & (law.accepted_probs[:, stop] > 0.0)
        weights = rule.extra_weights(blocks, law, blocks.lengths.clamp(max=stop))[reached]
        assert torch.isfinite(weights).all()
        assert (weights >= 0.0).all()
        assert (weights[:, target[stop] == 0.0] == 0.0).all()
        assert (weights.sum(dim=1) > 0.0).all()


def fractions_law(name: str, target: Tensor, draft: Tensor, tokens: list[int]) -> list[Fraction]:
    """Returns the probability of each number of accepted tokens, as the papers state it, without rounding."""
    p, q = ([[Fraction(value) for value in row] for row in rows.tolist()] for rows in (target, draft))
    weights, num = [Fraction(1)], len(tokens)
    for place, token in enumerate(tokens):
        ratio = p[place][token] / q[place][token]
        weights.append(min(Fraction(1), ratio if name == "token" else weights[-1] * ratio))
    if name == "token":
        reach = [prod(weights[: place + 1], start=Fraction(1)) for place in range(num + 1)]
        return [here - after for here, after in pairwise([*reach, Fraction(0)])]
    tests = [Fraction(1)]
    for place in range(1, num):
        mass = sum(max(weights[place] * a - b, Fraction(0)) for a, b in zip(p[place], q[place], strict=True))
        total = mass + 1 - weights[place]
        tests.append(mass / total if total else Fraction(1))
    tests.append(weights[num])
    return [
        tests[place] * prod((1 - test for test in tests[place + 1 :]), start=Fraction(1)) for place in range(num + 1)
    ]


@every("tail", [5e-324, 1e-310])
@LAYOUTS
def test_draft_probability_whose_ratio_overflows_leaves_the_law_exact(tail: float, layout: str) -> None:
    """In float64, 0.5 / 5e-324 is infinite. All 27 blocks, compared with fractions; greedy block has to be a law."""
    assert torch.isinf(tensor([0.5]) / tail).all()
    target = tensor([[0.5, 0.3, 0.2], [0.1, 0.0, 0.9], [tail, 0.4, 0.6], [0.2, 0.2, 0.6]])
    draft = tensor([[tail, 0.5, 0.5], [0.25, 0.75, tail], [0.5, tail, 0.5]])
    blocks = [list(each) for each in product(range(3), repeat=3)]
    rows = [rows_in(layout, draft, unused_id=first) for first, *_ in blocks]
    batch = BlockBatch.packed(target, rows, blocks, [0] * len(blocks))
    for name in (*CHAINED, GreedyBlockRule.name):
        law = law_rule(name).stop_law(batch).accepted_probs
        assert torch.isfinite(law).all(), name
        assert (law.sum(dim=1) - 1.0).abs().max() < 1e-12, name
        outcome = verify(named(name), batch, noise_of(len(blocks)))
        assert outcome.num_accepted.max() <= 3
        assert outcome.extra_tokens.max() <= 2
        if name in CHAINED:
            expected = tensor([[float(prob) for prob in fractions_law(name, target, draft, each)] for each in blocks])
            assert (law - expected).abs().max() < 1e-12, name


def test_drafted_tail_that_the_target_likes_is_kept_and_its_own_is_not() -> None:
    target = tensor([[0.5, 0.5, 1e-30], [0.5, 0.5, 1e-30]])
    draft = tensor([[1e-30, 0.5, 0.5]])
    for name in CHAINED:
        assert outcome_law(RULES[name], target, draft, (0,))[1].sum() == 1.0
        assert outcome_law(RULES[name], target, draft, (2,))[1].sum() == pytest.approx(2e-30, rel=1e-9)


@every("name", [*LAW_RULES, GreedyBlockRule.name])
@every("uniform", [0.0, 1.0 - 2**-53])
@every("dtype", [torch.float32, torch.float64])
@every("vocab_size", [4, 5_000])
@LAYOUTS
def test_impossible_tokens_are_never_emitted_at_the_ends_of_the_uniforms(
    name: str, uniform: float, dtype: torch.dtype, vocab_size: int, layout: str
) -> None:
    first = vocab_size // 2 - 2  # impossible tokens stand on both sides
    target, draft = torch.zeros(3, vocab_size, dtype=dtype), torch.zeros(2, vocab_size, dtype=dtype)
    target[:, first : first + 4] = torch.tensor([0.0, 1.0 - 1e-7, 1e-7, 0.0], dtype=dtype)
    draft[:, first : first + 4] = torch.tensor([0.5, 1e-30, 0.5 - 1e-30, 0.0], dtype=dtype)
    noise = FixedNoise(torch.full((1, 2), uniform, dtype=torch.float64))
    outcome = verify(named(name), many(target, draft, [first, first], layout, 1), noise)
    assert int(outcome.num_accepted[0]) == 0
    assert int(outcome.extra_tokens[0]) in (first + 1, first + 2)


@every("name", CHAINED)
@every("uniform", [0.0, 1.0 - 2**-53])
def test_certain_outcomes_stay_certain_at_the_ends_of_the_uniforms(name: str, uniform: float) -> None:
    """Twice as likely under the target as under the drafter: each token is accepted, whatever is drawn."""
    target = tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    draft = tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]])
    noise = FixedNoise(torch.full((1, 2), uniform, dtype=torch.float64))
    outcome = verify(RULES[name], single_block(target, draft, [0, 0]), noise)
    assert (int(outcome.num_accepted), int(outcome.extra_tokens)) == (2, 2 if uniform else 1)


# Typical acceptance


@every("dtype", [torch.float32, torch.float64])
@every(
    ("probs", "num_kept"),
    [([0.25] * 4, 4), ([0.05] * 20, 20), ([0.915, 0.085], 1), ([0.5, 0.41, 0.05, 0.03, 0.01], 2)],
)
def test_typical_keeps_what_is_above_the_lower_of_two_thresholds(
    probs: list[float], num_kept: int, dtype: torch.dtype
) -> None:
    """By hand: the nearly certain row bounds at 0.09; four equal tokens have entropy log 4, which bounds at 0.3 / 4;
    twenty equal ones at 0.3 / 20; impossible tokens, whose p log p is 0, change no entropy."""
    target = torch.tensor([probs + [0.0] * (40 - len(probs))] * 2, dtype=dtype)
    for token in range(40):
        emitted = decisions("typical", target, torch.full((1, 40), 1 / 40, dtype=dtype), [token], count=20)
        assert {accepted for accepted, _ in emitted} == {int(token < num_kept)}


@every(("epsilon", "delta", "kept"), [(0.3, 10.0, 1), (0.2, 10.0, 2), (0.9, 0.3, 3), (0.9, 1.2, 1)])
def test_typical_takes_its_thresholds(epsilon: float, delta: float, kept: int) -> None:
    # Entropy 1.03 nats: exp(-H) is 0.357, so that a delta of 0.3 bounds at 0.107 and one of 1.2 at 0.43.
    target, draft = tensor([[0.5, 0.3, 0.2]] * 4), tensor([[1 / 3] * 3] * 3)
    law = TypicalRule(epsilon, delta).stop_law(single_block(target, draft, [0, 1, 2]))
    assert law.accepted_probs.tolist() == [[float(count == kept) for count in range(4)]]


def test_typical_is_certain_of_what_it_keeps_and_reads_no_distributions() -> None:
    generator = torch.Generator().manual_seed(61)
    rule = RULES["typical"]
    assert isinstance(rule, LawRule)
    lengths = [4] * 50
    targets, drafts, tokens = random_blocks(generator, lengths, 6, "dense", torch.float64)
    laws = [
        rule.stop_law(packed(targets, rows, tokens, "dense")).accepted_probs
        for rows in (drafts, [torch.full_like(rows, torch.nan) for rows in drafts])
    ]
    assert torch.equal(laws[0], laws[1])
    assert ((laws[0] == 0.0) | (laws[0] == 1.0)).all()
    assert laws[0].sum(dim=1).tolist() == [1.0] * 50
    assert int((laws[0].sum(dim=0) > 0.0).sum()) >= 4


def test_typical_draws_the_extra_token_from_the_target_where_it_stopped() -> None:
    target, draft = tensor([[0.97, 0.01, 0.02], [0.01, 0.0, 0.99], [0.2, 0.5, 0.3]]), tensor([[0.0, 0.9, 0.1]] * 2)
    for tokens, accepted in (([1, 2], 0), ([0, 0], 1), ([0, 2], 2)):
        uniforms = torch.stack([torch.zeros(1_000), (torch.arange(1_000) + 0.5) / 1_000], dim=1).double()
        outcome = verify(RULES["typical"], many(target, draft, tokens, "dense", 1_000), FixedNoise(uniforms))
        assert outcome.num_accepted.tolist() == [accepted] * 1_000
        shares = torch.bincount(outcome.extra_tokens, minlength=3) / 1_000
        assert (shares - target[accepted]).abs().max() < 2e-3


# Precision


def h_of(accepted_probs: Tensor) -> Tensor:
    """Returns h_i, the probability that the test of i succeeds if no later one does, from the law of a block."""
    return accepted_probs[:, 1:] / accepted_probs.cumsum(dim=1)[:, 1:]


@LAYOUTS
def test_decisions_from_float32_rows_match_float64_to_1e_5(layout: str) -> None:
    """Where target and drafter all but agree a test is a quotient of two roundings, but hardly ever made: there the
    probabilities of the outcomes are compared alone."""
    generator = torch.Generator().manual_seed(51)
    rule = RULES["block"]
    assert isinstance(rule, LawRule)
    num_compared = 0
    for closeness in (1.0, 0.3, 0.1, 0.03, 0.001):
        logits = 2 * torch.randn(9, 50_000, generator=generator, dtype=torch.float64)
        noise = closeness * torch.randn(8, 50_000, generator=generator, dtype=torch.float64)
        target, draft = logits.softmax(-1), (logits[:8] + noise).softmax(-1).float()
        if layout == "sparse":
            kept = draft.topk(64)
            draft = torch.zeros_like(draft).scatter_(1, kept.indices, kept.values / kept.values.sum(1, keepdim=True))
        tokens = torch.multinomial(draft, 1, generator=generator).flatten().tolist()
        single = rule.stop_law(many(logits.float().softmax(-1), draft, tokens, layout, 1)).accepted_probs
        double = rule.stop_law(many(target, draft.double(), tokens, "dense", 1)).accepted_probs
        assert ((single >= 0.0) & (single <= 1.0)).all()
        assert float(single.sum()) == pytest.approx(1.0, abs=1e-9)
        assert (single - double).abs().max() < 1e-5
        if closeness >= 0.03:
            is_made = double.cumsum(dim=1)[:, 1:] > 1e-6
            assert (h_of(single) - h_of(double))[is_made].abs().max() < 1e-5
            num_compared += int(is_made.sum())
    assert num_compared > 10


class Coupled(CoupledRule):
    """Would be given one-hot rows, in place of the distributions that it was proved with."""

    name = "mine"
    needs_draft_probs = True


class Walks(CoupledWalkRule):
    name = "walks"


class Undeclared:
    """A rule for trees that does not say whether it is lossless."""

    name = "mine"

    def decide_trees(self, trees: object, noise: object) -> None: ...


class Nameless(TokenRule):
    name = ""


def test_own_rules_are_served_under_names_that_no_other_has() -> None:
    own = "examples.rules.exact_match.ExactMatchRule"
    assert list(served_rules([])) == list(RULES)
    assert list(served_rules([own])) == [*RULES, "exact_match"]
    for paths in ([own, own], ["draftwire.verification.TokenRule"]):
        with pytest.raises(InvalidRequestError, match="as another rule does"):
            served_rules(paths)
    for path, why in (
        ("examples.rules.greedy_block.GreedyBlockRule", "remembers what it decided"),
        (f"{__name__}.Coupled", "no distributions travel"),
        (f"{__name__}.Nameless", f"rules: {__name__}.Nameless: .*letters, digits"),
    ):
        with pytest.raises(InvalidRequestError, match=why):
            served_rules([path])
    with pytest.raises(InvalidRequestError, match="cannot import"):
        served_rules(["nothing.of.this.Name"])
