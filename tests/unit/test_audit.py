"""The audit: two statistics with mean zero for honest drafters, and a test that follows them for ever.

Odds of a false alarm of these tests: seeds are fixed, so they pass or fail alike each time. Where runs are simulated,
the docstring says how likely a sound audit is to fail under a fresh seed.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import product

import numpy as np
import pytest
import torch
from cases import every
from numpy.typing import NDArray
from scipy.special import softmax
from scipy.stats import binom

from draftwire.audit import Alarm, AuditSums, DrafterAudit, FirstUses, Statistic, audit_sums
from draftwire.method.distributions import DenseRows, DraftRows, SparseRows, no_rows
from draftwire.method.keys import Role, derive_key
from draftwire.verification import BlockBatch

torch.set_num_threads(1)

Array = NDArray[np.float64]
Row = list[float]

VOCAB_SIZE = 24
STEP = 64
"""Draft tokens that simulated drafters report at a time."""

MAX_SURPRISE = 16.0 * math.log(2.0)

AWKWARD_PAIRS: dict[str, tuple[Row, Row]] = {
    "any": ([0.2, 0.5, 0.3], [0.6, 0.1, 0.3]),
    "equal": ([0.2, 0.5, 0.3], [0.2, 0.5, 0.3]),
    "target has zeros": ([0.0, 1.0, 0.0], [0.5, 0.25, 0.25]),
    "draft has zeros": ([0.25, 0.25, 0.5], [0.0, 0.9, 0.1]),
    "disjoint": ([1.0, 0.0, 0.0], [0.0, 0.3, 0.7]),
    "clipped": ([0.1, 0.2, 0.7], [1e-9, 1e-6, 1.0 - 1e-9 - 1e-6]),
    "denormal": ([0.1, 0.2, 0.7], [5e-324, 0.5, 0.5]),
    "uniform": ([0.1, 0.2, 0.7], [1 / 3, 1 / 3, 1 / 3]),
    "sum is not quite 1": ([0.1, 0.2, 0.7], [0.3 * 1.001, 0.5 * 1.001, 0.2 * 1.001]),
    "nearly one-hot": ([0.1, 0.2, 0.7], [1.0 - 2**-16, 2**-16, 0.0]),
}
"""Target and draft."""


def acceptance(target: float, draft: float) -> float:
    return min(1.0, target / draft)


def surprise(target: float, draft: float) -> float:
    return min(max(-math.log(draft), 0.0), MAX_SURPRISE)


def expected(value: Callable[[float, float], float], target: Row, draft: Row) -> tuple[float, float]:
    """Mean and variance of a statistic of a token that is drawn from the draft, in plain Python."""
    total = math.fsum(draft)
    terms = [(q / total, value(p, q)) for p, q in zip(target, draft, strict=True) if q > 0.0]
    mean = math.fsum(prob * one for prob, one in terms)
    return mean, math.fsum(prob * one * one for prob, one in terms) - mean * mean


def sparse_rows(rows: list[Row], drawn: list[int], dtype: torch.dtype = torch.float64) -> SparseRows:
    """The rows without their zeros. Two unused places hold the drawn token, which must not count."""
    support = 2 + max(len(row) for row in rows)
    token_ids = torch.zeros(len(rows), support, dtype=torch.int64)
    probs = torch.zeros(len(rows), support, dtype=dtype)
    for index, (row, token) in enumerate(zip(rows, drawn, strict=True)):
        used = [entry for entry, prob in enumerate(row) if prob > 0.0]
        token_ids[index] = token
        token_ids[index, : len(used)] = torch.tensor(used)
        probs[index, : len(used)] = torch.tensor([row[entry] for entry in used], dtype=dtype)
    return SparseRows(token_ids, probs, len(rows[0]))


def dense_rows(rows: list[Row], drawn: list[int], dtype: torch.dtype = torch.float64) -> DenseRows:
    return DenseRows(torch.tensor(rows, dtype=dtype))


RowMaker = Callable[[list[Row], list[int]], DraftRows]
both_encodings = every("rows_of", [dense_rows, sparse_rows])


def packed(rows_of: RowMaker, blocks: list[list[tuple[Row, Row, int]]], vocab_size: int = 3) -> BlockBatch:
    """Blocks of (target, draft, drawn token); the target's row after the last draft token is NaN."""
    after = [math.nan] * vocab_size
    target = [row for block in blocks for row in (*(target for target, _, _ in block), after)]
    tokens = [[token for _, _, token in block] for block in blocks]
    drafts = [
        rows_of([draft for _, draft, _ in block], drawn) if block else no_rows(vocab_size)
        for block, drawn in zip(blocks, tokens, strict=True)
    ]
    if rows_of is dense_rows:
        drafts = [draft if len(draft.probs) else DenseRows(torch.zeros(0, vocab_size)) for draft in drafts]
    starts = np.cumsum([0, *(len(block) + 1 for block in blocks)])[:-1].tolist()
    return BlockBatch.packed(torch.tensor(target, dtype=torch.float64), drafts, tokens, starts)


