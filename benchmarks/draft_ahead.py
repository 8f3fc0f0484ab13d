"""Drafting ahead of the verdict against strict drafting, on scripted pairs with a way between the services.

    python -m benchmarks.draft_ahead --output benchmarks/results/draft_ahead.json

Gateway, drafter and verifier are processes; every connection between them goes through a relay that delays bytes, 0, 5
or 20 ms one way. A pass of the target takes 10 ms and one of the drafter 2, the rejected token's place has the token of
which the drafter thinks first in half of the rejections, and a further block of a batch costs nothing, or a fifth of a
pass. Three gateways share the models: one drafts strictly, one up to two rounds ahead, and one a single round. The
first two have each length in turn, and their best lengths are compared in further turns, with the same seeds, as are
two rounds ahead and one at the same length. Beside the ratio stands what `benchmarks.ahead_model` says, from the times
of plain and of strict decoding here. With `--slower 4` all these times are four times as long, and what the services
themselves take on the cores that they share counts for a fourth.

With `--settle-s`, a fourth gateway chooses by measurement whether to draft ahead, and what length. After so many
seconds it is compared with the better of strict drafting at its best length and plain decoding; its turns have its
probes.

`--target` and `--drafter` measure a pair with weights in place of scripts, without relays, each with `--threads`.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any

from benchmarks.adaptive import SCRIPTED_CACHE
from benchmarks.ahead_model import LENGTHS, Pair, ahead_rate, best, mean_tokens
from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
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


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured."""

    verifier: str
    """The model of the target: a script or a folder."""
    drafter: str
    """That of the drafter."""
    threads: int
    """Of each of the two."""
    temperature: float | None
    """Of requests; None is 1."""
    delay_ms: float = 0.0
    """Of every connection, one way."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long a pair is measured."""

    rounds: int
    """Of a turn."""
    lengths: Sequence[int]
    """Of drafts, of which the best ones are compared."""
    turns: int
    """Of the best lengths."""
    settle_s: float
    """Of a gateway that chooses, if there is one, before its first turn."""
    turn_s: float
    """Of each turn, if one chooses; else it has `rounds`."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Schedule":
        """Returns what a command line says."""
        return cls(arguments.rounds, arguments.lengths, arguments.turns, arguments.settle_s, arguments.turn_s)


class Requests:
    """Texts of one setting, one after another."""

    def __init__(self, setting: Setting, max_tokens: int) -> None:
        self._options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": setting.temperature,
        }
        is_scripted = setting.verifier.startswith("scripted")
        self._prompts = ["a"] if is_scripted else load_prompts()

    async def rate(
        self, client: AsyncClient, length: int | None, seed: int, *, rounds: int = 0, seconds: float = 0
    ) -> float:
        """Returns the tokens/s of texts from their second pieces on, over so many rounds or so long.

        Args:
            client: of the gateway.
            length: draft tokens of a round; None lets the gateway choose.
            seed: of the first text.
            rounds: to be counted; 0 does not end them.
            seconds: to be measured; 0 does not end them.
        """
        num_tokens, took_s, num_pieces = 0, 0.0, 0
        while (not rounds or num_pieces < rounds) and (not seconds or took_s < seconds):
            last = None
            prompt = self._prompts[seed % len(self._prompts)]
            # A seed of its own would be drafted for ahead in any case.
            seeded: dict[str, Any] = {} if length is None else {"seed": seed, "num_speculative_tokens": length}
            async with client.stream(prompt, **self._options, **seeded) as stream:
                async for piece in stream:
                    now = time.perf_counter()
                    if last is not None:
                        num_tokens, took_s, num_pieces = (
                            num_tokens + len(piece.token_ids),
                            took_s + now - last,
                            num_pieces + 1,
                        )
                    last = now
                    if (rounds and num_pieces >= rounds) or (seconds and took_s >= seconds):
                        break
            seed += 1
        return num_tokens / took_s


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


def measure(setting: Setting, arguments: argparse.Namespace, pair: Pair | None) -> dict[str, object]:
    """Returns the figures of one pair; of `pair` the model says what to expect."""
    models = {
        name: {
            "model": model,
            "threads": setting.threads,
            "kv_cache_tokens": SCRIPTED_CACHE if pair else arguments.cache,
        }
        for name, model in (("verifier", setting.verifier), ("drafter", setting.drafter))
    }
    with ExitStack() as running:
        services = running.enter_context(LocalStack(models)).services
        ports = {name: service.port for name, service in services.items()}
        if setting.delay_ms or pair:
            ports = {
                name: running.enter_context(Relay(port, setting.delay_ms / 1e3)).port for name, port in ports.items()
            }
        peers = {name: f"127.0.0.1:{port}" for name, port in ports.items()}

        addresses = gateways(running, peers, bool(arguments.settle_s))
        requests = Requests(setting, MAX_TOKENS if pair else arguments.max_tokens)
        return asyncio.run(compare(addresses, requests, Schedule.of(arguments), pair))


def gateways(running: ExitStack, peers: Mapping[str, str], is_choosing: bool) -> dict[str, str]:
    """Starts the gateways that are compared; returns their addresses as `compare` takes them.

    Args:
        running: stops them in the end.
        peers: addresses of verifier and drafter.
        is_choosing: whether one of them chooses.
    """

    def gateway(**options: object) -> str:
        own = {**peers, "local_drafts": "none", "draft_ahead_branches": BRANCHES, **options}
        return running.enter_context(LocalStack({"gateway": own})).address

    addresses = {
        "strict": gateway(speculation="fixed", draft_ahead_rounds=0),
        "ahead": gateway(speculation="fixed", draft_ahead_rounds=ROUNDS_AHEAD),
        "one round ahead": gateway(speculation="fixed", draft_ahead_rounds=1),
    }
    if is_choosing:
        addresses["chosen"] = gateway(draft_ahead_rounds=ROUNDS_AHEAD)
    return addresses


async def compare(
    addresses: dict[str, str], requests: Requests, schedule: Schedule, pair: Pair | None
) -> dict[str, object]:
    """Returns the figures of one pair.

    Args:
        addresses: of gateways: "strict" drafts strictly, "ahead" up to `ROUNDS_AHEAD` rounds ahead, "one round ahead"
            one; "chosen", if it is there, chooses.
        requests: what they are asked.
        schedule: of the turns.
        pair: of which the model says what to expect, if at all.
    """
    async with AsyncExitStack() as open_clients:
        clients = {
            name: await open_clients.enter_async_context(AsyncClient(address)) for name, address in addresses.items()
        }
        plain = await requests.rate(clients["strict"], 0, 0, rounds=5 * schedule.rounds)
        picked: dict[str, dict[int, float]] = {"strict": {}, "ahead": {}}
        for length in schedule.lengths:
            for name, rates in picked.items():
                rates[length] = await requests.rate(clients[name], length, length, rounds=schedule.rounds // 2)
        chosen: dict[str, int | None] = {name: best(rates) for name, rates in picked.items()}
        chosen["one round ahead"] = chosen["ahead"]
        sides = ["strict", "ahead", "one round ahead"]
        if "chosen" in clients:
            await requests.rate(clients["chosen"], None, 50, seconds=schedule.settle_s)
            chosen |= {"chosen": None, "plain": 0}
            clients["plain"] = clients["strict"]
            sides += ["plain", "chosen"]
        turns: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(schedule.turns):
            for name in sides if number % 2 == 0 else reversed(sides):
                seconds = schedule.turn_s if "chosen" in clients else 0.0
                rounds = 0 if seconds else schedule.rounds
                turns[name].append(
                    await requests.rate(clients[name], chosen[name], 100 + 10 * number, rounds=rounds, seconds=seconds)
                )
        result: dict[str, object] = {
            "plain": plain,
            "picked": {name: {str(length): rate for length, rate in own.items()} for name, own in picked.items()},
            "best": chosen,
            **{name: mean(rates) for name, rates in turns.items()},
            "ratio": asdict(ratio_of(turns["ahead"], turns["strict"])),
            "two_over_one": asdict(ratio_of(turns["ahead"], turns["one round ahead"])),
        }
        if pair is not None:
            assert chosen["ahead"] is not None
            result["expected_ahead"] = predicted(pair, plain, picked["strict"], chosen["ahead"])
        if "chosen" in turns:
            other = max(("strict", "plain"), key=lambda name: mean(turns[name]))
            result["better"] = other
            result["chosen_ratio"] = asdict(ratio_of(turns["chosen"], turns[other]))
        return result


def scripted(delay_ms: float, acceptance: float, row_share: float, slower: float) -> tuple[Setting, Pair]:
    """Returns a scripted pair, and what the model needs of it. All times are so many times as long."""
    verify_ms, draft_ms, delay_ms = (slower * each for each in (VERIFY_MS, DRAFT_MS, delay_ms))
    script = (
        f"scripted:verify_ms={verify_ms:g},draft_ms={draft_ms:g},acceptance={acceptance:g},recovered=0.5,"
        f"draft_row_us={1e3 * row_share * draft_ms:g}"
    )
    pair = Pair(verify_ms / 1e3, draft_ms / 1e3, row_share * draft_ms / 1e3, delay_ms / 1e3, acceptance)
    return Setting(script, script, 1, None, delay_ms), pair


def main() -> None:
    """Measures, prints a line for each pair, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=150, help="of a turn")
    parser.add_argument("--turns", type=int, default=2, help="of the best lengths")
    parser.add_argument("--settle-s", type=float, default=0.0, help="of a gateway that chooses; 0 leaves it out")
    parser.add_argument("--turn-s", type=float, default=5.0, help="of each turn, where one chooses")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS_MS)
    parser.add_argument("--acceptance", type=float, nargs="+", default=ACCEPTANCE)
    parser.add_argument("--row-shares", type=float, nargs="+", default=ROW_SHARES)
    parser.add_argument("--slower", type=float, default=1.0, help="times of scripts and relays, times this")
    parser.add_argument("--target", type=Path, help="folder of a target with weights")
    parser.add_argument("--drafter", type=Path, help="and of its drafter")
    parser.add_argument("--threads", type=int, default=1, help="of each of these two")
    parser.add_argument("--temperature", type=float, help="of their requests [default: 1]")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each of their texts")
    parser.add_argument("--cache", type=int, default=8192, help="tokens of the KV cache of each of the two")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.slower <= 0.0:
        parser.error("--slower must be above 0")
    results = []
    if arguments.target is not None:
        setting = Setting(str(arguments.target), str(arguments.drafter), arguments.threads, arguments.temperature)
        result = measure(setting, arguments, None)
        results.append({**asdict(setting), **result})
        print(f"{setting.verifier}: {told(result)}", flush=True)
        write_report(arguments, {"results": results})
        return
    cells = list(product(arguments.row_shares, arguments.delays, arguments.acceptance))
    for row_share, delay_ms, acceptance in progress(cells, "pairs"):
        setting, pair = scripted(delay_ms, acceptance, row_share, arguments.slower)
        result = measure(setting, arguments, pair)
        results.append({"delay_ms": delay_ms, "acceptance": acceptance, "row_share": row_share, **result})
        print(f"{delay_ms:g} ms, acceptance {acceptance:g}, row {row_share:g}: {told(result)}", flush=True)
    write_report(arguments, {"results": results})


def told(result: dict[str, object]) -> str:
    """Returns what a line says about a pair."""
    said = (
        f"plain {result['plain']:.0f}, strict {result['strict']:.0f}, ahead {result['ahead']:.0f} tokens/s, at "
        f"{result['best']}: {result['ratio']}; two rounds ahead over one {result['two_over_one']}"
    )
    if "expected_ahead" in result:
        said += f"; the model says {result['expected_ahead']:.0f}"
    if "chosen_ratio" in result:
        said += f"; chosen {result['chosen']:.0f}, over {result['better']} {result['chosen_ratio']}"
    return said


if __name__ == "__main__":
    main()
