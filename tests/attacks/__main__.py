"""Carries out attacks on three services of the embedded pair while honest users stream, and says what these notice.

    python -m tests.attacks [NAME ...] [--seconds-each 5] [--minutes M] [--max-gap-s 1] [--seed 0] [--output FILE]

Each attack runs alone, in an order that is drawn; with `--minutes` they follow each other until the time is over. The
status is 1 if a service ended, an honest completion was lost, a gap was too long, or memory passed its bound.
"""

import argparse
import json
import random
import sys
import time
from contextlib import ExitStack
from typing import Any

from draftwire.cli.local_stack import LocalStack
from draftwire.cli.up_command import stack_options
from tests.attacks.honest_users import HonestUsers
from tests.attacks.victim import Figures, Listed, Victim, all_attacks

MAX_GAP_S = 1.0
"""Longest wait of honest users for a delta."""
MAX_RESIDENT_MIB = {"gateway": 1250.0, "verifier": 1700.0, "drafter": 1500.0}
"""Most memory of a service with its child processes; docs/threats.md says what makes it up."""
QUIET_SECONDS = 5.0


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
    num_errors, started = len(users.errors), time.monotonic()
    try:
        figures = listed.run(victim)
    except Exception as error:  # an attack that is thrown out has failed, which is well
        figures = {"ended_with": f"{type(error).__name__}: {error}"[:200]}
    ended = time.monotonic()
    return {
        "attack": listed.name,
        "attacker": listed.attacker,
        "seconds": ended - started,
        "largest_gap_s": users.largest_gap_s(started, ended),
        "lost": users.errors[num_errors:],
        "resident_mib": {name: victim.resident_mib(name) for name in victim.pids},
        "figures": figures,
    }


def failures_of(report: Figures, max_gap_s: float) -> list[str]:
    """Returns in which ways an attack succeeded."""
    found = [f"lost: {error}" for error in report["lost"]]
    if report["largest_gap_s"] > max_gap_s:
        found.append(f"a gap of {report['largest_gap_s']:.2f} s")
    for name, size in report["resident_mib"].items():
        if size == 0.0:
            found.append(f"{name} ended")
        elif size > MAX_RESIDENT_MIB[name]:
            found.append(f"{name} takes {size:.0f} MiB")
    return found


def main() -> int:
    """Attacks, prints a line for each attack, and writes JSON."""
    parser = argparse.ArgumentParser(description="Attack running services and see what others notice.")
    parser.add_argument("names", nargs="*", help="attacks [default: all]")
    parser.add_argument("--seconds-each", type=float, default=5.0)
    parser.add_argument("--minutes", type=float, help="go on for so long")
    parser.add_argument("--max-gap-s", type=float, default=MAX_GAP_S, help="longest wait of honest users for a delta")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output")
    options = parser.parse_args()
    chosen = [one for one in all_attacks() if not options.names or one.name in options.names]
    if options.names and len(chosen) != len(set(options.names)):
        parser.error(f"known: {', '.join(one.name for one in all_attacks())}")
    generator = random.Random(options.seed)
    reports: list[dict[str, Any]] = []
    failed = False
    with ExitStack() as cleanup:
        stack = cleanup.enter_context(LocalStack(stack_options(None, None, 4)))
        users = cleanup.enter_context(HonestUsers(stack.address))
        victim = victim_of(stack, options.seconds_each)
        time.sleep(QUIET_SECONDS)
        now = time.monotonic()
        print(f"quiet: largest gap {users.largest_gap_s(now - QUIET_SECONDS, now):.3f} s", flush=True)
        until = now + 60.0 * (options.minutes or 0.0)
        first = True
        while first or time.monotonic() < until:
            first = False
            for listed in generator.sample(chosen, len(chosen)):
                report = carry_out(listed, victim, users)
                found = failures_of(report, options.max_gap_s)
                reports.append(report)
                failed = failed or bool(found)
                sizes = " ".join(f"{name} {size:.0f}" for name, size in report["resident_mib"].items())
                verdict = "; ".join(found) or "nothing"
                print(f"{listed.name:48} {report['largest_gap_s']:6.3f} s  {sizes} MiB  {verdict}", flush=True)
    print(f"{len(reports)} attacks, {users.num_completed} honest completions, {len(users.errors)} lost")
    if options.output:
        with open(options.output, "w") as file:
            json.dump(reports, file, indent=2)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