def numbers(sums: AuditSums) -> Row:
    return [getattr(sums, field.name) for field in fields(sums)]


# The statistics


RANDOM_PAIRS = [
    tuple(softmax(sharpness * row).tolist() for row in np.random.default_rng(1).normal(size=(2, 3)))
    for sharpness in (0.3, 1.0, 3.0, 8.0)
]


@both_encodings
@every("pair", [*AWKWARD_PAIRS.values(), *RANDOM_PAIRS])
def test_statistics_match_plain_python_and_have_mean_zero_under_the_draft(
    pair: tuple[Row, Row], rows_of: RowMaker
) -> None:
    target, draft = pair
    possible = [token for token, prob in enumerate(draft) if prob > 0.0]
    found = audit_sums(packed(rows_of, [[(target, draft, token)] for token in possible]))
    assert found[0].num_positions == 1
    for value, name in ((acceptance, "acceptance"), (surprise, "surprise")):
        mean, variance = expected(value, target, draft)
        terms = [getattr(sums, f"{name}_sum") for sums in found]
        assert terms == pytest.approx([value(target[t], draft[t]) - mean for t in possible], abs=1e-12)
        assert [getattr(sums, f"{name}_variance") for sums in found] == pytest.approx(
            [variance] * len(found), abs=1e-14
        )
    rounded = torch.tensor(draft, dtype=torch.float32).to(torch.float64).tolist()
    if min(rounded[token] for token in possible) > 0.0:
        single = packed(lambda rows, drawn: rows_of(rows, drawn, torch.float32), [[(target, draft, possible[0])]])  # type: ignore[call-arg]
        exact = packed(rows_of, [[(target, rounded, possible[0])]])
        assert single.draft.probs.dtype == torch.float32
        assert numbers(audit_sums(single)[0]) == pytest.approx(numbers(audit_sums(exact)[0]), abs=1e-12)


@both_encodings
def test_blocks_of_all_lengths_give_the_sums_of_their_tokens(rows_of: RowMaker) -> None:
    generator = np.random.default_rng(2)
    pairs = list(AWKWARD_PAIRS.values())
    blocks = []
    for length in (3, 0, 1, 4, 0, 2):
        chosen = [pairs[index] for index in generator.integers(len(pairs), size=length)]
        blocks.append([(target, draft, draft.index(max(draft))) for target, draft in chosen])
    found = audit_sums(packed(rows_of, blocks))
    assert [sums.num_positions for sums in found] == [len(block) for block in blocks]
    for block, sums in zip(blocks, found, strict=True):
        alone = [audit_sums(packed(rows_of, [[place]]))[0] for place in block]
        assert numbers(sums) == pytest.approx(numbers(sum(alone, AuditSums())), abs=1e-12)


