"""What a newcomer waits for, and the first number that is shown: `draftwire demo`, `up`, `generate` and `bench`.

    python -m benchmarks.first_minute --output benchmarks/results/first_minute.json

Times are from the start of a command, as from Enter, with files in the system's cache; with `--cold` that is emptied
before each start, where this process may do so. `up` and `demo` run several times, on free ports, with the chat model,
if it has been fetched, and with the embedded pair. CPU seconds are those of all processes of `up` until it is ready.

    python -m benchmarks.first_minute --others 16 --output benchmarks/results/first_minute_after_others.json

measures something else: the tokens/s of a visitor's texts on a fresh `up` of the embedded pair, and on one that so many
other clients have used for a minute, both at temperature 0, in turn.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.prompts import load_prompts
from benchmarks.report import write_report
from draftwire.cli.named_models import CHAT_MODEL, EMBEDDED
from draftwire.client import Client
from draftwire.models.fetching import PACKAGED

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-m", "draftwire.cli")
PORTS = ("--verifier-port", "0", "--drafter-port", "0", "--http-port", "0", "--port", "0")
READY = re.compile(r"ready on (\S+?);")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
UP_SECONDS = 120.0
VISITOR_TEXTS = 8


def empty_cache() -> None:
    """Makes the next start read all files anew. Needs root."""
    os.sync()
    DROP_CACHES.write_text("3")


def cpu_s(process: int) -> float:
    """Returns the CPU seconds of a process and of all that it has started and that still run."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            facts = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(facts[1]), (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")
    children = [number for number, (parent, _) in parents.items() if parent == process]
    return parents[process][1] + sum(map(cpu_s, children))


def demo_s(target: str) -> dict[str, float]:
    """Returns how long `draftwire demo` takes to its first generated text, and in all, seconds."""
    began = time.monotonic()
    process = subprocess.Popen(
        [*COMMAND, "demo", "--color", "always", "--target", target],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    process.stdout.read(1)  # nothing is written before the first token
    first_s = time.monotonic() - began
    _, said = process.communicate(timeout=UP_SECONDS)
    gain = re.search(r"([\d.]+) times as fast as plain decoding", said.decode())
    assert gain is not None, said.decode()
    return {"first_token_s": first_s, "whole_s": time.monotonic() - began, "times_plain": float(gain[1])}


@contextmanager
def up(target: str) -> Iterator[tuple[subprocess.Popen[str], str, dict[str, float]]]:
    """Yields a running `draftwire up`, the address of its gateway, and how long that took, seconds, of the CPU too."""
    began = time.monotonic()
    process = subprocess.Popen(
        [*COMMAND, "up", "--target", target, *PORTS], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        said = ""
        for line in lines:
            said = line
            if found := READY.search(line):
                break
        else:
            raise RuntimeError(f"up ended: {said}")
        yield process, found[1], {"ready_s": time.monotonic() - began, "cpu_s": cpu_s(process.pid)}
    finally:
        process.kill()
        process.wait()


def first_token_s(address: str) -> float:
    """Returns how long `draftwire generate` takes to its first text, seconds."""
    began = time.monotonic()
    arguments = [*COMMAND, "generate", "import os", "--max-tokens", "20", "--address", address]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.read(1)
    first_s = time.monotonic() - began
    process.communicate(timeout=UP_SECONDS)
    return first_s


def up_s(target: str) -> dict[str, float]:
    """Returns how long `draftwire up` takes to be ready, then the first token of a command, and Ctrl-C, seconds."""
    with up(target) as (process, address, ready):
        token_s = first_token_s(address)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=UP_SECONDS)
        return {**ready, "first_token_s": token_s, "stopped_s": time.monotonic() - began}


def bench(target: str, temperature: float) -> dict[str, Any]:
    """Returns the ratio that `draftwire bench` prints on a fresh `up`."""
    with up(target) as (_, address, _):
        arguments = [*COMMAND, "bench", "--address", address, "--temperature", str(temperature), "--json"]
        printed = subprocess.run(arguments, stdout=subprocess.PIPE, check=True, cwd=ROOT).stdout
        ratio: dict[str, Any] = json.loads(printed)["speedup"]
        return ratio


def visitor_rates(address: str) -> list[float]:
    """Returns the tokens/s of texts that a visitor has one after the other, as the playground asks for them."""
    rates = []
    with Client(address) as client:
        for prompt in load_prompts()[:VISITOR_TEXTS]:
            began = time.monotonic()
            made = client.generate(prompt, max_tokens=128, temperature=0.0)
            rates.append(len(made.token_ids) / (time.monotonic() - began))
    return rates


def after_others(num_others: int, runs: int, others_s: float) -> dict[str, Any]:
    """Returns the tokens/s of a visitor on a fresh `up`, and on one that others have used, by runs that alternate."""
    rates: dict[str, list[float]] = {"fresh": [], "after": []}
    for _ in range(runs):
        with up(EMBEDDED) as (_, address, _):
            rates["fresh"] += visitor_rates(address)
        with up(EMBEDDED) as (_, address, _):
            ends_at = time.monotonic() + others_s

            def use(number: int, address: str = address, ends_at: float = ends_at) -> None:
                with Client(address) as client:
                    for prompt in islice(cycle(load_prompts()), number, None):
                        client.generate(prompt, max_tokens=192, temperature=float(number % 2))
                        if time.monotonic() > ends_at:
                            return

            with ThreadPoolExecutor(num_others) as pool:
                list(pool.map(use, range(num_others)))
            rates["after"] += visitor_rates(address)
    ratios = [after / fresh for fresh, after in zip(rates["fresh"], rates["after"], strict=True)]
    return {"others": num_others, **rates, "after_over_fresh": median(ratios), "of_means": mean_ratio(rates)}


def mean_ratio(rates: dict[str, list[float]]) -> float:
    """Returns the tokens/s of all texts after others over those on a fresh `up`."""
    total_s = {name: sum(1.0 / rate for rate in of) for name, of in rates.items()}
    return total_s["fresh"] / total_s["after"]


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each figure."""
    return {name: round(median(run[name] for run in runs), 3) for name in runs[0]}


def main() -> None:
    """Measures, and prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of demo and up")
    parser.add_argument("--cold", action="store_true", help="empty the system's cache of files before each")
    parser.add_argument("--no-bench", action="store_true", help="leave out `draftwire bench`")
    parser.add_argument("--others", type=int, help="clients that use `up` before a visitor does")
    parser.add_argument("--others-s", type=float, default=60.0, help="for how long they do")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.others:
        write_report(arguments, after_others(arguments.others, arguments.runs, arguments.others_s))
        return
    prepare = empty_cache if arguments.cold else lambda: None
    figures: dict[str, Any] = {}
    for target in (CHAT_MODEL, EMBEDDED) if PACKAGED[CHAT_MODEL].file.is_file() else (EMBEDDED,):
        demos, ups = [], []
        for _ in range(arguments.runs):
            prepare()
            demos.append(demo_s(target))
            prepare()
            ups.append(up_s(target))
        figures[target] = {"demo": medians(demos), "up": medians(ups)}
        if not arguments.no_bench:
            benched = {f"temperature {value:g}": bench(target, value) for value in (1.0, 0.0)}
            figures[target]["bench"] = benched
    write_report(arguments, figures)


if __name__ == "__main__":
    main()
