"""Rules and rounds to try the checker on: textbook implementations, and mistakes the way people make them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwire.checking.whole_round import Ran, Round
from draftwire.method.distributions import SparseRows, SupportProbs, draw, race
from draftwire.options.trees.traversal import TraversalRule
from draftwire.options.trees.walk import TargetOnlyRule
from draftwire.verification import (
    BlockBatch,
    FixedNoise,
    LawRule,
    Noise,
    Outcome,
    StopLaw,
    TokenRule,
    TreeBatch,
    TreeLaw,
    TreeOutcome,
)
from draftwire.verification.block import BlockRule, block_weights, largest_success
from examples.rules.greedy_block import GreedyBlockRule
from examples.rules.multi_round import MultiRoundRule


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
        times = noise.exponentials(index // places, self.raced_at(index % places, places), vocab_size)
        tokens = race(p.flatten(0, 1), times).winners.reshape(batch, places)
        is_kept = self.matches(tokens[:, :-1], blocks.draft_tokens, p / times.reshape(p.shape)) & blocks.inside
        accepted = is_kept.to(torch.int64).cumprod(1).sum(1)
        return Outcome(accepted, tokens.gather(1, accepted.unsqueeze(1)).squeeze(1))

    def raced_at(self, offsets: Tensor, count: int) -> Tensor:
        return offsets

    def matches(self, winners: Tensor, drafted: Tensor, speeds: Tensor) -> Tensor:
        return winners == drafted


class Coupled(ExactMatchByRaces):
    """Sound: the same with the drafter's noise."""

    is_coupled = True


def mistaken(name: str, right: type, **members: object) -> type:
    """Returns a rule or a round with a mistake: with some members replaced."""
    return type(name, (right,), members)


# --- rules that do not emit the target's law


def residual_beside(step: int) -> Callable:
    """Returns a correction from the rows so many places after the rejected token's."""

    def residual(rule: Textbook, p: Tensor, q: Tensor, rows: Tensor, at: Tensor, scale: Tensor) -> Tensor:
        return Textbook.residual(rule, p, q, rows, (at + step).clamp(min=0, max=q.shape[1] - 1), scale)

    return residual


def inverted_ratios(rule: Textbook, blocks: BlockBatch) -> Tensor:
    """Returns drafter over target, as some copies print it."""
    ratios = blocks.ratios()
    return torch.where(ratios > 0.0, 1.0 / ratios, 0.0)


def ratios_with_epsilon(rule: Textbook, blocks: BlockBatch) -> Tensor:
    """Returns target / (draft + epsilon)."""
    draft = blocks.draft_probs_of_drafts() + 1e-5
    return torch.where(blocks.inside, blocks.target_probs_of_drafts() / draft, 0.0)