def test_padding_that_holds_nan_counts_nothing() -> None:
    target, draft = AWKWARD_PAIRS["any"]
    bad = [math.nan] * 3
    blocks = BlockBatch.padded(
        torch.tensor([[target, bad, bad], [target, target, bad]], dtype=torch.float64),
        torch.tensor([[draft, bad], [draft, draft]], dtype=torch.float64),
        torch.tensor([[1, 2], [1, 2]]),
        torch.tensor([1, 2]),
    )
    first, second = audit_sums(blocks)
    assert first.num_positions == 1
    assert second.num_positions == 2
    assert all(map(math.isfinite, numbers(first) + numbers(second)))
    assert numbers(first) == pytest.approx(numbers(audit_sums(packed(dense_rows, [[(target, draft, 1)]]))[0]))


@both_encodings
def test_empty_blocks_one_hot_rows_and_bare_tokens_count_for_nothing(rows_of: RowMaker) -> None:
    assert audit_sums(packed(rows_of, [[], []])) == [AuditSums()] * 2
    some = packed(rows_of, [[(*AWKWARD_PAIRS["any"], 0)] * 2])
    assert audit_sums(some.cut(torch.tensor([0]))) == [AuditSums()]
    assert audit_sums(replace(some, draft=no_rows(3), lengths=torch.tensor([0]))) == [AuditSums()]
    target, tokens = torch.full((3, 5), 0.2), torch.tensor([[4], [2]])
    said_nothing = SparseRows(tokens, torch.ones(2, 1), 5)  # as rows of encoding NONE are decoded
    assert audit_sums(BlockBatch.packed(target, [said_nothing], [[4, 2]], [0])) == [AuditSums()]
    one_hot, choice = [([0.2, 0.5, 0.3], [0.0, 1.0, 0.0], 1)], [(*AWKWARD_PAIRS["clipped"], 2)]
    alone, mixed, only = audit_sums(packed(rows_of, [one_hot, one_hot + choice, choice]))
    assert (alone, mixed) == (AuditSums(), only)


@both_encodings
def test_token_of_declared_probability_zero_counts_as_finite_evidence(rows_of: RowMaker) -> None:
    sums = audit_sums(packed(rows_of, [[([0.2, 0.3, 0.5], [0.0, 0.5, 0.5], 0)]]))[0]
    assert all(map(math.isfinite, numbers(sums)))
    assert sums.surprise_sum == pytest.approx(MAX_SURPRISE - math.log(2.0))


# The bound holds for honest drafters


def evalue(sums: AuditSums) -> float:
    """The e-value of the sums: how many times larger it is than the bound alpha / 2 of everything ever seen."""
    audit = DrafterAudit(alpha=1e-300, window=2**62)
    audit.add(sums)
    return float(10.0 ** (audit.evidence - math.log10(1e-300 / 2.0)))


def times(sums: AuditSums, count: int) -> AuditSums:
    return AuditSums(*(count * number for number in numbers(sums)))  # type: ignore[arg-type]


@every("rare", [2.0**-16, 0.001, 0.01, 0.1, 0.3, 0.5])
@every("kind", ["rare is accepted", "rare is refused", "equal"])
@every("num_positions", [1, 2, 10, 100])
def test_mean_evalue_of_an_honest_drafter_is_at_most_one(rare: float, kind: str, num_positions: int) -> None:
    """Exact: of n draws of one of two tokens, all numbers of rare ones. By Ville's inequality nothing more is needed.

    Rare tokens of which all are accepted or refused, and no others, are where the bound of a single term is met.
    """
    target = {"rare is accepted": [1.0, 0.0], "rare is refused": [0.0, 1.0], "equal": [rare, 1.0 - rare]}[kind]
    draft = [rare, 1.0 - rare]
    is_rare, is_common = audit_sums(packed(dense_rows, [[(target, draft, token)] for token in (0, 1)], 2))
    mean = 0.0
    for number, weight in enumerate(binom.pmf(range(num_positions + 1), num_positions, rare)):
        if weight > 1e-200:
            mean += weight * evalue(times(is_rare, number) + times(is_common, num_positions - number))
    assert mean <= 1.0 + 1e-9


