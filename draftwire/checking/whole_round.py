"""A whole round as a function of its random numbers, because mistakes are also made around a rule.

A subclass of `Round` can change the distributions that tokens are drawn from, the distributions that the rule reads,
the target's rows, or the assignment of random numbers; `check_round` then checks the result.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from draftwire.checking.all_blocks import digits, emitted_codes, rows_along
from draftwire.checking.cube import integrate
from draftwire.checking.emissions import Emissions, completed_law, largest_deviation, num_codes
from draftwire.checking.toy_models import Pair
from draftwire.method.distributions import DenseRows, DraftRows, draw
from draftwire.method.sampling import Span, probabilities_of_spans
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import FixedNoise, VerificationRule, verify


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Result of the check of a whole round."""

    deviation: float
    """Largest difference of the round's law, completed by the target, from the target's."""
    is_exact: bool
    """Whether nothing was sampled."""
    accepted: float
    """Mean number of accepted draft tokens at the start."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Results of rounds."""

    drafted: Tensor
    """`[points] int64`: the draft tokens in base `vocab`."""
    codes: Tensor
    """`[points] int64`: the codes of the emitted tokens, see `encoded`."""


class Round:
    """One round as the product runs it, in float64: drafts, states the draft distributions, and verifies."""

    num_verifying: ClassVar[int] = 2
    """Uniform numbers that the rule requests."""

    def __init__(self, rule: VerificationRule, pair: Pair, length: int, sampling: SamplingParams | None = None) -> None:
        """Prepares a round of `length` draft tokens; `sampling` applies to both models' logits."""
        self.rule = rule
        self.pair = pair
        self.length = length
        self.sampling = sampling or SamplingParams()
        self.target_rows = self.rows_of_blocks(pair.target, length + 1)
        self.draft_rows = self.rows_of_blocks(pair.drafter, max(1, length))

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        return self.pair.vocab_size

    @property
    def num_drafting(self) -> int:
        """Uniform numbers that drafting uses."""
        return self.length

    @property
    def num_uniforms(self) -> int:
        """Uniform numbers of the whole round."""
        return self.num_drafting + self.num_verifying

    @property
    def most_emitted(self) -> int:
        """Maximum number of tokens that a round emits."""
        return self.length + 1

    def rows_of_blocks(self, table: Tensor, num_rows: int) -> Tensor:
        """Returns a model's distributions along every block after every context, computed as the product does.

        Returns:
            `[contexts * vocab ** (num_rows - 1), num_rows, vocab]`, by block numbers of `num_rows - 1` tokens.
        """
        contexts, tokens = digits(
            torch.arange(len(table) * self.vocab_size ** (num_rows - 1)), num_rows - 1, self.vocab_size
        )
        rows = rows_along(table, contexts, tokens).flatten(0, 1)
        return self._sampled(rows, contexts, tokens, num_rows).reshape(-1, num_rows, self.vocab_size)

    def _sampled(self, rows: Tensor, contexts: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
        """Returns a model's rows at the last `num_rows` positions of texts, `[texts * num_rows, vocab]`, as sampled."""
        prompts = [self.prompt(context) for context in contexts.tolist()]
        spans = [
            Span(self.sampling, num_rows, [*prompt, *text], len(prompt))
            for prompt, text in zip(prompts, tokens.tolist(), strict=True)
        ]
        return probabilities_of_spans(rows.log(), spans)

    def prompt(self, context: int) -> list[int]:
        """Returns the prompt that a context represents."""
        return [context] if context < self.vocab_size else []

    def drawing_law(self, rows: Tensor) -> Tensor:
        """Returns the distributions that draft tokens are drawn from, given the drafter's, `[..., vocab]`."""
        return rows

    def drawn(self, rows: Tensor, uniforms: Tensor) -> Tensor:
        """Returns draft tokens, `[points] int64`, from the drafter's distributions, `[points, vocab]`."""
        return draw(self.drawing_law(rows), uniforms)

    def stated_law(self, rows: Tensor) -> DraftRows:
        """Returns the draft distributions that the rule reads, given the drafter's, `[rows, vocab]`."""
        return DenseRows(rows)

    def shared(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Splits the numbers into those for drafting, `[points, num_drafting]`, and those for verifying."""
        return uniforms[:, : self.num_drafting], uniforms[:, self.num_drafting :]

    def drafted(self, contexts: Tensor, uniforms: Tensor) -> Tensor:
        """Returns the numbers of the blocks drawn after contexts, `[points] int64`."""
        numbers = contexts
        for position in range(self.length):
            block = numbers * self.vocab_size ** (self.draft_rows.shape[1] - 1 - position)
            row = self.draft_rows[block, position]
            numbers = numbers * self.vocab_size + self.drawn(row, uniforms[:, position])
        return numbers

    def verified(self, numbers: Tensor, uniforms: Tensor) -> Tensor:
        """Returns the codes of the tokens that a round with these blocks emits, `[points] int64`."""
        _, tokens = digits(numbers, self.length, self.vocab_size)
        rows = self.draft_rows[numbers // self.vocab_size if self.length else numbers][:, : self.length]
        blocks = BlockBatch(
            self.target_rows.flatten(0, 1),
            self.stated_law(rows.flatten(0, 1)),
            tokens,
            torch.full_like(numbers, self.length),
            numbers.unsqueeze(1) * (self.length + 1) + torch.arange(self.length + 1),
            torch.arange(len(numbers) * self.length).reshape(len(numbers), self.length),
        )
        return emitted_codes(blocks, verify(self.rule, blocks, FixedNoise(uniforms)))

    def run(self, contexts: Tensor, uniforms: Tensor) -> Ran:
        """Runs a round after each context, `[points] int64`, with numbers `[points, num_uniforms]`."""
        drafting, verifying = self.shared(uniforms)
        numbers = self.drafted(contexts, drafting)
        return Ran(numbers % self.vocab_size**self.length, self.verified(numbers, verifying))

    def reference(self) -> Tensor:
        """Returns the law of plain decoding, token by token, `[contexts, vocab ** most_emitted]`."""
        vocab_size, contexts = self.vocab_size, self.vocab_size + 1
        law = torch.ones(contexts, 1, dtype=torch.float64)
        for count in range(self.most_emitted):
            first, tokens = digits(torch.arange(contexts * vocab_size**count), count, vocab_size)
            last = rows_along(self.pair.target, first, tokens)[:, -1]
            rows = self._sampled(last, first, tokens, 1).reshape(contexts, -1, vocab_size)
            law = (law.unsqueeze(2) * rows).flatten(1)
        return law


def check_round(whole: Round) -> RoundReport:
    """Checks a round against plain decoding."""
    contexts, codes = whole.vocab_size + 1, num_codes(whole.vocab_size, whole.most_emitted)

    def decision(cases: Tensor, uniforms: Tensor) -> Tensor:
        # The code includes the drafted block, because different blocks may emit the same tokens: `integrate` needs a
        # value that identifies the results of all comparisons.
        ran = whole.run(cases, uniforms)
        return ran.drafted * codes + ran.codes

    measure = integrate(decision, contexts, whole.num_uniforms, codes * whole.vocab_size**whole.length)
    probs = measure.probs.reshape(contexts, -1, codes).sum(dim=1)
    emissions = Emissions.from_codes(probs, whole.vocab_size)
    reference = whole.reference()
    deviation = largest_deviation(completed_law(emissions, reference), reference)
    return RoundReport(deviation, measure.is_exact, float(emissions.expected_accepted()[-1]))
