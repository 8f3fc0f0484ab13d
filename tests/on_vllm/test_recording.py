"""The record that `make test` replays without vLLM is what vLLM does."""

import json
import os
from pathlib import Path

import pytest

from draftwire.method.quantization import Encoding
from draftwire.requests.logprobs import LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from on_vllm.models import RANKS
from on_vllm.recording import Recording
from on_vllm.test_engine_on_vllm import PROMPT, Alone

RECORD = Path(__file__).parents[1] / "vectors" / "vllm_steps.json"


@pytest.mark.skipif(RANKS > 1, reason="one record is enough")
def test_record_is_what_vllm_does(vllm, own) -> None:
    """Prompts whole and in chunks, shared prefixes, blocks at open and later, sessions that wait, a preemption. With
    RECORD=1 the file is written anew.
    """
    vllm.engine._num_opened = 0
    greedy = {"sampling": SamplingParams(0.0)}
    with Recording(vllm.engine._scheduler) as recording:
        alone = Alone(vllm, own, pacer_tokens=120)
        first = alone.open(1, PROMPT, plain_rounds=1, **greedy)
        long = alone.open(2, [index % 256 for index in range(300)], plain_rounds=1, **greedy)
        one = alone.open(3, [9], **greedy)
        alone.duel.offer(one, alone.duel.block(one, 3, Encoding.ONE_HOT))
        reported = alone.open(4, PROMPT[:30], plain_rounds=1, logprobs=LogprobsRequest(prompt_logprobs=1), **greedy)
        waits = alone.open(5, PROMPT, plain_rounds=0, **greedy)
        alone.run()
        again = alone.open(6, [index % 256 for index in range(300)], **greedy)
        for session, length in ((first, 4), (long, 1), (again, 5), (waits, 2)):
            alone.duel.offer(session, alone.duel.block(session, length, Encoding.ONE_HOT))
        alone.run()
        pool = vllm.engine._scheduler.kv_cache_manager.block_pool
        alone.close(again)
        grown = [alone.open(number, [number] * 126, plain_rounds=6, **greedy) for number in (7, 8)]
        alone.step()
        held = pool.get_new_blocks(pool.get_num_free_blocks() - 1)
        for _ in range(9):
            alone.step()
        pool.free_blocks(held)
        alone.run()
        for session in (first, long, one, reported, waits, *grown):
            alone.close(session)
    assert any(step["drafted"] for step in recording.steps)
    assert any(len(step["waiting_after"]) for step in recording.steps), "somebody was preempted"
    steps = json.loads(json.dumps(recording.steps))
    if os.environ.get("RECORD"):
        lines = ",\n".join(json.dumps(step, separators=(",", ":")) for step in steps)
        RECORD.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    assert json.loads(RECORD.read_text(encoding="utf-8")) == steps
