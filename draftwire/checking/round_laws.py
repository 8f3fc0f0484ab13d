"""The law of one round of a rule, computed from the law that the rule states or from its decisions."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwire.checking.all_blocks import AllBlocks, all_blocks, chosen, emitted_codes, merged
from draftwire.checking.cube import LAST, Measure, edge_points, integrate, sample
from draftwire.checking.emissions import Emissions, num_codes
from draftwire.checking.toy_models import Pair
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import FixedNoise, LawRule, VerificationRule, verify

EDGE_BLOCKS_AT_ONCE = 2**16


@dataclass(slots=True)
class RecordingNoise:
    """Noise that records which numbers a rule requests, and returns one constant for all."""

    value: float
    batch_size: int
    num_uniforms: int = 0
    asks_exponentials: bool = False

    def uniforms(self, count: int) -> Tensor:
        """Returns the constant for each block and place, and records `count`."""
        self.num_uniforms = max(self.num_uniforms, count)
        return torch.full((self.batch_size, count), self.value, dtype=torch.float64)

    def exponentials(self, blocks: Tensor, offsets: Tensor, vocab_size: int) -> Tensor:
        """Returns the exponential that the constant maps to for each token, and records the request."""
        self.asks_exponentials = True
        return torch.full((len(blocks), vocab_size), max(-math.log1p(-self.value), 1e-300), dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Deciding:
    """A rule's decisions about blocks of one length as a function of the numbers that it requests: uniforms, and, if
    it draws by exponentials that no drafter shares, the uniforms that these are computed from.
    """

    rule: VerificationRule
    batch: BlockBatch
    num_uniforms: int
    num_exponentials: int

    @classmethod
    def of(cls, rule: VerificationRule, batch: BlockBatch) -> "Deciding":
        """Runs the rule once to find which numbers it requests, and returns its decision function."""
        num_uniforms, asks_exponentials = 0, False
        for value in (0.0, 0.5, LAST):
            noise = RecordingNoise(value, batch.batch_size)
            verify(rule, batch, noise)
            num_uniforms = max(num_uniforms, noise.num_uniforms)
            asks_exponentials |= noise.asks_exponentials
        num_exponentials = (batch.max_len + 1) * batch.target_probs.shape[1] if asks_exponentials else 0
        return cls(rule, batch, num_uniforms, num_exponentials)

    @property
    def dimensions(self) -> int:
        """How many numbers the rule requests."""
        return self.num_uniforms + self.num_exponentials

    @property
    def num_codes(self) -> int:
        """How many different texts a round may emit."""
        return num_codes(self.batch.target_probs.shape[1], self.batch.max_len + 1)

    def codes(self, cases: Tensor, numbers: Tensor) -> Tensor:
        """Returns the code of the emitted text for each case, `[points] int64`; a `Decision`."""
        batch = chosen(self.batch, cases)
        exponentials = None
        if self.num_exponentials:
            times = -torch.log1p(-numbers[:, self.num_uniforms :]).clamp(max=-(2.0**-54))
            exponentials = times.reshape(len(cases), batch.max_len + 1, -1)
        noise = FixedNoise(numbers[:, : self.num_uniforms], exponentials)
        return emitted_codes(batch, verify(self.rule, batch, noise))

    def edge_codes(self) -> Tensor:
        """Returns the codes for numbers of 0, a half, or the largest below 1, `[blocks, points] int64`."""
        points, count = edge_points(self.dimensions), self.batch.batch_size
        result = []
        for part in torch.arange(count).split(max(1, EDGE_BLOCKS_AT_ONCE // len(points))):
            cases = part.repeat_interleave(len(points))
            result.append(self.codes(cases, points.repeat(len(part), 1)).reshape(len(part), -1))
        return torch.cat(result)


class DecidedRound:
    """Emissions of rounds, computed from decisions alone."""

    def __init__(self, rule: VerificationRule) -> None:
        """Starts with no laws; the rule is not coupled."""
        self.is_exact = True
        self._rule = rule
        self._measures: dict[tuple[Pair, int], Measure] = {}

    def prepare(self, pairs: Sequence[Pair], lengths: Iterable[int]) -> None:
        """Computes the laws for pairs of one vocabulary size together, which is much faster."""
        for length in lengths:
            missing = [pair for pair in pairs if (pair, length) not in self._measures]
            if not missing:
                continue
            parts = [all_blocks(pair, length) for pair in missing]
            deciding = Deciding.of(self._rule, merged(parts))
            find = integrate if self.is_exact else sample
            measure = find(deciding.codes, deciding.batch.batch_size, deciding.dimensions, deciding.num_codes)
            self.is_exact &= measure.is_exact
            replicates = measure.replicates.split([len(part.numbers) for part in parts], dim=1)
            self._measures.update(
                {(pair, length): Measure(part) for pair, part in zip(missing, replicates, strict=True)}
            )

    def measure(self, pair: Pair, length: int) -> Measure:
        """Returns the law of the emitted text for each of `all_blocks`."""
        self.prepare((pair,), (length,))
        return self._measures[pair, length]

    def __call__(self, pair: Pair, length: int) -> Emissions:
        """Returns the emissions of one round, from the decisions about all blocks."""
        return decided_emissions(all_blocks(pair, length), self.measure(pair, length).probs)


def decided_emissions(blocks: AllBlocks, probs: Tensor) -> Emissions:
    """Returns the emissions of rounds, from the law of each block's codes, `[blocks, codes]`."""
    weighted = probs * blocks.probs.unsqueeze(1)
    masses = probs.new_zeros(blocks.pair.vocab_size + 1, probs.shape[1]).index_add_(0, blocks.contexts, weighted)
    return Emissions.from_codes(masses, blocks.pair.vocab_size)


def stated_emissions(rule: LawRule, blocks: AllBlocks) -> Emissions:
    """Returns the emissions of rounds, from the law that a rule states."""
    law, vocab_size = rule.stop_law(blocks.batch), blocks.pair.vocab_size
    result = []
    for accepted in range(blocks.length + 1):
        weights = rule.extra_weights(blocks.batch, law, torch.full_like(blocks.numbers, accepted)).to(torch.float64)
        reach = (blocks.probs * law.accepted_probs[:, accepted]).unsqueeze(1)
        contributions = torch.where(reach == 0.0, 0.0, reach * weights / weights.sum(dim=1, keepdim=True))
        emitted = torch.zeros((vocab_size + 1) * vocab_size**accepted, vocab_size, dtype=torch.float64)
        emitted.index_add_(0, blocks.prefixes(accepted), contributions)
        result.append(emitted.reshape(vocab_size + 1, -1))
    return Emissions(tuple(result))


def improbability(rule: LawRule, blocks: AllBlocks) -> float:
    """Returns by how much the stated laws of blocks fail to be distributions: negative entries or sums other than 1."""
    law = rule.stop_law(blocks.batch)
    wrong = [-law.accepted_probs.min(), (law.accepted_probs.sum(dim=1) - 1.0).abs().max()]
    for accepted in range(blocks.length + 1):
        weights = rule.extra_weights(blocks.batch, law, torch.full_like(blocks.numbers, accepted))
        wrong.append(-torch.where(law.accepted_probs[:, accepted : accepted + 1] > 0.0, weights, 0.0).min())
    return float(torch.stack([value.to(torch.float64) for value in wrong]).max())
