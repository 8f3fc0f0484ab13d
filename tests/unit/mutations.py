"""Rules and rounds to try the checker on: textbook implementations, and mistakes the way people make them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwire.checking.blocks import sparse_rows
from draftwire.checking.whole_round import Ran, Round
from draftwire.distributions import DraftRows, SparseRows, draw, race
from draftwire.parameters import SamplingParams
from draftwire.sampling import Span, probabilities_of_spans
from draftwire.verification import BlockBatch, GreedyBlockRule, LawRule, Noise, Outcome, StopLaw, TokenRule
from draftwire.verification.block import BlockRule, block_weights, largest_success


class Textbook:
    """A rule written with a coin for each draft token, as papers print it. The methods are what mutations change.

    Number 0 draws the extra token, so that a block's numbers do not depend on how long others are.
    """

    name = "textbook"
    is_lossless = True
    needs_draft_probs = True
    is_coupled = False

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        uniforms = noise.uniforms(blocks.max_len + 1)
        p, q = blocks.padded_target_probs(), blocks.padded_draft_probs()
        accepted, scale = self.accepted(blocks, p, q, self.coins(uniforms[:, 1:]))
        rows = torch.arange(blocks.batch_size)
        at = accepted.clamp(max=max(0, blocks.max_len - 1))
        if blocks.max_len:
            residual = self.residual(p, q, rows, at, scale)
            is_residual = self.corrects(blocks, accepted) & (residual.sum(1) > 0.0)
            weights = torch.where(is_residual.unsqueeze(1), residual, p[rows, accepted])
        else:
            weights = p[rows, accepted]
        return Outcome(accepted, draw(weights, uniforms[:, 0]))

    def coins(self, uniforms: Tensor) -> Tensor:
        return uniforms

    def passes(self, uniform: Tensor, threshold: Tensor) -> Tensor:
        return uniform < threshold

    def ratios(self, blocks: BlockBatch) -> Tensor:
        return blocks.ratios()

    def corrects(self, blocks: BlockBatch, accepted: Tensor) -> Tensor:
        return accepted < blocks.lengths

    def residual(self, p: Tensor, q: Tensor, rows: Tensor, at: Tensor, scale: Tensor) -> Tensor:
        return (scale.unsqueeze(1) * p[rows, at] - q[rows, at]).clamp(min=0.0)

    def accepted(self, blocks: BlockBatch, p: Tensor, q: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class TextbookToken(Textbook):
    """Leviathan et al., Algorithm 1."""

    def accepted(self, blocks: BlockBatch, p: Tensor, q: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
        accepted = torch.zeros_like(blocks.lengths)
        is_going = torch.ones_like(accepted, dtype=torch.bool)
        ratios = self.ratios(blocks)
        for i in range(blocks.max_len):
            is_passed = self.passes(coins[:, i], ratios[:, i].clamp(max=1.0)) & (i < blocks.lengths)
            is_going = self.goes_on(is_going, is_passed)
            accepted = torch.where(is_going & is_passed, i + 1, accepted)
        return accepted, torch.ones(blocks.batch_size, dtype=torch.float64)

    def goes_on(self, is_going: Tensor, is_passed: Tensor) -> Tensor:
        return is_going & is_passed


class TextbookBlock(Textbook):
    """Sun et al., Algorithm 2."""

    def accepted(self, blocks: BlockBatch, p: Tensor, q: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
        accepted, weight = torch.zeros_like(blocks.lengths), torch.ones(blocks.batch_size, dtype=torch.float64)
        scale, is_going, ratios = weight.clone(), torch.ones_like(accepted, dtype=torch.bool), self.ratios(blocks)
        for i in range(1, blocks.max_len + 1):
            before, weight = weight, self.next_weight(weight, ratios[:, i - 1])
            test = weight
            if i < blocks.max_len:
                mass = (weight.unsqueeze(1) * p[:, i] - q[:, i]).clamp(min=0.0).sum(1)
                total = mass + 1.0 - weight
                inner = torch.where(total > 0.0, mass / torch.where(total > 0.0, total, 1.0), 1.0)
                test = torch.where(i == blocks.lengths, weight, inner)
            is_passed = self.passes(coins[:, i - 1], test) & (i <= blocks.lengths)
            is_going = self.goes_on(is_going, is_passed)
            accepted = torch.where(is_going & is_passed, i, accepted)
            scale = torch.where(is_going & is_passed, self.scale(before, weight), scale)
        return accepted, scale

    def next_weight(self, weight: Tensor, ratio: Tensor) -> Tensor:
        return (weight * ratio).clamp(max=1.0)

    def goes_on(self, is_going: Tensor, is_passed: Tensor) -> Tensor:
        return torch.ones_like(is_going)

    def scale(self, before: Tensor, weight: Tensor) -> Tensor:
        return weight


def mistaken(name: str, right: type[Textbook], **methods: Callable) -> type[Textbook]:
    """Returns a textbook rule with a mistake: with some methods replaced."""
    return type(name, (right,), methods)


def residual_beside(step: int) -> Callable:
    """Returns a correction from the rows so many places after the rejected token's."""

    def residual(rule: Textbook, p: Tensor, q: Tensor, rows: Tensor, at: Tensor, scale: Tensor) -> Tensor:
        return Textbook.residual(rule, p, q, rows, (at + step).clamp(min=0, max=q.shape[1] - 1), scale)

    return residual


