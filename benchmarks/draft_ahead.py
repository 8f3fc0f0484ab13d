"""Drafting ahead of the verdict against strict drafting, on scripted pairs with a way between the services.

    python -m benchmarks.draft_ahead --output benchmarks/results/draft_ahead.json

Gateway, drafter and verifier are processes; every connection between them goes through a relay that delays bytes, 0, 5
or 20 ms one way. A pass of the target takes 10 ms and one of the drafter 2, the rejected token's place has the token of
which the drafter thinks first in half of the rejections, and a further block of a batch costs nothing, or a fifth of a
pass. Two gateways share the models: one drafts strictly, the other up to two rounds ahead. Both have each length in
turn, and their best lengths are compared in further turns, with the same seeds. Beside the ratio stands what
`benchmarks.ahead_model` says, from the times of plain and of strict decoding here.
"""

import argparse
import asyncio
import time
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import linear_regression, mean

from benchmarks.adaptive import SCRIPTED_CACHE
from benchmarks.ahead_model import LENGTHS, Pair, ahead_rate, best, mean_tokens
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
ROUNDS_AHEAD, BRANCHES = 2, 16
MAX_TOKENS = 8000


async def rate_of(client: AsyncClient, length: int, num_rounds: int, seed: int) -> float:
    """Returns the tokens/s of one text from its second piece on, over so many rounds."""
    started, num_tokens, num_pieces = 0.0, 0, 0
    async with client.stream(
        "a", max_tokens=MAX_TOKENS, ignore_eos=True, seed=seed, num_speculative_tokens=length
    ) as stream:
        async for piece in stream:
            if num_pieces:
                num_tokens += len(piece.token_ids)
            else:
                started = time.perf_counter()
            num_pieces += 1
            if num_pieces > num_rounds:
                break
    return num_tokens / (time.perf_counter() - started)


def predicted(pair: Pair, plain: float, strict: dict[int, float], length: int) -> float:
    """Returns the tokens/s of drafting ahead that the model expects.

    Args:
        pair: of which the times are replaced.
        plain: tokens/s without drafts: one for each step of the verifier.
        strict: tokens/s of strict drafting by length.
        length: with which it drafts ahead.
    """
    rounds_s = {each: mean_tokens(pair.acceptance, each) / rate for each, rate in strict.items()}
    line = linear_regression(list(rounds_s), list(rounds_s.values()))
    verify_s = 1.0 / plain
    hop_s = max(0.0, line.intercept - verify_s) / 3.0
    measured = Pair(verify_s, line.slope, pair.row_s, hop_s, pair.acceptance, pair.recovered)
    return ahead_rate(measured, length, ROUNDS_AHEAD, BRANCHES)


def measure(delay_ms: float, acceptance: float, row_share: float, arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the figures of one pair."""
    script = (
        f"scripted:verify_ms={VERIFY_MS:g},draft_ms={DRAFT_MS:g},acceptance={acceptance:g},recovered=0.5,"
        f"draft_row_us={1e3 * row_share * DRAFT_MS:g}"
    )
    model = {"model": script, "threads": 1, "kv_cache_tokens": SCRIPTED_CACHE}
    pair = Pair(VERIFY_MS / 1e3, DRAFT_MS / 1e3, row_share * DRAFT_MS / 1e3, delay_ms / 1e3, acceptance)
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
                            "speculation": "fixed",
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
                plain = await rate_of(strict, 0, 5 * arguments.rounds, 0)
                picked: dict[str, dict[int, float]] = {"strict": {}, "ahead": {}}
                for length in LENGTHS:
                    picked["strict"][length] = await rate_of(strict, length, arguments.rounds // 2, length)
                    picked["ahead"][length] = await rate_of(ahead, length, arguments.rounds // 2, length)
                chosen = {name: best(rates) for name, rates in picked.items()}
                turns: dict[str, list[float]] = {"strict": [], "ahead": []}
                for number in range(arguments.turns):
                    for name in ("strict", "ahead") if number % 2 == 0 else ("ahead", "strict"):
                        client = strict if name == "strict" else ahead
                        turns[name].append(await rate_of(client, chosen[name], arguments.rounds, 100 + number))
            expected = predicted(pair, plain, picked["strict"], chosen["ahead"])
            return {
                "delay_ms": delay_ms,
                "acceptance": acceptance,
                "row_share": row_share,
                "plain": plain,
                "picked": {name: {str(length): rate for length, rate in own.items()} for name, own in picked.items()},
                "best": chosen,
                "strict": mean(turns["strict"]),
                "ahead": mean(turns["ahead"]),
                "expected_ahead": expected,
                "ratio": asdict(ratio_of(turns["ahead"], turns["strict"])),
            }

        return asyncio.run(run())


def main() -> None:
    """Measures, prints a line for each pair, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=150, help="of a turn")
    parser.add_argument("--turns", type=int, default=2, help="of the best lengths")
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
            f"{result['strict']:.0f}, ahead {result['ahead']:.0f} tokens/s, at {result['best']}: {result['ratio']}; "
            f"the model says {result['expected_ahead']:.0f}",
            flush=True,
        )
    write_report(arguments, {"results": results})


if __name__ == "__main__":
    main()
