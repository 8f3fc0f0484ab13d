"""Forms are compiled in a process with limits first: bad ones harm nobody, and callers take turns."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from observing import is_alive, until, wait_until
from tokenizers import Tokenizer, decoders, models

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.options.structured_output import form_budget, form_sandbox
from draftwire.options.structured_output.form_budget import FULL_S, MAX_CALLERS, REFILL_S, FormBudget
from draftwire.options.structured_output.form_sandbox import MAX_RUNNING, FormSandbox
from draftwire.options.structured_output.grammar_automaton import TRIAL_S, FormVocabulary
from draftwire.requests.structured_output import StructuredOutput

TOKENS = [*'"0123456789abcdef', "<end>"]
GOOD = StructuredOutput.regex("[ab]{2}")
AMBIGUOUS = StructuredOutput.grammar('start: e\ne: e e e | e e | "a" | "b"')
ENDLESS = StructuredOutput.json({"type": "integer", "multipleOf": 9_999_991})


def vocabulary() -> FormVocabulary:
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(TOKENS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return FormVocabulary(tokenizer.to_str(), len(TOKENS), len(TOKENS), (len(TOKENS) - 1,))


@pytest.fixture
async def sandbox() -> AsyncIterator[FormSandbox]:
    sandbox = FormSandbox(vocabulary)
    yield sandbox
    sandbox.stop()


async def test_endless_form_is_refused_in_time_and_others_are_compiled_meanwhile(
    sandbox: FormSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_sandbox, "CPU_SECONDS", 1)
    monkeypatch.setattr(form_sandbox, "SECONDS", 60.0)  # however busy the machine is
    endless = asyncio.create_task(sandbox.measure(ENDLESS, "somebody"))
    cost = await sandbox.measure(GOOD, "another")
    assert not endless.done()
    assert 0 < cost.memory_bytes < 2**24
    assert 0.0 < cost.cpu_s < 0.5
    with pytest.raises(InvalidRequestError):
        await endless
    num_compiled = sandbox._last_number
    for form in (ENDLESS, GOOD):
        with pytest.raises(InvalidRequestError, match="more than") if form is not GOOD else monkeypatch.context():
            await sandbox.measure(form, "another")
    assert sandbox._last_number == num_compiled, "what is known is not compiled again"
    with pytest.raises(InvalidRequestError, match="unclosed"):
        await sandbox.measure(StructuredOutput.regex("(a"), "another")


async def test_form_with_costly_masks_is_refused_though_it_compiles_quickly(sandbox: FormSandbox) -> None:
    with pytest.raises(InvalidRequestError, match="costs too much to follow"):
        await sandbox.measure(AMBIGUOUS, "somebody")
    cost = sandbox._known[form_sandbox._hash_of(AMBIGUOUS)]
    assert cost.cpu_s < TRIAL_S < cost.trial_s
    assert (await sandbox.measure(GOOD, "somebody")).trial_s < TRIAL_S / 4


async def test_process_ends_with_the_sandbox_and_all_that_it_compiles(sandbox: FormSandbox) -> None:
    await sandbox.measure(GOOD)
    process = sandbox._process
    assert process is not None
    waiting = asyncio.create_task(sandbox.measure(ENDLESS))
    children = f"/proc/{process.pid}/task/{process.pid}/children"

    def forks() -> list[int]:
        with open(children) as file:
            return [int(one) for one in file.read().split()]

    await until(forks, "the form is being compiled")
    forked = forks()
    sandbox.stop()
    with pytest.raises(NoRoomError):
        await waiting
    wait_until(lambda: not is_alive(process.pid), "the process has ended")
    wait_until(lambda: not any(map(is_alive, forked)), "no form is compiled any more")


async def test_another_process_is_started_after_one_that_was_killed(sandbox: FormSandbox) -> None:
    await sandbox.measure(GOOD)
    first = sandbox._process
    assert first is not None
    first.kill()
    await until(lambda: sandbox._process is not first, "the end of the process is noticed")
    await sandbox.measure(StructuredOutput.regex("a"))
    assert sandbox._process is not None


class Turns(FormSandbox):
    """One whose forms are compiled when the test says so."""

    def __init__(self, budget: FormBudget | None = None) -> None:
        super().__init__(vocabulary, budget)
        self.started: list[int] = []
        self.num_processes = 0

    async def _run_process(self) -> None:
        self.num_processes += 1
        await asyncio.Event().wait()

    def _send(self, request: Any) -> None:
        if "id" in request:
            self.started.append(request["id"])

    async def compile_next(self, cpu_s: float | None = 0.1, trial_s: float = 0.0) -> str:
        """Ends the form that was begun first; returns whose it is."""
        caller = self._running[number := self.started.pop(0)].caller
        self._take({"id": number, "cpu_s": cpu_s, "memory_bytes": 1, "trial_s": trial_s, "reason": ""})
        for _ in range(5):
            await asyncio.sleep(0)
        return caller


def forms(count: int) -> list[StructuredOutput]:
    return [StructuredOutput.regex(f"a{{{number + 1}}}") for number in range(count)]


async def queued(sandbox: FormSandbox, caller: str, wanted: list[StructuredOutput]) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(sandbox.measure(form, caller)) for form in wanted]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def test_callers_take_turns_and_have_one_form_compiled_at_a_time() -> None:
    sandbox = Turns()
    first = await queued(sandbox, "first", forms(6))
    assert len(sandbox.started) == 1 < MAX_RUNNING
    second = await queued(sandbox, "second", forms(2))
    assert len(sandbox.started) == 2
    third = await queued(sandbox, "third", forms(2))
    order = [await sandbox.compile_next() for _ in range(10)]
    assert order.index("third") <= 2, "whoever comes later does not wait for all forms of those before"
    assert sorted(order[:6]) == sorted(["first", "second", "third"] * 2)
    await asyncio.gather(*first, *second, *third)
    sandbox.stop()


async def test_stop_of_the_sandbox_refuses_waiting_forms_and_starts_no_process() -> None:
    sandbox = Turns()
    tasks = [task for caller in "abcde" for task in await queued(sandbox, caller, forms(2))]
    assert len(sandbox.started) == MAX_RUNNING < len(tasks)
    sandbox.stop()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [NoRoomError] * len(tasks)
    with pytest.raises(NoRoomError, match="stopping"):
        await sandbox.measure(GOOD, "late")
    assert (sandbox.num_processes, len(sandbox.started), sandbox._task) == (1, MAX_RUNNING, None)
    assert not sandbox._jobs


async def test_nothing_waits_for_a_process_that_takes_its_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def wait() -> None:
        assert may_end.wait(20.0)
        ended.set()

    monkeypatch.setattr(form_sandbox.os, "killpg", lambda *_: None)
    sandbox = FormSandbox(vocabulary)
    sandbox._process = SimpleNamespace(pid=1, wait=wait)  # type: ignore[assignment]
    sandbox.stop()
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(20.0), "it is waited for, or it would stay as a zombie"


async def test_tokenizer_is_encoded_on_a_thread(sandbox: FormSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded_on: list[tuple[bool, str]] = []
    encode = form_sandbox._line

    def line(content: Any) -> bytes:
        encoded_on.append(("tokenizer" in content, threading.current_thread().name))
        return encode(content)

    monkeypatch.setattr(form_sandbox, "_line", line)
    await sandbox.measure(GOOD)
    ((is_tokenizer, thread), *requests) = encoded_on
    assert is_tokenizer
    assert thread != threading.current_thread().name
    assert requests == [(False, threading.current_thread().name)]


async def test_caller_of_costly_forms_is_sent_away_and_nobody_else_is() -> None:
    now = 0.0
    sandbox = Turns(FormBudget(lambda: now))
    greedy = await queued(sandbox, "greedy", forms(8))
    for _ in range(5):
        assert await sandbox.compile_next(2.0) == "greedy"
    with pytest.raises(NoRoomError, match="retry in") as raised:
        await sandbox.measure(forms(20)[-1], "greedy")
    assert raised.value.retry_after_s >= 1.0
    results = await asyncio.gather(*greedy, return_exceptions=True)
    assert [type(result) for result in results[-3:]] == [NoRoomError] * 3, "also what had been queued before"
    (other,) = await queued(sandbox, "other", forms(9)[-1:])
    assert await sandbox.compile_next() == "other"
    await other
    now = REFILL_S
    (again,) = await queued(sandbox, "greedy", forms(10)[-1:])
    assert await sandbox.compile_next() == "greedy"
    await again
    sandbox.stop()


async def test_caller_pays_once_for_following_texts_of_a_form() -> None:
    now = 0.0
    sandbox = Turns(FormBudget(lambda: now))
    (task,) = await queued(sandbox, "somebody", forms(1))
    await sandbox.compile_next(0.0, trial_s=FULL_S)
    await task
    with pytest.raises(NoRoomError, match="used up"):
        await sandbox.measure(forms(1)[0], "somebody")
    now = 1.0
    for _ in range(5):
        await sandbox.measure(forms(1)[0], "somebody")
    sandbox.stop()


async def test_known_costly_forms_are_charged_again_as_services_recompile_them() -> None:
    sandbox = Turns(FormBudget(lambda: 0.0))
    (task,) = await queued(sandbox, "greedy", forms(1))
    await sandbox.compile_next(0.9)
    await task
    asked = [sandbox.measure(forms(1)[0], "greedy") for _ in range(50)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(not isinstance(result, NoRoomError) for result in results) == pytest.approx(FULL_S / 0.9, abs=2)
    sandbox.stop()


def test_budgets_are_refilled_and_callers_are_forgotten() -> None:
    now = 0.0
    budget = FormBudget(lambda: now)
    budget.charge("a", FULL_S * 1.5)
    with pytest.raises(NoRoomError) as raised:
        budget.check("a")
    assert raised.value.retry_after_s == pytest.approx(REFILL_S / 2)
    budget.check("b")
    now = REFILL_S * 0.6
    budget.check("a")
    for number in range(MAX_CALLERS + 5):
        budget.charge(f"caller {number}", 1.0)
    assert len(budget._full_at) == MAX_CALLERS


def test_budgets_that_are_full_take_no_place() -> None:
    """A table that is full of them is cleared at once, and not searched for every caller that comes."""
    now = 0.0
    budget = FormBudget(lambda: now)
    for number in range(MAX_CALLERS):
        budget.charge(f"free {number}", 0.0)
    assert not budget._full_at
    for number in range(MAX_CALLERS):
        budget.charge(f"caller {number}", 1.0)
    now = REFILL_S / FULL_S
    budget.charge("last", 1.0)
    assert list(budget._full_at) == ["last"]


def test_caller_whose_budget_is_nearest_to_full_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_budget, "MAX_CALLERS", 2)
    budget = FormBudget(lambda: 0.0)
    for caller, cpu_s in (("a", 12.0), ("b", 11.0), ("c", 13.0)):
        budget.charge(caller, cpu_s)
    budget.check("b")
    for caller in "ac":
        with pytest.raises(NoRoomError):
            budget.check(caller)


def test_process_loads_neither_torch_nor_grpc() -> None:
    code = (
        "import json, sys, draftwire.options.structured_output.form_sandbox_process\n"
        "print(json.dumps([name for name in ('torch', 'grpc', 'transformers') if name in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == []


def test_threads_that_never_end_keep_no_process_alive() -> None:
    code = (
        "import threading\nfrom draftwire.runtime.daemon_threads import DaemonThreads\n"
        "threads = DaemonThreads(1, 'form')\nbegun = threading.Event()\n"
        "threads.submit(lambda: (begun.set(), threading.Event().wait()))\nbegun.wait()"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, env={**os.environ})
