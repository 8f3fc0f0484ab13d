"""Carries out attacks on three services of the embedded pair while honest users stream, and says what these notice.

    python -m tests.attacks [NAME ...] [--seconds-each 5] [--minutes M] [--law] [--max-gap-s 1] [--seed 0]

Each attack runs alone, in an order that is drawn, and behind its control if it has one, the same in an honest form;
with `--minutes` they follow each other until the time is over. The first is `nothing`, so that gaps can be compared
with those of a quiet stack. Attacks over TLS come once, at the end, on services of their own, whose users are those
that notice them. The status is 1 if a service ended, an honest completion was lost, a gap was too long or
more than `MAX_RATIO` times that of the control, memory passed its bound or grew in the last two thirds of
`--minutes`, or with `--law`, honest texts are not distributed as the target's.
"""

import argparse
import json
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import trustme

from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED, embedded_model
from draftwire.cli.stack_options import stack_options
from tests.attacks.honest_law import honest_p_value
from tests.attacks.honest_users import HonestUsers, Notes
from tests.attacks.victim import HARM, MAX_RATIO, Figures, Listed, Victim, all_attacks, judged, peak_memory
from tests.certificates import NAME, write_identity

MAX_GAP_S = 1.0
"""Longest wait of honest users for a delta."""
LEAST_GAP_S = 0.3
"""Shorter waits are compared as if they were so long: a quiet stack has some of 0.1 s."""
MAX_RESIDENT_MIB = {"gateway": 1250.0, "verifier": 1700.0, "drafter": 1500.0}
"""Most memory of a service with its child processes; docs/threats.md says what makes it up."""
VERIFIER_CACHE_TOKENS = 13_648
"""640 MiB of the embedded target: the default may grow to 3 GiB, which would hide what leaks beside it."""
MAX_GROWTH = 1.1
"""Most memory at the end of `--minutes`, over that at a third of them."""
MIN_P_VALUE = 1e-3
NICE = (10,)
"""Of the thread that attacks, and of those that it starts: an attacker has a machine of its own, and what its own work
takes of this one is not what it does to others."""


def nothing(victim: Victim) -> Figures:
    """What gaps under attack are compared with."""
    time.sleep(victim.seconds)
    return judged({}, {})


NOTHING = Listed("nothing", "nobody", nothing)


@contextmanager
def attacked(over_tls: bool) -> Iterator[tuple[LocalStack, HonestUsers]]:
    """Starts services, and users of them who stream until the block is left.

    Args:
        over_tls: whether the gateway requires TLS, of users over gRPC and over HTTP.
    """
    services, of_users = stack_options(EMBEDDED, None, 4), dict[str, object]()
    services["verifier"]["kv_cache_tokens"] = VERIFIER_CACHE_TOKENS
    with TemporaryDirectory() as folder:
        if over_tls:
            files = write_identity(Path(folder) / "gateway", trustme.CA())
            of_users = {"tls_ca": files.pop("tls_ca"), "tls_target_name": NAME}
            services["gateway"] |= files
        with LocalStack(services) as stack, HonestUsers(stack.address, **of_users) as users:
            yield stack, users


def victim_of(stack: LocalStack, seconds: float) -> Victim:
    """Returns what there is to attack."""
    services = stack.services
    return Victim(
        gateway=stack.address,
        http=stack.http_address,
        verifier=f"127.0.0.1:{services['verifier'].port}",
        drafter=f"127.0.0.1:{services['drafter'].port}",
        metrics={name: f"127.0.0.1:{service.metrics_port}" for name, service in services.items()},
        pids={name: service.process.pid for name, service in services.items()},
        seconds=seconds,
    )


def carry_out(listed: Listed, victim: Victim, users: HonestUsers) -> Figures:
    """Runs one attack and returns its figures beside what others noticed."""
    started, (num_steps, steps_s) = time.monotonic(), victim.steps()
    with peak_memory(victim.pids) as peaks:
        try:
            figures = listed.run(victim)
        except Exception as error:
            traceback.print_exc()
            figures = {HARM: [f"the attack itself failed: {type(error).__name__}: {error}"[:200]]}
    ended = time.monotonic()
    largest_gap_s, lost = users.noticed(started, ended)
    later_steps, later_s = victim.steps()
    return {
        "attack": listed.name,
        "step_ms": 1e3 * (later_s - steps_s) / max(1.0, later_steps - num_steps),
        "attacker": listed.attacker,
        "seconds": ended - started,
        "largest_gap_s": largest_gap_s,
        "lost": lost,
        "resident_mib": {name: victim.resident_mib(name) for name in victim.pids},
        "peak_mib": peaks,
        "figures": figures,
    }


def shown(report: Figures) -> str:
    """Returns an attack's name, the longest wait of others, and the mean time of a step of the verifier."""
    return f"{report['attack']:48} {report['largest_gap_s']:6.3f} s  step {report['step_ms']:5.1f} ms"


