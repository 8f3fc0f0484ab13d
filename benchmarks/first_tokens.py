"""Time to the first token of texts that begin together, first with prompts that nobody has read, then with cached ones.

    python -m tools.synth --shape 370m --draft-layers 2 --agreement 0.8 --temperature 1.0 --out /tmp/370m
    python -m benchmarks.first_tokens --large /tmp/370m --output benchmarks/results/first_tokens.json

All texts of a turn are cancelled at its end: one that has no first token by then was kept waiting all the time.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.adaptive import Cell, options_of
from benchmarks.prompts import load_prompts
from benchmarks.report import write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.client import AsyncClient

TURNS = (8, 8, 0, 8)
"""Draft tokens of the rounds of each turn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Texts that began together."""

    num_draft_tokens: int
    first_token_s: list[float]
    """Of the texts that began to decode before the end, ascending."""
    num_waiting: int
    """Texts that did not."""
    tokens_per_second: float
    """Of all texts."""


async def run_turn(client: AsyncClient, sessions: int, length: int, seconds: float) -> Turn:
    """Begins a completion of each of the first committed prompts, and cancels them in the end."""
    began_at = time.perf_counter()
    first_token_s: list[float] = []
    num_tokens = 0

    async def session(prompt: str) -> None:
        nonlocal num_tokens
        has_begun = False
        async with client.stream(
            prompt, max_tokens=192, temperature=0.0, ignore_eos=True, num_speculative_tokens=length
        ) as stream:
            async for piece in stream:
                if not has_begun:
                    first_token_s.append(time.perf_counter() - began_at)
                has_begun = True
                num_tokens += len(piece.token_ids)

    tasks = [asyncio.create_task(session(prompt)) for prompt in load_prompts()[:sessions]]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    return Turn(length, first_token_s, sessions - len(first_token_s), num_tokens / seconds)


def measure(cell: Cell, large: Path | None, seconds: float) -> Sequence[Turn]:
    """Runs all turns on services that have just started."""

    async def run(address: str) -> list[Turn]:
        async with AsyncClient(address) as client:
            return [await run_turn(client, cell.sessions, length, seconds) for length in TURNS]

    with LocalStack(options_of(cell, large)) as stack:
        return asyncio.run(run(stack.address))


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--large", type=Path, help="folder of the 374 M pair; without it, the embedded one")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=16.0, help="of a turn")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cell = Cell("first tokens", "embedded" if arguments.large is None else "large", arguments.sessions)
    turns = measure(cell, arguments.large, arguments.seconds)
    write_report(arguments, {"turns": [asdict(turn) for turn in turns]})


if __name__ == "__main__":
    main()
