"""Time of a round by part, for one session at a time through the three processes; the parts add up to the round.

    python -m benchmarks.round_profile --output benchmarks/results/round_profile.json

A round begins when its drafter learns how the one before ended, and ends when it learns of this one. Its work is
sequential, so each moment belongs to the leg between two stations, and each leg to a part:

    draft      forward passes of the draft model
    draw       probabilities, drawing and quantising
    encode     between objects and messages, at either end of the two hops
    wire       gRPC and the kernel: block to the verifier, outcome to the drafter
    queue      from one thread or task to the next: event loops, schedulers, torch threads
    verify     forward pass of the target
    rule       probabilities and rule

Rounds that do not pass every station once and in order are "unattributed": those that are begun by a calibration, say.
The audit, the gateway's and the client's work on a round overlap with the next one; that on its text is listed
separately. Tracing costs a microsecond per station. Times are the host's: on a GPU, whose work it
does not wait for, forward passes would seem short and draws long.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.load import Answer, Ask, run_load
from benchmarks.prompts import load_prompts
from benchmarks.report import write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options

PARTS = ("draft", "draw", "encode", "wire", "queue", "verify", "rule", "unattributed")
BAR_WIDTH = 40
CACHE_TOKENS = 4096
"""Room of the KV caches: far more than one session needs."""


@dataclass(frozen=True, slots=True)
class Way:
    """How prompts are continued."""

    num_speculative_tokens: int
    num_draft_nodes: int = 0
    """Draft tokens of a token tree; 0 drafts chains."""
    max_tokens: int = 128
    temperature: float = 1.0
    rule: str = "block"
    """By which drafts are judged."""


@dataclass(frozen=True, slots=True)
class Station:
    """A moment of every round: the beginning or the end of a traced call."""

    span: str
    is_end: bool
    part: str
    """Part of the time since the previous station."""
    leg: str
    """Name of that time."""


def _begins(span: str, part: str, leg: str) -> Station:
    return Station(span, False, part, leg)


def _ends(span: str, part: str, leg: str) -> Station:
    return Station(span, True, part, leg)


WAY = (
    _begins("draft step", "queue", "outcome to the torch thread"),
    _ends("draft step", "draw", "probabilities and the rest of the step"),
    _begins("block encoded", "queue", "block to the writer"),
    _ends("block encoded", "encode", "block encoded"),
    _begins("block decoded", "wire", "block to the verifier"),
    _ends("block decoded", "encode", "block decoded"),
    _begins("verify step", "queue", "block to the torch thread"),
    _ends("verify step", "rule", "probabilities and the rest of the step"),
    _begins("outcome encoded", "queue", "outcome to the writer"),
    _ends("outcome encoded", "encode", "outcome encoded"),
    _begins("outcome decoded", "wire", "outcome to the drafter"),
    _ends("outcome decoded", "encode", "outcome decoded"),
    _begins("outcome taken", "queue", "outcome to the scheduler"),
)
"""Stations of a round, from the outcome of one to that of the next at the drafter's scheduler."""

WITHIN = {
    "drafter's forward pass": "draft",
    "tokens drawn": "draw",
    "distributions encoded": "encode",
    "target's forward pass": "verify",
    "rule applied": "rule",
}
"""Calls within the two steps, each with its part. The rest of a step belongs to the leg."""

FORWARD_PASSES = ("drafter's forward pass", "target's forward pass")


@dataclass(frozen=True, slots=True)
class Span:
    """One traced call."""

    name: str
    began: float
    ended: float
    """By `time.perf_counter`, seconds."""
    about: list[int]
    """For a committed verdict: draft tokens, committed tokens, and the model time that the services report, in us."""
    cpu_s: float
    """CPU time of its thread within it."""


@dataclass(slots=True)
class Round:
    """One traced round. Times are in seconds."""

    start: float
    end: float
    """By `time.perf_counter`, like everything here."""
    num_tokens: int
    reported: float
    """Time reported by the services: calibration, drafting and verifying."""
    legs: dict[tuple[str, str], float] = field(default_factory=dict)
    """Times by part and leg. They add up to `wall`."""
    num_passes: dict[str, int] = field(default_factory=dict)
    """Forward passes of either model."""

    @property
    def wall(self) -> float:
        """Duration of the round."""
        return self.end - self.start

    def part(self, name: str) -> float:
        """Returns the time of all legs of a part."""
        return sum(seconds for (part, _), seconds in self.legs.items() if part == name)


