"""Chosen lengths of drafts against fixed ones, in turns, on pairs for which very different lengths are best.

    python -m tools.synth --shape 370m --draft-layers 2 --agreement 0.8 --temperature 1.0 --out /tmp/370m
    python -m benchmarks.adaptive --large /tmp/370m --output benchmarks/results/adaptive.json

Each cell is a pair at a number of sessions, served by three processes. After turns of chosen lengths, plain decoding
and drafts of 1, 2, 4 and 8 tokens have turns one after the other, and the one with the most tokens is the best. In
later turns, so that none is best by luck, chosen lengths are compared with it: chosen, best, plain (if that is not the
best) and best again, forwards and backwards. The ratio is of the chosen lengths over both turns of the best; A/A is one
of these over the other. Sessions of a turn start together and end with it, and all of it counts: that a drafter has to
read the texts first is what drafts cost. In the end the server says what it expects of each fixed length.

A drop is a text whose acceptance falls from 0.9 to 0.1: tokens/s from the second second after it, over plain decoding
by the same services.
"""

import argparse
import asyncio
import io
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Unpack

from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options, threads_for
from draftwire.client import AsyncClient, Options
from draftwire.v1.gateway_pb2 import ExplainSpeculationResponse

FIXED = (0, 1, 2, 4, 8)
"""Draft tokens of a round. None stands for chosen ones."""
GAINFUL = 1.2
"""Drafts are worth having where the best fixed length makes so many times the tokens/s of plain decoding."""
SLOWER = 4
"""Turns of a slow pair take so many times as long."""
DROP = "scripted:verify_ms=10,draft_ms=0.5,acceptance=0.9,late_acceptance=0.1,late_from=2500"
SCRIPTED_CACHE = 1_000_000
"""Tokens of the KV cache of scripted services, which has no data: with less, some sessions would have no drafter."""
DROP_AT = 2500
"""Place of the text at which acceptance drops."""
DROP_SETTLE_S = 0.5
"""Of plain decoding, before it is counted: of a text with a drop nothing is counted before its second second."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A pair, and how it is used."""

    name: str
    model: str
    """A script, "embedded" or "large"."""
    sessions: int
    temperature: float = 1.0
    max_tokens: int = 8192
    """Of a completion; when it ends, the session starts another one."""
    is_slow: bool = False
    """Whether to read a prompt takes seconds: then turns take longer, and there are half as many."""


def scripted(sessions: int, **script: float) -> Cell:
    """Returns a cell of a scripted pair."""
    text = ",".join(f"{name}={value:g}" for name, value in script.items())
    shown = ", ".join(f"{name.removesuffix('_ms').removesuffix('_us')} {value:g}" for name, value in script.items())
    return Cell(f"scripted: {shown}; {sessions} sessions", f"scripted:{text}", sessions)


