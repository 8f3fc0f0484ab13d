"""Logits to probabilities: the one definition of what "the target's distribution" means.

The verifier applies it to the target's logits at every draft position and at the bonus position; the drafter applies
it to its own logits before it draws. A parameter that is not listed here is refused, never ignored.

The order is fixed: logit bias and masks (allowed_token_ids, min_tokens), repetition penalty, presence and frequency
penalty, temperature, top-k, top-p, min-p. What depends on the text sees, at each draft position, the committed tokens
and the draft tokens before it, as if they had been generated one by one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from draftwire.devices import upload
from draftwire.errors import InvalidRequestError

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
"""Largest presence and frequency penalty, as OpenAI has it."""
MAX_BIAS = 100.0
"""Largest logit bias, as OpenAI has it."""
MAX_BIASED_TOKENS = 1024
MAX_REPETITION_PENALTY = 100.0
MAX_ALLOWED_TOKENS = 2**18
"""As many as the largest vocabularies have."""

SMALLEST = 1e-30
"""Smaller temperatures, masses and repetition penalties are taken as this: float32 would round them to 0, which means
something else."""

COLD = 1e-3
"""Below this temperature logits are shifted before they are divided, which keeps them from overflowing."""

TOP_P_CANDIDATES = 1024
"""Tokens among which top-p first looks for its set, before it sorts a whole vocabulary."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How logits become a distribution; the order in which this is done is the module's.

    Raises:
        InvalidRequestError: a value is out of range; the message names it.
    """

    temperature: float = 1.0
    """0 is greedy decoding; at most 100."""
    top_k: int = 0
    """Keep the k most likely tokens, and those as likely as the last of them; 0 keeps all, 1 is greedy decoding."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1], and those as likely as its
    last."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one, in [0, 1]; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of prompt and output, multiplies negative ones; above 0, at most 100."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of generated tokens, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it was generated, in [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and what is added to its logit, in [-100, 100]; at most 1,024, no id twice."""
    allowed_token_ids: frozenset[int] | None = None
    """Only these tokens are possible, at most 262,144; None allows all."""
    min_tokens: int = 0
    """No stop token is possible before so many tokens are generated."""

    def __post_init__(self) -> None:
        # NaN fails every comparison.
        _require(0.0 <= self.temperature <= MAX_TEMPERATURE, "temperature", "in [0, 100]", self.temperature)
        _require(self.top_k >= 0, "top_k", "0 (off) or positive", self.top_k)
        _require(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        _require(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]", self.min_p)
        is_penalty = 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY
        _require(is_penalty, "repetition_penalty", "above 0 and at most 100", self.repetition_penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY, name, "in [-2, 2]", getattr(self, name))
        is_few = len(self.logit_bias) <= MAX_BIASED_TOKENS
        _require(is_few, "logit_bias", f"at most {MAX_BIASED_TOKENS} token ids", len(self.logit_bias))
        for token, bias in self.logit_bias:
            _require(
                token >= 0 and abs(bias) <= MAX_BIAS, "logit_bias", "ids with values in [-100, 100]", (token, bias)
            )
        num_biased = len({token for token, _ in self.logit_bias})
        _require(num_biased == len(self.logit_bias), "logit_bias", "without repeated ids", len(self.logit_bias))
        if self.allowed_token_ids is not None:
            count = len(self.allowed_token_ids)
            _require(1 <= count <= MAX_ALLOWED_TOKENS, "allowed_token_ids", f"1 to {MAX_ALLOWED_TOKENS} ids", count)
            _require(min(self.allowed_token_ids) >= 0, "allowed_token_ids", "token ids", min(self.allowed_token_ids))
            # A set knows its hash: masks are looked up by it.
            object.__setattr__(self, "allowed_token_ids", frozenset(self.allowed_token_ids))
        _require(self.min_tokens >= 0, "min_tokens", "0 or more", self.min_tokens)

    @property
    def greedy(self) -> bool:
        """Whether one token has all the mass."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are left out."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalizes(self) -> bool:
        """Whether tokens of the text get other logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks that all token ids are within a vocabulary.

        Raises:
            InvalidRequestError: one is not.
        """
        largest = {
            "logit_bias": max((token for token, _ in self.logit_bias), default=0),
            "allowed_token_ids": max(self.allowed_token_ids or (0,)),
        }
        for name, token in largest.items():
            _require(token < vocab_size, name, f"token ids in 0..{vocab_size - 1}", token)


PARAMETERS = tuple(field.name for field in fields(SamplingParams))
"""Names of all sampling parameters."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive places of one text, whose distributions are wanted."""

    params: SamplingParams
    num_rows: int
    """How many places."""
    text: Sequence[int] = ()
    """The tokens before the last of the places; before the others stand as many less. Needed if params.penalizes."""
    prompt_len: int = 0
    """How many tokens of the text are the prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    """The tokens that min_tokens keeps away."""
    text_len: int | None = None
    """Tokens before the last of the places, where `text` is left out."""

    @property
    def num_generated(self) -> int:
        """Tokens that were generated before the first of the places."""
        text_len = len(self.text) if self.text_len is None else self.text_len
        return text_len - (self.num_rows - 1) - self.prompt_len


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Returns the distribution of the next token at places where nothing was generated yet.

    Args:
        logits: `[..., vocab]`, any float dtype; -inf marks impossible tokens. Not changed.
        params: one for all rows.

    Returns:
        `[..., vocab]`, as `probabilities_of_spans`.

    Raises:
        ValueError: a row has a NaN, a +inf, or no finite logit, which is a failure of the model.
    """
    rows = logits.reshape(-1, logits.shape[-1]).clone()
    result = probabilities_of_spans(rows, [Span(params, len(rows))])
    if not bool(is_distribution(result).all()):
        raise ValueError("a row of logits has a NaN, a +inf, or no finite entry")
    return result.reshape(logits.shape)


def probabilities_of_spans(logits: Tensor, spans: Sequence[Span]) -> Tensor:
    """Returns the distribution of the next token at each place of several texts. A row depends on its span alone.

    Args:
        logits: `[rows, vocab]`, the spans' rows one after the other, any float dtype; overwritten.
        spans: whose places they are, and how they are processed.

    Returns:
        `[rows, vocab]` probabilities, float64 for float64 logits, else float32. A greedy row is one-hot at the first
        largest logit, so every verification rule turns into exact matching without a case of its own. Where logits
        have a NaN, a +inf or no finite entry the whole row is NaN; see `is_distribution`.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    starts = accumulate((span.num_rows for span in spans), initial=0)
    for start, span in zip(starts, spans, strict=False):
        _edit(logits[start : start + span.num_rows], span)
    params = [span.params for span in spans for _ in range(span.num_rows)]
    is_greedy = [one.greedy for one in params]
    if all(is_greedy):
        return _one_hot(logits)
    if any(is_greedy):
        greedy_rows = _indices(is_greedy, logits.device)
        chosen = _one_hot(logits[greedy_rows])
    _divide(logits, [1.0 if one.greedy else one.temperature for one in params])
    is_truncated = [one.truncates for one in params]
    if all(is_truncated):
        _truncate(logits, params)
    elif any(is_truncated):
        rows = _indices(is_truncated, logits.device)
        logits[rows] = _truncate(logits[rows], [one for one in params if one.truncates])
    probs = torch.softmax(logits, dim=-1, out=logits)  # in place: a fresh tensor of this size costs more than the sum
    if any(is_greedy):
        probs[greedy_rows] = chosen
    return probs


def is_distribution(probs: Tensor) -> Tensor:
    """Returns which rows of `probabilities_of_spans` are distributions, `[rows] bool`; others are NaN throughout."""
    return probs[:, 0] >= 0.0  # NaN fails the comparison


def _edit(logits: Tensor, span: Span) -> None:
    """Applies what changes single tokens' logits, in place. Masks are added, so that they hide no NaN and no +inf.

    Args:
        logits: `[num_rows, vocab]`.
        span: whose.
    """
    params, vocab_size = span.params, logits.shape[1]
    if params.logit_bias:
        pairs = [(token, bias) for token, bias in params.logit_bias if token < vocab_size]
        index = upload([token for token, _ in pairs], logits.device, torch.int64)
        logits[:, index] += upload([bias for _, bias in pairs], logits.device, logits.dtype)
    if params.allowed_token_ids is not None:
        logits += _mask(params.allowed_token_ids, vocab_size, logits.device)
    if params.min_tokens:
        num_masked = max(0, min(span.num_rows, params.min_tokens - span.num_generated))
        stops = [token for token in span.stop_token_ids if token < vocab_size]
        logits[:num_masked, upload(stops, logits.device, torch.int64)] += -math.inf
    if params.penalizes and span.text:
        _penalize(logits, span)


def _penalize(logits: Tensor, span: Span) -> None:
    """Applies the penalties, in place. Reads and writes the logits of the text's tokens alone."""
    params, vocab_size = span.params, logits.shape[1]
    text = np.asarray(span.text, dtype=np.int64)
    positions = np.flatnonzero(text < vocab_size)
    text, is_generated = text[positions], positions >= span.prompt_len
    rows = positions - (len(span.text) - span.num_rows)  # the first row that a token counts for; <= 0: for all rows
    is_early = rows <= 0
    early = np.bincount(text[is_early], minlength=vocab_size)
    early_generated = np.bincount(text[is_early & is_generated], minlength=vocab_size)
    tokens = np.union1d(np.flatnonzero(early), text[~is_early])
    places = np.searchsorted(tokens, text[~is_early])
    later = np.zeros((2, span.num_rows, len(tokens)), dtype=np.int64)
    np.add.at(later[0], (rows[~is_early], places), 1)
    np.add.at(later[1], (rows[~is_early], places), is_generated[~is_early].astype(np.int64))
    # [num_rows, tokens]: how often each token occurs before each row, in all of the text and in what was generated
    counts = later.cumsum(axis=1) + np.stack([early[tokens], early_generated[tokens]])[:, None]
    seen, generated = upload(counts, logits.device, logits.dtype)
    index = upload(tokens, logits.device)
    values = logits[:, index]
    factor = max(params.repetition_penalty, SMALLEST)
    values = torch.where(seen > 0.0, torch.where(values < 0.0, values * factor, values / factor), values)
    penalty = params.presence_penalty * (generated > 0.0).to(values.dtype) + params.frequency_penalty * generated
    logits[:, index] = values - penalty


def _divide(logits: Tensor, temperatures: list[float]) -> None:
    """Divides rows by their temperatures, all above 0, in place."""
    if all(value == 1.0 for value in temperatures):
        return
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
        top_p: `[rows, 1]`; 1 or more wants all tokens, whose least is taken as 0.

    Returns:
        `[rows, 1]`.
    """
    # A GPU sorts all of them sooner than it tells the host whether it has to.
    count = probs.shape[1] if probs.is_cuda else min(TOP_P_CANDIDATES, probs.shape[1])
    ordered = probs.topk(count, dim=1).values
    mass_before = ordered.to(torch.float64).cumsum(dim=1) - ordered
    num_kept = (mass_before < top_p.clamp(min=SMALLEST)).sum(dim=1, keepdim=True).clamp(min=1)  # 0 in rows of NaN
    least = ordered.gather(1, num_kept - 1)
    beyond = ((num_kept == count) & (top_p < 1.0)).squeeze(1)
    if count < probs.shape[1] and bool(beyond.any()):  # mass is spread over more tokens than were looked at
        ordered = probs[beyond].sort(dim=1, descending=True).values
        mass_before = ordered.to(torch.float64).cumsum(dim=1) - ordered
        num_kept = (mass_before < top_p[beyond].clamp(min=SMALLEST)).sum(dim=1, keepdim=True)
        least[beyond] = ordered.gather(1, num_kept - 1)
    return torch.where(top_p < 1.0, least, 0.0)


def _one_hot(logits: Tensor) -> Tensor:
    """Returns rows with all mass on the first largest logit; NaN where that is not finite."""
    choice = logits.argmax(dim=-1, keepdim=True)
    is_finite = torch.isfinite(logits.gather(-1, choice))
    return torch.zeros_like(logits).scatter_(-1, choice, 1.0).masked_fill_(~is_finite, math.nan)


@lru_cache(maxsize=64)
def _mask(allowed: frozenset[int], vocab_size: int, device: torch.device) -> Tensor:
    """Returns 0 for tokens in `allowed` and -inf for others, `[vocab_size] float32`."""
    mask = torch.full((vocab_size,), -math.inf)
    mask[torch.tensor([token for token in allowed if token < vocab_size], dtype=torch.int64)] = 0.0
    return mask.to(device)


def _indices(is_chosen: Sequence[bool], device: torch.device) -> Tensor:
    return upload(np.flatnonzero(np.asarray(is_chosen)), device)


def _require(condition: bool, name: str, expected: str, value: object) -> None:
    if not condition:
        raise InvalidRequestError(f"{name} must be {expected}, not {value}")