def failures_of(report: Figures, max_gap_s: float, control: Figures | None, max_ratio: float = MAX_RATIO) -> list[str]:
    """Returns in which ways an attack succeeded."""
    found = [*report["figures"][HARM], *(f"lost: {error}" for error in report["lost"])]
    if control is not None and report["largest_gap_s"] > max_ratio * max(LEAST_GAP_S, control["largest_gap_s"]):
        found.append(f"more than {max_ratio:g} times the gap of its control")
    if report["largest_gap_s"] > max_gap_s:
        found.append(f"a gap of {report['largest_gap_s']:.2f} s")
    found += [f"{name} ended" for name, size in report["resident_mib"].items() if size == 0.0]
    for name, size in report["peak_mib"].items():
        if size > MAX_RESIDENT_MIB[name]:
            found.append(f"{name} took {size:.0f} MiB")
    return found


def growth_of(reports: Sequence[Figures], minutes: float) -> dict[str, float]:
    """Returns each service's memory between attacks in the last sixth of the time, over that in the sixth from a third.

    Medians: what an attack leaves for a moment depends on which one was the last.
    """

    def typical(service: str, start: float, end: float) -> float:
        within = [each for each in reports if start < each["ended_s"] / (60.0 * minutes) <= end]
        return median(float(each["resident_mib"][service]) for each in within) if within else math.nan

    return {name: typical(name, 5 / 6, math.inf) / typical(name, 1 / 3, 1 / 2) for name in MAX_RESIDENT_MIB}


def carry_out_all(
    chosen: Sequence[Listed], stack: LocalStack, users: HonestUsers, options: argparse.Namespace, minutes: float
) -> list[Figures]:
    """Runs attacks, and prints a line for each; a report's `failures` say in which ways it succeeded."""
    generator, victim = random.Random(options.seed), victim_of(stack, options.seconds_each)
    reports: list[Figures] = []
    began = time.monotonic()
    while not reports or time.monotonic() - began < 60.0 * minutes:
        for listed in [NOTHING, *generator.sample(chosen, len(chosen))]:
            control = None
            if listed.control is not None:
                control = carry_out(Listed(f"{listed.name}, control", "nobody", listed.control), victim, users)
                print(shown(control), flush=True)
            report = carry_out(listed, victim, users)
            report["ended_s"] = time.monotonic() - began
            report["failures"] = failures_of(report, options.max_gap_s, control, listed.max_ratio)
            reports.append(report)
            sizes = " ".join(f"{name} {size:.0f}" for name, size in report["peak_mib"].items())
            verdict = "; ".join(report["failures"]) or "no harm"
            print(f"{shown(report)}  {sizes} MiB  {verdict}", flush=True)
    return reports


def main() -> int:
    """Attacks, prints a line for each attack, and writes JSON."""
    parser = argparse.ArgumentParser(description="Attack running services and see what others notice.")
    parser.add_argument("names", nargs="*", help="attacks [default: all, the long ones with --minutes only]")
    parser.add_argument("--seconds-each", type=float, default=5.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for so long")
    parser.add_argument("--max-gap-s", type=float, default=MAX_GAP_S, help="longest wait of honest users for a delta")
    parser.add_argument("--law", action="store_true", help="compare honest texts with the target's law, at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    known = [one.name for one in all_attacks()]
    if not set(options.names) <= set(known):
        parser.error(f"known: {', '.join(known)}")
    by_default = [one.name for one in all_attacks() if options.minutes or not one.is_long]
    chosen = [one for one in all_attacks() if one.name in (options.names or by_default)]
    reports, in_plaintext, notes = list[Figures](), list[Figures](), Notes()
    for over_tls in sorted({one.over_tls for one in chosen}):
        own, minutes = [one for one in chosen if one.over_tls == over_tls], 0.0 if over_tls else options.minutes
        with attacked(over_tls) as (stack, users), ThreadPoolExecutor(1, initializer=os.nice, initargs=NICE) as thread:
            new = thread.submit(carry_out_all, own, stack, users, options, minutes).result()
        reports += new
        in_plaintext += [] if over_tls else new
        notes.add(users.notes)
    failures = [failure for report in reports for failure in report["failures"]] + notes.errors
    num_attacks = sum(report["attack"] != NOTHING.name for report in reports)
    print(f"{num_attacks} attacks, {notes.num_completed} honest completions, {len(notes.errors)} lost")
    if options.minutes and in_plaintext:
        growth = growth_of(in_plaintext, options.minutes)
        print("memory at the end over that at a third: " + " ".join(f"{name} {by:.3f}" for name, by in growth.items()))
        failures += [f"{name} grew" for name, by in growth.items() if by > MAX_GROWTH]
    if options.law:
        chance = honest_p_value(notes.samples, (Path(embedded_model("target")), Path(embedded_model("drafter"))))
        print(f"{len(notes.samples)} honest texts follow the target's law: p = {chance:.3g}")
        failures += ["honest texts do not follow the target's law"] if chance < MIN_P_VALUE else []
    if options.output:
        options.output.write_text(json.dumps(reports, indent=2))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
