"""A drafter's and a verifier's steps on one device, by turns and at the same time, in two processes and in one."""

import time
from collections.abc import Callable
from statistics import median

from benchmarks.gpu_sections.pair import Pair
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.sharing import DraftSteps, drafting_process, overlap, verify_steps_ms
from benchmarks.gpu_sections.timer import WARM_UPS


def turns(plan: Plan, pair: Pair, findings: Findings, _: Budget) -> None:
    """Runs the section."""
    with drafting_process(plan) as other:
        overlap(plan, pair, other, findings)
        by_turns(plan, pair, other.step, "two processes", findings)
    by_turns(plan, pair, DraftSteps(plan).step_ms, "one process", findings)


def by_turns(plan: Plan, pair: Pair, draft_ms: Callable[[], float], name: str, findings: Findings) -> None:
    """Measures rounds of a verify step and a draft step, each of which begins when the other is done.

    Args:
        plan: says for how long.
        pair: whose target verifies.
        draft_ms: runs a draft step and returns its time.
        name: where the steps run.
        findings: to add to.
    """
    drafted: list[float] = []
    ends: list[float] = []

    def draft() -> None:
        drafted.append(draft_ms())
        ends.append(time.perf_counter())

    verified = verify_steps_ms(plan, pair, draft)
    rounds = [(later - earlier) * 1e3 for earlier, later in zip(ends[WARM_UPS - 1 :], ends[WARM_UPS:], strict=False)]
    found = {"verify_ms": median(verified), "draft_ms": median(drafted[WARM_UPS:]), "round_ms": median(rounds)}
    found["beside_ms"] = found["round_ms"] - found["verify_ms"] - found["draft_ms"]
    findings.results[f"by turns, {name}"] = {**found, "rounds": len(rounds)}
    findings.rows += [
        Row(f"by turns, {name}: verify step", found["verify_ms"], "ms"),
        Row(f"by turns, {name}: draft step", found["draft_ms"], "ms"),
        Row(f"by turns, {name}: between them", found["beside_ms"], "ms"),
    ]
