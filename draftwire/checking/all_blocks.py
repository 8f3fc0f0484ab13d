"""Every block that a drafter may draw, after every context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwire.checking.emissions import encoded
from draftwire.checking.toy_models import Pair
from draftwire.method.distributions import DenseRows, DraftRows, SparseRows
from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import Outcome

RowsOf = Callable[[Tensor], DraftRows]
"""Converts the drafter's distributions, `[rows, vocab]`, to the form that a rule reads."""


@dataclass(frozen=True, slots=True)
class AllBlocks:
    """The blocks of one length that have a positive probability. A block's number is its context and tokens read as
    digits in base `vocab`.
    """

    pair: Pair
    length: int
    numbers: Tensor
    """`[blocks] int64`."""
    probs: Tensor
    """`[blocks] float64`: the probability of drawing the block after its context."""
    batch: BlockBatch

    @property
    def contexts(self) -> Tensor:
        """`[blocks] int64`: the row of the tables that each block begins with."""
        return self.prefixes(0)

    def prefixes(self, count: int) -> Tensor:
        """Returns the number of each block's context and first `count` tokens, `[blocks] int64`."""
        size: int = self.pair.vocab_size ** (self.length - count)
        return self.numbers // size


def all_blocks(pair: Pair, length: int, rows_of: RowsOf = DenseRows) -> AllBlocks:
    """Returns the blocks of `length` tokens with target and draft distributions, in float64."""
    vocab_size = pair.vocab_size
    contexts, tokens = digits(torch.arange((vocab_size + 1) * vocab_size**length), length, vocab_size)
    target, draft = rows_along(pair.target, contexts, tokens), rows_along(pair.drafter, contexts, tokens)[:, :-1]
    probs = draft.gather(2, tokens.unsqueeze(2)).squeeze(2).prod(dim=1)
    numbers = (probs > 0.0).nonzero().squeeze(1)
    return AllBlocks(
        pair, length, numbers, probs[numbers], stated(target[numbers], draft[numbers], tokens[numbers], rows_of)
    )


def merged(parts: Sequence[AllBlocks]) -> BlockBatch:
    """Returns all blocks of several pairs of one vocabulary size and length as one batch with dense rows."""
    target = torch.cat([part.batch.target_probs[part.batch.target_rows] for part in parts])
    draft = torch.cat([part.batch.draft.dense()[part.batch.draft_rows] for part in parts])
    return stated(target, draft, torch.cat([part.batch.draft_tokens for part in parts]))


def digits(numbers: Tensor, length: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Returns the contexts, `[any]`, and tokens, `[any, length]`, that block numbers encode."""
    places = vocab_size ** torch.arange(length - 1, -1, -1)
    return numbers // vocab_size**length, numbers.unsqueeze(1) // places % vocab_size


def rows_along(table: Tensor, contexts: Tensor, tokens: Tensor) -> Tensor:
    """Returns a model's distributions before each token and after the last, `[batch, length + 1, vocab]`."""
    return table[torch.cat([contexts.unsqueeze(1), tokens], dim=1)]


def stated(target: Tensor, draft: Tensor, tokens: Tensor, rows_of: RowsOf = DenseRows) -> BlockBatch:
    """Returns a batch of blocks of one length.

    Args:
        target: `[batch, length + 1, vocab]`.
        draft: `[batch, length, vocab]`.
        tokens: `[batch, length] int64`.
        rows_of: converts `draft` to dense or sparse rows.
    """
    batch = BlockBatch.padded(target, draft, tokens, torch.full((len(tokens),), tokens.shape[1]))
    return replace(batch, draft=rows_of(draft.flatten(0, 1)))


def chosen(batch: BlockBatch, index: Tensor) -> BlockBatch:
    """Returns the blocks of a batch at `index`, `[any] int64`; their rows are not copied."""
    return replace(
        batch,
        draft_tokens=batch.draft_tokens[index],
        lengths=batch.lengths[index],
        target_rows=batch.target_rows[index],
        draft_rows=batch.draft_rows[index],
    )


def sparse_rows(probs: Tensor) -> SparseRows:
    """Returns distributions `[rows, vocab]` as sparse rows, padded with unused places to the largest support."""
    support = max(1, int((probs > 0.0).sum(dim=1).max())) if len(probs) else 1
    top = probs.topk(support, dim=1)
    return SparseRows(torch.where(top.values > 0.0, top.indices, 0), top.values, probs.shape[1])


def emitted_codes(blocks: BlockBatch, outcome: Outcome) -> Tensor:
    """Returns the code of the tokens that each block's round emits, `[batch] int64`; see `encoded`.

    Raises:
        ValueError: an outcome is impossible under any rule.
    """
    vocab_size = blocks.target_probs.shape[1]
    accepted, extra = outcome.num_accepted, outcome.extra_tokens
    if bool(((accepted < 0) | (accepted > blocks.lengths)).any()):
        raise ValueError("num_accepted is not within the block")
    if bool(((extra < 0) | (extra >= vocab_size)).any()):
        raise ValueError("extra_tokens are not within the vocabulary")
    tokens = torch.cat([blocks.draft_tokens, extra.unsqueeze(1)], dim=1)
    tokens = tokens.scatter(1, accepted.unsqueeze(1), extra.unsqueeze(1))
    return encoded(tokens, accepted + 1, vocab_size)
