"""Log-probabilities that requests ask for, from the logits of a step. Runs on the torch thread."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwire.method.devices import upload
from draftwire.method.sampling import Span, first_penalized, probabilities_of_spans
from draftwire.requests.logprobs import LogprobsMode, TokenLogprob
from draftwire.verification.deciding import Case, Judgement, ScoredBlock

ROWS_AT_ONCE = 64
"""Rows of a prompt that are computed at once; bounds the memory beside the logits."""


def log_softmax_of(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns the unprocessed log-probabilities of some rows.

    Has to run before `probabilities_of_spans`, which overwrites the logits.

    Args:
        logits: `[any, vocab]`, any float dtype. Not changed.
        rows: row numbers; at least one.

    Returns:
        `[len(rows), vocab]`, float64 for float64 logits, else float32.
    """
    chosen = logits.index_select(0, upload(rows, logits.device, torch.int64))
    return torch.log_softmax(chosen if chosen.dtype == torch.float64 else chosen.float(), dim=-1)


def reported(log_probs: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Returns the log-probability of each row's token and of the likeliest ones, with one transfer to the host.

    Args:
        log_probs: `[rows, vocab]`.
        token_ids: the token of each row.
        num_top: how many of the likeliest tokens each row reports; fewer if fewer are possible.
    """
    own = log_probs.gather(1, upload(token_ids, log_probs.device, torch.int64).unsqueeze(1))
    width = min(max(num_top), log_probs.shape[1])
    top = log_probs.topk(width, dim=1)
    values = torch.cat([own, top.values], dim=1).double().clamp_(max=0.0)  # rounding may exceed 0
    numbers = torch.cat([values, top.indices.double()], dim=1).tolist()  # ids are exact in float64
    tokens = []
    for token, (value, *best), count in zip(token_ids, numbers, num_top, strict=True):
        pairs = list(zip(map(int, best[width:]), best[:width], strict=True))[:count]
        tokens.append(TokenLogprob(token, value, [pair for pair in pairs if pair[1] > -math.inf]))
    return tokens


def of_prompt(case: Case, start: int, logits: Tensor, num_top: int, mode: LogprobsMode) -> list[TokenLogprob]:
    """Returns the log-probabilities of consecutive tokens of a prompt.

    In mode PROCESSED, no token counts as generated.

    Args:
        case: of the session, with its committed tokens.
        start: position of the token before the first of these.
        logits: `[num_tokens, vocab]`: the logits before each token. Not changed.
        num_top: likeliest tokens to report with each.
        mode: which of the target's distributions is reported.
    """
    tokens: list[TokenLogprob] = []
    for first in range(0, len(logits), ROWS_AT_ONCE):
        end = min(first + ROWS_AT_ONCE, len(logits))
        if mode is LogprobsMode.RAW:
            log_probs = log_softmax_of(logits, range(first, end))
        else:
            text_len = start + end  # before the last position
            before = case.committed[first_penalized(case.sampling, text_len) : text_len]
            span = Span(case.sampling, end - first, before, len(before), case.stop_token_ids, edits=case.edits)
            log_probs = probabilities_of_spans(logits[first:end].clone(), [span]).log_()
        tokens += reported(log_probs, case.committed[start + 1 + first : start + 1 + end], [num_top] * (end - first))
    return tokens


@dataclass(frozen=True, slots=True)
class Asking:
    """A block of a step whose emitted tokens are reported."""

    block: ScoredBlock
    num_top: int
    """Likeliest tokens to report with each."""
    mode: LogprobsMode


@dataclass(frozen=True, slots=True)
class EmittedLogprobs:
    """The log-probabilities of the tokens that a step emits, for all blocks together."""

    asking: Sequence[Asking]
    raw: Tensor | None
    """`[any, vocab]`: unprocessed log-probabilities of the blocks that ask for them; None if none does."""
    raw_starts: dict[int, int]
    """First row of each such block, by `ScoredBlock.index`."""

    @classmethod
    def of(cls, asking: Sequence[Asking], logits: Tensor) -> "EmittedLogprobs":
        """Keeps what is needed of the logits, which are overwritten next."""
        starts: dict[int, int] = {}
        rows: list[int] = []
        for one in asking:
            if one.mode is LogprobsMode.RAW:
                starts[one.block.index] = len(rows)
                rows.extend(range(one.block.first_row, one.block.end_row))
        return cls(asking, log_softmax_of(logits, rows) if rows else None, starts)

    def add(self, decided: dict[int, Judgement], target_probs: Tensor) -> None:
        """Adds them to the judgements, by `ScoredBlock.index`; `target_probs` is `[any, vocab]`."""
        parts, emitting = list[Tensor](), list[Asking]()
        for mode, source in ((LogprobsMode.RAW, self.raw), (LogprobsMode.PROCESSED, target_probs)):
            own = [one for one in self.asking if one.mode is mode and one.block.index in decided]
            rows = [row for one in own for row in self._rows(one.block, decided[one.block.index])]
            if rows:
                assert source is not None, "raw rows are kept for those who ask"
                chosen = source.index_select(0, upload(rows, source.device, torch.int64))
                parts.append(chosen if mode is LogprobsMode.RAW else chosen.log_())
                emitting += own
        if not parts:
            return
        token_ids = [token for one in emitting for token in decided[one.block.index].token_ids]
        num_top = [one.num_top for one in emitting for _ in decided[one.block.index].token_ids]
        tokens = iter(reported(torch.cat(parts), token_ids, num_top))
        for one in emitting:
            judgement = decided[one.block.index]
            decided[one.block.index] = replace(judgement, logprobs=[next(tokens) for _ in judgement.token_ids])

    def _rows(self, block: ScoredBlock, judgement: Judgement) -> list[int]:
        """Returns the rows of a block's emitted tokens, in `raw` or among the target's probabilities."""
        first = self.raw_starts.get(block.index, block.first_row)
        return [first + row for row in judgement.rows]
