"""Where the device's time goes within a recorded step, by the names of its kernels."""

import re
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from benchmarks.gpu_kernel_sections.inferred import PRODUCTS_SHARE, REST_MS, STEP_MS
from benchmarks.gpu_sections.batch import random_ids
from benchmarks.gpu_sections.pair import Pair
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.timer import Timer
from benchmarks.planned_trees import shape_of_widths
from draftwire.models.cached_model import CachedModel
from draftwire.models.sequence_model import Reading

KINDS = {
    "attention": r"fmha|attention|flash|softmax",
    "products": r"gemm|gemv|cutlass|nvjet|xmma|splitk|cublas|_linear_pointwise|::(add)?mm$",
    "copies": r"memcpy|copy|gather|scatter|index|::cat$",
}
"""Kinds of kernels by what their names contain, the first that fits; all others are small kernels."""
SMALL = "small kernels"
PROFILED_STEPS = 5
MOST_NAMES = 40
"""Names that the report lists, those of the longest times."""
MARGIN = 96
"""Slots of the cache for each text beyond its prompt."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """A step that is profiled."""

    texts: int
    tokens: int
    """Of each text."""
    is_tree: bool = False
    """Whether all but the first are nodes of a tree."""
    has_inferred: bool = False
    """Whether it is the step for which times were inferred."""

    @property
    def name(self) -> str:
        """What it is called."""
        texts = f"{self.texts} texts, " if self.texts > 1 else ""
        tokens = f"{self.tokens} token{'s' if self.tokens > 1 else ''}{' each' if self.texts > 1 else ''}"
        return f"{texts}{tokens}{' of a tree' if self.is_tree else ''}"


STEPS = (
    StepKind(1, 5, has_inferred=True),
    StepKind(1, 1),
    StepKind(1, 9),
    StepKind(1, 65, is_tree=True),
    StepKind(64, 1),
    StepKind(64, 5),
)


class ProfiledStep:
    """A step of the target over texts that were read before."""

    def __init__(self, plan: Plan, model: CachedModel, kind: StepKind) -> None:
        """Reads the texts."""
        self._model, self._length = model, plan.prompt_tokens
        self._sequences = [model.cache.open() for _ in range(kind.texts)]
        ids = [random_ids(self._length + kind.tokens, model.vocab_size, seed) for seed in range(kind.texts)]
        for sequence, own in zip(self._sequences, ids, strict=True):
            model.read([Reading(sequence, own[: self._length], 0)])
        parents = shape_of_widths(((kind.tokens - 1) // 4, 1, 1, 1)).parents if kind.is_tree else ()
        self._readings = [
            Reading(sequence, own[self._length :], kind.tokens, parents)
            for sequence, own in zip(self._sequences, ids, strict=True)
        ]

    def run(self) -> None:
        """Runs the step."""
        self._model.read(self._readings)

    def forget(self) -> None:
        """Takes its tokens back."""
        for sequence in self._sequences:
            self._model.cache.truncate(sequence, self._length)

    def close(self) -> None:
        """Frees the cache's room."""
        for sequence in self._sequences:
            self._model.cache.close(sequence)


def step_profile(plan: Plan, pair: Pair, read: float | None, findings: Findings, budget: Budget) -> None:
    """Runs the section; `read` is the bandwidth, bytes/ms, or None if it was not measured."""
    timer = Timer(plan.device)
    most = max(kind.texts for kind in STEPS)
    model = pair.models(most * (plan.prompt_tokens + MARGIN), is_static=True).target
    for kind in STEPS:
        if budget.is_nearly_spent:
            findings.lacks(kind.name, "the section's time was spent")
            continue
        step = ProfiledStep(plan, model, kind)
        profile, failure = profiled(plan, step)
        step_ms = timer.median_ms(step.run, plan.repetitions, step.forget)
        step.close()
        inferred = STEP_MS if kind.has_inferred else None
        findings.results[kind.name] = {"step_ms": step_ms, **profile}
        findings.rows.append(Row(f"{kind.name}: step", step_ms, "ms", inferred=inferred))
        if failure:
            findings.lacks(f"{kind.name}: kernels", failure)
        else:
            findings.rows += _rows(kind, step_ms, profile, pair.target_bytes / read if read else None)


def profiled(plan: Plan, step: ProfiledStep) -> tuple[dict[str, Any], str]:
    """Returns `kernels_of`; without it why there is none, in words."""
    try:
        if plan.is_cuda:  # the graph is recorded while the profiler runs, which then knows its kernels
            kernels_of(plan, step)
        profile = kernels_of(plan, step)
    except RuntimeError as error:
        return {}, f"the profiler failed: {str(error).partition(chr(10))[0]}"
    return (profile, "") if profile["kernels"] else ({}, "the profiler saw none")


def _rows(kind: StepKind, step_ms: float, profile: dict[str, Any], weights_ms: float | None) -> list[Row]:
    of_kinds = profile["kinds_ms"]
    share, rest = (PRODUCTS_SHARE, REST_MS) if kind.has_inferred else (None, None)
    rows = [Row("  products", of_kinds["products"], "ms")]
    if weights_ms is not None and of_kinds["products"]:
        label = "  bandwidth of products, as a share of reading's"
        rows.append(Row(label, weights_ms / of_kinds["products"], inferred=share))
    rows.append(Row("  all but products", step_ms - of_kinds["products"], "ms", inferred=rest))
    rows += [Row(f"    {name}", of_kinds[name], "ms") for name in ("attention", "copies", SMALL)]
    rows.append(Row("    between kernels", step_ms - profile["kernels_ms"], "ms"))
    rows.append(Row("  kernels", profile["num_kernels"]))
    return rows


def kernels_of(plan: Plan, step: ProfiledStep) -> dict[str, Any]:
    """Returns the time of a step's kernels by name and by kind, as profiled; on a CPU, of its operations."""
    activities = [torch.profiler.ProfilerActivity.CUDA if plan.is_cuda else torch.profiler.ProfilerActivity.CPU]
    step.forget()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            step.run()
            step.forget()
        if plan.is_cuda:
            torch.cuda.synchronize()
    wanted, part = ("CUDA", "device") if plan.is_cuda else ("CPU", "cpu")
    time_us = attrgetter(f"self_{part}_time_total")
    found = {
        event.key: {"ms": time_us(event) / PROFILED_STEPS / 1e3, "count": event.count / PROFILED_STEPS}
        for event in profiler.key_averages()
        if event.device_type.name == wanted and time_us(event)
    }
    kinds: dict[str, float] = defaultdict(float, dict.fromkeys((*KINDS, SMALL), 0.0))
    for name, own in found.items():
        kinds[kind_of(name)] += own["ms"]
    longest = sorted(found, key=lambda name: -found[name]["ms"])[:MOST_NAMES]
    return {
        "kernels_ms": sum(own["ms"] for own in found.values()),
        "num_kernels": sum(own["count"] for own in found.values()),
        "kinds_ms": dict(kinds),
        "kernels": {name: found[name] for name in longest},
    }


def kind_of(name: str) -> str:
    """Returns the kind of a kernel."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), SMALL)
