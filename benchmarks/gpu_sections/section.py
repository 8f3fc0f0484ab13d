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
        return f"  {self.label:<62} {shown:>12} {self.unit:<10} {bound:<9} {self.verdict}".rstrip()


@dataclass(slots=True)
class Findings:
    """Results of a section."""

    results: dict[str, Any] = field(default_factory=dict)
    """For the report."""
    rows: list[Row] = field(default_factory=list)
    """For the table."""


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
        print(f"{self.name}: {'FAILED' if failure else 'done'}, {budget.spent_s:.1f} s of {self.budget_s:g}")
        for row in findings.rows:
            print(row.line)
        if failure:
            print(f"  {failure['error']}")
        print(flush=True)
        _give_memory_back()
        verdicts = {row.label: row.verdict for row in findings.rows if row.verdict}
        return {
            "is_ok": not failure,
            "seconds": budget.spent_s,
            "verdicts": verdicts,
            **findings.results,
            **failure,
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
