"""Checks a rule on many small models, block lengths and rounds, exactly where possible."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from draftwire.checking.all_blocks import AllBlocks, all_blocks, sparse_rows
from draftwire.checking.coupling import coupled_round
from draftwire.checking.cube import Measure
from draftwire.checking.emissions import Emissions, completed_law, largest_deviation, law_of_rounds, sequence_law
from draftwire.checking.report import Findings, Kind, RuleReport
from draftwire.checking.round_laws import (
    DecidedRound,
    Deciding,
    RecordingNoise,
    decided_emissions,
    improbability,
    stated_emissions,
)
from draftwire.checking.stateful import StatefulRule
from draftwire.checking.theory import EXPECTATIONS, Expectation, block_expectation
from draftwire.checking.toy_models import SHARPNESSES, Pair, adversarial_pairs, random_pairs, toy_pair
from draftwire.checking.wire_rounds import COARSE, FINE, quantized, through_bytes
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import FixedNoise, LawRule, Outcome, VerificationRule, verify

EmissionsOf = Callable[[Pair, int], Emissions]
"""Takes a model pair and a block length; returns the law of what a round emits."""

TOLERANCE = 1e-9
"""Allowed deviation of exact laws. Rounding adds up to 1e-12 at most."""

SAMPLED_SIGMAS = 8.0
"""Allowed deviation of sampled laws, in standard errors."""

BATCH_SIZES = (1, 2, 3, 17)
BATCH_REPEATS = 25


@dataclass(frozen=True, slots=True)
class Size:
    """The models and block lengths of which laws are enumerated."""

    vocab_size: int
    schedules: tuple[tuple[int, ...], ...]
    """Block lengths of consecutive rounds; the last is repeated when the list ends."""
    num_random: int = len(SHARPNESSES)
    is_adversarial: bool = True

    def pairs(self) -> tuple[Pair, ...]:
        """Returns the model pairs."""
        adversarial = adversarial_pairs(self.vocab_size) if self.is_adversarial else ()
        return random_pairs(self.vocab_size)[-self.num_random :] + adversarial

    def lengths(self) -> list[int]:
        """Returns the distinct block lengths, ascending."""
        return sorted({length for schedule in self.schedules for length in schedule})


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """The sizes that a check enumerates for each kind of rule."""

    stated: tuple[Size, ...]
    """Sizes for rules that state their law."""
    decided: tuple[Size, ...]
    """Sizes for rules whose decisions are integrated over their random numbers."""
    coupled: tuple[Size, ...]
    """Sizes for coupled rules."""
    stateful: tuple[Size, ...]
    """Sizes for rules that remember, whose blocks are of one length."""
    sampled: tuple[Size, ...]
    """Sizes for rules whose decisions have to be sampled."""
    edges: tuple[int, ...]
    """Block lengths, with a vocabulary of three, that are decided with uniforms at the ends of their range."""


THOROUGH = CheckPlan(
    stated=(
        Size(3, ((0,), (1,), (2,), (3,), (2, 0, 3, 1))),
        Size(4, ((2,), (4,))),
        Size(5, ((3,),)),
        Size(6, ((1, 2),)),
        Size(7, ((4,),)),
    ),
    decided=(
        Size(3, ((0,), (1,), (2,), (2, 0, 1))),
        Size(3, ((3,),), is_adversarial=False),
        Size(4, ((2,),), is_adversarial=False),
    ),
    coupled=(
        Size(3, ((0,), (1,), (2,), (2, 0, 1))),
        Size(3, ((3,), (4,)), is_adversarial=False),
        Size(4, ((2,),), is_adversarial=False),
        Size(5, ((1,),)),
        Size(6, ((2,),), num_random=1, is_adversarial=False),
        Size(7, ((1,), (2,)), num_random=1, is_adversarial=False),
    ),
    stateful=(
        Size(3, ((1,), (2,), (3,))),
        Size(3, ((4,),), num_random=1, is_adversarial=False),
        Size(4, ((2,), (3,)), num_random=2, is_adversarial=False),
        Size(5, ((2,),), num_random=1, is_adversarial=False),
        Size(6, ((2,),), num_random=1, is_adversarial=False),
        Size(7, ((2,),), num_random=1, is_adversarial=False),
    ),
    sampled=(Size(3, ((1,),)), Size(3, ((2,),), is_adversarial=False)),
    edges=(1, 2, 3),
)

COMPARED_LENGTH = 3
"""Block length for which the report has the mean number of accepted tokens."""


def check(rule: VerificationRule, plan: CheckPlan = THOROUGH) -> RuleReport:
    """Checks a rule and returns the report. A rule that raises fails the check; `check` itself does not raise.

    Takes seconds on one core. Rules are called with up to 65,536 blocks at once.
    """
    findings = Findings()
    if isinstance(rule, StatefulRule):
        return _stateful(rule, plan, findings)
    decided = DecidedRound(rule)
    source: EmissionsOf = decided
    method, sizes = "decided", plan.decided
    if rule.is_coupled:
        source, method, sizes = partial(_coupled, rule, findings), "coupled", plan.coupled
    elif isinstance(rule, LawRule):
        source, method, sizes = partial(_stated, rule), "stated", plan.stated
        with findings.recording_errors():
            _check_stated(rule, decided, plan, findings)
    with findings.recording_errors():
        if source is decided:
            decided.prepare(random_pairs(3), (2,))
            method, sizes = ("decided", sizes) if decided.is_exact else ("sampled", plan.sampled)
        _check_laws(rule, source, sizes, findings)
    if not rule.is_coupled:
        with findings.recording_errors():
            _check_edges(rule, plan, findings)
        if rule.needs_draft_probs:
            with findings.recording_errors():
                _check_sparse(rule, findings)
            with findings.recording_errors():
                _check_wire(rule, findings)
    with findings.recording_errors():
        _check_batches(rule, findings)
    return _report(rule, method, source, findings)


def _coupled(rule: VerificationRule, findings: Findings, pair: Pair, length: int) -> Emissions:
    """Returns the emissions of a coupled rule, and reports wrong uses of noise."""
    found = coupled_round(rule, pair, length)
    for reason in found.reasons:
        findings.require(Kind.NOISE, 1.0, 0.0, f"{reason}; {_where(pair, (length,))}")
    return found.emissions


def _stated(rule: LawRule, pair: Pair, length: int) -> Emissions:
    return stated_emissions(rule, all_blocks(pair, length))


def _check_laws(rule: VerificationRule, source: EmissionsOf, sizes: tuple[Size, ...], findings: Findings) -> None:
    """Compares laws of texts of several rounds with the target's, and mean numbers of accepted tokens with theory."""
    for size in sizes:
        if isinstance(source, DecidedRound):
            source.prepare(size.pairs(), size.lengths())
        for pair in size.pairs():
            rounds = {length: source(pair, length) for length in size.lengths()}
            for schedule in size.schedules:
                where = _where(pair, schedule)
                if isinstance(source, DecidedRound) and not source.is_exact:
                    deviation, error = _sampled_deviation(pair, schedule[0], source.measure(pair, schedule[0]))
                    tolerance = SAMPLED_SIGMAS * error + TOLERANCE
                    findings.judge(deviation, tolerance, pair, rule.is_lossless, where)
                    continue
                length = max(schedule) + 2
                law = law_of_rounds([rounds[block_length] for block_length in schedule], length)
                deviation = largest_deviation(law, sequence_law(pair.target, length))
                findings.judge(deviation, TOLERANCE, pair, rule.is_lossless, where)
                if len(schedule) == 1:
                    _check_accepted(rule, pair, schedule[0], rounds[schedule[0]].expected_accepted(), findings)