def inverted_ratios(rule: Textbook, blocks: BlockBatch) -> Tensor:
    """Returns drafter over target, as some copies print it."""
    ratios = blocks.ratios()
    return torch.where(ratios > 0.0, 1.0 / ratios, 0.0)


# --- mistakes in the block rule


# Break instead of continue.
BlockBreaks = mistaken("BlockBreaks", TextbookBlock, goes_on=TextbookToken.goes_on)


class StatedBreaks(BlockRule):
    """The same, in a rule that states its law: exactly i tokens with probability h_1 .. h_i (1 - h_{i+1})."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        law = super().stop_law(blocks)
        at_most = law.accepted_probs.cumsum(1)  # product of 1 - h_j over j > i
        tests = torch.where(at_most[:, 1:] > 0.0, law.accepted_probs[:, 1:] / at_most[:, 1:], 0.0)
        ones = torch.ones_like(at_most[:, :1])
        reached = torch.cat([ones, tests.cumprod(1)], dim=1)
        return StopLaw(reached * torch.cat([1.0 - tests, ones], dim=1), law.residual_scales)


class StatesNegativeProbabilities(BlockRule):
    """P(i tokens) = a_i - a_{i+1}: sums to 1 and emits the target's law, but block weights may rise along a block."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        weights = block_weights(blocks)
        return StopLaw(torch.cat([weights[:, :-1] - weights[:, 1:], weights[:, -1:]], dim=1), weights)


# Drafter over target.
RatioInverted = mistaken("RatioInverted", TextbookBlock, ratios=inverted_ratios)

# Drafter over target.
TokenRatioInverted = mistaken("TokenRatioInverted", TextbookToken, ratios=inverted_ratios)

WeightsWithoutClamp = mistaken(
    "WeightsWithoutClamp", TextbookBlock, next_weight=lambda _, weight, ratio: weight * ratio
)  # the bound at 1 is missing

ResidualOfRowBefore = mistaken(
    "ResidualOfRowBefore", TextbookBlock, residual=residual_beside(-1)
)  # of the last accepted token

ResidualOfRowAfter = mistaken(
    "ResidualOfRowAfter", TextbookBlock, residual=residual_beside(1)
)  # of the token after the rejected one

TokenResidualOfRowBefore = mistaken(
    "TokenResidualOfRowBefore", TextbookToken, residual=residual_beside(-1)
)  # of the last accepted token

TokenResidualOfRowAfter = mistaken(
    "TokenResidualOfRowAfter", TextbookToken, residual=residual_beside(1)
)  # of the token after