@contextmanager
def traced(options: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[LocalStack, Path]]:
    """Runs a stack whose services write their spans into the folder when they stop."""
    with tempfile.TemporaryDirectory() as folder:
        hooks = str(Path(__file__).parent / "round_trace")
        python_path = os.pathsep.join([hooks, *filter(None, [os.environ.get("PYTHONPATH")])])
        with (
            patch.dict(os.environ, {"ROUND_TRACE_FOLDER": folder, "PYTHONPATH": python_path}),
            LocalStack(options) as stack,
        ):
            yield stack, Path(folder)


def read_spans(folder: Path) -> list[Span]:
    """Returns the spans of all services in the order in which they began."""
    notes = (note for file in folder.glob("*.json") for note in json.loads(file.read_text()))
    return sorted((Span(*note) for note in notes), key=lambda span: span.began)


def read_rounds(spans: list[Span], since: float = 0.0, until: float = math.inf) -> Iterator[Round]:
    """Yields the rounds from one outcome to the next between two moments; only one session may have run at a time."""
    begins = [span.began for span in spans]
    outcomes = [span.began for span in spans if span.name == "outcome taken"]
    committed = [span for span in spans if span.name == "verdict committed" and span.about[0]]
    for start, end in pairwise(outcomes):
        if start < since or end > until:
            continue
        _, num_tokens, reported_us = min(committed, key=lambda verdict: abs(verdict.began - end)).about
        window = spans[bisect_right(begins, start) : bisect_right(begins, end)]
        done = Round(start, end, num_tokens, reported_us / 1e6)
        _attribute(done, window)
        yield done


def _attribute(done: Round, window: list[Span]) -> None:
    """Attributes the time of a round to legs; or to none if a station is missing, double or out of order."""
    moments = [done.start]
    for station in WAY:
        found = [span for span in window if span.name == station.span]
        if len(found) != 1:
            done.legs = {("unattributed", f"{station.span}: {len(found)} times"): done.wall}
            return
        moments.append(found[0].ended if station.is_end else found[0].began)
    if moments != sorted(moments):
        done.legs = {("unattributed", "stations out of order"): done.wall}
        return
    for station, (before, after) in zip(WAY, pairwise(moments), strict=True):
        within = [span for span in window if span.name in WITHIN and before <= span.began < after]
        left = after - before
        for span in within:
            leg = (WITHIN[span.name], span.name)
            done.legs[leg] = done.legs.get(leg, 0.0) + span.ended - span.began
            done.num_passes[span.name] = done.num_passes.get(span.name, 0) + 1
            left -= span.ended - span.began
        leg = (station.part, station.leg)
        done.legs[leg] = done.legs.get(leg, 0.0) + left


def at_client(rounds: list[Round], spans: list[Span], answers: list[Answer]) -> dict[str, float]:
    """Returns mean times of rounds at the client, in milliseconds: the time between rounds, and its parts."""
    arrivals = [arrival for answer in answers for arrival in answer.delta_times]
    texts = [span for span in spans if span.name == "text made"]
    began = [span.began for span in texts]
    starts = [arrivals[bisect_right(arrivals, each.start)] for each in rounds]
    ends = [arrivals[bisect_right(arrivals, each.end)] for each in rounds]
    made = [texts[bisect_right(began, arrival) - 1] for arrival in ends]
    return {
        "round": statistics.mean(end - start for start, end in zip(starts, ends, strict=True)) * 1e3,
        "text made at the gateway": statistics.mean(span.ended - span.began for span in made) * 1e3,
        "text to the client": statistics.mean(end - span.ended for end, span in zip(ends, made, strict=True)) * 1e3,
    }


def summarize(rounds: list[Round]) -> dict[str, Any]:
    """Returns the means of rounds: whole, by part and by leg, in milliseconds, and what they are relative to models."""
    wall = sum(each.wall for each in rounds)
    means: dict[str, dict[str, float]] = defaultdict(dict)
    for part, leg in dict.fromkeys(key for each in rounds for key in each.legs):  # in the order of the way
        means[part][leg] = statistics.mean(each.legs.get((part, leg), 0.0) for each in rounds) * 1e3
    passes = {name: sum(each.num_passes.get(name, 0) for each in rounds) for name in FORWARD_PASSES}
    traced_rounds = [each for each in rounds if each.num_passes]
    models = sum(each.part("draft") + each.part("verify") for each in traced_rounds)
    return {
        "rounds": len(rounds),
        "tokens_per_round": sum(each.num_tokens for each in rounds) / len(rounds),
        "wall_ms": wall / len(rounds) * 1e3,
        "median_wall_ms": statistics.median(each.wall for each in rounds) * 1e3,
        "parts": {
            part: {
                "ms": sum(means[part].values()),
                "share": sum(means[part].values()) / (wall / len(rounds) * 1e3),
                "median_ms": statistics.median(each.part(part) for each in rounds) * 1e3,
                "legs_ms": means[part],
            }
            for part in PARTS
        },
        "passes_per_round": {name: count / max(len(traced_rounds), 1) for name, count in passes.items()},
        "wall_over_forward_passes": sum(each.wall for each in traced_rounds) / models if models else None,
        "wall_over_reported": wall / sum(each.reported for each in rounds),
    }


