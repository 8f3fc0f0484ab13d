"""RemoteDrafter without vLLM, against a real drafter: what vLLM's model runner would be given, step by step."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from observing import wait_until
from transformers import AutoModelForCausalLM

from benchmarks.law import CONTEXT_LENGTH
from tests.in_process import InProcessStack
from vllm_remote_drafter import RemoteDrafter

LONG = 3
DEADLINE_S = 5.0


class Rows:
    """vLLM's batch: texts, to each of which every step adds a token."""

    def __init__(self, remote: RemoteDrafter, *texts: list[int]) -> None:
        self.texts = [list(text) for text in texts]
        self._remote = remote

    def step(self, *token_ids: int) -> list[list[int]]:
        """Adds a token to each text, and returns what is drafted behind them."""
        buffer = np.zeros((len(self.texts), CONTEXT_LENGTH), np.int32)
        for row, (text, token_id) in enumerate(zip(self.texts, token_ids, strict=True)):
            text.append(token_id)
            buffer[row, : len(text)] = text
        lengths = np.array([len(text) for text in self.texts])
        return self._remote.propose([[token_id] for token_id in token_ids], lengths, buffer, slot_mappings=None)


@pytest.fixture
def drafter(pair: tuple[Path, Path]) -> Iterator[InProcessStack]:
    """A drafter of its own, which is killed."""
    with InProcessStack({"drafter": {"model": pair[1], "threads": 1}}) as running:
        yield running


def test_drafts_are_the_drafters_likeliest_tokens_and_none_when_it_is_gone(
    pair: tuple[Path, Path], drafter: InProcessStack
) -> None:
    address = f"127.0.0.1:{drafter.services['drafter'].port}"
    config = SimpleNamespace(
        additional_config={"draftwire": {"drafters": [address], "deadline_ms": DEADLINE_S * 1e3}},
        model_config=SimpleNamespace(model=str(pair[0]), revision=None, max_model_len=CONTEXT_LENGTH),
        speculative_config=SimpleNamespace(num_speculative_tokens=LONG),
    )
    model: Any = AutoModelForCausalLM.from_pretrained(pair[1]).eval()

    def likeliest(text: list[int]) -> list[int]:
        ids = list(text)
        for _ in range(LONG):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(text) :]

    remote = RemoteDrafter(config)
    rows = Rows(remote, [0, 1], [2, 1, 0])
    assert rows.step(0, 1) == [[], []], "of another rank than 0, nothing is asked"
    remote.start()
    try:
        (link,) = remote._running.result().drafters
        wait_until(lambda: link.connected, "it has found its drafter")
        assert rows.step(1, 2) == [[], []], "it does not wait for the prefill"
        wait_until(lambda: link.num_sessions == 2, "both are opened")
        wait_until(lambda: all(one.session.is_ready for one in remote._running.result().texts), "both are read")
        for tokens in ((2, 0), (1, 1), (0, 2)):
            assert rows.step(*tokens) == [likeliest(text) for text in rows.texts]
        drafter.kill("drafter")
        for tokens in ((1, 1), (2, 2)):
            began = time.monotonic()
            assert rows.step(*tokens) == [[], []]
            assert time.monotonic() - began < DEADLINE_S, "it does not wait for a drafter that is gone"
    finally:
        remote.stop()
    assert rows.step(1, 0) == [[], []]
