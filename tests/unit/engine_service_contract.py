"""What drafter and verifier both promise as services, written once and run on each of them."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from group_fakes import FakeFollowers, FakeParallelModel, guarded
from observing import until

from draftwire.engine.leases import SessionFailed
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.place import Place, WantedGroup
from draftwire.errors import DraftwireError, GroupLostError, NoRoomError, UnavailableError
from draftwire.runtime.metrics import PREFIX
from draftwire.runtime.outbox import Outbox
from draftwire.runtime.settings import EngineSettings


@dataclass(slots=True)
class Served:
    """A service with a scripted model that runs, and a gateway's stream."""

    core: Any
    lease_id: int
    outbox: Outbox[Any]
    running: asyncio.Task[None]

    @property
    def failures(self) -> list[tuple[int, Exception]]:
        """Sessions that the gateway was told are gone, and why."""
        told = [event for event in self.outbox._items if isinstance(event, SessionFailed)]
        assert all(event.epoch == 0 for event in told)
        return [(event.session_id, event.error) for event in told]


def join_group(
    core: Any, running: asyncio.Task[None], fake: FakeParallelModel, followers: FakeFollowers
) -> asyncio.Task[None]:
    """Makes a service that runs rank 0 of two, without another one, and returns its new run."""
    running.cancel()
    service = core.config.wanted_group.service
    core.group = GroupGuard(WantedGroup(service, "ranks", 2, 0.2), core._torch, Place(0, 2), followers)
    core.group.take(guarded(fake, service))
    return asyncio.create_task(core.run())