@every("bias", [-10.0, -0.3, -0.01, 0.001, 0.01, 0.1, 1.0, 10.0])
@every("scale", [1.0, MAX_SURPRISE])
def test_evidence_is_close_to_that_of_the_best_rate(bias: float, scale: float) -> None:
    """Bennett's inequality: with the best lambda, the exponent is V * h(S / V), h(u) = (1 + u) log(1 + u) - u."""
    variance = 100.0 / bias**2
    both = (bias * variance * scale, variance * scale**2)
    found = math.log(evalue(AuditSums(10, *both) if scale == 1.0 else AuditSums(10, 0.0, 0.0, *both)))
    best = variance * ((1.0 + abs(bias)) * math.log1p(abs(bias)) - abs(bias))
    assert 0.8 * best - math.log(64) <= found <= best


def test_error_budgets_of_all_windows_and_of_everything_sum_to_alpha() -> None:
    """With no evidence at all in the windows, what is left to the alarm is their budget."""
    alpha, window = 0.01, 8
    audit = DrafterAudit(alpha, window)
    assert 10.0**audit.evidence == pytest.approx(alpha / 2.0)  # everything
    # So much variance without a sum that nothing remains of the e-value of everything, nor of the first three windows.
    for _ in range(2):
        audit.add(AuditSums(window, 0.0, 1e12, 0.0, 1e12))
    budgets = []
    for _ in range(1000):
        audit.add(AuditSums(window))
        budgets.append(10.0**audit.evidence)
    # Each is in use for two windows' length, and while both are, the older one has more to spend.
    assert budgets == pytest.approx([alpha / 2.0 / (k * (k + 1)) for k in (4, *range(4, 1003))])
    assert sum(alpha / 2.0 / (k * (k + 1)) for k in range(1, 1003)) + alpha / 2.0 <= alpha


def test_total_evidence_does_not_vanish_in_windows_that_are_too_short() -> None:
    weak = AuditSums(10, 0.2, 2.0, 0.0, 2.0)  # a hundredth of a deviation that a single window could tell
    audit, seen = DrafterAudit(window=10), 0
    while audit.alarm is None and seen < 100_000:
        audit.add(weak)
        seen += 10
    assert audit.alarm is not None
    assert not audit.alarm.is_recent


# Simulated drafters


@dataclass(frozen=True)
class Places:
    """Places in texts: the target's distribution, and what the drafter draws from. All `[places, vocab]`."""

    target: Array
    draft: Array


def places_of(kind: str, count: int = 60) -> Places:
    """Random places, the same each time. Drafts are weights of 16 bits over half of the vocabulary."""
    generator = np.random.default_rng(sum(map(ord, kind)))
    logits = {"flat": 0.3, "peaked": 5.0}.get(kind, 2.0) * generator.normal(size=(count, VOCAB_SIZE))
    noise = {"close": 0.2, "far": 3.0}.get(kind, 0.7) * generator.normal(size=(count, VOCAB_SIZE))
    draft = softmax(logits + noise, axis=1)
    draft[draft < np.median(draft, axis=1, keepdims=True)] = 0.0
    weights = np.where(draft > 0.0, np.maximum(np.round(draft / draft.sum(axis=1, keepdims=True) * 65536), 1.0), 0.0)
    weights[np.arange(count), weights.argmax(axis=1)] += 65536.0 - weights.sum(axis=1)
    return Places(softmax(logits, axis=1), weights / 65536.0)


def mixed_places() -> Places:
    every = [places_of(kind) for kind in ("close", "far", "peaked", "flat", "any")]
    return Places(np.concatenate([one.target for one in every]), np.concatenate([one.draft for one in every]))


class Reports:
    """What the verifier's audit is told of a drafter that declares one thing and draws from another.

    The audit's sums of every possible token at every place are tabulated once.
    """

    def __init__(self, target: Array, declared: Array, drawn_from: Array) -> None:
        assert np.all((declared > 0.0) | (drawn_from == 0.0)), "other tokens are refused where blocks are read"
        place, token = drawn_from.nonzero()
        blocks = [[(target[p].tolist(), declared[p].tolist(), int(t))] for p, t in zip(place, token, strict=True)]
        found = audit_sums(packed(sparse_rows, blocks, declared.shape[1]))
        self.table = np.array([numbers(sums) for sums in found])
        law = drawn_from[place, token]
        self.cumulated = np.cumsum(law) / law.sum()

    def draw(self, num_positions: int, step: int, generator: np.random.Generator) -> list[AuditSums]:
        """Sums of `step` positions at a time; each is at a random place."""
        rows = np.searchsorted(self.cumulated, generator.random(num_positions - num_positions % step), side="right")
        sums = self.table[rows.clip(max=len(self.table) - 1)].reshape(-1, step, 5).sum(axis=1)
        return [AuditSums(int(count), *rest) for count, *rest in sums.tolist()]


