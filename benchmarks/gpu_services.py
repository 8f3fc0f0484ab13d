"""What the services choose, and what drafting ahead and token trees gain, for one pair whose services share a GPU.

    python -m tools.synth --shape llama-3-8b --draft-layers 2 --dtype bfloat16 --device cuda:0 --out PAIR
    python -m benchmarks.gpu_services --pair PAIR --output benchmarks/results/gpu_services.json
    python -m benchmarks.gpu_services --pair models --device cpu --seconds 0.5 --turns 1 --sessions 1   # without a GPU

Drafter and verifier are a process each, on the same device, and stay for all parts; gateways come and go.
`benchmarks.gpu` measures the same models without services. Each cell is a rule at a number of sessions: chosen drafts
against the best fixed chain or tree, which is found first. Before them, one session drafts ahead, as in
`benchmarks.draft_ahead`. The report is written after each cell. With `--only` there are no comparisons: chains of
these lengths have a turn each, at each temperature and number of sessions; 0 is plain decoding.
"""

import argparse
import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import draft_ahead
from benchmarks.adaptive import Cell, Schedule, run_turn
from benchmarks.paired import ratio_of
from benchmarks.report import write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.client import AsyncClient, Options

RULES = ("block", "coupled")
LENGTHS = (1, 2, 4, 8)
"""Of drafts, where one drafts ahead."""
CHAINS = ((0, 0), (1, 0), (2, 0), (4, 0), (8, 0))
SHAPES = (*CHAINS, (4, 8), (4, 16), (8, 16), (8, 32))
"""Draft tokens on a path, and of a token tree; 0 of a chain."""


@dataclass(frozen=True, slots=True)
class ShapeResult:
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


async def compare(client: AsyncClient, cell: Cell, schedule: Schedule, rule: str) -> ShapeResult:
    """Runs the turns of a cell, after the server has served chosen drafts for a while.

    Args:
        client: of services whose drafter and verifier have token trees.
        cell: says what requests are like, and how many there are at once.
        schedule: of the turns.
        rule: by which drafts are judged.
    """
    picking: dict[tuple[int, int], list[float]] = {shape: [] for shape in SHAPES}
    turns: dict[str, list[float]] = {name: [] for name in ("chosen", "best", "chain", "best again")}

    async def turn(shape: tuple[int, int] | None, settle_s: float, seconds: float) -> float:
        length, num_nodes = (None, None) if shape is None else shape
        more: Options = {"rejection_sample_method": rule, "num_draft_nodes": num_nodes}
        return await run_turn(client, cell, length, settle_s, seconds, **more)

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
    return ShapeResult(
        name=cell.name,
        best=named(best),
        best_chain=named(chain),
        tokens_per_second={named(shape): median(rates) for shape, rates in picking.items()},
        over_best=asdict(ratio_of(turns["chosen"], both)),
        over_chain=asdict(ratio_of(turns["chosen"], turns["chain"])),
        a_over_a=asdict(ratio_of(turns["best again"], turns["best"])),
        chosen_turns=turns["chosen"],
    )


def told(result: ShapeResult) -> str:
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


def models_of(pair: Path, device: str, cache_tokens: int, max_tree_nodes: int) -> dict[str, dict[str, object]]:
    """Returns the options of the services that have models.

    Args:
        pair: folder of target/ and drafter/.
        device: of both.
        cache_tokens: of the KV cache of each.
        max_tree_nodes: of token trees; 0 if there are none.
    """
    own = {"device": device, "threads": 1, "kv_cache_tokens": cache_tokens, "max_tree_nodes": max_tree_nodes}
    names = {"verifier": "target", "drafter": "drafter"}
    return {service: {"model": pair / name, **own} for service, name in names.items()}


