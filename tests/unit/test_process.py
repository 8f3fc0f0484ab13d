"""How a service's process ends, and what it says of it."""

import asyncio
import errno
import gc
import os
import resource
import signal
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from draftwire.errors import UnavailableError
from draftwire.runtime.metrics import ServiceMetrics
from draftwire.runtime.process import OPEN_FILES, OpenFilesLog, allow_open_files, run_service
from draftwire.runtime.service import Service
from draftwire.runtime.settings import ConnectionSettings, ServerSettings


async def at_once() -> None:
    """Work that ends as it begins."""


async def for_ever() -> None:
    await asyncio.Event().wait()


async def until_a_signal() -> None:
    """Sends it to this process."""
    os.kill(os.getpid(), signal.SIGTERM)
    await for_ever()


def fails_with(kind: type[Exception], message: str) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise kind(message)

    return fail


@pytest.fixture(autouse=True)
def _heap_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is over can be collected here, and later."""
    monkeypatch.setattr(gc, "freeze", lambda: None)


async def run(
    start: Callable[[], Awaitable[None]] = at_once,
    work: Callable[[], Awaitable[None]] = until_a_signal,
    num_sessions: Callable[[], int] = lambda: 0,
    is_lost: bool = False,
    metrics_port: int | None = None,
) -> tuple[int, list[EventDict]]:
    """Runs a service to its end, and returns the exit status and what was logged."""
    stopped: list[bool] = []
    service = Service(
        name="verifier",
        grpc_names=("draftwire.v1.VerifierService",),
        settings=ServerSettings(drain_seconds=0.2, metrics_port=metrics_port),
        connections=ConnectionSettings(),
        metrics=ServiceMetrics(),
        register=lambda _server: None,
        start=start,
        run=work,
        stop=lambda: stopped.append(True),
        num_sessions=num_sessions,
        is_lost=lambda: is_lost,
    )
    with capture_logs() as logs:
        status = await run_service(service)
        await asyncio.sleep(0.01)  # what the loop still holds goes
        gc.collect()  # and an error that nobody has looked at is logged when it does
    assert stopped == [True], "what it took is freed, once"
    return status, logs


def events_of(logs: list[EventDict]) -> list[str]:
    return [line["event"].removeprefix("verifier.") for line in logs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "work", "status", "reason"),
    [
        (at_once, fails_with(ValueError, "quoting a prompt"), 1, "ValueError"),
        (at_once, fails_with(UnavailableError, "a rank is lost"), 1, "a rank is lost"),
        (fails_with(UnavailableError, "no model folder"), for_ever, 2, "no model folder"),
        (fails_with(ValueError, "before any prompt"), for_ever, 2, "ValueError: before any prompt"),
    ],
)
async def test_failure_is_logged_once_and_told_in_the_status(
    start: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[None]], status: int, reason: str
) -> None:
    ended, logs = await run(start, work)
    assert ended == status
    errors = [line for line in logs if line["log_level"] == "error"]
    assert [(line["event"], line["reason"]) for line in errors] == [("verifier.server_failed", reason)]


@pytest.mark.parametrize("is_lost", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("start", [at_once, until_a_signal], ids=["serving", "loading"])
async def test_signal_ends_it_with_status_0_unless_a_part_of_it_is_lost(
    start: Callable[[], Awaitable[None]], is_lost: bool
) -> None:
    status, logs = await run(start, is_lost=is_lost)
    assert status == int(is_lost)
    assert all(line["log_level"] == "info" for line in logs)
    assert ("server_stopped" in events_of(logs)) == (start is at_once)


@pytest.mark.slow
async def test_sessions_that_outlast_the_drain_are_cut_and_counted() -> None:
    status, logs = await run(num_sessions=lambda: 3)
    assert status == 0
    assert [line["sessions_cut"] for line in logs if line["event"] == "verifier.drain_ended"] == [3]


@pytest.mark.slow
async def test_drain_ends_with_the_last_session() -> None:
    left = [2, 1, 0]
    status, logs = await run(num_sessions=lambda: left.pop(0))
    assert status == 0
    assert left == []
    assert "drain_ended" not in events_of(logs)


@pytest.mark.slow
async def test_work_ends_in_order_though_listeners_have_ended_before() -> None:
    """Followers, say, have to be told: the stop of a listener ends the service's work, and then cancels it again."""
    ended = []

    async def work() -> None:
        try:
            await until_a_signal()
        finally:
            await asyncio.sleep(0.05)
            ended.append(True)

    await run(work=work, metrics_port=0)
    assert ended


async def test_work_that_ends_by_itself_ends_the_service() -> None:
    """Without a signal: a listener that was stopped, say."""
    status, logs = await run(work=at_once)
    assert status == 0
    assert events_of(logs)[-1] == "server_stopped"


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "is_low"),
    [
        (1024, 2**20, OPEN_FILES, False),
        (1024, 4096, 4096, True),
        (4096, 4096, None, True),
        (1024, resource.RLIM_INFINITY, OPEN_FILES, False),
        (2**20, 2**20, None, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, False),
    ],
)
def test_as_many_files_may_be_open_as_connections_are_accepted(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, is_low: bool
) -> None:
    """As far as the process may raise it: else callers who say nothing take what the service itself needs."""
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: made.append(limits))
    with capture_logs() as lines:
        allow_open_files()
    assert made == ([] if raised is None else [(raised, hard)])
    assert events_of(lines) == ["process.open_files_limited"] * is_low


def test_files_that_cannot_be_opened_are_logged_once_a_minute() -> None:
    now = 0.0
    open_files_log = OpenFilesLog(lambda: now)
    counts: list[int] = []
    for _ in range(600):
        with capture_logs() as lines:
            assert open_files_log.takes(OSError(errno.EMFILE, "too many"))
        counts += [line["num_failures"] for line in lines]
        now += 0.2
    assert counts == [1, 300]
    assert not open_files_log.takes(OSError(errno.EPIPE, "broken"))
    assert not open_files_log.takes(None)