def honest(places: Places) -> Reports:
    return Reports(places.target, places.draft, places.draft)


def positions_until_alarm(audit: DrafterAudit, reports: list[AuditSums]) -> int | None:
    seen = 0
    for sums in reports:
        seen += sums.num_positions
        audit.add(sums)
        if audit.alarm is not None:
            return seen
    return None


def flag_nobody(num_lives: int, num_positions: int) -> None:
    kinds = [honest(places_of(kind)) for kind in ("close", "far", "peaked", "flat")] + [honest(mixed_places())]
    generator = np.random.default_rng(3)
    for life in range(num_lives):
        audit = DrafterAudit()
        assert positions_until_alarm(audit, kinds[life % len(kinds)].draw(num_positions, STEP, generator)) is None
        assert audit.total.num_positions > num_positions - STEP
        assert 4096 <= audit.recent.num_positions <= 2 * 4096 + STEP


def test_honest_drafter_is_never_flagged_in_5_lives_of_20_000_tokens() -> None:
    """One of each kind of text. Odds of failing with a fresh seed: 5 * 1e-6 at most."""
    flag_nobody(5, 20_000)


@pytest.mark.slow
def test_honest_drafter_is_never_flagged_in_200_lives_of_50_000_tokens() -> None:
    """Odds of failing with a fresh seed: 200 * 1e-6 at most."""
    flag_nobody(200, 50_000)


def test_chance_of_ever_flagging_an_honest_drafter_is_below_alpha() -> None:
    """Exact: every history of 14 tokens of a drafter that is honest about a rare token, with windows of 4."""
    rare = 0.1
    options = audit_sums(packed(dense_rows, [[([1.0, 0.0], [rare, 1.0 - rare], token)] for token in (0, 1)], 2))
    alpha = 0.2
    living, flagged = [(1.0, DrafterAudit(alpha, 4))], 0.0
    for _ in range(14):
        following = []
        for chance, audit in living:
            for prob, sums in zip((rare, 1.0 - rare), options, strict=True):
                after = copy(audit)
                after.add(sums)
                if after.alarm is None:
                    following.append((chance * prob, after))
                else:
                    flagged += chance * prob
        living = following
    assert 1e-6 < flagged <= alpha


# Dishonest drafters


def sharpened(draft: Array, temperature: float) -> Array:
    """The distribution at another temperature."""
    weights = np.where(draft > 0.0, draft ** (1.0 / temperature), 0.0)
    result: Array = weights / weights.sum(axis=1, keepdims=True)
    return result


def one_hot(tokens: NDArray[np.int64], size: int) -> Array:
    return np.eye(size)[tokens]


def declares_the_place_before(draft: Array) -> tuple[Array, Array]:
    """The tokens that both places have in common are drawn as here and declared as there."""
    before = np.roll(draft, 1, axis=0)
    common = np.where(before > 0.0, draft, 0.0)
    return before, common / common.sum(axis=1, keepdims=True)


Lie = Callable[[Array], tuple[Array, Array]]
"""Takes what an honest drafter would draw from; returns what is declared, and what is drawn from."""

