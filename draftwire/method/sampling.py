"""Logits to probabilities: the definition of "the target's distribution".

The verifier applies it to the target's logits at every draft position and at the bonus position; the drafter applies
it to its own logits before it draws. A parameter that is not listed here is refused, never ignored.

The order is fixed: logit bias and masks (allowed_token_ids, structured_output, min_tokens), repetition penalty,
presence and frequency penalty, temperature, top-k, top-p, min-p. Parameters that depend on the text use, at each draft
position, the committed tokens and the draft tokens before it, as if they had been generated one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.method.devices import upload
from draftwire.requests.parameters import SamplingParams

SMALLEST = 1e-30
"""Smaller temperatures, masses and repetition penalties are raised to this: float32 would round them to 0, which has
another meaning."""

COLD = 1e-3
"""Below this temperature logits are shifted before they are divided, which keeps them from overflowing."""

TOP_P_CANDIDATES = 1024
"""Top-p first looks for its set among this many likeliest tokens, before it sorts a whole vocabulary."""


class TokenEdits:
    """A request's bias and masks, as tensors. They do not depend on the text: keep one per session.

    Made when they are first needed, in time and memory of one row over the vocabulary each, however long the lists are.
    Used on the torch thread.
    """

    def __init__(self, params: SamplingParams, stop_token_ids: frozenset[int] = frozenset()) -> None:
        """Computes nothing yet; the arguments are those of `Span`."""
        self._params = params
        self._stop_token_ids = stop_token_ids
        self._made: dict[tuple[str, int, torch.device], Any] = {}

    def bias(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the biased tokens, `[n] int64`, and what is added to their logits, of the dtype of `logits`."""
        key = ("bias", logits.shape[1], logits.device)
        if key not in self._made:
            pairs = [(token, bias) for token, bias in self._params.logit_bias if token < logits.shape[1]]
            index = upload([token for token, _ in pairs], logits.device, torch.int64)
            self._made[key] = index, upload([bias for _, bias in pairs], logits.device, torch.float64)
        index, values = self._made[key]
        return index, values.to(logits.dtype)

    def not_allowed(self, logits: Tensor) -> Tensor:
        """Returns -inf for tokens that `allowed_token_ids` leaves out and 0 for others, `[vocab]`."""
        return self._mask("allowed", logits, self._params.allowed_token_ids or frozenset(), if_listed=False)

    def stops(self, logits: Tensor) -> Tensor:
        """Returns -inf for the stop tokens and 0 for others, `[vocab]`."""
        return self._mask("stops", logits, self._stop_token_ids, if_listed=True)

    def _mask(self, name: str, logits: Tensor, token_ids: frozenset[int], *, if_listed: bool) -> Tensor:
        key = (name, logits.shape[1], logits.device)
        if key not in self._made:
            is_masked = torch.full((logits.shape[1],), not if_listed)
            listed = [token for token in token_ids if token < logits.shape[1]]
            is_masked[torch.tensor(listed, dtype=torch.int64)] = if_listed
            self._made[key] = upload(is_masked, logits.device)  # a byte a token
        return torch.where(self._made[key], -math.inf, 0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """Positions of one text whose distributions are requested: consecutive, or at the ends of paths of a tree."""

    params: SamplingParams
    num_rows: int
    text: Sequence[int] = ()
    """The tokens before the last position; earlier positions see prefixes of it. Needed if params.penalizes, from
    `first_penalized` on: `prompt_len` and `text_len` then count from there too."""
    prompt_len: int = 0
    """How many tokens of the text are the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    """The tokens that min_tokens masks."""
    text_len: int | None = None
    """Number of tokens before the last position, if `text` is left out."""
    masks: NDArray[np.uint8] | None = None
    """Tokens that `SamplingParams.structured_output` allows at each position, `[num_rows, bytes]`: one bit per token,
    lowest first. Computed by `draftwire.requests.automaton`; None allows all."""
    edits: TokenEdits | None = None
    """Those of `params` and `stop_token_ids`, kept from earlier calls; None makes them for this one."""
    paths: Sequence[Sequence[int]] | None = None
    """Paths of a tree: the generated tokens between `text` and each position; `text` then comes before all of them, and
    is counted once. None: positions are consecutive."""

    @property
    def num_generated(self) -> int:
        """Number of tokens generated before the first position; of a tree before all paths."""
        text_len = len(self.text) if self.text_len is None else self.text_len
        return text_len - (self.num_rows - 1 if self.paths is None else 0) - self.prompt_len

    def rows_below(self, num_tokens: int) -> list[int]:
        """Returns the positions before which fewer tokens than this were generated."""
        num_missing = num_tokens - self.num_generated
        if self.paths is None:
            return list(range(min(self.num_rows, num_missing)))
        return [row for row, path in enumerate(self.paths) if len(path) < num_missing]


def first_penalized(params: SamplingParams, prompt_len: int) -> int:
    """Returns the position of the first token of a text that penalties can look at.

    That is the first generated one without a repetition penalty: the other two count what was generated, and to copy,
    count and upload a long prompt for each block takes longer than to penalize it.
    """
    return prompt_len if params.repetition_penalty == 1.0 else 0


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Returns the distribution of the next token where nothing was generated yet.

    Args:
        logits: `[..., vocab]`, any float dtype; -inf marks impossible tokens. Not changed.
        params: the same for all rows.

    Returns:
        `[..., vocab]`, as `probabilities_of_spans`.

    Raises:
        ValueError: a row has a NaN, a +inf, or no finite logit: a failure of the model.
    """
    rows = logits.reshape(-1, logits.shape[-1]).clone()
    result = probabilities_of_spans(rows, [Span(params, len(rows))])
    if not bool(is_distribution(result).all()):
        raise ValueError("a row of logits has a NaN, a +inf, or no finite entry")
    return result.reshape(logits.shape)


def probabilities_of_spans(logits: Tensor, spans: Sequence[Span]) -> Tensor:
    """Returns the distribution of the next token at each position of several texts. A row depends on its span alone.

    Args:
        logits: `[rows, vocab]`, the concatenated rows of the spans, any float dtype; overwritten.
        spans: positions and sampling parameters of the rows.

    Returns:
        `[rows, vocab]` probabilities, float64 for float64 logits, else float32. A greedy row is one-hot at the first
        largest logit, so every verification rule becomes exact matching without a special case. Where logits have a
        NaN, a +inf or no finite entry the whole row is NaN; see `is_distribution`.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    num_rows = [span.num_rows for span in spans]
    for rows_of_span, span in zip(logits.split(num_rows), spans, strict=True):
        _edit(rows_of_span, span)
    is_greedy = [span.params.greedy for span in spans]
    if all(is_greedy) or not len(logits):
        return _one_hot(logits)
    if any(is_greedy):
        greedy_rows = _indices(np.repeat(is_greedy, num_rows), logits.device)
        chosen = _one_hot(logits[greedy_rows])
    temperatures = [1.0 if span.params.greedy else span.params.temperature for span in spans]
    if any(value != 1.0 for value in temperatures):
        _divide(logits, np.repeat(temperatures, num_rows).tolist())
    is_truncated = [span.params.truncates for span in spans]
    params = [span.params for span in spans if span.params.truncates for _ in range(span.num_rows)]
    if all(is_truncated):
        _truncate(logits, params)
    elif any(is_truncated):
        rows = _indices(np.repeat(is_truncated, num_rows), logits.device)
        logits[rows] = _truncate(logits[rows], params)
    probs = torch.softmax(logits, dim=-1, out=logits)  # in place: a fresh tensor of this size costs more than the sum
    if any(is_greedy):
        probs[greedy_rows] = chosen
    return probs


def is_distribution(probs: Tensor) -> Tensor:
    """Returns which rows of `probabilities_of_spans` are distributions, `[rows] bool`; others are NaN throughout."""
    return probs[:, 0] >= 0.0  # NaN fails the comparison


def _edit(logits: Tensor, span: Span) -> None:
    """Applies bias, masks and penalties to `[num_rows, vocab]` logits, in place. Masks are added, so that they hide no
    NaN and no +inf.
    """
    params = span.params
    edits = span.edits if span.edits is not None else TokenEdits(params, span.stop_token_ids)
    if params.logit_bias:
        index, bias = edits.bias(logits)
        logits[:, index] += bias
    if params.allowed_token_ids is not None:
        logits += edits.not_allowed(logits)
    if span.masks is not None:
        _keep_form(logits, span.masks)
    if params.min_tokens and (rows := span.rows_below(params.min_tokens)):
        if rows[-1] + 1 == len(rows):
            logits[: len(rows)] += edits.stops(logits)
        else:
            logits[upload(rows, logits.device, torch.int64)] += edits.stops(logits)
    if params.penalizes and (span.text or span.paths):
        _penalize(logits, span)


def _keep_form(logits: Tensor, masks: NDArray[np.uint8]) -> None:
    """Sets logits that masks do not allow to -inf, in place. Tokens beyond the masks are not allowed either."""
    packed = upload(masks, logits.device).int()
    width = min(logits.shape[1], 8 * packed.shape[1])
    logits[:, :width] += torch.nn.functional.embedding(packed, _unpacking(logits.device)).flatten(1)[:, :width]
    logits[:, width:] += -math.inf


def _penalize(logits: Tensor, span: Span) -> None:
    """Applies the penalties, in place. Reads and writes the logits of the text's tokens alone."""
    params, vocab_size = span.params, logits.shape[1]
    text = np.asarray(span.text, dtype=np.int64)
    positions = np.arange(len(text))
    is_generated = positions >= span.prompt_len
    rows = positions - (len(text) - span.num_rows)  # the first row that a token counts for; <= 0: for all rows
    is_early = rows <= 0
    if span.paths is not None:  # all of the text counts for all rows, and the tokens of a path for its own
        lengths = list(map(len, span.paths))
        drafted = np.fromiter(chain.from_iterable(span.paths), dtype=np.int64, count=sum(lengths))
        text, rows = np.append(text, drafted), np.append(rows, np.repeat(np.arange(span.num_rows), lengths))
        is_generated = np.append(is_generated, np.ones(len(drafted), dtype=bool))
        is_early = np.arange(len(text)) < len(positions)
    is_known = text < vocab_size
    text, rows = text[is_known], rows[is_known]
    is_generated, is_early = is_generated[is_known], is_early[is_known]
    early = np.bincount(text[is_early], minlength=vocab_size)
    early_generated = np.bincount(text[is_early & is_generated], minlength=vocab_size)
    tokens = np.union1d(np.flatnonzero(early), text[~is_early])
    places = np.searchsorted(tokens, text[~is_early])
    later = np.zeros((2, span.num_rows, len(tokens)), dtype=np.int64)
    np.add.at(later[0], (rows[~is_early], places), 1)
    np.add.at(later[1], (rows[~is_early], places), is_generated[~is_early].astype(np.int64))
    if span.paths is None:
        later = later.cumsum(axis=1)
    # [num_rows, tokens]: how often each token occurs before each row, in all of the text and in what was generated
    counts = later + np.stack([early[tokens], early_generated[tokens]])[:, None]
    seen, generated = upload(counts, logits.device, logits.dtype)
    index = upload(tokens, logits.device)
    values = logits[:, index]
    factor = max(params.repetition_penalty, SMALLEST)
    values = torch.where(seen > 0.0, torch.where(values < 0.0, values * factor, values / factor), values)
    penalty = params.presence_penalty * (generated > 0.0).to(values.dtype) + params.frequency_penalty * generated
    logits[:, index] = values - penalty


def _divide(logits: Tensor, temperatures: list[float]) -> None:
    """Divides rows by their temperatures, all above 0, in place."""
    divisors = upload([[max(value, SMALLEST)] for value in temperatures], logits.device, logits.dtype)
    if min(temperatures) < COLD:
        largest = logits.amax(dim=1, keepdim=True)
        logits.sub_(torch.where(divisors < COLD, largest, 0.0))
    logits.div_(divisors)


def _truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Makes unlikely tokens impossible, in place: top-k, then top-p, then min-p."""
    vocab_size = logits.shape[1]

    def column(values: list[float]) -> Tensor:
        return upload(values, logits.device, logits.dtype).unsqueeze(1)

    if any(0 < one.top_k < vocab_size for one in params):
        ranks = [min(one.top_k, vocab_size) or vocab_size for one in params]
        most = max(rank for rank in ranks if rank < vocab_size)
        ordered = logits.topk(most, dim=1).values
        last = ordered.gather(1, upload([[min(rank, most) - 1] for rank in ranks], logits.device))
        keeps_all = upload([[rank == vocab_size] for rank in ranks], logits.device)
        logits.masked_fill_(logits < last.masked_fill(keeps_all, -math.inf), -math.inf)
    if any(one.top_p < 1.0 for one in params):
        probs = logits.softmax(dim=1)
        logits.masked_fill_(probs < _least_of_top_mass(probs, column([one.top_p for one in params])), -math.inf)
    if any(one.min_p > 0.0 for one in params):
        gaps = column([math.log(one.min_p) if one.min_p else -math.inf for one in params])
        logits.masked_fill_(logits < logits.amax(dim=1, keepdim=True) + gaps, -math.inf)
    return logits


def _least_of_top_mass(probs: Tensor, top_p: Tensor) -> Tensor:
    """Returns the smallest probability in the smallest set of most likely tokens whose mass reaches `top_p`.

    Args:
        probs: `[rows, vocab]`.
        top_p: `[rows, 1]`; 1 or more keeps all tokens and returns 0.

    Returns:
        `[rows, 1]`.
    """
    # On a GPU sorting everything is cheaper than waiting for the result of the test.
    count = probs.shape[1] if probs.is_cuda else min(TOP_P_CANDIDATES, probs.shape[1])
    ordered = probs.topk(count, dim=1).values
    mass_before = ordered.to(torch.float64).cumsum(dim=1) - ordered
    num_kept = (mass_before < top_p.clamp(min=SMALLEST)).sum(dim=1, keepdim=True).clamp(min=1)  # 0 in rows of NaN
    least = ordered.gather(1, num_kept - 1)
    beyond = ((num_kept == count) & (top_p < 1.0)).squeeze(1)
    if count < probs.shape[1] and bool(beyond.any()):  # the set is larger than the candidates
        ordered = probs[beyond].sort(dim=1, descending=True).values
        mass_before = ordered.to(torch.float64).cumsum(dim=1) - ordered
        num_kept = (mass_before < top_p[beyond].clamp(min=SMALLEST)).sum(dim=1, keepdim=True)
        least[beyond] = ordered.gather(1, num_kept - 1)
    return torch.where(top_p < 1.0, least, 0.0)


def _one_hot(logits: Tensor) -> Tensor:
    """Returns rows with all mass on the first largest logit; NaN if that logit is not finite."""
    choice = logits.argmax(dim=-1, keepdim=True)
    is_finite = torch.isfinite(logits.gather(-1, choice))
    return torch.zeros_like(logits).scatter_(-1, choice, 1.0).masked_fill_(~is_finite, math.nan)


@lru_cache(maxsize=8)
def _unpacking(device: torch.device) -> Tensor:
    """Returns for each byte, per bit from the lowest, 0 if it is set and -inf otherwise, `[256, 8] float32`."""
    is_set = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.where(is_set.bool(), 0.0, -math.inf).to(device)


def _indices(is_chosen: NDArray[np.bool_], device: torch.device) -> Tensor:
    return upload(np.flatnonzero(is_chosen), device)