class EngineServiceContract:
    """Tests of any service with an engine; a class that inherits them says what its messages are."""

    def make_core(self) -> Any:
        """Makes a service with a scripted model, not yet started."""
        raise NotImplementedError

    async def open(self, core: Any, session_id: int, lease_id: int) -> None:
        """Opens a session and returns once no step is wanted for it."""
        raise NotImplementedError

    def ask(self, core: Any, session_id: int) -> None:
        """Gives a session work for one step."""
        raise NotImplementedError

    def done(self, served: Served) -> list[int]:
        """Returns the sessions that steps brought what was asked for."""
        raise NotImplementedError

    def say_nothing(self, core: Any) -> None:
        """Sends a message that makes no step."""
        raise NotImplementedError

    @pytest.fixture
    async def served(self) -> AsyncIterator[Served]:
        core = self.make_core()
        await core.start()
        served = Served(core, *core.open_lease(), asyncio.create_task(core.run()))
        yield served
        served.running.cancel()
        await asyncio.gather(served.running, return_exceptions=True)
        await core._torch.run(lambda: None)  # the running step ends while there is a loop to tell of it
        core.stop()

    async def open_all(self, served: Served, *session_ids: int) -> None:
        for session_id in session_ids:
            await asyncio.wait_for(self.open(served.core, session_id, served.lease_id), 10.0)
        assert not self.done(served)

    def let_steps_fail(self, core: Any, patch: pytest.MonkeyPatch, *errors: Exception) -> None:
        """Lets the next steps fail; those after them are carried out."""
        step = core._engine.step
        patch.setattr(core._engine, "step", Mock(side_effect=[*errors, *[DEFAULT] * 9], wraps=step))

    # Start

    async def test_started_service_has_measured_reading_and_shows_its_numbers(self, served: Served) -> None:
        core = served.core
        assert core._scheduler.pacer.alone.seconds_per_token > 0.0
        assert core.metrics.of_model.model_name == core.description.name
        for num_sessions in (0, 1, 2):
            assert core.metrics.registry.get_sample_value(PREFIX + "num_sessions") == num_sessions == core.num_sessions
            await self.open_all(served, num_sessions)

    async def test_engine_prepares_further_steps_while_no_session_is_open(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core, prepared, engine = served.core, list[int](), served.core._engine

        def prepare() -> None:
            prepared.append(core.num_sessions)
            engine.is_prepared = len(prepared) == 5

        await self.open_all(served, 1)
        monkeypatch.setattr(engine, "prepare", prepare)
        monkeypatch.setattr(engine, "is_prepared", False, raising=False)
        self.ask(core, 1)
        await until(lambda: self.done(served) == [1], "a session is served meanwhile")
        assert not prepared
        core.close_session(1, 0)
        await until(lambda: engine.is_prepared, "all steps are made")
        assert prepared == [0] * 5

    # Leases

    async def test_sessions_end_with_their_own_lease_and_free_what_they_hold(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core, (other_id, other) = served.core, served.core.open_lease()
        freed: list[tuple[Any, str]] = []
        forget = core._engine.forget
        monkeypatch.setattr(
            core._engine, "forget", lambda key: (freed.append((key, threading.current_thread().name)), forget(key))
        )
        await self.open_all(served, 1, 2)
        await self.open(core, 3, other_id)
        core.end_lease(served.lease_id)
        assert set(core._scheduler.sessions) == {(3, 0)}
        await core._torch.run(lambda: None)
        assert freed == [((1, 0), "torch"), ((2, 0), "torch")]
        assert await asyncio.wait_for(served.outbox.take_all(), 5.0) == [], "its stream has ended"
        assert not other._items
        self.ask(core, 3)
        await until(lambda: self.done(replace(served, outbox=other)) == [3], "the other stream's session is served")

    async def test_command_for_another_streams_session_is_not_carried_out(self, served: Served) -> None:
        core, (other_id, _) = served.core, served.core.open_lease()
        await self.open_all(served, 1)
        assert core.is_for(served.lease_id, (1, 0))
        assert core.is_for(other_id, (1, 1)), "whom an unknown session belongs to is not known"
        assert not core._scheduler.dropped
        assert not core.is_for(other_id, (1, 0))
        assert core._scheduler.dropped == {"other_lease": 1}

    # Steps that fail

    async def test_library_error_fails_the_steps_sessions_unquoted_and_no_later_one(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self.open_all(served, 1, 2, 3)
        self.let_steps_fail(served.core, monkeypatch, RuntimeError("words of a prompt"))
        for session_id in (1, 2):
            self.ask(served.core, session_id)
        await until(lambda: served.failures, "sessions fail")
        assert [session_id for session_id, _ in served.failures] == [1, 2]
        for _, error in served.failures:
            assert isinstance(error, UnavailableError)
            assert "words" not in str(error)
        assert served.core.num_sessions == 1
        self.ask(served.core, 3)
        await until(lambda: self.done(served) == [3], "the next session runs")

    async def test_error_of_ours_is_told_as_it_is(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        error: DraftwireError = NoRoomError("the cache is full")
        await self.open_all(served, 1)
        self.let_steps_fail(served.core, monkeypatch, error)
        self.ask(served.core, 1)
        await until(lambda: served.failures, "sessions fail")
        assert served.failures == [(1, error)]

    async def test_session_closed_during_a_failing_step_is_not_failed_when_reopened(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core, begun, to_end = served.core, threading.Event(), threading.Event()
        await self.open_all(served, 1, 2)
        carry_out = core._engine.step

        def step(step: Any) -> Any:
            if begun.is_set():
                return carry_out(step)
            begun.set()
            to_end.wait(10.0)
            raise RuntimeError

        monkeypatch.setattr(core._engine, "step", step)
        for session_id in (1, 2):
            self.ask(core, session_id)
        await until(begun.is_set, "the step begins")
        assert core.busy_s() > 0.0
        core.close_session(1, 0)
        opening = asyncio.create_task(self.open(core, 1, served.lease_id))
        await asyncio.sleep(0)
        to_end.set()
        await asyncio.wait_for(opening, 10.0)
        await until(lambda: served.failures, "sessions fail")
        assert [session_id for session_id, _ in served.failures] == [2]
        self.ask(core, 1)
        await until(lambda: self.done(served) == [1], "the session that was opened again runs")

    # Groups of processes

    @pytest.mark.parametrize("how", ["ended", "silent", "in a step", "stuck"])
    async def test_lost_group_is_told_to_every_session_and_ends_the_run(
        self, served: Served, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core, fake, followers = served.core, FakeParallelModel(), FakeFollowers()
        await self.open_all(served, 1, 2)
        if how == "stuck":
            core.config = replace(core.config, engine=EngineSettings(watchdog_s=0.1))
        served.running = join_group(core, served.running, fake, followers)
        await asyncio.sleep(0)
        match how:
            case "ended":
                followers.end = "rank 1 ended with status -9"
            case "silent":
                fake.error = UnavailableError("rank 1 is silent")
            case "in a step":
                self.let_steps_fail(core, monkeypatch, GroupLostError("rank 1 is gone"))
                self.ask(core, 1)
            case "stuck":
                core._torch.post(time.sleep, 1.0)
        reason = r"a step takes longer than 0\.1 s" if how == "stuck" else "rank 1"
        with pytest.raises(GroupLostError, match=reason):
            await asyncio.wait_for(served.running, 5.0)
        assert core.group.is_lost
        assert core.num_sessions == 0
        assert [session_id for session_id, _ in served.failures] == [1, 2]
        assert all(isinstance(error, GroupLostError) for _, error in served.failures)

    @pytest.mark.parametrize("has_messages", [False, True])
    async def test_idle_group_hears_of_rank_0_within_the_timeout_until_it_is_let_go(
        self, served: Served, has_messages: bool
    ) -> None:
        """While it is idle, and while messages come that make no step."""
        fake = FakeParallelModel()
        served.running = join_group(served.core, served.running, fake, FakeFollowers())
        for _ in range(70):
            if has_messages:
                self.say_nothing(served.core)
            await asyncio.sleep(0.005)
        assert fake.calls.count("heartbeat") >= 3
        served.running.cancel()
        await asyncio.gather(served.running, return_exceptions=True)
        assert fake.calls[-1] == "stop"
        assert not served.core.group.is_lost