DISHONEST: dict[str, tuple[Lie, int]] = {
    "draws at temperature 0.7": (lambda draft: (draft, sharpened(draft, 0.7)), 2_000),
    "draws at temperature 0.9": (lambda draft: (draft, sharpened(draft, 0.9)), 16_000),
    "draws at temperature 1.1": (lambda draft: (draft, sharpened(draft, 1.1)), 20_000),
    "draws at temperature 1.4": (lambda draft: (draft, sharpened(draft, 1.4)), 2_000),
    "declares temperature 0.7": (lambda draft: (sharpened(draft, 0.7), draft), 2_000),
    "declares temperature 1.4": (lambda draft: (sharpened(draft, 1.4), draft), 2_500),
    "takes the best, declares a softmax": (lambda draft: (draft, np.eye(VOCAB_SIZE)[draft.argmax(axis=1)]), 450),
    "repeats token 0 wherever it can": (
        lambda draft: (draft, np.where(draft[:, :1] > 0.0, np.eye(VOCAB_SIZE)[0], draft)),
        250,
    ),
    "declares the place before": (declares_the_place_before, 60),
    "ignores its weights": (lambda draft: (draft, sharpened(draft, math.inf)), 130),
}
"""Drafters, and within how many draft tokens they are flagged."""


def lying(name: str, places: Places) -> Reports:
    return Reports(places.target, *DISHONEST[name][0](places.draft))


