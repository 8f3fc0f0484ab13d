"""Benchmarks that CI does not run must still fit the code that they measure."""

import json
import os
import statistics
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from benchmarks.peers import endless, read_pair
from draftwire.models.loading import load_model
from tests.tiny_models import save_tiny_model

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


def test_round_profile_gives_each_moment_of_a_round_to_one_part(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    output = tmp_path / "profile.json"
    models = ("--target", str(pair[0]), "--drafter", str(pair[1]), "--threads", "1")
    sizes = ("--prompts", "2", "--max-tokens", "24", "--num-speculative-tokens", "3")
    table = run("-m", "benchmarks.round_profile", *models, *sizes, "--output", str(output))
    report = json.loads(output.read_text())
    parts = report["parts"]
    assert sum(part["ms"] for part in parts.values()) == pytest.approx(report["wall_ms"], rel=0.01)
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1.0, abs=0.01)
    for part in parts.values():
        assert part["ms"] == pytest.approx(sum(part["legs_ms"].values()), rel=0.01)
    assert parts.pop("unattributed")["share"] < 0.5  # on a busy machine some blocks are sent for before they are done
    assert all(part["ms"] > 0.0 for part in parts.values())
    assert all(name in table for name in parts)
    assert len(parts["wire"]["legs_ms"]) == 3  # calibration, block, verdict
    assert 1.0 <= report["tokens_per_round"] <= 4.0
    assert report["passes_per_round"]["target's forward pass"] == 1.0
    assert 1.0 < report["passes_per_round"]["drafter's forward pass"] <= 3.0
    assert 1.0 < report["wall_over_reported"] < report["wall_over_forward_passes"]
    assert report["at_client_ms"]["round"] == pytest.approx(report["wall_ms"], rel=0.3)


def test_peers_benchmark_compares_exact_numbers_of_the_same_tokens(tmp_path: Path) -> None:
    output = tmp_path / "peers.json"
    sizes = ("--prompts", "2", "--prompt-tokens", "24", "--max-tokens", "12", "--repetitions", "2")
    sweeps = ("--assistant-tokens", "1", "3", "--block-lengths", "2", "3", "--sweep-repetitions", "1")
    run("-m", "benchmarks.peers", *sizes, *sweeps, "--output", str(output))
    report = json.loads(output.read_text())
    for temperature in (0, 1):
        results = report["embedded"][f"temperature {temperature}"]
        rates = results["median_tokens_per_second"]
        assert len(rates) == 6
        assert min(rates.values()) > 0.0
        assert set(results["best_draft_tokens"].values()) <= {1, 2, 3}
        rows = [row for row in report["measurements"] if row["temperature"] == temperature]
        assert sorted((row["repetition"], row["contestant"]) for row in rows) == sorted(product((0, 1), rates))
        for name, rate in rates.items():
            own_rates = [row["tokens_per_second"] for row in rows if row["contestant"] == name]
            assert rate == pytest.approx(statistics.median(own_rates), rel=0.01)
        for name, ratio in results["ratios"].items():
            own, baseline = (rates[contestant] for contestant in name.split(" / "))
            assert ratio["of_medians"] == pytest.approx(own / baseline, rel=0.01)
            assert ratio["min"] * 0.999 <= ratio["of_medians"] <= ratio["max"] * 1.001
            assert ratio["min"] <= ratio["median"] <= ratio["max"]
        for name in ("transformers", "decoder", "plain"):
            assert results["tokens_per_pass"][name] == 1.0
            assert results["acceptance_rate"][name] is None
        for name in ("transformers assisted", "transformers assisted, tuned", "speculative"):
            assert 0.0 < results["acceptance_rate"][name] <= 1.0
            assert 1.0 < results["tokens_per_pass"][name] <= results["block_efficiency"][name]
    # Whoever continues a prompt greedily, and however, says the same.
    agreement = report["embedded"]["temperature 0"]["share_of_texts_like_those_of_transformers"]
    assert set(agreement.values()) == {1.0}


def test_peers_benchmark_runs_a_pair_at_its_temperature_and_without_an_end_of_text(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        save_tiny_model(tmp_path / name, stop_token_id=2)
    (tmp_path / "synthesis.json").write_text(json.dumps({"temperature": 0.0}))
    assert load_model(str(tmp_path / "target")).description.stop_token_ids == (2,)
    with endless(read_pair(str(tmp_path))) as pair:
        assert pair.temperatures == (0.0,)
        copies = [load_model(folder).description for folder in (pair.target, pair.drafter)]
    original = load_model(str(tmp_path / "target")).description
    assert [copy.stop_token_ids for copy in copies] == [(), ()]
    assert {copy.vocabulary_fingerprint for copy in copies} == {original.vocabulary_fingerprint}
    assert {copy.weights_fingerprint for copy in copies} == {original.weights_fingerprint}
