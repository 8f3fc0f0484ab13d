"""What the containers of the compose file cost at rest, and how long they take to come up and to go down.

    make images && python -m benchmarks.compose [--seconds 60] [--rounds 3] [--file OTHER.yml]

Prints a line of JSON a round: seconds of `up --wait` with the images present; CPU of each container at rest, in percent
of a core, health checks included; seconds of `down` at rest, and while completions stream that take minutes.
"""

import argparse
import json
import os
import secrets
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.relay import free_port

ROOT = Path(__file__).parents[1]
DOCKER = os.environ.get("DOCKER", "docker")
SERVICES = ("gateway", "verifier", "drafter")
SETTLE_SECONDS = 10.0
"""After a start, before a container counts as at rest."""
USAGE = "cat /sys/fs/cgroup/cpuacct/cpuacct.usage 2>/dev/null || grep usage_usec /sys/fs/cgroup/cpu.stat"
"""Prints the CPU time of a container: nanoseconds with cgroups of version 1, else microseconds after a name."""


@dataclass(frozen=True, slots=True)
class Project:
    """The compose file, as a project of its own on free ports."""

    files: Sequence[str] = ("docker-compose.yml",)
    name: str = field(default_factory=lambda: f"draftwire-bench-{secrets.token_hex(4)}")
    port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)

    def compose(self, *arguments: str) -> float:
        """Runs `docker compose`, and returns how many seconds it took."""
        files = [part for file in self.files for part in ("--file", file)]
        ports = {"GATEWAY_PORT": str(self.port), "HTTP_PORT": str(self.http_port)}
        started_at = time.monotonic()
        subprocess.run(
            [DOCKER, "compose", *files, "--project-name", self.name, *arguments],
            cwd=ROOT,
            env={**os.environ, **ports},
            check=True,
            capture_output=True,
        )
        return time.monotonic() - started_at

    def up(self) -> float:
        """Starts everything, and returns how many seconds it took until all were healthy."""
        return self.compose("up", "--detach", "--no-build", "--wait")

    def cpu_s(self, service: str) -> float:
        """Returns the CPU time that a container has used, seconds."""
        shell = [DOCKER, "exec", f"{self.name}-{service}-1", "sh", "-c", USAGE]
        name, _, number = subprocess.run(shell, check=True, capture_output=True, text=True).stdout.rpartition(" ")
        return int(number) / (1e6 if name else 1e9)

    def cpu_percent(self, seconds: float) -> dict[str, float]:
        """Returns the CPU that each container uses for some time, in percent of a core."""
        began = {service: (time.monotonic(), self.cpu_s(service)) for service in SERVICES}
        time.sleep(seconds)
        used = {
            service: (time.monotonic() - at, self.cpu_s(service) - before) for service, (at, before) in began.items()
        }
        return {service: round(100.0 * cpu_s / elapsed_s, 2) for service, (elapsed_s, cpu_s) in used.items()}

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Lets completions stream that take longer than a drain."""
        asked = {"model": "target", "prompt": "def f(", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http_port}/v1/completions",
            json.dumps({**asked, "n": 8}).encode(),
            {"content-type": "application/json"},
        )
        has_begun = threading.Event()

        def read() -> None:
            try:
                with urllib.request.urlopen(request, timeout=600.0) as response:
                    while response.readline():
                        has_begun.set()
            except OSError:
                pass

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        if not has_begun.wait(60.0):
            raise RuntimeError("no completion streams")
        yield
        reading.join(60.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one round showed."""

    load: float
    """Of this machine, before."""
    up_s: float
    cpu_percent_at_rest: dict[str, float]
    down_at_rest_s: float
    down_with_stream_s: float


def measure(files: Sequence[str], seconds: float) -> Figures:
    """Returns the figures of one round."""
    load, project = os.getloadavg()[0], Project(files)
    try:
        up_s = project.up()
        time.sleep(SETTLE_SECONDS)
        cpu_percent = project.cpu_percent(seconds)
        down_s = project.compose("down")
        project.up()
        with project.streaming():
            down_with_stream_s = project.compose("down")
    finally:
        project.compose("down", "--timeout", "1")
    return Figures(round(load, 1), round(up_s, 1), cpu_percent, round(down_s, 1), round(down_with_stream_s, 1))


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="at rest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--file", action="append", default=[], help="a further compose file")
    arguments = parser.parse_args()
    for _ in range(arguments.rounds):
        print(json.dumps(asdict(measure(["docker-compose.yml", *arguments.file], arguments.seconds))), flush=True)


if __name__ == "__main__":
    main()
