"""A KV cache that is measured, and the rank in a process of its own, as it is on a CPU outside of tests."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from draftwire.errors import InvalidRequestError
from draftwire_verifier.vllm.vllm_engine import load_vllm
from on_vllm.models import ARGUMENTS, CONTEXT_LENGTH, ENGINE, vllm_config

pytestmark = pytest.mark.skipif("TEST_VLLM_MEASURED" not in os.environ, reason="needs a process of its own")


def test_vllm_that_cannot_start_is_refused_in_words(folder: Path) -> None:
    engine = replace(ENGINE, kv_cache_tokens=10**11)
    with pytest.raises(InvalidRequestError, match="vLLM cannot start: "):
        load_vllm(vllm_config(folder, engine, ARGUMENTS))


def test_measured_cache_holds_all_sessions_at_their_longest_and_no_more(folder: Path) -> None:
    """The model is so small that what is left of the machine's memory would hold more."""
    engine = load_vllm(vllm_config(folder, replace(ENGINE, kv_cache_tokens="auto"), ARGUMENTS)).engine
    try:
        block_size = engine._scheduler.block_size
        of_a_session = -(-(CONTEXT_LENGTH + ENGINE.max_draft_tokens + 1) // block_size) * block_size
        assert engine.num_cached_tokens == ENGINE.max_sessions * of_a_session
        assert [num_tokens for num_tokens, _ in engine.warm_up()] == [2, 64]
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        assert engine.core.model_executor.workers, "the rank is in a process of its own"
    finally:
        engine.stop()
