"""Benchmarks that CI does not run must still fit the code that they measure."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_round_trace_finds_every_station_of_every_service() -> None:
    code = (
        "from benchmarks.round_trace.sitecustomize import watch_service\n"
        "for name in ('gateway', 'drafter', 'verifier'):\n"
        "    print(watch_service(f'python -m draftwire.services.{name}'))"
    )
    assert run("-c", code).split() == ["gateway", "drafter", "verifier"]


def test_gpu_benchmark_runs_without_a_gpu_and_finds_the_cached_passes_right() -> None:
    arguments = ("--device", "cpu", "--size", "tiny", "--repetitions", "1")
    report = json.loads(run("-m", "benchmarks.gpu", *arguments))
    assert report["largest_error"] < 1e-5
    assert set(report["step_ms"]) == {"1", "4", "16", "64"}
    assert report["noise_error"] == 0.0
    assert set(report["rule_differences"].values()) == {0}
    assert report["rules"]["batch_16"]["block"]["accepted"] > 0.0