def _check_accepted(rule: VerificationRule, pair: Pair, length: int, accepted: Tensor, findings: Findings) -> None:
    """Compares mean numbers of accepted tokens after each context with theory and with the bound for lossless rules."""
    where = _where(pair, (length,))
    expectation = _expectation_of(rule)
    if expectation is not None:
        size = largest_deviation(accepted, expectation(pair, length))
        findings.require(Kind.ACCEPTED, size, TOLERANCE, f"not the theoretical one of {rule.name}; {where}")
    if rule.is_lossless and not isinstance(rule, StatefulRule):
        size = float((accepted - block_expectation(pair, length)).max())
        findings.require(Kind.ACCEPTED, size, TOLERANCE, f"more than any lossless rule can have; {where}")


def _check_stated(rule: LawRule, decided: DecidedRound, plan: CheckPlan, findings: Findings) -> None:
    """Checks that a stated law is a distribution, and that the rule's decisions follow it."""
    for size in plan.decided:
        decided.prepare(size.pairs(), size.lengths())
        for pair in size.pairs():
            for length in size.lengths():
                where = _where(pair, (length,))
                findings.require(Kind.NO_LAW, improbability(rule, all_blocks(pair, length)), TOLERANCE, where)
                deviation = _stated(rule, pair, length).deviation_from(decided(pair, length))
                findings.require(Kind.DRAWING, deviation, TOLERANCE + _sampling_error(decided, pair, length), where)


