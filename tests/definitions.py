"""What the law of the next token is, for one row and in plain Python: the one definition that tests compare with."""

import math
from collections.abc import Sequence
from itertools import accumulate

from draftwire.requests.parameters import SamplingParams


def defined_law(
    logits: list[float],
    params: SamplingParams,
    text: Sequence[int] = (),
    prompt_len: int = 0,
    stops: frozenset[int] = frozenset(),
) -> list[float]:
    """Returns the probabilities of the tokens after a text, word for word as documented; NaN where none is possible."""
    values, vocab, generated = list(logits), range(len(logits)), list(text[prompt_len:])
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in vocab:
        is_early_stop = token in stops and len(generated) < params.min_tokens
        if is_early_stop or (params.allowed_token_ids is not None and token not in params.allowed_token_ids):
            values[token] = -math.inf
        if token in text:
            penalty = params.repetition_penalty
            values[token] = values[token] * penalty if values[token] < 0.0 else values[token] / penalty
        values[token] -= params.presence_penalty * (token in generated)
        values[token] -= params.frequency_penalty * generated.count(token)
    if max(values) == -math.inf:
        return [math.nan for _ in vocab]
    if params.temperature == 0.0 or params.top_k == 1:
        return [float(token == values.index(max(values))) for token in vocab]
    values = [value / params.temperature for value in values]
    if 0 < params.top_k < len(values):
        values = _kept(values, values, sorted(values, reverse=True)[params.top_k - 1])
    probs = _softmax(values)
    if params.top_p < 1.0:
        ranked = sorted(probs, reverse=True)
        enough = (prob for prob, mass in zip(ranked, accumulate(ranked), strict=True) if mass >= params.top_p)
        values = _kept(values, probs, next(enough, ranked[-1]))
        probs = _softmax(values)
    return _softmax(_kept(values, probs, params.min_p * max(probs)))


def _kept(values: list[float], scores: list[float], least: float) -> list[float]:
    return [value if score >= least else -math.inf for value, score in zip(values, scores, strict=True)]


def _softmax(values: list[float]) -> list[float]:
    largest = max(values)
    weights = [math.exp(value - largest) for value in values]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
