"""The verifier's own tests, of sessions, leases, fences, refusals and the audit, with vLLM as its engine."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_verifier_core as of_scripted
from greetings import greet
from on_vllm.models import vllm_config
from test_verifier_core import *  # noqa: F403
from test_verifier_core import DRAFTER, OTHER, VerifierCore

from draftwire_verifier.vllm import vllm_engine

_folder: Path | None = None


@pytest.fixture(autouse=True)
def shared_vllm(vllm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every core gets the vLLM that all tests share."""
    global _folder
    _folder = folder
    monkeypatch.setattr(vllm_engine, "load_vllm", lambda config: vllm)
    monkeypatch.setattr(vllm.engine, "stop", lambda: None)
    yield


def make_core() -> VerifierCore:
    assert _folder is not None
    return VerifierCore(vllm_config(_folder))


@pytest.fixture
async def core() -> AsyncIterator[VerifierCore]:
    core = make_core()
    await core.start()
    core.drafters._new_id = itertools.count(DRAFTER).__next__
    for drafter_id in (DRAFTER, OTHER):
        assert core.welcome_drafter(greet(), core.description).id == drafter_id
    yield core
    core.stop()


class TestVerifierService(of_scripted.TestVerifierService):
    """The service's contract, as a class of `test_verifier_core` states it."""

    def make_core(self) -> VerifierCore:
        return make_core()
