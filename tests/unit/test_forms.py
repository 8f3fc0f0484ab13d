"""Forms are read on threads of their own, and only so many and so long."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.options.structured_output import form_compiler_pool
from draftwire.options.structured_output.form_compiler_pool import FormCompilerPool
from draftwire.options.structured_output.form_sandbox import FormSandbox
from draftwire.options.structured_output.grammar_automaton import FormCompiler
from draftwire.requests.automaton import Automaton
from draftwire.requests.structured_output import StructuredOutput

FORM = StructuredOutput.regex("a")


@dataclass(frozen=True)
class Stuck:
    """What a form was compiled from, in the place of an automaton."""

    wanted: StructuredOutput
    generated_ids: Sequence[int]


class StuckCompiler:
    """Reads a form when it is let go."""

    def __init__(self) -> None:
        self.is_free = threading.Event()

    def compile(self, wanted: StructuredOutput, generated_ids: Sequence[int] = ()) -> Automaton:
        assert self.is_free.wait(20.0)
        return cast(Automaton, Stuck(wanted, generated_ids))


@pytest.fixture
def stuck() -> Iterator[StuckCompiler]:
    compiler = StuckCompiler()
    yield compiler
    compiler.is_free.set()


def forms_of(compiler: StuckCompiler) -> FormCompilerPool:
    return FormCompilerPool(cast(FormCompiler, compiler), cast(FormSandbox, None))


async def test_forms_that_take_long_hold_up_nothing_else_that_runs_on_threads(stuck: StuckCompiler) -> None:
    reader = forms_of(stuck)
    reading = [asyncio.create_task(reader.compile(FORM, [number], 1)) for number in range(100)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "prompt"), 5.0) == "prompt"
    stuck.is_free.set()
    results: list[Any] = await asyncio.gather(*reading)
    assert results == [Stuck(FORM, [number]) for number in range(100)]


async def test_cancellation_is_never_forgotten_however_late_it_comes(stuck: StuckCompiler) -> None:
    """Also where the form has just been read: the request of a user who has left must not go on."""
    stuck.is_free.set()
    reader, num_cancelled = forms_of(stuck), 0
    for number in range(200):
        reading = asyncio.create_task(reader.compile(FORM, (), 1))
        for _ in range(number % 12):
            await asyncio.sleep(0)
        if reading.cancel():
            num_cancelled += 1
            with pytest.raises(asyncio.CancelledError):
                await reading
    assert num_cancelled > 20


async def test_forms_that_wait_for_others_are_told_to_come_back(
    stuck: StuckCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_compiler_pool, "COMPILE_SECONDS", 0.2)
    reader = forms_of(stuck)
    waiting = [reader.compile(FORM, (), 1) for _ in range(form_compiler_pool.COMPILE_THREADS + 2)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    kinds = [type(result) for result in results]
    assert kinds == [InvalidRequestError] * form_compiler_pool.COMPILE_THREADS + [NoRoomError] * 2


async def test_form_that_was_begun_late_is_told_to_come_back(
    stuck: StuckCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_compiler_pool, "COMPILE_SECONDS", 1.0)
    monkeypatch.setattr(form_compiler_pool, "COMPILE_THREADS", 1)
    reader, first_is_free = forms_of(stuck), threading.Event()
    reader._threads.submit(first_is_free.wait, 20.0)
    late = asyncio.create_task(reader.compile(FORM, (), 1))
    await asyncio.sleep(0.5)
    first_is_free.set()  # the form is begun now, and does not end in what is left of its time
    with pytest.raises(NoRoomError, match="other forms"):
        await late


async def test_too_many_waiting_forms_are_refused_at_once(
    stuck: StuckCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_compiler_pool, "COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(form_compiler_pool, "MAX_WAITING", 3)
    reader = forms_of(stuck)
    results = await asyncio.gather(*(reader.compile(FORM, (), 1) for _ in range(4)), return_exceptions=True)
    assert [isinstance(result, NoRoomError) and "limit" in str(result) for result in results] == [False] * 3 + [True]
    stuck.is_free.set()
    assert await reader.compile(FORM, (), 1), "those that have gone do not count"
