"""Log-probabilities that requests ask for, from the logits of a step. Runs on the torch thread."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwire.method.devices import upload
from draftwire.method.sampling import Span, TokenEdits, first_penalized, probabilities_of_spans
from draftwire.requests.logprobs import LogprobsMode, TokenLogprob
from draftwire.requests.parameters import SamplingParams

ROWS_AT_ONCE = 64
"""Rows of a prompt that are computed at once; bounds the memory beside the logits."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Consecutive prompt tokens whose log-probabilities are reported."""

    text: list[int]
    """The prompt up to and including the last of these tokens."""
    num_rows: int
    """Number of these tokens, at the end of `text`."""
    num_top: int
    """Likeliest tokens to report with each."""
    mode: LogprobsMode
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    edits: TokenEdits | None = None
    """Edits of the logits, as in `Span`."""


@dataclass(frozen=True, slots=True)
class EmittedRows:
    """Emitted tokens of one sequence whose log-probabilities are reported."""

    rows: Sequence[int]
    """Their row numbers in the probabilities or raw log-probabilities."""
    token_ids: Sequence[int]
    """The emitted tokens."""
    num_top: int
    """Likeliest tokens to report with each."""
    mode: LogprobsMode


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


def of_prompt(logits: Tensor, prompt: PromptRows) -> list[TokenLogprob]:
    """Returns the log-probabilities of consecutive tokens of a prompt.

    In mode PROCESSED, no token counts as generated.

    Args:
        logits: `[prompt.num_rows, vocab]`: the logits before each token. Not changed.
        prompt: the tokens.
    """
    tokens: list[TokenLogprob] = []
    first = len(prompt.text) - prompt.num_rows
    for start in range(0, prompt.num_rows, ROWS_AT_ONCE):
        end = min(start + ROWS_AT_ONCE, prompt.num_rows)
        if prompt.mode is LogprobsMode.RAW:
            log_probs = log_softmax_of(logits, range(start, end))
        else:
            text_len = first + end - 1  # before the last position
            before = prompt.text[first_penalized(prompt.sampling, text_len) : text_len]
            span = Span(prompt.sampling, end - start, before, len(before), prompt.stop_token_ids, edits=prompt.edits)
            log_probs = probabilities_of_spans(logits[start:end].clone(), [span]).log_()
        tokens += reported(log_probs, prompt.text[first + start : first + end], [prompt.num_top] * (end - start))
    return tokens


def of_emitted(raw: Tensor | None, target_probs: Tensor, emitted: Sequence[EmittedRows]) -> list[list[TokenLogprob]]:
    """Returns the log-probabilities of the tokens that a step emitted, for all sequences together.

    Args:
        raw: `[any, vocab]` log-probabilities for mode RAW; None if no sequence uses it.
        target_probs: `[any, vocab]` probabilities for mode PROCESSED.
        emitted: the tokens of each sequence; at least one sequence.
    """
    order = sorted(range(len(emitted)), key=lambda index: emitted[index].mode is LogprobsMode.PROCESSED)
    parts: list[Tensor] = []
    for mode, source in ((LogprobsMode.RAW, raw), (LogprobsMode.PROCESSED, target_probs)):
        rows = [row for index in order if emitted[index].mode is mode for row in emitted[index].rows]
        if rows:
            assert source is not None, "raw rows are kept for those who ask"
            chosen = source.index_select(0, upload(rows, source.device, torch.int64))
            parts.append(chosen if mode is LogprobsMode.RAW else chosen.log_())
    token_ids = [token for index in order for token in emitted[index].token_ids]
    num_top = [emitted[index].num_top for index in order for _ in emitted[index].rows]
    tokens = iter(reported(torch.cat(parts), token_ids, num_top))
    tokens_of = {index: [next(tokens) for _ in emitted[index].rows] for index in order}
    return [tokens_of[index] for index in range(len(emitted))]
