"""Correctness of verification rules on the device against the CPU, and their times."""

import copy
from typing import Any

import torch

from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.rules import CASES, Shape, Step, measure
from draftwire.method.randomness import exponentials

NOISE_ERROR = 1e-12
"""Of the noise of `coupled`, relative to the CPU's."""
NUM_BLOCKS = 16
"""Blocks that are decided on both; the noise of `coupled` takes a CPU most of the time."""
BATCH_SIZES = (1, 16)


def rules(plan: Plan, findings: Findings, budget: Budget) -> None:
    """Runs the section."""
    findings.results["noise_error"] = error = noise_error(plan.device)
    findings.rows.append(Row("relative error of the noise of `coupled`", error, "", NOISE_ERROR))
    for count in BATCH_SIZES:
        found: dict[str, Any] = measure(plan.rule_shape, count, str(plan.device), plan.repetitions)
        findings.results[f"batch_{count}"] = found
        for name in ("block", "coupled"):
            label = f"{name}, {count} block{'s' if count > 1 else ''} of {plan.rule_shape.block_length}"
            findings.rows.append(Row(label, found[name]["milliseconds"], "ms"))
    if budget.spent_s > budget.seconds / 2:
        findings.results["left_out"] = "rule_differences"
        return
    findings.results["rule_differences"] = differences = rule_differences(str(plan.device), plan.rule_shape)
    label = "blocks that some rule decides otherwise than on the CPU"
    findings.rows.append(Row(label, sum(differences.values()), f"of {NUM_BLOCKS * len(CASES)}"))


@torch.inference_mode()
def rule_differences(device: str, shape: Shape) -> dict[str, int]:
    """Returns how many blocks each rule decides differently from the CPU, from the same logits and keys.

    Softmax and sums round differently, so a uniform number close to a threshold may fall on its other side.
    """
    reference = Step(shape, NUM_BLOCKS, "cpu")
    own = copy.copy(reference)  # building another one would take long
    own.device, own.logits = torch.device(device), reference.logits.to(device)
    own.buffer = torch.empty_like(own.logits)
    differences = {}
    for name, (rule, params) in CASES.items():
        pairs = zip(own.decide_afresh(rule, params), reference.decide_afresh(rule, params), strict=True)
        differences[name] = sum(one != other for one, other in pairs)
    return differences


def noise_error(device: torch.device) -> float:
    """Returns how far the noise of `coupled` is from the CPU's, relative to it: rounding of one logarithm."""
    words, positions = torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, 6])
    expected = exponentials(words, positions, 50_000)
    return float((exponentials(words.to(device), positions.to(device), 50_000).cpu() / expected - 1.0).abs().max())