def _sampling_error(decided: DecidedRound, pair: Pair, length: int) -> float:
    """Returns the allowed sampling error of a round's emission probabilities; 0 if they are exact."""
    blocks, replicates = all_blocks(pair, length), decided.measure(pair, length).replicates
    rounds = [torch.cat(decided_emissions(blocks, probs).of_count, dim=1) for probs in replicates]
    return SAMPLED_SIGMAS * _standard_error(torch.stack(rounds))


def _check_edges(rule: VerificationRule, plan: CheckPlan, findings: Findings) -> None:
    """Checks that no impossible token is emitted for uniforms of 0 or of their maximum."""
    if not rule.is_lossless:
        return
    for pair in random_pairs(3)[:1] + adversarial_pairs(3):
        for length in plan.edges:
            blocks = all_blocks(pair, length)
            codes = Deciding.of(rule, blocks.batch).edge_codes()
            support = (pair.target > 0.0).to(torch.float64)
            possible = torch.cat([sequence_law(support, count) for count in range(1, length + 2)], dim=1) > 0.0
            is_wrong = ~possible[blocks.contexts.unsqueeze(1), codes]
            findings.require(Kind.IMPOSSIBLE, float(is_wrong.any()), 0.0, _where(pair, (length,)))


def _check_batches(rule: VerificationRule, findings: Findings) -> None:
    """Checks that decisions are the same alone and in batches, padded and packed, given the same random numbers."""
    for batch_size in BATCH_SIZES:
        for repeat in range(BATCH_REPEATS):
            generator = torch.Generator().manual_seed(1000 * batch_size + repeat)
            padded, packed, singles = _ragged(batch_size, generator)
            recorded = RecordingNoise(0.5, batch_size)
            verify(rule, padded, recorded)
            uniforms = torch.rand(batch_size, recorded.num_uniforms, generator=generator, dtype=torch.float64)
            shape = (*padded.target_rows.shape, padded.target_probs.shape[1])
            times = -torch.rand(shape, generator=generator, dtype=torch.float64).clamp(min=1e-300).log()
            together = [verify(rule, blocks, FixedNoise(uniforms, times)) for blocks in (padded, packed)]
            for index, single in enumerate(singles):
                alone = verify(rule, single, FixedNoise(uniforms[[index]], times[[index]]))
                is_same = all(_pair_of(alone, 0) == _pair_of(outcome, index) for outcome in together)
                findings.require(Kind.BATCH, float(not is_same), 0.0, f"in a batch of {batch_size}")


def _ragged(batch_size: int, generator: torch.Generator) -> tuple[BlockBatch, BlockBatch, list[BlockBatch]]:
    """Returns random blocks of different lengths: padded, packed as a server has them, and each alone."""
    vocab_size, max_len = 5, 4
    target, draft = (
        torch.randn(batch_size, places, vocab_size, generator=generator, dtype=torch.float64).softmax(-1)
        for places in (max_len + 1, max_len)
    )
    tokens = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).reshape(batch_size, max_len)
    lengths = torch.randint(0, max_len + 1, (batch_size,), generator=generator)
    singles = [
        BlockBatch.padded(target[[row], : length + 1], draft[[row], :length], tokens[[row], :length], lengths[[row]])
        for row, length in enumerate(lengths.tolist())
    ]
    packed = BlockBatch.packed(
        torch.cat([single.target_probs for single in singles]),
        [single.draft for single in singles],
        [single.draft_tokens[0].tolist() for single in singles],
        ((lengths + 1).cumsum(0) - lengths - 1).tolist(),
    )
    return BlockBatch.padded(target, draft, tokens, lengths), packed, singles


def _check_sparse(rule: VerificationRule, findings: Findings) -> None:
    """Checks that decisions and stated laws are the same for dense and sparse draft distributions."""
    for pair in random_pairs(4)[:2] + adversarial_pairs(4):
        for length in (1, 2, 3):
            dense, sparse = all_blocks(pair, length), all_blocks(pair, length, sparse_rows)
            _check_alike(rule, dense, sparse, Kind.SPARSE, findings)


def _check_wire(rule: VerificationRule, findings: Findings) -> None:
    """Checks the same for distributions that were quantized, encoded and decoded."""
    for pair in random_pairs(4)[:2] + adversarial_pairs(4):
        for quantization in (COARSE, FINE):
            sent = quantized(pair, quantization)
            for length in (1, 2, 3):
                blocks = all_blocks(sent, length, through_bytes)
                _check_alike(rule, all_blocks(sent, length), blocks, Kind.WIRE, findings)
                if rule.is_lossless and isinstance(rule, LawRule):
                    reference = sequence_law(pair.target, length + 1)
                    law = completed_law(stated_emissions(rule, blocks), reference)
                    findings.require(Kind.WIRE, largest_deviation(law, reference), TOLERANCE, _where(sent, (length,)))


