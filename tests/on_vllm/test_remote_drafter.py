"""vLLM itself with drafts of a drafter service: the texts that it writes without, whatever becomes of the drafter.

Runs in a process of its own: each engine is a process that vLLM starts.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Any

import pytest
from observing import read_metric, wait_until

from draftwire.cli.local_stack import LocalStack
from on_vllm.models import CONTEXT_LENGTH, RANKS

pytestmark = pytest.mark.skipif("TEST_VLLM_REMOTE" not in os.environ, reason="starts engines of its own")

PROMPTS = [[(7 * number + index) % 256 for index in range(length)] for number, length in enumerate((3, 20, 41, 150))]
PROMPTS.append(PROMPTS[1])
NUM_TOKENS = 100
LONG = 4


def start(folder: Any, **drafts: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        max_model_len=CONTEXT_LENGTH,
        kv_cache_memory_bytes=2**26,
        disable_log_stats=False,
        tensor_parallel_size=RANKS,
        **drafts,
    )


def write(engine: Any) -> list[list[int]]:
    from vllm import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [list(result.outputs[0].token_ids) for result in engine.generate(prompts, how, use_tqdm=False)]


def counted(engine: Any, name: str) -> float:
    return sum(metric.value for metric in engine.get_metrics() if metric.name == f"vllm:spec_decode_num_{name}")


@pytest.fixture(scope="module", autouse=True)
def engines_in_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        yield


def test_texts_are_those_without_drafts_even_if_the_drafter_is_killed(folder) -> None:
    engine = start(folder)
    expected = write(engine)
    engine.llm_engine.engine_core.shutdown()
    with LocalStack({"drafter": {"model": folder, "dtype": "float32", "threads": 1}}) as stack:
        drafter = stack.services["drafter"]
        engine = start(
            folder,
            speculative_config={
                "method": "custom_class",
                "model": "vllm_remote_drafter.RemoteDrafter",
                "num_speculative_tokens": LONG,
            },
            additional_config={"draftwire": {"drafters": [f"127.0.0.1:{drafter.port}"], "deadline_ms": 2000}},
        )
        assert write(engine) == expected
        drafted, accepted = counted(engine, "draft_tokens"), counted(engine, "accepted_tokens")
        print(f"{accepted:g} of {drafted:g} draft tokens accepted, {len(PROMPTS) * NUM_TOKENS} tokens")
        assert accepted > 0.5 * len(PROMPTS) * NUM_TOKENS, "drafts of the target itself"
        assert accepted > 0.9 * drafted
        sent = read_metric(stack, "drafter", "blocks_sent_total")
        texts: Future[list[list[int]]] = Future()
        writing = Thread(target=lambda: texts.set_result(write(engine)))
        writing.start()
        wait_until(lambda: read_metric(stack, "drafter", "blocks_sent_total") > sent + 10, "it drafts")
        drafter.process.send_signal(signal.SIGKILL)
        assert not texts.done(), "it was killed in the middle"
        writing.join(60.0)
        assert texts.result(0) == expected
        assert write(engine) == expected
        engine.llm_engine.engine_core.shutdown()
