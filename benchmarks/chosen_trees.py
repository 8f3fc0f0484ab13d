"""Chosen drafts against fixed chains and token trees, on services of pairs whose drafters draft trees.

    python -m benchmarks.chosen_trees --large /tmp/370m --output benchmarks/results/chosen_trees.json

A script says how often each child of a token is right and what a row costs, so that cells differ in whether trees pay.
The best fixed shape, chain or tree, is found first; then chosen drafts, that shape and the best fixed chain have turns.
`--large` names a pair with weights, as `python -m tools.synth` makes one; its turns are longer.
"""

import argparse
import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.adaptive import SLOWER, Cell, Schedule, chosen_cells, options_of, run_turn
from benchmarks.paired import ratio_of
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.client import AsyncClient, Options
from draftwire_gateway.speculation.pair_chooser import TREES

RULE = "coupled"
"""Its trees are walks: scripts have no distributions for others."""
CHAINS = ((0, 0), (1, 0), (2, 0), (4, 0), (8, 0))
SHAPES = (*CHAINS, *TREES)
"""Draft tokens on a path, and of a tree; 0 of a chain."""
MAX_NODES = TREES[-1][1]
GPU = "verify_ms=60,draft_ms=2"
"""Rows cost nothing beside a step, as at small batches: steps are so long that the rules' own time for a tree, some
milliseconds on a CPU, counts for little."""
CELLS = (
    *(
        Cell(f"{named}; {sessions} sessions", f"scripted:{script}", sessions)
        for named, script in (
            ("cheap rows, good siblings", f"{GPU},acceptance=0.6,recovered=0.8"),
            ("cheap rows, poor siblings", f"{GPU},acceptance=0.8,recovered=0.1"),
            ("dear rows, good siblings", f"{GPU},read_us=3000,acceptance=0.6,recovered=0.8"),
        )
        for sessions in (1, 4)
    ),
    *(
        Cell(f"374 M, temperature {temperature:g}; 1 sessions", "large", 1, temperature, 192, is_slow=True)
        for temperature in (0.0, 1.0)
    ),
)


@dataclass(frozen=True, slots=True)
class TreeResult:
    """What a cell showed."""

    name: str
    best: str
    """The best fixed shape."""
    best_chain: str
    tokens_per_second: dict[str, float]
    """Of fixed shapes while the best one was sought, median, of all sessions."""
    over_best: dict[str, float]
    """Chosen drafts over the best shape."""
    over_chain: dict[str, float]
    """Chosen drafts over the best chain."""
    a_over_a: dict[str, float]
    """The best shape over itself."""
    chosen_turns: list[float]


def named(shape: tuple[int, int]) -> str:
    """Returns what a shape is called."""
    length, num_nodes = shape
    return f"{num_nodes} in {length}" if num_nodes else str(length)


async def measure(client: AsyncClient, cell: Cell, schedule: Schedule, rule: str = RULE) -> TreeResult:
    """Runs the turns of a cell, after the server has served chosen drafts for a while.

    Args:
        client: of services whose drafter and verifier have token trees.
        cell: says what requests are like, and how many there are at once.
        schedule: of the turns.
        rule: by which drafts are judged.
    """
    picking: dict[tuple[int, int], list[float]] = {shape: [] for shape in SHAPES}
    turns: dict[str, list[float]] = {name: [] for name in ("chosen", "best", "chain", "best again")}
    times = SLOWER if cell.is_slow else 1

    async def turn(shape: tuple[int, int] | None, settle_s: float, seconds: float) -> float:
        length, num_nodes = (None, None) if shape is None else shape
        more: Options = {"rejection_sample_method": rule, "num_draft_nodes": num_nodes}
        return await run_turn(client, cell, length, times * settle_s, times * seconds, **more)

    await turn(None, 0.0, schedule.warm_up_s)
    for number in range(schedule.picking_turns):
        for shape in SHAPES if number % 2 == 0 else SHAPES[::-1]:
            picking[shape].append(await turn(shape, schedule.settle_s, schedule.seconds))
    best, chain = (max(among, key=lambda shape: sum(picking[shape])) for among in (SHAPES, CHAINS))
    shapes: dict[str, tuple[int, int] | None] = {"chosen": None, "best": best, "chain": chain, "best again": best}
    for number in range(schedule.turns):
        for name in turns if number % 2 == 0 else reversed(turns):
            turns[name].append(await turn(shapes[name], schedule.settle_s, schedule.seconds))
    both = [(first + second) / 2 for first, second in zip(turns["best"], turns["best again"], strict=True)]
    return TreeResult(
        name=cell.name,
        best=named(best),
        best_chain=named(chain),
        tokens_per_second={named(shape): median(rates) for shape, rates in picking.items()},
        over_best=asdict(ratio_of(turns["chosen"], both)),
        over_chain=asdict(ratio_of(turns["chosen"], turns["chain"])),
        a_over_a=asdict(ratio_of(turns["best again"], turns["best"])),
        chosen_turns=turns["chosen"],
    )


def measure_cell(cell: Cell, large: Path | None, schedule: Schedule) -> TreeResult:
    """Runs the turns of a cell on services of its own."""
    options = options_of(cell, large)
    for service in ("verifier", "drafter"):
        options[service]["max_tree_nodes"] = MAX_NODES

    async def run(address: str) -> TreeResult:
        async with AsyncClient(address) as client:
            return await measure(client, cell, schedule)

    with LocalStack(options) as stack:
        return asyncio.run(run(stack.address))


def told(result: TreeResult) -> str:
    """Returns a line about a cell."""
    compared = ", ".join(
        f"{name} {ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        for name, ratio in (
            (f"chosen / {result.best}", result.over_best),
            (f"chosen / chain of {result.best_chain}", result.over_chain),
            ("A/A", result.a_over_a),
        )
    )
    rates = ", ".join(f"{name}: {rate:.0f}" for name, rate in result.tokens_per_second.items())
    return f"{result.name}: {rates}; {compared}"


def main() -> None:
    """Measures, prints a line for each cell, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--large", type=Path, help="folder of the 374 M pair; without it, its cells are left out")
    parser.add_argument("--only", help="cells whose name has this in it")
    parser.add_argument("--picking-turns", type=int, default=2, help="of each fixed shape, to find the best one")
    parser.add_argument("--turns", type=int, default=6, help="of chosen drafts and of the best shapes, to compare them")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, that are counted")
    parser.add_argument("--settle-s", type=float, default=0.3, help="of a turn, before")
    parser.add_argument("--warm-up-s", type=float, default=30.0, help="chosen drafts before the first turn of a cell")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cells = list(chosen_cells(CELLS, arguments))
    if not cells:
        named_cells = "; ".join(cell.name + " (with --large)" * (cell.model == "large") for cell in CELLS)
        parser.error(f"no cell that can be run has {arguments.only!r} in its name: {named_cells}")
    results = []
    for cell in progress(cells, "cells"):
        result = measure_cell(cell, arguments.large, Schedule.of(arguments))
        results.append(result)
        print(told(result), flush=True)
    least = {name: min(getattr(one, name)["median"] for one in results) for name in ("over_best", "over_chain")}
    write_report(arguments, {"least": least, "results": [asdict(result) for result in results]})


if __name__ == "__main__":
    main()
