"""Two ranks: one dies or fails in a forward pass. The verifier notices, fails its sessions so that they move, and ends.

Each test loses vLLM for the whole process: they run one by one, in processes of their own.
"""

import asyncio
import os
import signal
import time
from typing import Any

import psutil
import pytest
from observing import until
from session_specs import target_spec

from draftwire.engine.leases import SessionFailed
from draftwire.errors import GroupLostError, UnavailableError
from draftwire.method.rounds import PlainRun, Verdict
from draftwire_verifier.core import VerifierCore
from on_vllm.models import RANKS, vllm_config

LOST = os.environ.get("TEST_VLLM_LOST", "")
pytestmark = pytest.mark.skipif(RANKS == 1 or not LOST, reason="needs two ranks, which are lost")
SECONDS = 15.0


def break_forward(worker: Any, rank: int) -> None:
    """Runs in a rank of vLLM."""
    if worker.rank == rank:
        worker.model_runner._model_forward = _fail


def _fail(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("planted")


def break_decisions(worker: Any) -> None:
    """Runs in a rank of vLLM; only rank 0 decides."""
    from draftwire.verification import deciding

    whole = deciding.probabilities_of_spans
    calls = []

    def once(*arguments: Any) -> Any:
        calls.append(1)
        return _fail() if len(calls) == 1 else whole(*arguments)

    deciding.probabilities_of_spans = once


async def test_sessions_are_moved_when_a_rank_is_lost(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions of tests go to the ranks
    core = VerifierCore(vllm_config(folder))
    await core.start()
    engine: Any = core._engine
    running = asyncio.create_task(core.run())
    lease, outbox = core.open_lease()

    def events(kind: type) -> list[Any]:
        return [event for event in outbox._items if isinstance(event, kind)]

    for number in range(4):
        core.open_session(target_spec(session_id=number, token_ids=[1, 2, number], plain_rounds=2), lease)
    await until(lambda: len(events(Verdict)) == 8, "all decide", 60.0)
    started = time.monotonic()
    if LOST == "killed":
        workers = [one for one in psutil.Process().children(recursive=True) if "VLLM" in one.name()]
        assert len(workers) >= 2, [one.name() for one in psutil.Process().children(recursive=True)]
        workers[-1].send_signal(signal.SIGKILL)
    elif LOST == "decisions":
        engine.core.collective_rpc(break_decisions)
        core.run_plain(PlainRun(core._scheduler.sessions[0, 0].fence, 1))
        await until(lambda: events(SessionFailed), "its session fails", SECONDS)
        assert [event.session_id for event in events(SessionFailed)] == [0]
        assert isinstance(events(SessionFailed)[0].error, UnavailableError)
        core.run_plain(PlainRun(core._scheduler.sessions[1, 0].fence, 1))
        await until(lambda: len(events(Verdict)) == 9, "the others go on", SECONDS)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return
    else:
        engine.core.collective_rpc(break_forward, args=(int(LOST.removeprefix("forward")),))
        core.run_plain(PlainRun(core._scheduler.sessions[0, 0].fence, 1))
    await until(lambda: len(events(SessionFailed)) == 4, "all sessions are told", SECONDS)
    print(f"{LOST}: all sessions failed after {time.monotonic() - started:.2f} s")
    with pytest.raises(GroupLostError):
        await running
    assert all(isinstance(event.error, GroupLostError) for event in events(SessionFailed))
    core.stop()
