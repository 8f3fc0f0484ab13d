"""Laws of the rule `greedy_block`, whose rounds modify the target of later ones: follows texts with their state."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwire.checking.all_blocks import AllBlocks, all_blocks, chosen, emitted_codes
from draftwire.checking.cube import integrate
from draftwire.checking.emissions import largest_deviation, num_codes
from draftwire.checking.toy_models import Pair
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import FixedNoise, Outcome
from examples.rules.greedy_block_state import Modifications, ModifiedBlocks, advance, modify

if TYPE_CHECKING:
    from examples.rules.greedy_block import GreedyBlockRule

BLOCKS_AT_ONCE = 2**14


@dataclass(frozen=True, slots=True)
class Texts:
    """Prefixes that rounds have emitted so far, with the rule's state."""

    numbers: Tensor
    """`[texts] int64`: context and tokens in base `vocab`."""
    lengths: Tensor
    """`[texts] int64`: tokens after the context."""
    probs: Tensor
    """`[texts] float64`."""
    state: Modifications

    @classmethod
    def empty(cls, contexts: int) -> "Texts":
        """Returns an empty text after each context."""
        index, probs = torch.arange(contexts), torch.ones(contexts, dtype=torch.float64)
        return cls(index, torch.zeros_like(index), probs, Modifications.none(contexts))

    def select(self, index: Tensor) -> "Texts":
        """Returns the texts at `index`, `[any] int64`."""
        return Texts(self.numbers[index], self.lengths[index], self.probs[index], self.state.select(index))


@dataclass(frozen=True, slots=True)
class Continued:
    """All blocks that may follow texts."""

    texts: Tensor
    """`[rows] int64`: which text each block follows."""
    blocks: Tensor
    """`[rows] int64`: index of the block among all blocks."""
    state: Modifications
    """Of each block's text."""
    given: BlockBatch
    """The blocks as passed to the rule."""
    modified: ModifiedBlocks

    @classmethod
    def of(cls, texts: Texts, blocks: AllBlocks) -> "Continued":
        """Returns the blocks that begin with each text's last token."""
        vocab_size = blocks.pair.vocab_size
        last_tokens = torch.where(texts.lengths > 0, texts.numbers % vocab_size, texts.numbers)
        text_of, block_of = (last_tokens.unsqueeze(1) == blocks.contexts).nonzero(as_tuple=True)
        given, state = chosen(blocks.batch, block_of), texts.state.select(text_of)
        return cls(text_of, block_of, state, given, modify(given, state))


