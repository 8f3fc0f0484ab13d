"""Benchmarks that CI does not run must still fit the code that they measure."""

import json
import operator
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

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


def report_of(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Runs a benchmark; returns the report that it writes and the table that it prints."""
    output = folder / "report.json"
    table = run("-m", *arguments, "--output", str(output))
    return json.loads(output.read_text()), table


def test_round_trace_finds_every_station_of_every_service() -> None:
    code = (
        "from benchmarks.round_trace.sitecustomize import watch_service\n"
        "for name in ('gateway', 'drafter', 'verifier'):\n"
        "    print(watch_service(f'python -m draftwire.cli serve {name}'))"
    )
    assert run("-c", code).split() == ["gateway", "drafter", "verifier"]


MISSING = ("structlog", "typer", "rich", "prometheus_client", "google", "scipy")
HIDING = f"""
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        return None if name.partition(".")[0] in {MISSING} else super().find_spec(name, *arguments)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""


@pytest.mark.evidence
def test_gpu_benchmark_runs_on_a_machine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run("-c", f"import importlib.util; print({{*map(importlib.util.find_spec, {MISSING})}})") == "{None}\n"
    sizes = ("--device", "cpu", "--size", "tiny", "--repetitions", "3")
    report, table = report_of(tmp_path, "benchmarks.gpu", *sizes)
    assert report["device"] == "cpu"
    assert report["torch"]
    sections = report["sections"]
    assert list(sections) == [
        "exactness",
        "pair",
        "steps",
        "heads",
        "speculation",
        "sharing",
        "rules",
        "layer parallel",
    ]
    for name, section in sections.items():
        assert section["is_ok"], section["traceback"]
        assert f"{name}: done" in table
    assert "sections that failed: none" in table
    check_exactness(sections["exactness"])
    check_steps(sections["steps"])
    check_speculation(sections["speculation"])
    assert sections["pair"]["agreement"] == pytest.approx(0.8, abs=0.03)
    assert 0.0 < sections["pair"]["drafter_gb_read"] < sections["pair"]["target_gb_read"]
    assert min(sections["sharing"]["steps"]) > 0
    assert sections["sharing"]["draft_beside_verify_ms"] > 0.0
    assert sections["rules"]["noise_error"] == 0.0
    assert set(sections["rules"]["rule_differences"].values()) == {0}
    assert sections["rules"]["batch_16"]["block"]["accepted"] > 0.0
    check_layer_parallel(sections["layer parallel"])


def check_exactness(found: dict[str, Any]) -> None:
    for name in ("packed", "static"):
        assert 0.0 < found[f"largest_error_{name}"] <= 1e-4
        assert found[f"logits_{name}"]["logit_deviation"] > 0.1
    assert set(found["verdicts"].values()) == {"ok"}
    assert found["synchronizations"] == {}
    assert (found["draft_differences"]["blocks"], found["draft_differences"]["differing"]) == (80, 0)


def check_steps(found: dict[str, Any]) -> None:
    for name in ("static", "packed"):
        times = found[name]
        assert times["verify_ratio"] == pytest.approx(times["verify_ms"] / found["reduction_ms"]["target"], rel=0.01)
        for block_length in (4, 8):
            own = times[f"block_{block_length}"]
            draft_ms = own["draft_ms_per_token"]
            assert own["forward_ms_per_token"] > 0.0
            assert own["forward_ms_per_token"] + own["sampling_ms_per_token"] == pytest.approx(draft_ms, rel=0.01)
            assert own["draft_ratio"] == pytest.approx(draft_ms / found["reduction_ms"]["drafter"], rel=0.01)
            assert own["judge_ratio"] == pytest.approx(own["judge_ms"] / found["reduction_ms"]["target"], rel=0.01)
            assert own["rounds"] > 0


TINY = ("--device", "cpu", "--size", "tiny", "--repetitions", "3")


def test_parts_of_a_round_are_measured_without_a_gpu_or_said_not_to_be(tmp_path: Path) -> None:
    report, table = report_of(tmp_path, "benchmarks.gpu_kernels", *TINY)
    sections = report["sections"]
    for name, section in sections.items():
        assert section["is_ok"], section["traceback"]
        assert f"{name}: done" in table
    assert "sections that failed: none" in table
    assert {name for name, section in sections.items() if "not_measured" in section} == {"launches"}
    assert set(sections["launches"]["not_measured"]) == {
        "a launch, host",
        "a node of a graph",
        "launching a graph of 1, host",
        "launching a graph of 300, host",
        "launching a graph of 700, host",
        "a pinned download with its wait",
    }
    assert re.search(r"a node of a graph +not measured \(CUDA graphs need a GPU\)", table)
    assert re.search(r"an eager operation, host +[\d.]+ us +inferred 25\n", table)
    assert sections["launches"]["inferred"] == {"an eager operation, host": 25.0}
    check_kernel_times(sections)
    check_decision_times(sections["decisions"])
    check_turns(sections["turns"])
    check_served(sections["round profile"], sections["services"]["rates"])


def check_kernel_times(sections: dict[str, Any]) -> None:
    assert sections["bandwidth"]["read_tb_per_s"] > 0.0
    assert sections["bandwidth"]["copy_tb_per_s"] > 0.0
    steps = (
        "5 tokens",
        "1 token",
        "9 tokens",
        "65 tokens of a tree",
        "64 texts, 1 token each",
        "64 texts, 5 tokens each",
    )
    for step in steps:
        found = sections["step profile"][step]
        assert sum(found["kinds_ms"].values()) == pytest.approx(found["kernels_ms"], rel=0.01)
        assert min(found["kinds_ms"].values()) > 0.0
        kinds = ("mkldnn::_linear_pointwise", "aten::mm")
        counts = [found["kernels"].get(kind, {"count": 0.0})["count"] for kind in kinds]
        assert sum(counts) == 4 * 4 + 1, "of four layers, and the head"
    for shape in ("target", "drafter of 1B"):
        found = sections["products"][shape]
        assert found["bytes"] == pytest.approx(sections["pair"]["target_gb_read"] * 1e9, rel=0.01), "but for the norms"
        layers, head = [4.0] * 4, [1.0]
        for rows, step_ms in found["step_ms"].items():
            times = [by_rows[rows] for by_rows in found["ms_by_rows"].values()]
            assert step_ms == pytest.approx(sum(map(operator.mul, times, layers + head)), rel=0.01)
    settings = sections["attention"]["settings"]
    assert len(settings) == 2 * 2 * 3 + 2, "65 tokens are more than the shorter texts have"
    assert all(min(times["gathering_ms"], times["step_ms"]) > 0.0 for times in settings.values())


def check_decision_times(found: dict[str, Any]) -> None:
    assert list(found["chains"]) == ["1 block of 4", "4 blocks of 8"]
    for parts in found["chains"].values():
        assert all(own["ms"] > 0.0 for own in parts.values())
        assert parts["rule token"]["operations"] < parts["rule block"]["operations"]
        assert parts["law, T = 1"]["operations"] < parts["law, top-p 0.95"]["operations"]
    operations = [tree["rule_operations"] for tree in found["trees"].values()]
    assert list(found["trees"]) == ["14", "16", "60"]
    assert operations[2] > max(operations[:2]) > found["chains"]["1 block of 4"]["rule block"]["operations"]


def check_turns(found: dict[str, Any]) -> None:
    for name in ("two processes", "one process"):
        own = found[f"by turns, {name}"]
        assert min(own["verify_ms"], own["draft_ms"]) > 0.0
        assert own["rounds"] > 0
    assert min(found["steps"]) > 0


def check_served(profiles: dict[str, Any], rates: list[dict[str, float]]) -> None:
    for name, depth in (("chain of 4", 4), ("tree of 60 in 8", 8)):
        profile = profiles[name]
        assert 1.0 <= profile["tokens_per_round"] <= depth + 1
        assert sum(part["ms"] for part in profile["parts"].values()) == pytest.approx(profile["wall_ms"], rel=0.01)
    cells = [(rate["sessions"], rate["temperature"], rate["length"]) for rate in rates]
    assert cells == list(product((2,), (1.0, 0.0), (0, 4)))
    assert all(rate["tokens_per_second"] > 0.0 for rate in rates)


def test_parts_without_their_packages_are_said_not_to_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sections = ("--only", "bandwidth", "round profile", "services", "--budget", "60")
    report, table = report_of(tmp_path, "benchmarks.gpu_kernels", *TINY, *sections)
    assert report["sections"]["bandwidth"]["read_tb_per_s"] > 0.0
    missing = "services need google, structlog, typer, rich, prometheus_client"
    for name, what in (("round profile", "rounds"), ("services", "tokens/s")):
        assert report["sections"][name]["not_measured"] == {f"{what} through the services": missing}
    assert table.count(f"not measured ({missing})") == 2


def check_layer_parallel(found: dict[str, Any]) -> None:
    assert 0.0 < found["largest_error"] <= 1e-4
    sizes = found["sizes"]
    assert [own["groups"] for own in sizes.values()] == [
        "0 1 2 3 4 5 6 7",
        "0 1 2-3 4-5 6 7",
        "0 1-2 3-5 6 7",
        "0 1-3 4-6 7",
        "0 1-4 5-6 7",
    ]
    for own in sizes.values():
        for count in (1, 16):
            faster = sizes["1"][f"batch_{count}_ms"] / own[f"batch_{count}_ms"]
            assert own[f"batch_{count}_faster_than_1"] == pytest.approx(faster, rel=0.01)
        phase_ms = found["calibration_ms"] + 4 * own["batch_1_ms"]
        assert own["draft_phase_faster_than_1"] == pytest.approx(5 * sizes["1"]["batch_1_ms"] / phase_ms, rel=0.01)


def check_speculation(found: dict[str, Any]) -> None:
    runs = found["runs"]
    assert len(runs) == 2 * (1 + 2 * 2)
    plain = {run["texts"]: run["tokens_per_s"] for run in runs if run["block_length"] == 0}
    for run_ in runs:
        assert 1.0 <= run_["block_efficiency"] <= run_["block_length"] + 1
        if run_["block_length"]:
            assert 0.2 < run_["acceptance_rate"] <= 1.0
            assert run_["ratio"] == pytest.approx(run_["tokens_per_s"] / plain[run_["texts"]], rel=0.01)
            accepted = 1.0 + run_["block_length"] * run_["acceptance_rate"]
            assert run_["block_efficiency"] == pytest.approx(accepted, rel=0.01)
    for count in (1, 4):
        rates = [run_["tokens_per_s"] for run_ in runs if run_["texts"] == count and run_["block_length"]]
        assert found["best"][f"batch_{count}"]["tokens_per_s"] == max(rates)


@pytest.mark.evidence
def test_gpu_benchmark_goes_on_after_a_failed_or_too_long_section() -> None:
    code = """
import json, time
from benchmarks.gpu_sections.section import Findings, Row, Section

def fail(findings, budget):
    findings.rows.append(Row("what was found", 1.0))
    findings.results["found"] = 1.0
    raise ValueError("what went wrong")

def dawdle(findings, budget):
    time.sleep(30.0)

print(json.dumps([Section("failing", 9.0, fail).run(), Section("slow", 0.1, dawdle).run()]))
"""
    *table, results = run("-c", code).splitlines()
    failing, slow = json.loads(results)
    assert (failing["is_ok"], failing["found"], failing["error"]) == (False, 1.0, "ValueError: what went wrong")
    assert "in fail" in failing["traceback"]
    assert (slow["is_ok"], slow["error"]) == (False, "OverBudgetError: the section did not end in time")
    assert slow["seconds"] < 5.0
    assert sum("FAILED" in line for line in table) == 2
    assert any("what was found" in line for line in table)


def test_wire_benchmark_finds_fewer_bytes_and_acceptance_for_less_mass(tmp_path: Path) -> None:
    sizes = ("--prompts", "2", "--max-tokens", "16", "--repetitions", "20")
    report, _ = report_of(tmp_path, "benchmarks.wire", "--parts", "codec", "settings", *sizes)
    assert report["codec"][0]["bytes_per_token"] == 32 * 5
    small, large = (
        next(row for row in report["settings at T=1.0"] if (row["mass"], row["cap"], row["bits"]) == (1.0, cap, 16))
        for cap in (8, 256)
    )
    assert small["bytes_per_position"] <= 8 * 4 + 1 < large["bytes_per_position"] <= 256 * 4 + 2
    assert 0.0 < small["acceptance"] < large["acceptance"] <= report["shape at T=1.0"]["dense_acceptance"]


def test_decoder_benchmark_exceeds_reading_time_and_lists_all_products(tmp_path: Path) -> None:
    sizes = ("--shape", "tiny", "--threads", "1", "--sessions", "1", "3", "--steps", "3", "--repetitions", "3")
    report, _ = report_of(tmp_path, "benchmarks.decoder", *sizes, "--length", "40", "--profile")
    assert report["million_parameters_read"] == pytest.approx(0.2177, rel=1e-3), "without the embedding"
    assert list(report["steps"]) == ["1 sessions", "3 sessions"]
    for step in report["steps"].values():
        assert step["step_ms"] > step["reading_ms"]
        kinds = ("mkldnn::_linear_pointwise", "aten::mm")
        calls = [step["operations"].get(kind, {"calls": 0})["calls"] for kind in kinds]
        assert sum(calls) == 4 * 4 + 1, "of four layers, and the output"
    copied = [step["copied_mb_per_token"] for step in report["steps"].values()]
    assert copied == [0.0, report["attended_mb_per_token"]], "one text is read where it is, short ones are gathered"


def test_prediction_for_a_pair_follows_passes_and_grows_with_acceptance(tmp_path: Path) -> None:
    sizes = ("--targets", "3x64", "--drafters", "1x64", "--repetitions", "1", "--steps", "2")
    report, _ = report_of(tmp_path, "benchmarks.pair_shapes", *sizes, "--draw-ms", "0.5")
    target, draft_ms = report["passes_ms"]["target 3x64x1"], report["passes_ms"]["drafter 1x64x1"]["1 tokens"] + 0.5
    rates = []
    for acceptance in (0.55, 0.65, 0.75, 0.85):
        found = report["predictions"]["3x64x1 with 1x64x1"][f"acceptance {acceptance}"]
        length = found["length"]
        round_ms = target[f"{length + 1} tokens"] + length * draft_ms + 6.0
        rates.append(1e3 * (1.0 - acceptance ** (length + 1)) / (1.0 - acceptance) / round_ms)
        assert found["tokens_per_s"] == pytest.approx(rates[-1], rel=1e-2)
        assert found["over_plain"] == pytest.approx(rates[-1] * (target["1 tokens"] + 1.5) / 1e3, rel=1e-2)
    assert rates == sorted(rates)


def test_layer_parallel_benchmark_loses_acceptance_and_times_each_exchange(tmp_path: Path) -> None:
    sizes = ("--sizes", "3", "--places", "2", "--prompts", "2", "--max-tokens", "16")
    texts = ("--texts", "2", "--text-tokens", "6")
    steps = ("--models", "tiny", "--repetitions", "1", "--seconds", "0.01")
    parts = ("--parts", "acceptance", "cosine", "steps")
    report, _ = report_of(tmp_path, "benchmarks.layer_parallel", *parts, *sizes, *texts, *steps)
    for temperature in (0, 1):
        rows = report[f"sizes, rule block, T={temperature}"]
        assert [(row["size"], row["calibrates"]) for row in rows] == [(1, True), (3, True), (3, False)]
        assert set(rows[0]["difference_from_1"].values()) == {0.0}
        for row in rows:
            assert 0.0 < row["acceptance_rate"]["value"] <= 1.0
            assert 1.0 < row["tokens_per_target_pass"]["value"] <= 6.0
            assert len(row["of_position"]) == 5
    assert [row["groups"] for row in report["places, rule block, T=1"]] == [
        "0-1 2 3 4 5 6 7",
        "0 1-2 3 4 5 6 7",
        "0 1 2 3-4 5 6 7",
        "0 1 2 3 4 5-6 7",
        "0 1 2 3 4 5 6-7",
    ]
    (cosine,) = report["cosine"]
    assert cosine["groups"] == "0 1-2 3-5 6 7"
    for kind, mean in cosine["mean"].items():
        by_layer = cosine["by_layer"][kind]
        assert mean == pytest.approx(statistics.mean(by_layer.values()), abs=1e-3)
        assert 0.5 < mean < 1.0
        assert by_layer["1"] == 1.0  # what the first layer of the first group reads is exact
        assert by_layer["2"] < 1.0
        assert by_layer["5"] < 1.0
    assert report["one exchange alone, ms, of tiny"] > 0.0
    check_shared_steps(report["steps of tiny"])


def check_shared_steps(rows: list[dict[str, Any]]) -> None:
    shared = ("two processes", "one of two ranks", "one of four ranks")
    ways = ("one process, 1 thread", "one process, 2 threads", *shared)
    assert [(row["way"], row["size"]) for row in rows] == list(product(ways, (1, 3)))
    for ordinary, row in zip(rows[::2], rows[1::2], strict=True):
        assert row["groups"] == "0 1-2 3"
        assert set(ordinary["batch_1_faster_than_1"].values()) == {1.0}
        for count in (1, 4, 16):
            faster = row[f"batch_{count}_faster_than_1"]
            assert faster["low"] == faster["high"] == pytest.approx(faster["median"])
            assert faster["median"] == pytest.approx(ordinary[f"batch_{count}_ms"] / row[f"batch_{count}_ms"], rel=0.01)
        phase_ms = row["calibration_ms"] + 4 * row["batch_1_ms"]
        faster = row["draft_phase_faster_than_1"]["median"]
        assert faster == pytest.approx(5 * ordinary["batch_1_ms"] / phase_ms, rel=0.01)
    exchanging = [row for row in rows if row["way"] == "two processes"]
    assert [row["exchanges"] for row in exchanging] == [0, 1]
    for row in exchanging:
        assert 0.0 < row["plan_ms"] < row["batch_1_ms"]
        assert (row["exchange_ms"] > 0.0) == (row["exchanges"] > 0)


def test_round_profile_gives_each_moment_of_a_round_to_one_part(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    models = ("--target", str(pair[0]), "--drafter", str(pair[1]), "--threads", "1")
    sizes = ("--prompts", "2", "--max-tokens", "24", "--num-speculative-tokens", "3")
    report, table = report_of(tmp_path, "benchmarks.round_profile", *models, *sizes)
    parts = report["parts"]
    assert sum(part["ms"] for part in parts.values()) == pytest.approx(report["wall_ms"], rel=0.01)
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1.0, abs=0.01)
    for part in parts.values():
        assert part["ms"] == pytest.approx(sum(part["legs_ms"].values()), rel=0.01)
    assert parts.pop("unattributed")["share"] < 0.5  # those that a calibration has begun
    assert all(part["ms"] > 0.0 for part in parts.values())
    assert all(name in table for name in parts)
    assert len(parts["wire"]["legs_ms"]) == 2  # block, outcome
    assert 1.0 <= report["tokens_per_round"] <= 4.0
    assert report["passes_per_round"]["target's forward pass"] == 1.0
    assert 1.0 < report["passes_per_round"]["drafter's forward pass"] <= 3.0
    assert 1.0 < report["wall_over_reported"] < report["wall_over_forward_passes"]
    assert report["at_client_ms"]["round"] == pytest.approx(report["wall_ms"], rel=0.3)


@pytest.mark.evidence
def test_services_on_one_device_are_measured_by_shape_and_ahead(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    for name, folder in zip(("target", "drafter"), pair, strict=True):
        (tmp_path / "pair" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "pair" / name).symlink_to(folder)
    times = ("--turns", "1", "--seconds", "0.2", "--settle-s", "0.1", "--warm-up-s", "0.5", "--rounds", "4")
    sizes = ("--cache", "4096", "--max-tokens", "20", "--sessions", "2", "--rules", "coupled")
    own = ("--pair", str(tmp_path / "pair"), "--device", "cpu")
    report, table = report_of(tmp_path, "benchmarks.gpu_services", *own, *times, *sizes)
    (cell,) = report["rules"]["coupled"]
    assert list(cell["tokens_per_second"]) == ["0", "1", "2", "4", "8", "8 in 4", "16 in 4", "16 in 8", "32 in 8"]
    assert all(rate > 0.0 for rate in cell["tokens_per_second"].values())
    assert cell["best_chain"] in ("0", "1", "2", "4", "8")
    assert report["ahead"]["best"]["plain"] == 0
    assert report["ahead"]["ratio"]["median"] > 0.0
    assert "coupled; 2 sessions" in table


@pytest.mark.evidence
def test_head_in_the_verifier_is_measured_against_the_model(tmp_path: Path) -> None:
    times = ("--turns", "2", "--seconds", "0.2", "--settle-s", "0.1", "--max-tokens", "20", "--temperatures", "1")
    report, table = report_of(tmp_path, "benchmarks.local_head", *times)
    (found,) = report["results"]
    assert all(rate > 0.0 for rate in found["tokens_per_second"].values())
    assert found["best_head"].startswith("head, ")
    assert found["head_over_better"]["median"] > 0.0
    assert found["best_head"] in table


def rates_of(rows: Sequence[Mapping[str, Any]], name: str, key: str = "contestant") -> list[float]:
    """Returns the token rates of a contestant, in turn."""
    return [row["tokens_per_second"] for row in rows if row[key] == name]


def test_peers_benchmark_compares_exact_numbers_of_the_same_tokens(tmp_path: Path) -> None:
    sizes = ("--prompts", "1", "--prompt-tokens", "24", "--max-tokens", "12", "--repetitions", "2")
    sweeps = ("--assistant-tokens", "1", "3", "--block-lengths", "2", "3", "--sweep-repetitions", "1")
    report, _ = report_of(tmp_path, "benchmarks.peers", *sizes, *sweeps)
    for temperature in (0, 1):
        results = report["embedded"][f"temperature {temperature}, 1 sessions, prompts of 24 tokens"]
        rates = results["median_tokens_per_second"]
        assert len(rates) == 7
        assert min(rates.values()) > 0.0
        assert set(results["best_draft_tokens"].values()) <= {1, 2, 3}
        rows = [row for row in report["measurements"] if row["temperature"] == temperature]
        assert sorted((row["repetition"], row["contestant"]) for row in rows) == sorted(product((0, 1), rates))
        for name, rate in rates.items():
            assert rate == pytest.approx(statistics.median(rates_of(rows, name)), rel=0.01)
        for name, ratio in results["ratios"].items():
            pairs = zip(*(rates_of(rows, contestant) for contestant in name.split(" / ")), strict=True)
            assert ratio["median"] == pytest.approx(statistics.median(own / base for own, base in pairs), rel=1e-3)
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
        for name in ("transformers", "decoder", "plain"):
            assert results["tokens_per_pass"][name] == 1.0
            assert results["acceptance_rate"][name] is None
        for name in ("transformers assisted", "transformers assisted, tuned", "speculative"):
            assert 0.0 < results["acceptance_rate"][name] <= 1.0
            assert 1.0 < results["tokens_per_pass"][name] <= results["block_efficiency"][name]
    # Whoever continues a prompt greedily, and however, says the same.
    results = report["embedded"]["temperature 0, 1 sessions, prompts of 24 tokens"]
    agreement = results["share_of_texts_like_those_of_plain"]
    assert set(agreement.values()) == {1.0}


def test_peers_benchmark_runs_a_pair_at_its_temperature_without_text_ends(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        save_tiny_model(tmp_path / name, stop_token_id=2)
    (tmp_path / "synthesis.json").write_text(json.dumps({"temperature": 0.0}))
    original = load_model(str(tmp_path / "target")).description
    assert original.stop_token_ids == (2,)
    with endless(read_pair(str(tmp_path))) as pair:
        assert pair.temperatures == (0.0,)
        copies = [load_model(folder).description for folder in (pair.target, pair.drafter)]
    assert [copy.stop_token_ids for copy in copies] == [(), ()]
    assert {copy.vocabulary_fingerprint for copy in copies} == {original.vocabulary_fingerprint}
    assert {copy.weights_fingerprint for copy in copies} == {original.weights_fingerprint}


def test_http_benchmark_streams_the_same_texts_both_ways(tmp_path: Path) -> None:
    sizes = ("--completions", "2", "--max-tokens", "8", "--repetitions", "2", "--concurrencies", "2")
    report, _ = report_of(tmp_path, "benchmarks.http_edge", *sizes)
    assert len(report["measurements"]) == 2 * 3
    result = report["at_2"]
    assert result["has_same_texts"] is True
    assert all(one["text_bytes"] > 8 for one in report["measurements"])
    for way in ("http", "http with details"):
        pairs = zip(*(rates_of(report["measurements"], one, "way") for one in (way, "grpc")), strict=True)
        median = statistics.median(own / base for own, base in pairs)
        assert result["beside_grpc"][way]["median"] == pytest.approx(median, rel=1e-3)


def test_token_trees_are_compared_with_a_chain_at_each_temperature(tmp_path: Path) -> None:
    sizes = ("--prompts", "2", "--max-tokens", "6", "--temperatures", "0", "1")
    arms = ("--arms", "planned 16", "coupled by racers 16")
    report, table = report_of(tmp_path, "benchmarks.block_efficiency", "--trees", *sizes, *arms)
    names = ["temperature_0_chain 8", "temperature_0_planned 16"]
    names += ["temperature_1_block chain 8", "temperature_1_coupled by racers 16"]
    assert [name for name in report if name.startswith("temperature_")] == names
    for name in names:
        found = report[name]["block_efficiency"]
        assert 1.0 <= found["low"] <= found["value"] <= found["high"] <= 11.0
        assert name.removeprefix("temperature_")[2:] in table


def test_block_is_expected_to_accept_no_less_than_token_of_the_same_blocks(tmp_path: Path) -> None:
    sizes = ("--prompts", "2", "--max-tokens", "24", "--block-length", "3", "--temperatures", "0", "1")
    report, table = report_of(tmp_path, "benchmarks.block_efficiency", "--paired", *sizes)
    for temperature in (0, 1):
        by_block, by_token = (report[f"temperature_{temperature}_{rule}"] for rule in ("block", "token"))
        assert f"T = {temperature:3} block over token" in table
        assert len(by_block["by_position"]) == 3
        # The first token is judged alike; each later one is accepted by `block` at least as often.
        assert by_block["by_position"][0] == by_token["by_position"][0]
        pairs = zip(by_block["by_position"], by_token["by_position"], strict=True)
        assert all(1.0 >= own >= other > 0.0 for own, other in pairs)
        for found in (by_block, by_token):
            assert 1.0 + found["accepted_per_block"]["value"] == pytest.approx(
                found["block_efficiency"]["value"], rel=1e-3
            )
        gained = report[f"temperature_{temperature}_gain_percent_block_over_token"]
        assert 0.0 <= gained["low"] <= gained["value"] <= gained["high"]
        assert (gained["value"] == 0.0) is (temperature == 0)
