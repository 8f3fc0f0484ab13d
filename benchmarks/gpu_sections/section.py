"""Sections: measurements with a time budget, whose failure does not affect other sections."""

import gc
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    label: str
    value: float | int | str
    unit: str = ""
    bound: float | None = None
    """Upper bound of the value, or lower bound if `is_least`."""
    is_least: bool = False
    inferred: float | None = None
    """What was inferred for it before it was measured, to stand beside the value."""

    @property
    def verdict(self) -> str:
        """Whether the bound holds; empty without a bound."""
        if self.bound is None or isinstance(self.value, str):
            return ""
        return "ok" if (self.value >= self.bound if self.is_least else self.value <= self.bound) else "NOT MET"

    @property
    def line(self) -> str:
        """The line."""
        shown = self.value if isinstance(self.value, str) else f"{self.value:.4g}"
        bound = "" if self.bound is None else f"{'>=' if self.is_least else '<='} {self.bound:g}"
        beside = self.verdict if self.inferred is None else f"inferred {self.inferred:g}"
        return f"  {self.label:<62} {shown:>12} {self.unit:<10} {bound:<9} {beside}".rstrip()


@dataclass(slots=True)
class Findings:
    """Results of a section."""

    results: dict[str, Any] = field(default_factory=dict)
    """For the report."""
    rows: list[Row] = field(default_factory=list)
    """For the table."""
    not_measured: dict[str, str] = field(default_factory=dict)
    """What could not be measured here, and why, in words."""

    def lacks(self, label: str, reason: str) -> None:
        """Notes what cannot be measured here, in the place of a number.

        Args:
            label: what a row would say.
            reason: what it would need, in words.
        """
        self.not_measured[label] = reason
        self.rows.append(Row(label, "not measured", f"({reason})"))


class OverBudgetError(Exception):
    """A section did not end in time."""


class Budget:
    """Time budget of a section."""

    def __init__(self, seconds: float) -> None:
        """Starts now."""
        self.seconds = seconds
        self._started = time.monotonic()

    @property
    def spent_s(self) -> float:
        """Elapsed seconds."""
        return time.monotonic() - self._started

    @property
    def is_nearly_spent(self) -> bool:
        """Whether no further measurement should start."""
        return self.spent_s > 0.85 * self.seconds


@dataclass(frozen=True, slots=True)
class Section:
    """Measurements that belong together."""

    name: str
    budget_s: float
    work: Callable[[Findings, Budget], None]
    """Adds results to the findings as they are measured, so that those before a failure are kept."""

    def run(self) -> dict[str, Any]:
        """Runs the work, prints its findings, and returns them for the report. Raises only interrupts."""
        findings, budget, failure = Findings(), Budget(self.budget_s), {}
        previous = signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, self.budget_s)
        try:
            self.work(findings, budget)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        except Exception as error:
            failure = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, previous)
        print(f"{self.name}: {'FAILED' if failure else 'done'}, {budget.spent_s:.1f} s of {self.budget_s:.3g}")
        for row in findings.rows:
            print(row.line)
        if failure:
            print(f"  {failure['error']}")
        print(flush=True)
        _give_memory_back()
        return {"is_ok": not failure, "seconds": budget.spent_s, **_report_of(findings), **failure}

    def left_out(self, reason: str) -> dict[str, Any]:
        """Prints and returns, for the report, why the work is not run at all."""
        print(f"{self.name}: not measured ({reason})\n", flush=True)
        return {"is_ok": True, "seconds": 0.0, "verdicts": {}, "not_measured": {self.name: reason}}


def _report_of(findings: Findings) -> dict[str, Any]:
    inferred = {row.label: row.inferred for row in findings.rows if row.inferred is not None}
    beside = {"inferred": inferred, "not_measured": findings.not_measured}
    return {
        "verdicts": {row.label: row.verdict for row in findings.rows if row.verdict},
        **findings.results,
        **{name: told for name, told in beside.items() if told},
    }


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise OverBudgetError("the section did not end in time")


def _give_memory_back() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # after a device error, every further call fails too
            print(f"  the device does not answer: {str(error).splitlines()[0]}")