def table(profile: dict[str, Any]) -> str:
    """Returns a profile as text: a line with a bar for each part, and one for each leg below it."""
    lines = [f"{'a round':<46}{profile['wall_ms']:8.3f} ms"]
    for name, part in profile["parts"].items():
        lines.append(f"{name:<46}{part['ms']:8.3f} ms {part['share']:6.1%} {_bar(part['share'], '█')}".rstrip())
        for leg, milliseconds in part["legs_ms"].items():
            share = milliseconds / profile["wall_ms"]
            lines.append(f"    {leg:<42}{milliseconds:8.3f} ms {share:6.1%} {_bar(share, '░')}".rstrip())
    return "\n".join(lines)


def _bar(share: float, block: str) -> str:
    return block * round(share * BAR_WIDTH)


def profile_of(options: Mapping[str, Mapping[str, object]], ways: Mapping[str, Sequence[Ask]]) -> dict[str, Any]:
    """Continues the prompts of each way one after the other, on one stack, and returns the profiles of their rounds.

    Args:
        options: of the services.
        ways: what is asked for, by name.
    """
    answered: dict[str, tuple[list[Answer], float]] = {}
    with traced(options) as (stack, folder):
        for name, asks in ways.items():
            run_load(stack.address, [asks[0]] * 2, 1)
            answered[name] = run_load(stack.address, asks, 1), time.perf_counter()
        stack.stop()  # the services write their spans
        spans = read_spans(folder)
    return {name: _profile(spans, answers, until) for name, (answers, until) in answered.items()}


def _profile(spans: list[Span], answers: list[Answer], until: float) -> dict[str, Any]:
    rounds = list(read_rounds(spans, answers[0].sent_at, until))
    if not rounds:
        raise RuntimeError("the texts were too short: no round was traced from one outcome to the next")
    spent = [answer.statistics for answer in answers]
    reported_us = sum(each.calibration_duration_us + each.draft_duration_us + each.verify_duration_us for each in spent)
    return {
        **summarize(rounds),
        "completions_over_reported": sum(each.duration_us for each in spent) / reported_us,
        "at_client_ms": at_client(rounds, spans, answers),
    }


def asks_of(way: Way, num_prompts: int) -> list[Ask]:
    """Returns requests for the committed prompts."""
    return [
        Ask(
            prompt,
            way.max_tokens,
            way.num_speculative_tokens,
            seed,
            way.temperature,
            way.rule,
            way.num_draft_nodes,
        )
        for seed, prompt in enumerate(load_prompts()[:num_prompts])
    ]


def with_models(
    options: Mapping[str, Mapping[str, object]], device: str, threads: int, num_draft_nodes: int
) -> dict[str, dict[str, object]]:
    """Returns the options of services whose models run on a device, with token trees of so many nodes at most."""
    own = {"threads": threads, "kv_cache_tokens": CACHE_TOKENS, "device": device, "max_tree_nodes": num_draft_nodes}
    return {name: {**each, **(own if name != "gateway" else {})} for name, each in options.items()}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the profile that a command line asks for."""
    options = stack_options(arguments.target, arguments.drafter, arguments.num_speculative_tokens)
    options = with_models(options, arguments.device, arguments.threads, arguments.num_draft_nodes)
    way = Way(
        arguments.num_speculative_tokens,
        arguments.num_draft_nodes,
        arguments.max_tokens,
        arguments.temperature,
        arguments.rule,
    )
    profile: dict[str, Any] = profile_of(options, {"": asks_of(way, arguments.prompts)})[""]
    return profile


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=EMBEDDED, help="folder or hub name")
    parser.add_argument("--drafter", help="folder or hub name; by default the embedded one, beside the embedded target")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--num-draft-nodes", type=int, default=0, help="of a token tree; 0 drafts chains")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the verifier, and of the drafter")
    parser.add_argument("--device", default="cpu", help="of both models")
    parser.add_argument("--rule", default="block", help="by which drafts are judged")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    profile = measure(arguments)
    write_report(arguments, profile)
    print(table(profile))


if __name__ == "__main__":
    main()