class WholeBlockByProduct(BlockRule):
    """The whole block by min(1, product of the ratios), everything shorter by the block rule."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        law = super().stop_law(blocks)
        whole = blocks.ratios().prod(dim=1, keepdim=True).clamp(max=1.0)
        shorter = law.accepted_probs[:, :-1]
        shares = (shorter / shorter.sum(dim=1, keepdim=True)).nan_to_num()
        return StopLaw(torch.cat([shares * (1.0 - whole), whole], dim=1), law.residual_scales)


OTHER_LAWS = [
    # break for continue, and the reverse
    mistaken("BlockBreaks", TextbookBlock, goes_on=TextbookToken.goes_on),
    mistaken("TokenContinues", TextbookToken, goes_on=TextbookBlock.goes_on),
    # tests
    mistaken("RatioInverted", TextbookBlock, ratios=inverted_ratios),
    mistaken("WeightsWithoutClamp", TextbookBlock, next_weight=lambda _, weight, ratio: weight * ratio),
    mistaken("EpsilonInRatio", TextbookToken, ratios=ratios_with_epsilon),
    mistaken("Float16Ratios", TextbookToken, ratios=lambda _, blocks: blocks.ratios().half().double()),
    WholeBlockByProduct,
    # corrections: of the last accepted token, of the token after, by the token rule, with a_{tau-1}, after whole blocks
    mistaken("ResidualOfRowBefore", TextbookBlock, residual=residual_beside(-1)),
    mistaken("ResidualOfRowAfter", TextbookBlock, residual=residual_beside(1)),
    mistaken("TokenResidualInBlock", TextbookBlock, scale=lambda _, before, weight: torch.ones_like(weight)),
    mistaken("EarlierWeightInResidual", TextbookBlock, scale=lambda _, before, weight: before),
    mistaken("BonusOfResidual", TextbookBlock, corrects=lambda _, blocks, accepted: accepted >= 0),
    mistaken("EpsilonInResidual", TextbookToken, residual=lambda *given: Textbook.residual(*given) + 1e-4),
    # random numbers
    mistaken("OneUniformForAllTests", TextbookToken, coins=lambda _, uniforms: uniforms[:, :1].expand_as(uniforms)),
    mistaken("ProductOfUniforms", TextbookToken, coins=lambda _, uniforms: uniforms.cumprod(dim=1)),
    mistaken("CoupledWithNextPlace", Coupled, raced_at=lambda _, offsets, count: (offsets + 1) % count),
]

# --- rules that break another promise


NotStrict = mistaken(
    "NotStrict", TextbookToken, passes=lambda _, uniform, threshold: uniform <= threshold
)  # lets what is impossible through where u is 0

AcceptsLess = mistaken(
    "AcceptsLess", BlockRule, stop_law=lambda _, blocks: TokenRule().stop_law(blocks)
)  # than a rule of its name does

CoupledWithTolerance = mistaken(
    "CoupledWithTolerance",
    Coupled,
    matches=lambda _, winners, drafted, speeds: (
        speeds[:, :-1].gather(2, drafted.unsqueeze(2)).squeeze(2) > (1.0 - 1e-4) * speeds[:, :-1].amax(dim=2)
    ),
)  # keeps a draft token that is almost the winner


class StatesNegativeProbabilities(BlockRule):
    """P(i tokens) = a_i - a_{i+1}: sums to 1 and emits the target's law, but block weights may rise along a block."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        weights = block_weights(blocks)
        return StopLaw(torch.cat([weights[:, :-1] - weights[:, 1:], weights[:, -1:]], dim=1), weights)


class DrawsWithTheTestsUniform(TokenRule):
    """States the right law, and draws the extra token with the number that decided."""

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        law, uniform = self.stop_law(blocks), noise.uniforms(1)[:, 0]
        accepted = draw(law.accepted_probs, uniform)
        return Outcome(accepted, draw(self.extra_weights(blocks, law, accepted), uniform))


class CoupledResidual(Coupled):
    """Draws the correction anew, from [p - q]+, with the noise that has shown that the draft token lost."""

    needs_draft_probs = True

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        accepted = super().decide(blocks, noise).num_accepted
        weights = blocks.residual(accepted, torch.ones(blocks.batch_size, dtype=torch.float64))
        times = noise.exponentials(torch.arange(blocks.batch_size), accepted, weights.shape[1])
        return Outcome(accepted, race(weights, times).winners)


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


class CoupledDependsOnTheBatch(Coupled):
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


class LossyAtGreedyTarget(LawRule):
    """Says that it is lossy, and changes greedy texts: accepts up to the last match."""

    name = "last_match"
    is_lossless = False

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        tests = torch.where(blocks.inside, blocks.target_probs_of_drafts(), 0.0)
        return StopLaw(largest_success(tests), torch.ones(blocks.batch_size, blocks.max_len + 1, dtype=torch.float64))


@dataclass(frozen=True, slots=True)
class ForgetfulSupport(SupportProbs):
    """Counts the residual mass on the support alone."""

    def residual_mass(self, scales: Tensor) -> Tensor:
        return (scales.unsqueeze(-1) * self.target - self.draft).clamp(min=0.0).sum(dim=-1)


@dataclass(frozen=True, slots=True)
class ForgetfulRows(SparseRows):
    """Sparse rows that count the residual mass on their support alone."""

    def beside(self, target_probs: Tensor, target_rows: Tensor, rows: Tensor) -> SupportProbs:
        read = SparseRows.beside(self, target_probs, target_rows, rows)
        return ForgetfulSupport(read.token_ids, read.draft, read.target)