def law_of_rounds(rule: "GreedyBlockRule", pair: Pair, block_length: int, length: int) -> Tensor:
    """Returns the law of the first `length` tokens, `[contexts, vocab ** length]`, over rounds of one block length."""
    blocks, vocab_size = all_blocks(pair, block_length), pair.vocab_size
    total = torch.zeros((vocab_size + 1) * vocab_size**length, dtype=torch.float64)
    texts = Texts.empty(vocab_size + 1)
    per_text = max(1, len(blocks.numbers) // (vocab_size + 1))
    while len(texts.numbers):
        grown = [
            part
            for index in torch.arange(len(texts.numbers)).split(max(1, BLOCKS_AT_ONCE // per_text))
            for part in _round(rule, texts.select(index), blocks)
        ]
        for part in grown:
            is_done = part.lengths >= length
            cut = part.numbers // vocab_size ** (part.lengths - length).clamp(min=0)
            total.index_add_(0, cut[is_done], part.probs[is_done])
        texts = _joined([part.select((part.lengths < length).nonzero().squeeze(1)) for part in grown])
    return total.reshape(vocab_size + 1, -1)


def drawing_deviation(rule: "GreedyBlockRule", pair: Pair, block_length: int) -> float:
    """Returns by how much the decisions of two rounds differ from the law that the rule states, block by block.

    Returns 1 if the rule's state after a decision is not the one that follows from the decision.
    """
    blocks, texts = all_blocks(pair, block_length), Texts.empty(pair.vocab_size + 1)
    result = 0.0
    for _ in range(2):
        rows = Continued.of(texts, blocks)
        count = num_codes(pair.vocab_size, block_length + 1)

        def codes(cases: Tensor, numbers: Tensor, rows: Continued = rows) -> Tensor:
            batch, fresh = chosen(rows.given, cases), type(rule)()
            fresh.modifications = rows.state.select(cases)
            return emitted_codes(batch, fresh.decide(batch, FixedNoise(numbers)))

        decided = integrate(codes, len(rows.texts), 2, count).probs
        expected = torch.zeros_like(decided)
        law = rule.stop_law(rows.modified.blocks)
        index = torch.arange(len(rows.texts))
        for accepted in range(block_length + 1):
            outcome = torch.full_like(index, accepted)
            weights = rule.extra_weights(rows.modified.blocks, law, outcome)
            weights = weights / weights.sum(dim=1, keepdim=True) * law.accepted_probs[:, accepted : accepted + 1]
            for token in range(pair.vocab_size):
                places = emitted_codes(rows.given, Outcome(outcome, torch.full_like(index, token)))
                expected[index, places] += weights[:, token]
        result = max(result, largest_deviation(decided, expected), float(_forgets(rule, rows)))
        texts = _joined(_round(rule, texts, blocks))
        texts = texts.select((texts.state.left > 0).any(dim=1).nonzero().squeeze(1)[:8])
        if not len(texts.numbers):
            break
    return result


def _forgets(rule: "GreedyBlockRule", rows: Continued) -> bool:
    """Returns whether the rule's state after a decision differs from the one that follows from it."""
    fresh = type(rule)()
    fresh.modifications = rows.state
    numbers = torch.rand(len(rows.texts), 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outcome = fresh.decide(rows.given, FixedNoise(numbers))
    expected, found = advance(rows.modified, outcome), fresh.modifications
    return (
        found is None
        or not torch.equal(found.left, expected.left)
        or not torch.allclose(found.ratios, expected.ratios, rtol=1e-12)
    )


def _round(rule: "GreedyBlockRule", texts: Texts, blocks: AllBlocks) -> list[Texts]:
    """Returns texts after one more round, grouped by the number of accepted draft tokens."""
    rows, vocab_size = Continued.of(texts, blocks), blocks.pair.vocab_size
    law = rule.stop_law(rows.modified.blocks)
    mass = texts.probs[rows.texts] * blocks.probs[rows.blocks]
    numbers = blocks.numbers[rows.blocks] % vocab_size**blocks.length  # without the context
    result = []
    for accepted in range(blocks.length + 1):
        weights = rule.extra_weights(rows.modified.blocks, law, torch.full_like(rows.texts, accepted))
        reach = (mass * law.accepted_probs[:, accepted]).unsqueeze(1)
        parts = torch.where(reach == 0.0, 0.0, reach * weights / weights.sum(dim=1, keepdim=True))
        # The continuation depends on the accepted tokens alone: blocks that differ only after them are merged.
        kept = numbers // vocab_size ** (blocks.length - accepted)
        groups, group_of = (rows.texts * vocab_size**accepted + kept).unique(return_inverse=True)
        probs = torch.zeros(len(groups), vocab_size, dtype=torch.float64).index_add_(0, group_of, parts)
        example = torch.full_like(groups, len(group_of)).scatter_reduce_(
            0, group_of, torch.arange(len(group_of)), "amin"
        )
        group, extra = (probs != 0.0).nonzero(as_tuple=True)  # keeps NaN, so that it shows in the result
        row = example[group]
        state = advance(_chosen(rows.modified, row), Outcome(torch.full_like(row, accepted), extra))
        before = texts.numbers[rows.texts[row]]
        text = (before * vocab_size**accepted + kept[row]) * vocab_size + extra
        result.append(Texts(text, texts.lengths[rows.texts[row]] + accepted + 1, probs[group, extra], state))
    return result


def _chosen(modified: ModifiedBlocks, index: Tensor) -> ModifiedBlocks:
    return ModifiedBlocks(
        chosen(modified.blocks, index), modified.layers[index], modified.ratios[index], modified.left[index]
    )


def _joined(parts: list[Texts]) -> Texts:
    """Concatenates texts with different numbers of modifications, padded with modifications that have expired."""
    most = max(part.state.left.shape[1] for part in parts)

    def padded(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, most - values.shape[1]))

    return Texts(
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.lengths for part in parts]),
        torch.cat([part.probs for part in parts]),
        Modifications(
            torch.cat([padded(part.state.ratios) for part in parts]),
            torch.cat([padded(part.state.left) for part in parts]),
        ),
    )
