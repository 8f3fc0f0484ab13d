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


def test_wire_benchmark_finds_that_keeping_less_takes_fewer_bytes_and_is_accepted_less(tmp_path: Path) -> None:
    output = tmp_path / "wire.json"
    sizes = ("--prompts", "2", "--max-tokens", "16", "--repetitions", "20")
    run("-m", "benchmarks.wire", "--parts", "codec", "settings", *sizes, "--output", str(output))
    report = json.loads(output.read_text())
    assert report["codec"][0]["bytes_per_token"] == 32 * 5
    small, large = (
        next(row for row in report["settings at T=1.0"] if (row["mass"], row["cap"], row["bits"]) == (1.0, cap, 16))
        for cap in (8, 256)
    )
    assert small["bytes_per_position"] <= 8 * 4 + 1 < large["bytes_per_position"] <= 256 * 4 + 2
    assert 0.0 < small["acceptance"] < large["acceptance"] <= report["shape at T=1.0"]["dense_acceptance"]
