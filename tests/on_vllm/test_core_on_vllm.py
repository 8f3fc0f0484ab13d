"""The verifier's own tests, of sessions, leases, fences, refusals and the audit, with vLLM as its engine."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import test_verifier_core as of_scripted
from greetings import greet
from observing import until
from session_specs import target_spec
from test_verifier_core import *  # noqa: F403
from test_verifier_core import DRAFTER, OTHER, VerifierCore, events_of

from draftwire.method.rounds import Verdict
from draftwire_verifier.vllm import vllm_engine
from on_vllm.models import vllm_config

IDLE_SECONDS = 10.0

_folder: Path | None = None


@pytest.fixture(autouse=True)
def shared_vllm(vllm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every core gets the vLLM that all tests share."""
    global _folder
    _folder = folder
    monkeypatch.setattr(vllm_engine, "load_vllm", lambda config: vllm)
    monkeypatch.setattr(vllm.engine, "stop", lambda: None)


def make_core() -> VerifierCore:
    assert _folder is not None
    return VerifierCore(vllm_config(_folder))


@pytest.fixture
async def core() -> AsyncIterator[VerifierCore]:
    core = make_core()
    await core.start()
    core.drafters._new_id = itertools.count(DRAFTER).__next__
    for drafter_id in (DRAFTER, OTHER):
        assert core.peers.welcome(greet(), core.description).id == drafter_id
    yield core
    core.stop()


class TestVerifierService(of_scripted.TestVerifierService):
    """The service's contract, as a class of `test_verifier_core` states it."""

    def make_core(self) -> VerifierCore:
        return make_core()


async def test_core_runs_on_vllm(core: VerifierCore) -> None:
    assert isinstance(core._engine, vllm_engine.VllmEngine)
    assert core.card.description.name == core.config.loading.model.rsplit("/", 1)[-1]


async def test_idle_verifier_with_open_sessions_uses_no_processor(core: VerifierCore) -> None:
    """Fifty sessions wait for blocks that do not come: less than 1 % of a processor, children included."""
    running = asyncio.create_task(core.run())
    lease, outbox = core.open_lease()
    for number in range(50):
        spec = target_spec(session_id=number, token_ids=[1, 2, 3 + number], plain_rounds=1)
        core.open_session(spec, lease)
    await until(lambda: sum(isinstance(event, Verdict) for event in events_of(outbox)) == 50, "all have decided once")
    process = psutil.Process()
    watched = [process, *process.children(recursive=True)]

    def used_s() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in watched)

    await asyncio.sleep(1.0)
    before = used_s()
    await asyncio.sleep(IDLE_SECONDS)
    share = (used_s() - before) / IDLE_SECONDS
    print(f"idle: {share:.2%} of a processor, {len(watched)} processes")
    assert share < 0.01
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