class ForgetsTheRest(BlockRule):
    """Forgets the target's mass outside the support of what is stated sparsely."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        draft = blocks.draft
        if isinstance(draft, SparseRows):
            draft = ForgetfulRows(draft.token_ids, draft.probs, draft.vocab_size)
        return super().stop_law(replace(blocks, draft=draft))


class Raises(TokenRule):
    """Raises when a draft token is improbable."""

    def stop_law(self, blocks: BlockBatch) -> StopLaw:
        if bool((blocks.ratios() == 0.0)[blocks.inside].any()):
            raise ZeroDivisionError("no ratio")
        return super().stop_law(blocks)


# --- rounds: right ones, and mistakes around the rule


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
        """Returns the code of a token followed by the text of a code: texts of one length more follow those of it."""
        sizes = self.vocab_size ** torch.arange(1, self.length + 2)
        return codes + (token + 1) * sizes[torch.bucketize(codes, sizes.cumsum(0), right=True)]


RedrawsAfresh = mistaken(
    "RedrawsAfresh", RedrawsUnderTheSameKey, again=lambda _, drafting: drafting[:, 1:]
)  # sound: the number of a wrong guess is never used again; what nobody has seen may be


class PenaltiesAtTheLastPlace(Round):
    """Penalties are applied to the target's last row alone."""

    def rows_of_blocks(self, table: Tensor, num_rows: int) -> Tensor:
        rows = super().rows_of_blocks(table, num_rows)
        plain = Round(self.rule, self.pair, self.length).rows_of_blocks(table, num_rows)
        return torch.cat([plain[:, :-1], rows[:, -1:]], dim=1) if table is self.pair.target else rows


WRONG_ROUNDS = [
    # Draft tokens are drawn from other laws than are stated: in bfloat16, at another temperature, from the likeliest.
    mistaken("DrawsInBfloat16", Round, drawing_law=lambda _, rows: rows.bfloat16().double()),
    mistaken("TemperatureOnOneSide", Round, drawing_law=lambda _, rows: rows.pow(1 / 0.7)),
    mistaken(
        "TopKBeforeDrawing",
        Round,
        drawing_law=lambda _, rows: torch.where(rows >= rows.topk(2, dim=-1).values[..., -1:], rows, 0.0),
    ),
    # The rule gets the numbers that drew the draft tokens.
    mistaken("SharesNoise", Round, num_verifying=0, shared=lambda _, uniforms: (uniforms, uniforms)),
    RedrawsUnderTheSameKey,
    PenaltiesAtTheLastPlace,
]


# Rules for trees


class TraversalTwice(TraversalRule):
    """Judges children from the weights of the node as if each were the first."""

    def tree_law(self, trees: TreeBatch) -> TreeLaw:
        return MultiRoundRule().tree_law(trees)

    def extra_weights(self, trees: TreeBatch, law: TreeLaw, last_nodes: Tensor) -> Tensor:
        rows = trees.target_rows.gather(1, last_nodes.unsqueeze(1) + 1).squeeze(1)
        return trees.target_probs[rows]


class TraversalWithoutLaw(TraversalRule):
    """States probabilities that do not sum to 1."""

    def tree_law(self, trees: TreeBatch) -> TreeLaw:
        law = super().tree_law(trees)
        return replace(law, stop_probs=0.5 * law.stop_probs)


class TraversalDrawsOther(TraversalRule):
    """Draws the extra token with the uniform of the path."""

    def decide_trees(self, trees: TreeBatch, noise: Noise) -> TreeOutcome:
        uniforms = noise.uniforms(2)
        return super().decide_trees(trees, FixedNoise(uniforms[:, :1].expand(-1, 2)))


class WalkWithOneUniform(TargetOnlyRule):
    """Uses the first place's number at each place."""

    def decide_trees(self, trees: TreeBatch, noise: Noise) -> TreeOutcome:
        uniforms = noise.uniforms(trees.depth + 1)
        return super().decide_trees(trees, FixedNoise(uniforms[:, :1].expand_as(uniforms)))


class RaisesOnTrees(TargetOnlyRule):
    """Takes chains alone."""

    def decide_trees(self, trees: TreeBatch, noise: Noise) -> TreeOutcome:
        raise ValueError("no trees")
