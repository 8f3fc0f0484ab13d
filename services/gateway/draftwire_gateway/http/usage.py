"""Token usage and speculation metrics of a response."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from draftwire_gateway.http.choice_deltas import Ending
from draftwire_gateway.session.statistics import Statistics

_FIELDS = tuple(field.name for field in fields(Statistics))
_NAMED_ALIKE = _FIELDS[_FIELDS.index("num_ahead_hits") :]
"""Statistics that the metrics have under their own names."""
_COMBINED: dict[str, Callable[[Iterable[int]], int]] = {
    "time_to_first_token_us": min,
    "duration_us": max,
    "max_held_bytes": max,
}
"""How statistics of several choices are combined that are not added."""


def usage_of(endings: Sequence[Ending]) -> dict[str, Any]:
    """Returns OpenAI's usage object. The tokens of a prompt count once, whatever the number of its choices."""
    total = _sum(ending.statistics for ending in endings)
    prompts: dict[int, Statistics] = {}
    for ending in sorted(endings, key=lambda ending: ending.generation.choice):
        prompts.setdefault(ending.generation.prompt_index, ending.statistics)
    num_prompt_tokens = sum(statistics.num_prompt_tokens for statistics in prompts.values())
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": total.num_generated_tokens,
        "total_tokens": num_prompt_tokens + total.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_prompt_tokens for one in prompts.values())},
        "completion_tokens_details": {
            "accepted_prediction_tokens": total.num_accepted_tokens,
            "rejected_prediction_tokens": total.num_draft_positions - total.num_accepted_tokens,
        },
    }


def metrics_of(endings: Sequence[Ending]) -> dict[str, Any]:
    """Returns metrics of speculation over all choices and, if there are several, of each."""
    metrics = _speculation(endings)
    if len(endings) > 1:
        ordered = sorted(endings, key=lambda ending: ending.generation.choice)
        metrics["choices"] = [{"index": ending.generation.choice, **_speculation([ending])} for ending in ordered]
    return {"speculative_decoding": metrics}


def _speculation(endings: Sequence[Ending]) -> dict[str, Any]:
    total = _sum(ending.statistics for ending in endings)
    generation = endings[0].generation  # rule and seed are the same for all choices
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "acceptance_histogram": total.acceptance_histogram,
        "draft_length_histogram": total.draft_length_histogram,
        "num_spec_steps": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted_draft_tokens": total.num_accepted_tokens,
        "num_accepted_tokens_per_pos": total.num_accepted_tokens_per_pos,
        "num_rounds": total.num_rounds,
        "block_efficiency": total.num_emitted_tokens / max(total.num_rounds, 1),
        "rejection_sample_method": generation.rule.name,
        "is_lossy": generation.is_lossy,
        "drafter_error": next((one.drafter_error for one in endings if one.drafter_error), ""),
        "seed": generation.seed,
        "time_to_first_token_ms": total.time_to_first_token_us / 1e3,
        "duration_ms": total.duration_us / 1e3,
        **{name: getattr(total, name) for name in _NAMED_ALIKE},
    }


def _sum(statistics: Iterable[Statistics]) -> Statistics:
    """Returns the sums of counts, with the earliest time to first token, the longest duration and the largest size."""
    parts, total = list(statistics), Statistics()
    for name in _FIELDS:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], list):
            setattr(total, name, [sum(row) for row in zip_longest(*values, fillvalue=0)])
        else:
            setattr(total, name, _COMBINED.get(name, sum)(values))
    return total
