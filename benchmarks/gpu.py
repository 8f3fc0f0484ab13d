"""Correctness and speed of everything that is meant for a GPU.

    python -m benchmarks.gpu --output benchmarks/results/gpu.json
    python -m benchmarks.gpu --device cpu --size tiny      # the same code without a GPU

Takes less than eight minutes on one H200, and four on one H100. Models have random weights, because a GPU machine need
not reach a model hub, and nothing is imported but torch, transformers, numpy, llguidance and what these bring along. A
section that fails leaves the others alone; the report is written after each.
"""

import argparse
import contextlib
import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu_sections.exactness import exactness
from benchmarks.gpu_sections.heads import heads
from benchmarks.gpu_sections.layer_parallel import layer_parallel
from benchmarks.gpu_sections.pair import Pair, make_pair
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.rules import rules
from benchmarks.gpu_sections.section import Budget, Findings, Section
from benchmarks.gpu_sections.sharing import sharing
from benchmarks.gpu_sections.speculation import speculation
from benchmarks.gpu_sections.steps import steps
from benchmarks.report import write_report
from draftwire.method.devices import prepare
from tools.synth.synthesis import SHAPES


class Sections:
    """Sections in order of importance: the last ones may run out of time."""

    def __init__(self, plan: Plan, has_greedy: bool) -> None:
        """Creates no sections yet."""
        self._plan = plan
        self._has_greedy = has_greedy
        self._made: Pair | None = None

    def all(self) -> list[Section]:
        """Returns all sections."""
        greedy = [
            Section("greedy pair", 60.0, partial(self._make, 0.0)),
            Section("greedy speculation", 100.0, self._speculation),
        ]
        return [
            Section("exactness", 60.0, partial(exactness, self._plan)),
            Section("pair", 60.0, partial(self._make, 1.0)),
            Section("steps", 50.0, self._steps),
            Section("heads", 40.0, self._heads),
            Section("speculation", 120.0, self._speculation),
            Section("sharing", 80.0, self._sharing),
            Section("rules", 80.0, partial(rules, self._plan)),
            Section("layer parallel", 25.0, partial(layer_parallel, self._plan)),
            *(greedy if self._has_greedy else []),
        ]

    @property
    def _pair(self) -> Pair:
        if self._made is None:
            raise RuntimeError("there is no pair to measure")
        return self._made

    def _make(self, temperature: float, findings: Findings, budget: Budget) -> None:
        self._made = None
        self._made = make_pair(self._plan, temperature, findings, budget)

    def _steps(self, findings: Findings, budget: Budget) -> None:
        steps(self._plan, self._pair, findings, budget)

    def _heads(self, findings: Findings, budget: Budget) -> None:
        heads(self._plan, self._pair, findings, budget)

    def _speculation(self, findings: Findings, budget: Budget) -> None:
        speculation(self._plan, self._pair, findings, budget)

    def _sharing(self, findings: Findings, budget: Budget) -> None:
        sharing(self._plan, self._pair, findings, budget)


def machine_facts(plan: Plan) -> dict[str, Any]:
    """Returns versions and properties of the device and the host."""
    facts: dict[str, Any] = {
        "device": str(plan.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
    }
    if plan.is_cuda:
        properties = torch.cuda.get_device_properties(plan.device)
        facts |= {
            "device": properties.name,
            "memory_gib": properties.total_memory / 2**30,
            "multiprocessors": properties.multi_processor_count,
        }
    return facts


def main() -> int:
    """Measures, prints a table and writes JSON; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", choices=sorted(SHAPES), default="llama-3-8b", help="shape of the target")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--only", nargs="+", default=[], help="names of sections; all if left out")
    parser.add_argument("--greedy", action="store_true", help="also a pair that agrees greedily, and its speculation")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    plan = Plan(torch.device(arguments.device), arguments.size, arguments.repetitions)
    if plan.is_cuda:
        torch.cuda.set_device(plan.device.index or 0)
        prepare(arguments.device)
    else:
        torch.set_num_threads(min(2, torch.get_num_threads()))
    facts = machine_facts(plan)
    print(", ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n", flush=True)
    sections = Sections(plan, arguments.greedy).all()
    unknown = set(arguments.only) - {section.name for section in sections}
    if unknown:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    found: dict[str, Any] = {}
    for section in sections:
        if arguments.only and section.name not in arguments.only:
            continue
        found[section.name] = section.run()
        with contextlib.redirect_stdout(io.StringIO()):  # the table has a shorter form
            write_report(arguments, {**facts, "sections": found})
    failed = [name for name, result in found.items() if not result["is_ok"]]
    missed = [f"{name}: {label}" for name, result in found.items() for label in _missed(result)]
    print(f"sections that failed: {', '.join(failed) or 'none'}", f"bounds not met: {len(missed)}", *missed, sep="\n  ")
    return 1 if failed else 0


def _missed(result: dict[str, Any]) -> list[str]:
    return [label for label, verdict in result["verdicts"].items() if verdict != "ok"]


if __name__ == "__main__":
    sys.exit(main())
