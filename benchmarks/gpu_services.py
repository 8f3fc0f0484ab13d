"""What the services choose, and what drafting ahead and token trees gain, for one pair whose services share a GPU.

    python -m tools.synth --shape llama-3-8b --draft-layers 2 --dtype bfloat16 --device cuda:0 --out PAIR
    python -m benchmarks.gpu_services --pair PAIR --output benchmarks/results/gpu_services.json
    python -m benchmarks.gpu_services --pair models --device cpu --seconds 0.5 --turns 1 --sessions 1   # without a GPU

Drafter and verifier are a process each, on the same device, and stay for all parts; gateways come and go.
`benchmarks.gpu` measures the same models without services. Each cell is a rule at a number of sessions: chosen drafts
against the best fixed chain or tree, as in `benchmarks.chosen_trees`. Before them, one session drafts ahead, as in
`benchmarks.draft_ahead`. The report is written after each cell.
"""

import argparse
import asyncio
import contextlib
import io
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import chosen_trees, draft_ahead
from benchmarks.adaptive import Cell, Schedule
from benchmarks.report import write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.client import AsyncClient

RULES = ("block", "coupled")
LENGTHS = (1, 2, 4, 8)
"""Of drafts, where one drafts ahead."""


def models_of(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Returns the options of the services that have models."""
    own = {
        "device": arguments.device,
        "threads": 1,
        "kv_cache_tokens": arguments.cache,
        "max_tree_nodes": chosen_trees.MAX_NODES,
    }
    names = {"verifier": "target", "drafter": "drafter"}
    return {service: {"model": arguments.pair / name, **own} for service, name in names.items()}


async def measure_rule(address: str, cell: Cell, schedule: Schedule, rule: str) -> chosen_trees.TreeResult:
    """Returns the figures of a cell under a rule."""
    async with AsyncClient(address) as client:
        return await chosen_trees.measure(client, cell, schedule, rule)


def measure_ahead(arguments: argparse.Namespace, peers: dict[str, str]) -> dict[str, object]:
    """Returns the figures of one session that drafts ahead."""
    setting = draft_ahead.Setting(str(arguments.pair / "target"), str(arguments.pair / "drafter"), 1, None)
    schedule = draft_ahead.Schedule(arguments.rounds, LENGTHS, arguments.turns, arguments.warm_up_s, arguments.seconds)
    requests = draft_ahead.Requests(setting, arguments.max_tokens)
    with ExitStack() as running:
        addresses = draft_ahead.gateways(running, peers, is_choosing=True)
        return asyncio.run(draft_ahead.compare(addresses, requests, schedule, None))


def main() -> None:
    """Measures, prints a line for each cell, and writes JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pair", type=Path, required=True, help="folder of target/ and drafter/")
    parser.add_argument("--device", default="cuda:0", help="of both models")
    parser.add_argument("--cache", type=int, default=32_768, help="tokens of the KV cache of each of the two")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=512, help="of each text")
    parser.add_argument("--picking-turns", type=int, default=1, help="of each fixed shape, to find the best one")
    parser.add_argument("--turns", type=int, default=4, help="of chosen drafts and of the best shapes")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, that are counted")
    parser.add_argument("--settle-s", type=float, default=0.3, help="of a turn, before")
    parser.add_argument("--warm-up-s", type=float, default=12.0, help="chosen drafts before the first turn of a cell")
    parser.add_argument("--rounds", type=int, default=60, help="of a length, where one drafts ahead; 0 leaves that out")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"rules": {rule: [] for rule in arguments.rules}}
    with LocalStack(models_of(arguments), start_timeout_s=None) as models:
        peers = {name: f"127.0.0.1:{service.port}" for name, service in models.services.items()}
        if arguments.rounds:
            found["ahead"] = measure_ahead(arguments, peers)
            print(f"one session: {draft_ahead.told(found['ahead'])}", flush=True)
        with LocalStack({"gateway": {**peers, "local_drafts": "none"}}) as gateway:
            for rule, sessions in product(arguments.rules, arguments.sessions):
                cell = Cell(f"{rule}; {sessions} sessions", "", sessions, arguments.temperature, arguments.max_tokens)
                result = asyncio.run(measure_rule(gateway.address, cell, Schedule.of(arguments), rule))
                found["rules"][rule].append(asdict(result))
                print(chosen_trees.told(result), flush=True)
                with contextlib.redirect_stdout(io.StringIO()):  # the lines have a shorter form
                    write_report(arguments, found)
    write_report(arguments, found)


if __name__ == "__main__":
    main()