def _check_alike(rule: VerificationRule, dense: AllBlocks, sparse: AllBlocks, kind: Kind, findings: Findings) -> None:
    """Compares decisions and stated laws for the same blocks with dense and sparse draft distributions."""
    where = _where(dense.pair, (dense.length,))
    if isinstance(rule, LawRule):
        size = stated_emissions(rule, dense).deviation_from(stated_emissions(rule, sparse))
        findings.require(kind, size, TOLERANCE, where)
    deciding = Deciding.of(rule, dense.batch)
    cases = torch.arange(len(dense.numbers)).repeat(8)
    generator = torch.Generator().manual_seed(len(cases))
    numbers = torch.rand(len(cases), deciding.dimensions, generator=generator, dtype=torch.float64)
    differs = deciding.codes(cases, numbers) != replace(deciding, batch=sparse.batch).codes(cases, numbers)
    findings.require(kind, float(differs.to(torch.float64).mean()), TOLERANCE, where)


def _stateful(rule: StatefulRule, plan: CheckPlan, findings: Findings) -> RuleReport:
    """Checks a rule that remembers, following its state over rounds."""
    first_round = partial(_stated, rule)
    with findings.recording_errors():
        for size in plan.stateful:
            for pair in size.pairs():
                for (block_length,) in size.schedules:
                    length = block_length + 2
                    law = rule.law_of_rounds(pair, block_length, length)
                    deviation = largest_deviation(law, sequence_law(pair.target, length))
                    findings.judge(deviation, TOLERANCE, pair, rule.is_lossless, _where(pair, (block_length,)))
                    accepted = first_round(pair, block_length).expected_accepted()
                    _check_accepted(rule, pair, block_length, accepted, findings)
    with findings.recording_errors():
        for pair in (random_pairs(3)[1], *adversarial_pairs(3)[:2]):
            deviation = rule.drawing_deviation(pair, 2)
            findings.require(Kind.DRAWING, deviation, TOLERANCE, _where(pair, (2,)))
    return _report(rule, "stateful", first_round, findings)


def _sampled_deviation(pair: Pair, length: int, measure: Measure) -> tuple[float, float]:
    """Returns the largest deviation of one round, completed by the target, and the largest standard error."""
    reference = sequence_law(pair.target, length + 1)
    blocks = all_blocks(pair, length)
    laws = torch.stack([completed_law(decided_emissions(blocks, probs), reference) for probs in measure.replicates])
    return largest_deviation(laws.mean(dim=0), reference), _standard_error(laws)


def _standard_error(estimates: Tensor) -> float:
    """Returns the largest standard error of the means of `[replicates, ...]`; 0 of a single one, which is exact."""
    return float(estimates.std(dim=0).max()) / math.sqrt(len(estimates)) if len(estimates) > 1 else 0.0


def _report(rule: VerificationRule, method: str, source: EmissionsOf, findings: Findings) -> RuleReport:
    pairs = random_pairs(3)

    def mean(values: Callable[[Pair, int], Tensor]) -> float:
        return sum(float(values(pair, COMPARED_LENGTH)[-1]) for pair in pairs) / len(pairs)

    accepted = toy = float("nan")
    with findings.recording_errors():
        if isinstance(source, DecidedRound):
            source.prepare(pairs, (COMPARED_LENGTH,))
        accepted = mean(lambda pair, length: source(pair, length).expected_accepted())
        toy = float(source(toy_pair(), 2).expected_accepted()[-1])
    expectation = _expectation_of(rule)
    return RuleReport(
        rule.name,
        rule.is_lossless,
        method,
        findings.num_laws,
        findings.deviation,
        findings.failures,
        accepted,
        None if expectation is None else mean(expectation),
        mean(block_expectation),
        toy,
    )


def _expectation_of(rule: VerificationRule) -> Expectation | None:
    """Returns the theory of a rule, if there is one."""
    return rule.expectation if isinstance(rule, StatefulRule) else EXPECTATIONS.get(rule.name)


def _pair_of(outcome: Outcome, index: int) -> tuple[int, int]:
    return int(outcome.num_accepted[index]), int(outcome.extra_tokens[index])


def _where(pair: Pair, schedule: tuple[int, ...]) -> str:
    lengths = ", ".join(map(str, schedule))
    return f"{pair.name}, {pair.vocab_size} tokens, blocks of {lengths}"
