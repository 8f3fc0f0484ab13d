"""Correctness and speed of everything that is meant for a GPU.

    python -m benchmarks.gpu --output benchmarks/results/gpu.json
    python -m benchmarks.gpu --device cpu --size tiny      # the same code without a GPU

Takes less than eight minutes on one H200, and four on one H100. Models have random weights, because a GPU machine need
not reach a model hub, and nothing is imported but torch, transformers, numpy, llguidance and what these bring along. A
section that fails leaves the others alone; the report is written after each.
"""

import argparse
import sys
from functools import partial

from benchmarks.gpu_sections.exactness import exactness
from benchmarks.gpu_sections.heads import heads
from benchmarks.gpu_sections.layer_parallel import layer_parallel
from benchmarks.gpu_sections.pair import Pair, make_pair
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.rules import rules
from benchmarks.gpu_sections.running import add_options, chosen, machine_facts, prepared, print_summary, run_all
from benchmarks.gpu_sections.section import Budget, Findings, Section
from benchmarks.gpu_sections.sharing import sharing
from benchmarks.gpu_sections.speculation import speculation
from benchmarks.gpu_sections.steps import steps


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


def main() -> int:
    """Measures, prints a table and writes JSON; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_options(parser)
    parser.add_argument("--greedy", action="store_true", help="also a pair that agrees greedily, and its speculation")
    arguments = parser.parse_args()
    plan = prepared(arguments)
    sections = chosen(parser, Sections(plan, arguments.greedy).all(), arguments.only)
    return print_summary(run_all(arguments, machine_facts(plan), sections))


if __name__ == "__main__":
    sys.exit(main())