CELLS = (
    scripted(1, verify_ms=20, draft_ms=0.5, acceptance=0.95),
    scripted(1, verify_ms=20, draft_ms=2, acceptance=0.8),
    scripted(1, verify_ms=20, draft_ms=2, acceptance=0.1),
    scripted(1, verify_ms=5, draft_ms=0.5, acceptance=0.8),
    scripted(1, verify_ms=5, draft_ms=2, read_us=200, acceptance=0.5),
    scripted(1, verify_ms=5, draft_ms=0.5, read_us=1000, acceptance=0.95),
    scripted(4, verify_ms=20, draft_ms=0.5, read_us=200, acceptance=0.5),
    scripted(4, verify_ms=20, draft_ms=2, read_us=1000, acceptance=0.5),
    scripted(16, verify_ms=20, draft_ms=0.5, read_us=200, acceptance=0.8),
    scripted(16, verify_ms=20, draft_ms=2, acceptance=0.1),
    scripted(16, verify_ms=20, draft_ms=0.5, acceptance=0.5),
    scripted(64, verify_ms=20, draft_ms=0.5, read_us=200, acceptance=0.95),
    *(
        Cell(f"embedded, temperature {temperature:g}; {sessions} sessions", "embedded", sessions, temperature, 192)
        for temperature in (0.0, 1.0)
        for sessions in (1, 4, 16)
    ),
    *(
        Cell(
            f"374 M, temperature {temperature:g}; {sessions} sessions",
            "large",
            sessions,
            temperature,
            192,
            is_slow=True,
        )
        for temperature in (0.0, 1.0)
        for sessions in (1, 4, 8)
    ),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long a cell is measured."""

    picking_turns: int
    """Of each fixed choice, to find the best one."""
    turns: int
    """Of what is chosen and of the best one, to compare them."""
    seconds: float
    """Of a turn, that are counted."""
    settle_s: float
    """Of a turn, before."""
    warm_up_s: float
    """Of chosen drafts, in turns of the same length, before the first one."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Schedule":
        """Returns what a command line says."""
        return cls(arguments.picking_turns, arguments.turns, arguments.seconds, arguments.settle_s, arguments.warm_up_s)


@dataclass(slots=True)
class Meter:
    """Counts tokens that arrive within a span of time."""

    begins_at: float
    num_tokens: int = 0

    def count(self, num_tokens: int) -> None:
        """Counts tokens that arrive now."""
        if time.perf_counter() >= self.begins_at:
            self.num_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell showed, tokens/s of all sessions."""

    name: str
    best: int
    """The best fixed length."""
    tokens_per_second: dict[str, float]
    """Of fixed lengths while the best one was sought, median."""
    ratio: dict[str, float]
    """Chosen lengths over the best one."""
    a_over_a: dict[str, float]
    """The best one over itself."""
    over_plain: dict[str, float]
    """Chosen lengths over plain decoding."""
    gain: float
    """The best one over plain decoding."""
    expected: dict[str, float]
    """By the server in the end, tokens/s of fixed lengths."""
    turns: dict[str, list[float]] = field(default_factory=dict)
    """Of the comparison."""


async def run_turn(
    client: AsyncClient,
    cell: Cell,
    length: int | None,
    settle_s: float,
    seconds: float,
    prompts: Sequence[str] | None = None,
    **more: Unpack[Options],
) -> float:
    """Returns the tokens/s of all sessions. By default they complete the committed prompts, and all drafters draft.

    Args:
        client: of the services.
        cell: says how many sessions there are, and how long their completions are.
        length: draft tokens of a round; None for chosen ones.
        settle_s: time before tokens are counted, seconds.
        seconds: for which they are counted.
        prompts: to complete.
        more: options of all requests.
    """
    meter = Meter(time.perf_counter() + settle_s)
    prompts = prompts or load_prompts()

    async def session(index: int) -> None:
        for prompt in islice(cycle(prompts), index, None):
            options: Options = {
                "max_tokens": cell.max_tokens,
                "temperature": cell.temperature,
                "ignore_eos": True,
                "num_speculative_tokens": length,
                **more,
            }
            async with client.stream(prompt, **options) as stream:
                async for piece in stream:
                    meter.count(len(piece.token_ids))

    tasks = [asyncio.create_task(session(index)) for index in range(cell.sessions)]
    await asyncio.sleep(settle_s + seconds)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError):
            raise RuntimeError(f"a session ended: {outcome!r}")
    return meter.num_tokens / seconds


async def read_prompts(client: AsyncClient, cell: Cell) -> None:
    """Has the services read the prompts that sessions begin with, so that they have them in their caches."""
    options: Options = {"max_tokens": 8, "temperature": cell.temperature, "num_speculative_tokens": 1}
    await asyncio.gather(*(client.generate(prompt, **options) for prompt in load_prompts()[: cell.sessions]))


def options_of(cell: Cell, large: Path | None) -> dict[str, dict[str, object]]:
    """Returns the options of the cell's services. Verifiers draft nothing by themselves: fixed lengths, 0 above all,
    would be at a disadvantage.
    """
    gateway: dict[str, object] = {"local_drafts": "none"}
    if cell.model == "embedded":
        options = stack_options(EMBEDDED, None, None)
        return {**options, "gateway": options["gateway"] | gateway}
    if cell.model == "large":
        assert large is not None, "cells without their pair were left out"
        return {
            "verifier": {"model": large / "target", "threads": threads_for(str(large / "target"))},
            "drafter": {"model": large / "drafter", "threads": threads_for(str(large / "drafter"))},
            "gateway": gateway,
        }
    return {
        "verifier": {"model": cell.model, "threads": 1, "kv_cache_tokens": SCRIPTED_CACHE},
        "drafter": {"model": cell.model, "threads": 1, "kv_cache_tokens": SCRIPTED_CACHE},
        "gateway": gateway,
    }


def measure_cell(cell: Cell, large: Path | None, schedule: Schedule) -> CellResult:
    """Runs the turns of a cell, after the server has served chosen lengths for a while."""
    picking: dict[int, list[float]] = {length: [] for length in FIXED}
    turns: dict[str, list[float]] = {name: [] for name in ("chosen", "best", "plain", "best again")}

    async def run(address: str) -> tuple[int, ExplainSpeculationResponse]:
        async with AsyncClient(address) as client:
            times, turns_each = (SLOWER, 2) if cell.is_slow else (1, 1)

            async def turn(length: int | None) -> float:
                return await run_turn(client, cell, length, times * schedule.settle_s, times * schedule.seconds)

            if cell.is_slow:  # it takes a turn to read all prompts
                await read_prompts(client, cell)
            for _ in range(math.ceil(schedule.warm_up_s / schedule.seconds / turns_each)):
                await turn(None)
            for number in range(-(-schedule.picking_turns // turns_each)):
                for length in FIXED if number % 2 == 0 else FIXED[::-1]:
                    picking[length].append(await turn(length))
            best = max(FIXED, key=lambda length: sum(picking[length]))
            lengths = {"chosen": None, "best": best, "plain": 0, "best again": best}
            names = [name for name in turns if best or name != "plain"]
            for number in range(-(-schedule.turns // turns_each)):
                for name in names if number % 2 == 0 else reversed(names):
                    turns[name].append(await turn(lengths[name]))
            return best, await client.explain_speculation()

    with LocalStack(options_of(cell, large)) as stack:
        best, explanation = asyncio.run(run(stack.address))
    both = [(first + second) / 2 for first, second in zip(turns["best"], turns["best again"], strict=True)]
    turns["plain"] = turns["plain"] or both
    return CellResult(
        name=cell.name,
        best=best,
        tokens_per_second={str(length): median(rates) for length, rates in picking.items()},
        ratio=asdict(ratio_of(turns["chosen"], both)),
        a_over_a=asdict(ratio_of(turns["best again"], turns["best"])),
        over_plain=asdict(ratio_of(turns["chosen"], turns["plain"])),
        gain=ratio_of(both, turns["plain"]).median,
        expected=expected_of(explanation, cell.sessions),
        turns=turns,
    )


def expected_of(explanation: ExplainSpeculationResponse, sessions: int) -> dict[str, float]:
    """Returns the tokens/s that a server expects of so many sessions with each fixed length."""
    (choice,) = (choice for choice in explanation.choices if choice.drafter)
    load = next(load for load in choice.loads if load.min_sessions <= sessions <= load.max_sessions)
    return {
        str(way.num_draft_tokens): sessions * way.tokens_per_round / way.round_s
        for way in load.estimates
        if way.drafter in ("", choice.drafter) and way.num_draft_tokens in FIXED
    }


async def tokens_after_drop(client: AsyncClient, seconds: float) -> float:
    """Returns tokens/s from the second second after the drop, for so many seconds."""
    arrivals: list[tuple[float, int]] = []
    dropped_at, num_tokens = None, 0
    async with client.stream("a", max_tokens=8192) as stream:
        async for piece in stream:
            now = time.perf_counter()
            num_tokens += len(piece.token_ids)
            if dropped_at is None and num_tokens >= DROP_AT:
                dropped_at = now
            arrivals.append((now, len(piece.token_ids)))
            if dropped_at is not None and now >= dropped_at + 1.0 + seconds:
                break
    assert dropped_at is not None, "the text is longer than that"
    return sum(count for at, count in arrivals if dropped_at + 1.0 <= at < dropped_at + 1.0 + seconds) / seconds


def measure_drops(arguments: argparse.Namespace) -> dict[str, object]:
    """Runs texts whose acceptance drops, each on services that have seen no other drop, after plain decoding."""
    chosen, plain = [], []
    cell = Cell("drop", DROP, 1)

    async def run(address: str) -> None:
        async with AsyncClient(address) as client:
            plain.append(await run_turn(client, cell, 0, DROP_SETTLE_S, arguments.seconds))
            chosen.append(await tokens_after_drop(client, arguments.drop_seconds))

    for _ in progress(range(arguments.drops), "drops"):
        with LocalStack(options_of(cell, None)) as stack:
            asyncio.run(run(stack.address))
    mean = sum(chosen) / sum(plain)
    return {"script": DROP, "mean": mean, "ratio": asdict(ratio_of(chosen, plain)), "chosen": chosen, "plain": plain}


def chosen_cells(cells: Iterable[Cell], arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yields the cells whose pair is there, of those that were asked for."""
    for cell in cells:
        is_asked = arguments.only is None or arguments.only in cell.name
        if is_asked and (cell.model != "large" or arguments.large is not None):
            yield cell


def summary(results: Sequence[CellResult]) -> dict[str, object]:
    """Returns the figures over all cells."""
    if not results:  # drops alone were asked for
        return {"cells": 0}
    ratios = [result.ratio["median"] for result in results]
    gainful = [result.ratio["median"] for result in results if result.gain >= GAINFUL]
    spread = [result.a_over_a["median"] for result in results]
    errors = [
        result.expected[length] / rate
        for result in results
        for length, rate in result.tokens_per_second.items()
        if length in result.expected  # nothing was measured at a load that never lasted
    ] or [math.nan]
    return {
        "cells": len(results),
        "median_ratio": median(ratios),
        "least_ratio": min(ratios),
        "below_0.95": [result.name for result in results if result.ratio["median"] < 0.95],
        "gainful_cells": len(gainful),
        "least_ratio_of_gainful": min(gainful, default=None),
        "least_over_plain": min(result.over_plain["median"] for result in results),
        "a_over_a": [min(spread), median(spread), max(spread)],
        "expected_over_measured": [min(errors), median(errors), max(errors)],
    }


def main() -> None:
    """Measures, prints a line for each cell and the summary, and writes JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--large", type=Path, help="folder of the 374 M pair; without it, its cells are left out")
    parser.add_argument("--only", help="cells whose name has this in it")
    parser.add_argument("--picking-turns", type=int, default=1, help="of each fixed length, to find the best one")
    parser.add_argument("--turns", type=int, default=4, help="of chosen lengths and of the best one, to compare them")
    parser.add_argument("--seconds", type=float, default=3.5, help="of a turn, that are counted")
    parser.add_argument("--settle-s", type=float, default=0.0, help="of a turn, before")
    parser.add_argument(
        "--warm-up-s", type=float, default=17.5, help="chosen lengths before the first turn of a cell, in turns"
    )
    parser.add_argument("--drops", type=int, default=20)
    parser.add_argument("--drop-seconds", type=float, default=5.0, help="that are counted after a drop")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cells = list(chosen_cells(CELLS, arguments))
    if not cells and not arguments.drops:
        parser.error(f"no cell has {arguments.only!r} in its name")
    results: list[CellResult] = []
    for cell in progress(cells, "cells"):
        result = measure_cell(cell, arguments.large, Schedule.of(arguments))
        results.append(result)
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in result.tokens_per_second.items())
        compared = ", ".join(
            f"{name} {ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            for name, ratio in (
                (f"chosen / {result.best}", result.ratio),
                ("A/A", result.a_over_a),
                ("chosen / plain", result.over_plain),
            )
        )
        print(f"{cell.name}: {rates}; {compared}", flush=True)
        with redirect_stdout(io.StringIO()):  # the line has a shorter form
            report(arguments, results, None)
    report(arguments, results, measure_drops(arguments) if arguments.drops else None)


def report(arguments: argparse.Namespace, results: Sequence[CellResult], drops: dict[str, object] | None) -> None:
    """Prints the summary, and writes it with the cells so far."""
    write_report(arguments, {**summary(results), "drops": drops, "results": [asdict(result) for result in results]})


if __name__ == "__main__":
    main()
