"""Runs the sections of a benchmark one after the other and writes the report after each."""

import argparse
import contextlib
import io
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Section
from benchmarks.report import write_report
from draftwire.method.devices import prepare
from tools.synth.synthesis import SHAPES

LEAST_S = 1.0
"""A section that would have less time than this does not begin."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that these benchmarks share."""
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", choices=sorted(SHAPES), default="llama-3-8b", help="shape of the target")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--only", nargs="+", default=[], help="names of sections; all if left out")
    parser.add_argument("--output", type=Path)


def prepared(arguments: argparse.Namespace) -> Plan:
    """Returns the plan that a command line asks for, after setting up its device."""
    plan = Plan(torch.device(arguments.device), arguments.size, arguments.repetitions)
    if plan.is_cuda:
        torch.cuda.set_device(plan.device.index or 0)
        prepare(arguments.device)
    else:
        torch.set_num_threads(min(2, torch.get_num_threads()))
    return plan


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


def chosen(parser: argparse.ArgumentParser, sections: Sequence[Section], only: Sequence[str]) -> list[Section]:
    """Returns the sections of these names, or all; names that there are not end the program."""
    unknown = set(only) - {section.name for section in sections}
    if unknown:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    return [section for section in sections if not only or section.name in only]


def run_all(
    arguments: argparse.Namespace, facts: dict[str, Any], sections: Sequence[Section], seconds: float = math.inf
) -> dict[str, dict[str, Any]]:
    """Runs sections, and writes the report of those so far after each.

    Args:
        arguments: of the command line.
        facts: of the machine.
        sections: in order of importance.
        seconds: for all of them. One that begins late gets what is left, and one for which nothing is left is reported
            as not measured.

    Returns:
        Their results by name.
    """
    print(", ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n", flush=True)
    found: dict[str, dict[str, Any]] = {}
    started = time.monotonic()
    for section in sections:
        left = seconds - (time.monotonic() - started)
        if left >= LEAST_S:
            found[section.name] = replace(section, budget_s=min(section.budget_s, left)).run()
        else:
            found[section.name] = section.left_out("the time of the run was spent")
        with contextlib.redirect_stdout(io.StringIO()):  # the table has a shorter form
            write_report(arguments, {**facts, "sections": found})
    return found


def print_summary(found: dict[str, dict[str, Any]]) -> int:
    """Prints which sections failed and which bounds are not met; returns the exit status."""
    failed = [name for name, result in found.items() if not result["is_ok"]]
    missed = [f"{name}: {label}" for name, result in found.items() for label in _missed(result)]
    print(f"sections that failed: {', '.join(failed) or 'none'}", f"bounds not met: {len(missed)}", *missed, sep="\n  ")
    return 1 if failed else 0


def _missed(result: dict[str, Any]) -> list[str]:
    return [label for label, verdict in result["verdicts"].items() if verdict != "ok"]
