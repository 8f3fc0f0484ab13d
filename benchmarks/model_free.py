"""Drafts without a model against plain decoding, on text that repeats itself and on text that does not.

    python -m benchmarks.model_free --output benchmarks/results/model_free.json

A verifier that drafts by itself, and no drafter. Cells are kinds of work: a scripted target that writes the same file
again and again with 5 % or 20 % of the tokens changed, and the embedded target that completes, edits and quotes (the
prompts of `benchmarks.model_free_replay`). Plain decoding, guesses of 4 and 8 tokens, and chosen lengths have turns
forwards and backwards; ratios are of the turns of one pass. A/A is plain decoding over itself.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.adaptive import SCRIPTED_CACHE, Cell, run_turn
from benchmarks.model_free_replay import works
from benchmarks.paired import ratio_of
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.up_command import stack_options
from draftwire.client import AsyncClient

ARMS: dict[str, int | None] = {"plain": 0, "4": 4, "chosen": None, "8": 8, "plain again": 0}
"""Draft tokens of a round; None is chosen."""
NUM_PROMPTS = 40


@dataclass(frozen=True, slots=True)
class Work:
    """What the sessions of a cell do."""

    name: str
    model: str
    """A script, or "embedded"."""
    temperature: float
    sessions: int
    prompts: Sequence[str] = ("a",)
    max_tokens: int = 8192


def scripted(changes: float, temperature: float, sessions: int) -> Work:
    """Returns a cell in which the alphabet is written again and again; at temperature 0 without changes."""
    script = f"scripted:verify_ms=20,read_us=200,acceptance={1.0 - changes:g}"
    shown = f"scripted, {changes:.0%} changed" if temperature else "scripted, nothing changed"
    return Work(shown, script, temperature, sessions)


def all_works() -> list[Work]:
    """Returns all cells."""
    prompts: dict[str, list[str]] = {}
    for kind, prompt in works(NUM_PROMPTS):
        prompts.setdefault(kind, []).append(prompt)
    cells = [scripted(changes, 1.0, sessions) for changes in (0.05, 0.2) for sessions in (1, 16)]
    cells += [scripted(0.05, 0.0, sessions) for sessions in (1, 16)]
    return cells + [
        Work(f"embedded, {kind}", "embedded", temperature, sessions, given, 128)
        for kind, given in prompts.items()
        for temperature in (0.0, 1.0)
        for sessions in (1, 16)
    ]


@dataclass(frozen=True, slots=True)
class WorkResult:
    """What a cell showed."""

    name: str
    temperature: float
    sessions: int
    tokens_per_second: dict[str, float]
    """Of all sessions, medians."""
    over_plain: dict[str, dict[str, float]]
    """Ratios to plain decoding; "plain again" is A/A."""
    chosen_over_best: float
    """Chosen lengths over the best of the fixed ones, plain decoding included, by medians."""
    turns: dict[str, list[float]] = field(default_factory=dict)


def measure(work: Work, strategy: str, arguments: argparse.Namespace) -> WorkResult:
    """Runs the turns of a cell, after the server has chosen for a while."""
    if work.model == "embedded":
        options = stack_options(None, "none", None)
    else:
        options = {"verifier": {"model": work.model, "threads": 1, "kv_cache_tokens": SCRIPTED_CACHE}, "gateway": {}}
    options["gateway"]["local_drafts"] = strategy
    cell = Cell(work.name, work.model, work.sessions, work.temperature, work.max_tokens)
    turns: dict[str, list[float]] = {arm: [] for arm in ARMS}

    async def run(address: str) -> None:
        async with AsyncClient(address) as client:
            await run_turn(client, cell, None, 0.0, arguments.warm_up_s, work.prompts)
            for number in range(arguments.turns):
                for arm in ARMS if number % 2 == 0 else reversed(ARMS):
                    rate = await run_turn(client, cell, ARMS[arm], arguments.settle_s, arguments.seconds, work.prompts)
                    turns[arm].append(rate)

    with LocalStack(options) as stack:
        asyncio.run(run(stack.address))
    rates = {arm: median(found) for arm, found in turns.items()}
    return WorkResult(
        work.name,
        work.temperature,
        work.sessions,
        rates,
        {arm: asdict(ratio_of(turns[arm], turns["plain"])) for arm in ARMS if arm != "plain"},
        rates["chosen"] / max(rates["plain"], rates["4"], rates["8"]),
        turns,
    )


def main() -> None:
    """Measures, prints a line for each cell, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="suffix")
    parser.add_argument("--only", help="cells whose name has this in it")
    parser.add_argument("--turns", type=int, default=4, help="of each arm")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn, that are counted")
    parser.add_argument("--settle-s", type=float, default=0.5, help="of a turn, before")
    parser.add_argument("--warm-up-s", type=float, default=8.0, help="chosen lengths before the first turn of a cell")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = []
    for work in progress([work for work in all_works() if (arguments.only or "") in work.name], "cells"):
        result = measure(work, arguments.strategy, arguments)
        results.append(result)
        ratios = ", ".join(f"{arm} {ratio['median']:.3f}" for arm, ratio in result.over_plain.items())
        named = f"{work.name}, T = {work.temperature:g}, {work.sessions} sessions"
        plain, best = result.tokens_per_second["plain"], result.chosen_over_best
        print(f"{named}: plain {plain:.0f} tokens/s; over plain: {ratios}; chosen / best {best:.3f}", flush=True)
    write_report(arguments, {"results": [asdict(result) for result in results]})


if __name__ == "__main__":
    main()
