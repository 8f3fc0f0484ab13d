"""Where the time of a round goes on a GPU: memory, launches, kernels, products, attention, rules, processes, services.

    python -m benchmarks.gpu_kernels --output benchmarks/results/gpu_kernels.json
    python -m benchmarks.gpu_kernels --device cpu --size tiny      # the same code without a GPU

Takes at most `--budget` seconds, nine minutes by default. `benchmarks.gpu` checks and times the same steps as a whole;
this takes them apart. The sections are in the order of what decides most, those that need no saved pair first. A
section that fails leaves the others alone, the report is written after each, and what cannot be measured on a machine
is said in words. Numbers that were inferred (docs/gpu.md) stand beside the measured ones: those of Llama 3 8B's shape
on an H200, whatever is measured here. Services run only where all their packages are installed; the other sections need
what `benchmarks.gpu` does.
"""

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path

from benchmarks.gpu_kernel_sections.attention import attention
from benchmarks.gpu_kernel_sections.bandwidth import bandwidth
from benchmarks.gpu_kernel_sections.decisions import decisions
from benchmarks.gpu_kernel_sections.draws import draws
from benchmarks.gpu_kernel_sections.launches import launches
from benchmarks.gpu_kernel_sections.products import products
from benchmarks.gpu_kernel_sections.saved_pair import TEMPERATURE, room_for, save_pair
from benchmarks.gpu_kernel_sections.services import round_profile, service_rates
from benchmarks.gpu_kernel_sections.step_profile import step_profile
from benchmarks.gpu_kernel_sections.turns import turns
from benchmarks.gpu_sections.pair import Pair, make_pair
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.running import add_options, chosen, machine_facts, prepared, print_summary, run_all
from benchmarks.gpu_sections.section import Budget, Findings, Section

BUDGET_S = 540.0


class Sections:
    """Sections in order of importance: the last ones may run out of time. Ends with the saved pair removed."""

    def __init__(self, plan: Plan) -> None:
        """Creates no sections yet."""
        self._plan = plan
        self._read: float | None = None
        self._made: Pair | None = None
        self._folder: Path | None = None
        self._saved: Path | None = None

    def __enter__(self) -> "Sections":
        """Does nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Removes the saved pair."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def all(self) -> list[Section]:
        """Returns all sections."""
        return [
            Section("bandwidth", 20.0, self._bandwidth),
            Section("launches", 20.0, partial(launches, self._plan)),
            Section("pair", 40.0, self._make),
            Section("step profile", 60.0, self._step_profile),
            Section("products", 70.0, self._products),
            Section("attention", 50.0, partial(attention, self._plan)),
            Section("decisions", 60.0, partial(decisions, self._plan)),
            Section("draws", 25.0, partial(draws, self._plan)),
            Section("turns", 60.0, self._turns),
            Section("saved pair", 60.0, self._save),
            Section("round profile", 110.0, self._round_profile),
            Section("services", 150.0, self._services),
        ]

    @property
    def _pair(self) -> Pair:
        if self._made is None:
            raise RuntimeError("there is no pair to measure")
        return self._made

    def _bandwidth(self, findings: Findings, budget: Budget) -> None:
        self._read = bandwidth(self._plan, findings, budget)

    def _make(self, findings: Findings, budget: Budget) -> None:
        self._made = make_pair(self._plan, TEMPERATURE, findings, budget)

    def _step_profile(self, findings: Findings, budget: Budget) -> None:
        step_profile(self._plan, self._pair, self._read, findings, budget)

    def _products(self, findings: Findings, budget: Budget) -> None:
        products(self._plan, self._read, findings, budget)

    def _turns(self, findings: Findings, budget: Budget) -> None:
        turns(self._plan, self._pair, findings, budget)

    def _save(self, findings: Findings, budget: Budget) -> None:
        self._made = None  # services need its memory
        self._folder = room_for(self._plan)
        save_pair(self._plan, self._folder, findings, budget)
        self._saved = self._folder

    def _round_profile(self, findings: Findings, budget: Budget) -> None:
        round_profile(self._plan, self._saved, findings, budget)

    def _services(self, findings: Findings, budget: Budget) -> None:
        service_rates(self._plan, self._saved, findings, budget)


def main() -> int:
    """Measures, prints a table and writes JSON; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_options(parser)
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="of all sections, seconds")
    arguments = parser.parse_args()
    plan = prepared(arguments)
    with Sections(plan) as sections:
        wanted = chosen(parser, sections.all(), arguments.only)
        return print_summary(run_all(arguments, machine_facts(plan), wanted, arguments.budget))


if __name__ == "__main__":
    sys.exit(main())
