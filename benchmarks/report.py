"""Shared by the benchmarks: reading metrics, and reports with the command and the machine."""

import argparse
import json
import os
import platform
import re
import shlex
import sys
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

PREFIX = "draftwire:"
Item = TypeVar("Item")


def progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterable[Item]:
    """Yields the items, and draws a progress bar on standard error, if that is a terminal.

    Args:
        items: the items to iterate over.
        description: label of the bar.
        total: number of items, if `items` has no length.
    """
    if not sys.stderr.isatty():
        return items
    from rich.console import Console  # optional on machines that run benchmarks
    from rich.progress import track

    return track(items, description, total=total, console=Console(stderr=True), transient=True)


def read_metric(port: int, name: str) -> float:
    """Returns the sum of a metric over its labels from a local service's `/metrics`; 0 if it has none yet."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(float(value) for value in re.findall(rf"^{PREFIX}{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def write_report(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Prints results, and writes them to `arguments.output` if that is set."""
    output: Path | None = arguments.output
    specification = sys.modules["__main__"].__spec__
    module = specification.name if specification else sys.argv[0]
    report = {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_processor()}, Python {platform.python_version()}",
        "million_loops_per_second": rounded(million_loops_per_second()),
        **{key: rounded(value) for key, value in results.items()},
    }
    shown = {key: value for key, value in report.items() if not isinstance(value, list)}
    print(json.dumps(shown, indent=2))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")


def rounded(value: Any) -> Any:
    """Returns a result with its numbers rounded to four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if is_dataclass(value) and not isinstance(value, type):
        return rounded(asdict(value))
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


def million_loops_per_second() -> float:
    """Returns the machine's current speed: on a shared machine it changes by a factor of two within minutes."""
    started = time.perf_counter()
    total = 0
    for number in range(2_000_000):
        total += number
    return 2.0 / (time.perf_counter() - started)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