async def measure_rule(address: str, cell: Cell, schedule: Schedule, rule: str) -> ShapeResult:
    """Returns the figures of a cell under a rule."""
    async with AsyncClient(address) as client:
        return await compare(client, cell, schedule, rule)


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens/s of all sessions in a turn."""

    sessions: int
    temperature: float
    length: int
    """Of chains; 0 is plain decoding."""
    tokens_per_second: float


async def rates_of(
    address: str, cells: Iterable[Cell], lengths: Sequence[int], settle_s: float, seconds: float
) -> AsyncIterator[Rate]:
    """Yields the rates of chains, cell by cell.

    Args:
        address: of the gateway.
        cells: of chains that are judged by the rule `block`; each is asked for when those before it are done.
        lengths: of chains.
        settle_s: of a turn, before tokens are counted.
        seconds: for which they are counted.
    """
    async with AsyncClient(address) as client:
        for cell in cells:
            for length in lengths:
                rate = await run_turn(client, cell, length, settle_s, seconds, rejection_sample_method="block")
                yield Rate(cell.sessions, cell.temperature, length, rate)


def rates(
    models: Mapping[str, Mapping[str, object]],
    cells: Iterable[Cell],
    lengths: Sequence[int],
    settle_s: float,
    seconds: float,
    on_rate: Callable[[Rate], object],
) -> None:
    """Runs services, and hands on the rates of chains as they are found; arguments as of `models_of` and `rates_of`."""

    async def run(address: str) -> None:
        async for rate in rates_of(address, cells, lengths, settle_s, seconds):
            on_rate(rate)

    with LocalStack({**models, "gateway": {"local_drafts": "none"}}, start_timeout_s=None) as stack:
        asyncio.run(run(stack.address))


def cells_of(arguments: argparse.Namespace, rule: str = "block") -> list[Cell]:
    """Returns the cells of a rule, in the order of sessions."""
    return [
        Cell(f"{rule}; {sessions} sessions; T = {temperature:g}", "", sessions, temperature, arguments.max_tokens)
        for sessions, temperature in product(arguments.sessions, arguments.temperature)
    ]


def measure_ahead(arguments: argparse.Namespace, peers: dict[str, str]) -> dict[str, object]:
    """Returns the figures of one session that drafts ahead."""
    setting = draft_ahead.Setting(str(arguments.pair / "target"), str(arguments.pair / "drafter"), 1, None)
    schedule = draft_ahead.Schedule(arguments.rounds, LENGTHS, arguments.turns, arguments.warm_up_s, arguments.seconds)
    requests = draft_ahead.Requests(setting, arguments.max_tokens)
    with ExitStack() as running:
        addresses = draft_ahead.gateways(running, peers, is_choosing=True)
        return asyncio.run(draft_ahead.compare(addresses, requests, schedule, None))


def measure_only(arguments: argparse.Namespace) -> None:
    """Measures rates alone, prints a line for each, and writes JSON after each."""
    found: list[Rate] = []

    def report(rate: Rate) -> None:
        found.append(rate)
        way = f"chains of {rate.length}" if rate.length else "plain"
        print(f"{rate.sessions} sessions, T = {rate.temperature:g}, {way}: {rate.tokens_per_second:.0f}", flush=True)
        with contextlib.redirect_stdout(io.StringIO()):  # the lines have a shorter form
            write_report(arguments, {"rates": found})

    options = models_of(arguments.pair, arguments.device, arguments.cache, 0)
    rates(options, cells_of(arguments), arguments.only, arguments.settle_s, arguments.seconds, report)


def main() -> None:
    """Measures, prints a line for each cell, and writes JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pair", type=Path, required=True, help="folder of target/ and drafter/")
    parser.add_argument("--device", default="cuda:0", help="of both models")
    parser.add_argument("--cache", type=int, default=32_768, help="tokens of the KV cache of each of the two")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--max-tokens", type=int, default=512, help="of each text")
    parser.add_argument("--picking-turns", type=int, default=1, help="of each fixed shape, to find the best one")
    parser.add_argument("--turns", type=int, default=4, help="of chosen drafts and of the best shapes")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, that are counted")
    parser.add_argument("--settle-s", type=float, default=0.3, help="of a turn, before")
    parser.add_argument("--warm-up-s", type=float, default=12.0, help="chosen drafts before the first turn of a cell")
    parser.add_argument("--rounds", type=int, default=60, help="of a length, where one drafts ahead; 0 leaves that out")
    parser.add_argument("--only", type=int, nargs="+", metavar="LENGTH", help="of chains; no comparisons")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.only:
        measure_only(arguments)
        return
    found: dict[str, Any] = {"rules": {rule: [] for rule in arguments.rules}}
    options = models_of(arguments.pair, arguments.device, arguments.cache, SHAPES[-1][1])
    with LocalStack(options, start_timeout_s=None) as models:
        peers = {name: f"127.0.0.1:{service.port}" for name, service in models.services.items()}
        if arguments.rounds:
            found["ahead"] = measure_ahead(arguments, peers)
            print(f"one session: {draft_ahead.told(found['ahead'])}", flush=True)
        with LocalStack({"gateway": {**peers, "local_drafts": "none"}}) as gateway:
            for rule in arguments.rules:
                for cell in cells_of(arguments, rule):
                    result = asyncio.run(measure_rule(gateway.address, cell, Schedule.of(arguments), rule))
                    found["rules"][rule].append(asdict(result))
                    print(told(result), flush=True)
                    with contextlib.redirect_stdout(io.StringIO()):  # the lines have a shorter form
                        write_report(arguments, found)
    write_report(arguments, found)


if __name__ == "__main__":
    main()
