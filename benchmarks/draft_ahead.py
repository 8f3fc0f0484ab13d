"""Drafting ahead of the verdict against strict drafting, on scripted pairs with a way between the services.

    python -m benchmarks.draft_ahead --output benchmarks/results/draft_ahead.json

Gateway, drafter and verifier are processes; every connection between them goes through a relay that delays bytes, 0, 5
or 20 ms one way. A pass of the target takes 10 ms and one of the drafter 2, the rejected token's place has the token of
which the drafter thinks first in half of the rejections, and a further block of a batch costs nothing, or a fifth of a
pass. Two gateways share the models: one drafts strictly, the other up to two rounds ahead. Both have each length in
turn, and their best lengths are compared in further turns.
"""

import argparse
import asyncio
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import mean

from benchmarks.adaptive import SCRIPTED_CACHE, Cell, run_turn
from benchmarks.paired import ratio_of
from benchmarks.relay import Relay
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.client import AsyncClient

VERIFY_MS, DRAFT_MS = 10.0, 2.0
DELAYS_MS = (0.0, 5.0, 20.0)
ACCEPTANCE = (0.6, 0.8, 0.95)
ROW_SHARES = (0.0, 0.2)
"""What a further block of a batch costs, of a pass."""
LENGTHS = (2, 4, 6, 8)
ROUNDS_AHEAD, BRANCHES = 2, 16


def measure(delay_ms: float, acceptance: float, row_share: float, arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the figures of one pair."""
    script = (
        f"scripted:verify_ms={VERIFY_MS:g},draft_ms={DRAFT_MS:g},acceptance={acceptance:g},recovered=0.5,"
        f"draft_row_us={1e3 * row_share * DRAFT_MS:g}"
    )
    model = {"model": script, "threads": 1, "kv_cache_tokens": SCRIPTED_CACHE}
    cell = Cell(script, script, 1)
    with ExitStack() as running:
        models = running.enter_context(LocalStack({"verifier": model, "drafter": model}))
        relays = {
            name: running.enter_context(Relay(models.services[name].port, delay_ms / 1e3))
            for name in ("verifier", "drafter")
        }
        peers = {name: f"127.0.0.1:{relay.port}" for name, relay in relays.items()}
        gateways = {
            rounds: running.enter_context(
                LocalStack(
                    {
                        "gateway": {
                            **peers,
                            "local_drafts": "none",
                            "draft_ahead_rounds": rounds,
                            "draft_ahead_branches": BRANCHES,
                        }
                    }
                )
            )
            for rounds in (0, ROUNDS_AHEAD)
        }

        async def run() -> dict[str, object]:
            async with (
                AsyncClient(gateways[0].address) as strict,
                AsyncClient(gateways[ROUNDS_AHEAD].address) as ahead,
            ):

                async def turn(client: AsyncClient, length: int) -> float:
                    return await run_turn(client, cell, length, 1.0, arguments.seconds)

                plain = await turn(strict, 0)
                picked: dict[str, dict[int, float]] = {"strict": {}, "ahead": {}}
                for length in LENGTHS:
                    picked["strict"][length] = await turn(strict, length)
                    picked["ahead"][length] = await turn(ahead, length)
                best = {name: max(rates, key=lambda length: rates[length]) for name, rates in picked.items()}
                turns: dict[str, list[float]] = {"strict": [], "ahead": []}
                for number in range(arguments.turns):
                    for name in ("strict", "ahead") if number % 2 == 0 else ("ahead", "strict"):
                        turns[name].append(await turn(strict if name == "strict" else ahead, best[name]))
            return {
                "delay_ms": delay_ms,
                "acceptance": acceptance,
                "row_share": row_share,
                "plain": plain,
                "picked": {name: {str(length): rate for length, rate in own.items()} for name, own in picked.items()},
                "best": best,
                "strict": mean(turns["strict"]),
                "ahead": mean(turns["ahead"]),
                "ratio": asdict(ratio_of(turns["ahead"], turns["strict"])),
            }

        return asyncio.run(run())


def main() -> None:
    """Measures, prints a line for each pair, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn, that are counted")
    parser.add_argument("--turns", type=int, default=4, help="of the best lengths")
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS_MS)
    parser.add_argument("--acceptance", type=float, nargs="+", default=ACCEPTANCE)
    parser.add_argument("--row-shares", type=float, nargs="+", default=ROW_SHARES)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = []
    cells = list(product(arguments.row_shares, arguments.delays, arguments.acceptance))
    for row_share, delay_ms, acceptance in progress(cells, "pairs"):
        result = measure(delay_ms, acceptance, row_share, arguments)
        results.append(result)
        print(
            f"{delay_ms:g} ms, acceptance {acceptance:g}, row {row_share:g}: plain {result['plain']:.0f}, strict "
            f"{result['strict']:.0f}, ahead {result['ahead']:.0f} tokens/s, at {result['best']}: {result['ratio']}",
            flush=True,
        )
    write_report(arguments, {"results": results})


if __name__ == "__main__":
    main()
