"""A head in the verifier against a draft model and plain decoding: tokens/s of the embedded target, with fixed lengths.

    python -m benchmarks.local_head --output benchmarks/results/local_head.json

Three services, whose verifier has the head too. Plain decoding, and each length of both, have turns forwards and
backwards at temperature 0 and 1. Every second turn says which length of each is best, the others how these compare. A/A
is plain decoding over itself.
"""

import argparse
import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.adaptive import Cell, run_turn
from benchmarks.paired import Ratio, ratio_of
from benchmarks.report import write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED, embedded_model
from draftwire.cli.stack_options import stack_options
from draftwire.client import AsyncClient

LENGTHS = (1, 2, 3, 4, 6, 8)
PLAIN, AGAIN, MODEL, HEAD = "plain", "plain again", "model", "head"
Arm = tuple[str, int]
"""Who drafts, and draft tokens of a round."""
ARMS: tuple[Arm, ...] = ((PLAIN, 0), *((who, length) for who in (MODEL, HEAD) for length in LENGTHS), (AGAIN, 0))


@dataclass(frozen=True, slots=True)
class HeadResult:
    """What one temperature showed."""

    temperature: float
    sessions: int
    tokens_per_second: dict[str, float]
    """Of all sessions, by arm, medians of all turns."""
    best_model: str
    best_head: str
    head_over_better: Ratio
    """The best length of the head over plain decoding or the best length of the model, whichever made more."""
    model_over_plain: Ratio
    plain_over_itself: Ratio


def shown(arm: Arm) -> str:
    """Returns an arm in words."""
    who, length = arm
    return f"{who}, {length}" if length else who


def compared(turns: dict[Arm, list[float]], temperature: float, sessions: int) -> HeadResult:
    """Picks the best lengths by every second turn, and compares them in the others."""
    picking = {arm: median(rates[1::2]) for arm, rates in turns.items() if arm[0] != AGAIN}
    comparing = {arm: rates[::2] for arm, rates in turns.items()}

    def best(*who: str) -> Arm:
        return max((arm for arm in picking if arm[0] in who), key=picking.__getitem__)

    plain = comparing[PLAIN, 0]
    return HeadResult(
        temperature,
        sessions,
        {shown(arm): median(rates) for arm, rates in turns.items()},
        shown(best(MODEL)),
        shown(best(HEAD)),
        ratio_of(comparing[best(HEAD)], comparing[best(PLAIN, MODEL)]),
        ratio_of(comparing[best(MODEL)], plain),
        ratio_of(comparing[AGAIN, 0], plain),
    )


async def measure(address: str, temperature: float, arguments: argparse.Namespace) -> HeadResult:
    """Runs the turns at one temperature."""
    cell = Cell("head", "embedded", arguments.sessions, temperature, arguments.max_tokens)
    turns: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
    async with AsyncClient(address) as client:
        (model,) = (await client.server()).drafters
        drafters = {MODEL: model.name, HEAD: arguments.kind}
        for number in range(arguments.turns + 1):
            for arm in ARMS if number % 2 else reversed(ARMS):
                who, length = arm
                drafter = drafters.get(who)
                rate = await run_turn(client, cell, length, arguments.settle_s, arguments.seconds, drafter=drafter)
                if number:  # the first ones warm up
                    turns[arm].append(rate)
    return compared(turns, temperature, arguments.sessions)


def main() -> None:
    """Measures, prints a line for each temperature, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, help="its folder; the embedded pair's if left out")
    parser.add_argument("--kind", default="eagle3")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--turns", type=int, default=12, help="of each arm, an even number")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, that are counted")
    parser.add_argument("--settle-s", type=float, default=0.5, help="of a turn, before")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.turns < 2:
        parser.error("--turns: one turn picks the lengths, another one compares them")
    options = stack_options(EMBEDDED, embedded_model("drafter"), None, str(arguments.head or embedded_model("head")))
    results = []
    with LocalStack(options) as stack:
        for temperature in arguments.temperatures:
            found = asyncio.run(measure(stack.address, temperature, arguments))
            results.append(found)
            rates = ", ".join(f"{arm} {rate:.0f}" for arm, rate in found.tokens_per_second.items())
            print(f"T = {temperature:g}, tokens/s: {rates}")
            print(
                f"  {found.best_head} over the better of plain and {found.best_model}: {found.head_over_better}; "
                f"{found.best_model} over plain: {found.model_over_plain}; equal runs: {found.plain_over_itself}",
                flush=True,
            )
    write_report(arguments, {"results": [asdict(each) for each in results]})


if __name__ == "__main__":
    main()
