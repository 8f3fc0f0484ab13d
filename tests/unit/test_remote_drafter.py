"""RemoteDrafter where its event loop is blocked: vLLM's steps do not wait for it again and again."""

import asyncio
from collections.abc import Iterator
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_remote_drafter import RemoteDrafter
from vllm_remote_drafter import remote_drafter as module

DEADLINE_S = 0.02


class CountingTexts:
    """Has no drafters, and counts how often it is asked."""

    num_asked = 0

    def ask(self, rows: Any) -> dict[int, Any]:
        self.num_asked += 1
        return {}


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    running = asyncio.new_event_loop()
    thread = Thread(target=running.run_forever, daemon=True)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


@pytest.fixture
def released(loop: asyncio.AbstractEventLoop) -> Iterator[Event]:
    """Blocks the loop until it is set."""
    event = Event()
    loop.call_soon_threadsafe(event.wait)
    yield event
    event.set()


def test_loop_that_is_blocked_is_waited_for_less_each_time(
    loop: asyncio.AbstractEventLoop, released: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = SimpleNamespace(
        additional_config={"draftwire": {"drafters": ["localhost:1"], "deadline_ms": DEADLINE_S * 1e3}},
        model_config=SimpleNamespace(model="none", revision=None, max_model_len=8),
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
    )
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    texts: Any = CountingTexts()
    remote = RemoteDrafter(config)
    remote._loop = loop
    remote._running.set_result(texts)
    remote._thread = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]
    num_waits = 0
    ask = remote._ask

    def counted(rows: Any) -> Any:
        nonlocal num_waits
        num_waits += 1
        return ask(rows)

    monkeypatch.setattr(remote, "_ask", counted)

    def step() -> None:
        assert remote.propose([[1]], np.array([2]), np.zeros((1, 8), np.int32)) == [[]]

    for number in (1, 2, 3):
        for _ in range(3):
            step()
        assert num_waits == number, "it rests after it was late"
        now += DEADLINE_S * 2**number - 0.001
        step()
        assert num_waits == number
        now += 0.002
    released.set()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)
    assert texts.num_asked == 0, "what nobody waits for any more is not asked"
    for _ in range(3):
        step()
    assert (num_waits, texts.num_asked) == (6, 3), "it is in time again"
    assert remote._lateness.num_late == 0