TokenResidualInBlock = mistaken(
    "TokenResidualInBlock", TextbookBlock, scale=lambda _, before, weight: torch.ones_like(weight)
)  # [p - q]+, as in the token rule

EarlierWeightInResidual = mistaken(
    "EarlierWeightInResidual", TextbookBlock, scale=lambda _, before, weight: before
)  # a_{tau-1} in the correction


class StatedEarlierWeight(BlockRule):
    """The same, in a rule that states its law."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        law = super().stop_law(blocks)
        scales = law.residual_scales
        return StopLaw(law.accepted_probs, torch.cat([scales[:, :1], scales[:, :-1]], dim=1))


BonusOfResidual = mistaken(
    "BonusOfResidual", TextbookBlock, corrects=lambda _, blocks, accepted: accepted >= 0
)  # also after a whole block


class WholeBlockByProduct(LawRule):
    """The whole block by min(1, product of the ratios), everything shorter by the block rule."""

    name = "whole_block_by_product"

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        law = BlockRule().stop_law(blocks)
        if blocks.max_len == 0:
            return law
        whole = blocks.ratios().prod(dim=1).clamp(max=1.0).unsqueeze(1)
        shorter = law.accepted_probs[:, :-1]
        left = shorter.sum(1, keepdim=True)
        first = torch.nn.functional.one_hot(torch.zeros_like(blocks.lengths), blocks.max_len).to(shorter.dtype)
        share = torch.where(left > 0.0, shorter / left, first)
        return StopLaw(torch.cat([share * (1.0 - whole), whole], dim=1), law.residual_scales)


# --- mistakes in the token rule


TokenContinues = mistaken(
    "TokenContinues", TextbookToken, goes_on=lambda _, is_going, is_passed: is_going
)  # continue instead of break

TokenBonusOfResidual = mistaken(
    "TokenBonusOfResidual", TextbookToken, corrects=lambda _, blocks, accepted: accepted >= 0
)  # also after a whole block


class EpsilonInRatio(TextbookToken):
    """target / (draft + epsilon)."""

    def ratios(self, blocks: BlockBatch) -> Tensor:
        draft = blocks.draft_probs_of_drafts() + 1e-5
        return torch.where(blocks.inside, blocks.target_probs_of_drafts() / draft, 0.0)


class EpsilonInResidual(TextbookToken):
    """[p - q]+ + epsilon: emits what the target forbids."""

    def residual(self, p: Tensor, q: Tensor, rows: Tensor, at: Tensor, scale: Tensor) -> Tensor:
        return super().residual(p, q, rows, at, scale) + 1e-4


class Float16Ratios(TextbookToken):
    """Probabilities rounded to half precision in the tests."""

    def ratios(self, blocks: BlockBatch) -> Tensor:
        return blocks.ratios().to(torch.float16).to(torch.float64)


# --- mistakes with random numbers


OneUniformForAllTests = mistaken(
    "OneUniformForAllTests", TextbookToken, coins=lambda _, uniforms: uniforms[:, :1].expand_as(uniforms)
)  # the first decides all

OneUniformForAllBlockTests = mistaken(
    "OneUniformForAllBlockTests", TextbookBlock, coins=lambda _, uniforms: uniforms[:, :1].expand_as(uniforms)
)  # the first decides all

ProductOfUniforms = mistaken(
    "ProductOfUniforms", TextbookToken, coins=lambda _, uniforms: uniforms.cumprod(dim=1)
)  # the product so far

ProductOfUniformsInBlock = mistaken(
    "ProductOfUniformsInBlock", TextbookBlock, coins=lambda _, uniforms: uniforms.cumprod(dim=1)
)  # the product so far

NotStrict = mistaken(
    "NotStrict", TextbookToken, passes=lambda _, uniform, threshold: uniform <= threshold
)  # lets what is impossible through where u is 0

NotStrictInBlock = mistaken(
    "NotStrictInBlock", TextbookBlock, passes=lambda _, uniform, threshold: uniform <= threshold
)  # the same


class DrawsWithTheTestsUniform(TokenRule):
    """States the right law, and draws the extra token with the number that decided."""

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        law, uniform = self.stop_law(blocks), noise.uniforms(1)[:, 0]
        accepted = draw(law.accepted_probs, uniform)
        return Outcome(accepted, draw(self.extra_weights(blocks, law, accepted), uniform))


class RacedToken(TokenRule):
    """Sound: states its law, and draws the extra token by a race."""

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        law = self.stop_law(blocks)
        accepted = draw(law.accepted_probs, noise.uniforms(1)[:, 0])
        weights = self.extra_weights(blocks, law, accepted)
        times = noise.exponentials(torch.arange(blocks.batch_size), accepted, weights.shape[1])
        return Outcome(accepted, race(weights, times).winners)


class ExactMatchByRaces(Textbook):
    """Sound: draws the target's tokens with exponentials of its own, and keeps what agrees."""

    needs_draft_probs = False

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        p = blocks.padded_target_probs()
        batch, places, vocab_size = p.shape
        index = torch.arange(batch * places)
        times = noise.exponentials(index // places, index % places, vocab_size)
        tokens = race(p.flatten(0, 1), times).winners.reshape(batch, places)
        matches = (tokens[:, :-1] == blocks.draft_tokens) & blocks.inside
        accepted = matches.to(torch.int64).cumprod(1).sum(1)
        return Outcome(accepted, tokens.gather(1, accepted.unsqueeze(1)).squeeze(1))


# --- mistakes in coupled rules


class Coupled(ExactMatchByRaces):
    """Sound: the same with the drafter's noise."""

    is_coupled = True


@dataclass(frozen=True)
class ShiftedNoise:
    """Noise whose places are off by some."""

    noise: Noise
    shift: int

    def uniforms(self, count: int) -> Tensor:
        return self.noise.uniforms(count)

    def exponentials(self, blocks: Tensor, offsets: Tensor, vocab_size: int) -> Tensor:
        return self.noise.exponentials(blocks, (offsets + self.shift) % (int(offsets.max()) + 1), vocab_size)


class CoupledWithNextPlace(Coupled):
    """The target races with the noise of the next place."""

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        return super().decide(blocks, ShiftedNoise(noise, 1))


class CoupledResidual(Coupled):
    """Draws the correction anew, from [p - q]+, with the noise that has shown that the draft token lost."""

    needs_draft_probs = True

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        accepted = super().decide(blocks, noise).num_accepted
        weights = blocks.residual(accepted, torch.ones(blocks.batch_size, dtype=torch.float64))
        times = noise.exponentials(torch.arange(blocks.batch_size), accepted, weights.shape[1])
        return Outcome(accepted, race(weights, times).winners)


class CoupledWithTolerance(Coupled):
    """A draft token is kept where it is almost the winner."""

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        shape = (blocks.batch_size, blocks.max_len + 1)
        offsets = torch.arange(shape[1]).expand(shape)
        times = noise.exponentials(
            torch.arange(shape[0]).unsqueeze(1).expand(shape).flatten(), offsets.flatten(), blocks.target_probs.shape[1]
        )
        scores = (blocks.padded_target_probs() / times.reshape(*shape, -1)).log()
        best, tokens = scores.max(dim=2)
        own = scores[:, :-1].gather(2, blocks.draft_tokens.unsqueeze(2)).squeeze(2)
        keeps = (own > best[:, :-1] - 1e-4) & blocks.inside
        accepted = keeps.to(torch.int64).cumprod(dim=1).sum(dim=1)
        return Outcome(accepted, tokens.gather(1, accepted.unsqueeze(1)).squeeze(1))


class CoupledLooksAhead(Coupled):
    """Gives a token back if the next place disagrees: later noise, used again in the next round, has decided."""

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        outcome = super().decide(blocks, noise)
        is_short = (outcome.num_accepted > 0) & (outcome.num_accepted < blocks.lengths)
        if blocks.max_len == 0:
            return outcome
        before = (outcome.num_accepted - 1).clamp(min=0)
        accepted = torch.where(is_short, before, outcome.num_accepted)
        dropped = blocks.draft_tokens.gather(1, before.unsqueeze(1)).squeeze(1)
        return Outcome(accepted, torch.where(is_short, dropped, outcome.extra_tokens))


# --- broken contracts


class DependsOnTheBatch(TokenRule):
    """A number that depends on the other blocks of the batch."""

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        outcome = super().decide(blocks, noise)
        return Outcome((outcome.num_accepted - int(blocks.batch_size == 17)).clamp(min=0), outcome.extra_tokens)


class EndOfTheLongestBlock(BlockRule):
    """The last test of a block is made only where the block is as long as the longest of its batch."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        weights = block_weights(blocks)
        if not blocks.has_drafts:
            return StopLaw(weights, weights)
        mass = blocks.residual_mass(weights[:, :-1])[:, 1:]
        inside = mass / (mass + (1.0 - weights[:, 1:-1])).clamp(min=1e-300)
        tests = torch.cat([inside, weights[:, -1:]], dim=1)
        return StopLaw(largest_success(torch.where(blocks.inside, tests, 0.0)), weights)


class ForgetsItsRounds(GreedyBlockRule):
    """Algorithm 4 alone: nothing is remembered."""

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        outcome = super().decide(blocks, noise)
        self.modifications = None
        return outcome


class AcceptsLess(BlockRule):
    """Lossless, and accepts less than a rule of its name does."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        return TokenRule().stop_law(blocks)


class LossyAtGreedyTarget(LawRule):
    """Says that it is lossy, and changes greedy texts: accepts up to the last match."""

    name = "last_match"
    is_lossless = False

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        tests = torch.where(blocks.inside, blocks.target_probs_of_drafts(), 0.0)
        return StopLaw(largest_success(tests), torch.ones(blocks.batch_size, blocks.max_len + 1, dtype=torch.float64))


class Raises(TokenRule):
    """Raises when a draft token is improbable."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        if bool((blocks.ratios() == 0.0)[blocks.inside].any()):
            raise ZeroDivisionError("no ratio")
        return super().stop_law(blocks)


# --- mistakes around the rule


class DrawsInBfloat16(Round):
    """Draft tokens are drawn from probabilities in bfloat16, and accepted by exact ones."""

    def drawing_law(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16).to(torch.float64)


class TemperatureOnOneSide(Round):
    """Draft tokens are drawn at another temperature than is stated."""

    def drawing_law(self, rows: Tensor) -> Tensor:
        return rows.pow(1 / 0.7)


class TopKBeforeDrawing(Round):
    """Draft tokens are drawn from the two likeliest, and the whole distribution is stated."""

    def drawing_law(self, rows: Tensor) -> Tensor:
        return torch.where(rows >= rows.topk(2, dim=-1).values[..., -1:], rows, 0.0)


class DropsUnlikelyTokens(Round):
    """A draft token is dropped because of its own probability, after it was drawn."""

    def verified(self, numbers: Tensor, uniforms: Tensor) -> Tensor:
        assert self.length == 1
        context, token = numbers // self.vocab_size, numbers % self.vocab_size
        is_dropped = self.draft_rows[context, 0].gather(1, token.unsqueeze(1)).squeeze(1) < 0.3
        plain = draw(self.target_rows[context * self.vocab_size, 0], uniforms[:, 1])
        return torch.where(is_dropped, plain, super().verified(numbers, uniforms))


class SharesNoise(Round):
    """The rule gets the numbers that drew the draft tokens."""

    num_verifying = 0

    def shared(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        return uniforms, uniforms


class RedrawsUnderTheSameKey(Round):
    """Guesses the token that comes before the round and drafts ahead, the guess with the round's first number. A wrong
    guess is thrown away with its block, and the block is drawn again from the first number on.
    """

    @property
    def num_drafting(self) -> int:
        return self.length + 2

    @property
    def most_emitted(self) -> int:
        return self.length + 2

    def run(self, contexts: Tensor, uniforms: Tensor) -> Ran:
        drafting, verifying = self.shared(uniforms)
        first, drafting = drafting[:, 0], drafting[:, 1:]
        token = draw(self.pair.target[contexts], first)
        guess = draw(self.pair.drafter[contexts], drafting[:, 0])
        ahead, again = self.drafted(token, drafting[:, 1:]), self.drafted(token, self.again(drafting))
        numbers = torch.where(guess == token, ahead, again)
        codes = self.after(token, self.verified(numbers, verifying))
        return Ran(numbers % self.vocab_size**self.length, codes)

    def again(self, drafting: Tensor) -> Tensor:
        return drafting[:, : self.length]

    def after(self, token: Tensor, codes: Tensor) -> Tensor:
        """Returns the code of a token followed by the text of a code."""
        vocab_size, result = self.vocab_size, torch.zeros_like(codes)
        start = 0
        for count in range(1, self.length + 2):
            end = start + vocab_size**count
            longer = end + token * vocab_size**count + (codes - start)
            result = torch.where((codes >= start) & (codes < end), longer, result)
            start = end
        return result


class RedrawsAfresh(RedrawsUnderTheSameKey):
    """Sound: the number of a wrong guess is never used again; what nobody has seen may be."""

    def again(self, drafting: Tensor) -> Tensor:
        return drafting[:, 1:]


@dataclass(frozen=True, slots=True)
class ForgetsTheRest(SparseRows):
    """Sparse rows that count the residual mass on their support alone."""

    def residual_mass(self, target_probs: Tensor, target_rows: Tensor, rows: Tensor, scales: Tensor) -> Tensor:
        draft = self.probs[rows]
        target = target_probs[target_rows.unsqueeze(-1), self.token_ids[rows]]
        return (scales.unsqueeze(-1) * target - draft).clamp(min=0.0).sum(dim=-1)


class SparseRound(Round):
    """Sound: what was drawn from is stated sparsely."""

    def stated_law(self, rows: Tensor) -> DraftRows:
        return sparse_rows(rows)


class ForgetfulSparseRound(Round):
    """Stated sparsely, and the target's mass outside the support is forgotten."""

    def stated_law(self, rows: Tensor) -> DraftRows:
        sparse = sparse_rows(rows)
        return ForgetsTheRest(sparse.token_ids, sparse.probs, sparse.vocab_size)


class PenaltiesAtTheLastPlace(Round):
    """Penalties are applied to the target's last row alone."""

    def rows_of_blocks(self, table: Tensor, num_rows: int) -> Tensor:
        rows = super().rows_of_blocks(table, num_rows)
        plain = Round.rows_of_blocks(_Plain(self), table, num_rows)
        return torch.cat([plain[:, :-1], rows[:, -1:]], dim=1) if table is self.pair.target else rows


class PenaltiesOfThePromptAlone(Round):
    """Penalties of all rows count the committed text, not the draft tokens before the row."""

    def rows_of_blocks(self, table: Tensor, num_rows: int) -> Tensor:
        rows = super().rows_of_blocks(table, num_rows)
        if table is not self.pair.target:
            return rows
        contexts = torch.arange(len(rows)) // self.vocab_size ** (num_rows - 1)
        plain = Round.rows_of_blocks(_Plain(self), table, num_rows)
        spans = [Span(self.sampling, 1, self.prompt(context), 0) for context in contexts.tolist()]
        result = [probabilities_of_spans(plain[:, row].log(), spans) for row in range(num_rows)]
        return torch.stack(result, dim=1)


class _Plain:
    """What `Round.rows_of_blocks` reads of a round, without processing."""

    def __init__(self, whole: Round) -> None:
        self.vocab_size, self.prompt, self.sampling = whole.vocab_size, whole.prompt, SamplingParams()
