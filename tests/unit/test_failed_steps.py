"""A step of the verifier that fails ends its sessions and nothing else, and quotes nothing."""

import asyncio
from typing import Any

import pytest

from draftwire.errors import UnavailableError
from draftwire.keys import KEY_BYTES
from draftwire.parameters import SamplingParams
from draftwire.rounds import TargetSessionSpec, Verdict
from draftwire.services.leases import SessionFailed
from draftwire.services.settings import ModelSettings
from draftwire.services.verifier.config import VerifierConfig
from draftwire.services.verifier.core import VerifierCore


def spec_of(session_id: int) -> TargetSessionSpec:
    return TargetSessionSpec(
        session_id=session_id,
        epoch=0,
        first_round=0,
        choice=0,
        token_ids=[1, 2, 3],
        prompt_len=3,
        sampling=SamplingParams(),
        rule="block",
        verifying_key=bytes(KEY_BYTES),
        max_draft_tokens=3,
        plain_rounds=1,
        stop_token_ids=frozenset(),
        max_len=20,
    )


async def test_error_of_a_library_fails_the_steps_sessions_without_a_quote_and_the_next_session_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = VerifierCore(VerifierConfig(ModelSettings("scripted:")))
    await core.start()
    lease_id, outbox = core.open_lease()
    running = asyncio.create_task(core.run_steps())

    def fail(_: object) -> Any:
        raise RuntimeError("words of a prompt")

    try:
        with monkeypatch.context() as broken:
            broken.setattr(core._engine, "step", fail)
            core.open_session(spec_of(1), lease_id)
            async with asyncio.timeout(10):
                (failed,) = await outbox.take_all()
        assert isinstance(failed, SessionFailed)
        assert isinstance(failed.error, UnavailableError)
        assert "words" not in str(failed.error)
        assert core.num_sessions == 0
        core.open_session(spec_of(2), lease_id)
        async with asyncio.timeout(10):
            (verdict,) = await outbox.take_all()
        assert isinstance(verdict, Verdict)
        assert verdict.fence.session_id == 2
    finally:
        running.cancel()
        core.stop()