@pytest.mark.slow
@every("name", DISHONEST)
def test_dishonest_drafter_is_flagged_soon(name: str) -> None:
    """Four lives, each within the limit, which is about twice what the longest of 20 takes."""
    limit = DISHONEST[name][1]
    reports, generator, step = lying(name, mixed_places()), np.random.default_rng(5), max(4, limit // 100)
    taken = [positions_until_alarm(DrafterAudit(), reports.draw(2 * limit, step, generator)) for _ in range(4)]
    assert all(life is not None and life <= limit for life in taken), taken


@every("name", ["draws at temperature 0.7", "takes the best, declares a softmax"])
def test_drafter_that_cheats_after_20_000_honest_tokens_is_flagged_soon(name: str) -> None:
    limit, generator, audit = DISHONEST[name][1], np.random.default_rng(6), DrafterAudit()
    assert positions_until_alarm(audit, honest(mixed_places()).draw(20_000, STEP, generator)) is None
    taken = positions_until_alarm(audit, lying(name, mixed_places()).draw(4 * limit, 4, generator))
    assert taken is not None
    assert taken <= 4 * limit
    assert audit.alarm is not None
    assert audit.alarm.is_recent


# What it cannot see


def test_swapping_tokens_that_are_alike_on_both_sides_is_not_seen() -> None:
    """Token 1 always gives way to token 0, to which both models give the same probability: the output is biased.

    Odds of failing with a fresh seed: 1e-6, those of an honest drafter.
    """
    places = mixed_places()
    target, draft = places.target.copy(), places.draft.copy()
    target[:, :2], draft[:, :2] = target[:, :2].mean(axis=1, keepdims=True), draft[:, :2].mean(axis=1, keepdims=True)
    drawn_from = draft.copy()
    drawn_from[:, 0], drawn_from[:, 1] = 2.0 * draft[:, 0], 0.0
    assert drawn_from[:, 0].mean() > 0.05
    reports = Reports(target, draft, drawn_from).draw(50_000, STEP, np.random.default_rng(8))
    assert positions_until_alarm(DrafterAudit(), reports) is None


def test_distribution_that_is_shaped_after_choosing_the_token_is_not_seen() -> None:
    """The drafter always chooses token 0 and declares it as one of two that the target finds equally likely."""
    sums = audit_sums(packed(sparse_rows, [[([0.4, 0.4, 0.2], [0.5, 0.5, 0.0], 0)]]))[0]
    assert sums == AuditSums(num_positions=1)
    assert positions_until_alarm(DrafterAudit(), [times(sums, STEP)] * 3_000) is None


# The audit as an object


def test_alarm_stays_and_says_what_it_saw() -> None:
    audit = DrafterAudit()
    reports = lying("takes the best, declares a softmax", mixed_places()).draw(10_000, 4, np.random.default_rng(9))
    positions_until_alarm(audit, reports)
    alarm, evidence, total = audit.alarm, audit.evidence, audit.total
    assert alarm is not None
    assert evidence >= 0.0
    assert alarm.num_positions == total.num_positions
    assert alarm.excess == total.excess(alarm.statistic)
    for sums in honest(mixed_places()).draw(10_000, STEP, np.random.default_rng(10)):
        audit.add(sums)
    assert (audit.alarm, audit.evidence, audit.total) == (alarm, evidence, total)


def test_alarm_tells_statistic_and_side_also_to_people() -> None:
    for statistic, sign in product(Statistic, (1.0, -1.0)):
        sums = (sign * 39.0, 1.0) if statistic is Statistic.ACCEPTANCE else (0.0, 0.0, 11.0 * sign * 39.0, 1.0)
        audit = DrafterAudit()
        audit.add(AuditSums(40, *sums))
        assert audit.alarm is not None
        assert (audit.alarm.statistic, audit.alarm.is_high) == (statistic, sign > 0.0)
        assert (audit.alarm.excess > 0.0) == audit.alarm.is_high
    acceptance_alarm = Alarm(Statistic.ACCEPTANCE, True, False, 1204, 0.0312)
    surprise_alarm = Alarm(Statistic.SURPRISE, False, True, 512, -0.25)
    assert acceptance_alarm.message == "acceptance too high by 0.031 a token over 1,204 tokens"
    assert surprise_alarm.message == "surprise too low by 0.25 nats a token over the last 512 tokens"


def test_sums_add_up_and_give_their_excess() -> None:
    both = AuditSums(2, 1.0, 0.5, -3.0, 4.0) + AuditSums(3, 0.25, 0.5, 1.0, 1.0)
    assert both == AuditSums(5, 1.25, 1.0, -2.0, 5.0)
    assert both.excess(Statistic.ACCEPTANCE) == pytest.approx(0.25)
    assert both.excess(Statistic.SURPRISE) == pytest.approx(-0.4)
    assert AuditSums().excess(Statistic.SURPRISE) == 0.0


def test_recent_sums_span_one_to_two_windows_of_telling_positions() -> None:
    audit, spans = DrafterAudit(window=10), []
    audit.add(AuditSums())
    assert audit.total == AuditSums()
    assert audit.evidence == pytest.approx(math.log10(5e-7))
    for _ in range(50):
        audit.add(AuditSums(1, 0.0, 0.1, 0.0, 0.1))
        spans.append(audit.recent.num_positions)
    assert spans == [*range(1, 20), *(10 + count % 10 for count in range(20, 51))]
    assert audit.total.num_positions == 50


def test_settings_out_of_range_are_refused() -> None:
    for alpha, window in ((0.0, 10), (1.0, 10), (-1e-6, 10), (math.nan, 10), (1e-6, 0)):
        with pytest.raises(ValueError, match="must be"):
            DrafterAudit(alpha, window)
    for bits in (0, -8, 12):
        with pytest.raises(ValueError, match="multiple of 8"):
            FirstUses(bits)


# Which sessions count


def test_honest_tokens_that_are_counted_again_and_again_look_like_a_lie() -> None:
    """Why only the first session of a seed counts: others are drawn with the same random numbers."""
    sums = honest(mixed_places()).draw(400, 400, np.random.default_rng(11))[0]
    audit = DrafterAudit()
    for _ in range(1000):
        audit.add(sums)
    assert audit.alarm is not None


def test_first_session_of_each_key_and_choice_is_told_from_the_others() -> None:
    """Two of the 300 names share one of 2^23 bits with odds of 0.5 %; the seed is fixed."""
    first_uses = FirstUses()
    names = [(derive_key(seed, Role.VERIFYING), choice) for seed in range(100) for choice in range(3)]
    assert all(first_uses.claim(*name) for name in names)
    assert not any(first_uses.claim(*name) for name in names)


def test_memory_of_keys_is_bounded_and_never_leaves_all_sessions_out() -> None:
    first_uses = FirstUses(64)
    claimed = [first_uses.claim(derive_key(seed, Role.VERIFYING), 0) for seed in range(2000)]
    assert 0.5 < np.mean(claimed) < 1.0
    assert any(claimed[-64:])
