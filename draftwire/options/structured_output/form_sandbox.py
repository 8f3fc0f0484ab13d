"""Measures forms in a process of its own before anything else compiles them: some never end, or take all memory."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b

import structlog

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.options.structured_output.form_budget import CHEAP_S, FormBudget
from draftwire.options.structured_output.grammar_automaton import FormVocabulary
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime.served_request import context_of_no_request

log = structlog.get_logger()

CPU_SECONDS = 2
"""CPU time after which the kernel ends a form; whole seconds, as it counts."""
ADDRESS_SPACE_BYTES = 256 * 2**20
"""Address space that a form may take beside that of its process."""
MAX_CPU_S = 1.0
"""Bound of the CPU time of a form that services compile."""
MAX_MEMORY_BYTES = 128 * 2**20
"""Bound of the memory of a form that services compile."""
MAX_RUNNING = 2
"""Forms that are compiled at once, of different callers."""
MAX_WAITING = 256
"""Forms that may be queued or compiling."""
MAX_WAITING_OF_CALLER = 32
"""The same of one caller."""
SECONDS = 10.0
"""Time limit of a form, waiting included."""
MAX_KNOWN = 4_096
"""Forms whose costs are remembered."""

_TOO_COSTLY = (
    f"structured_output: compiling the form takes more than {MAX_CPU_S:g} s of CPU time or "
    f"{MAX_MEMORY_BYTES // 2**20} MiB of memory"
)
_STOPPED = "the service is stopping and compiles no more forms"
_COMMAND = (sys.executable, "-m", "draftwire.options.structured_output.form_sandbox_process")
_ONE_THREAD = dict.fromkeys(("MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
"""A process that forks has no other threads."""


@dataclass(frozen=True, slots=True)
class FormCost:
    """Cost of compiling a form, in its own process."""

    cpu_s: float
    memory_bytes: int
    """Memory that was taken, at least 1: 0 stands for a form that was not measured."""
    trial_s: float = 0.0
    """CPU time of following random texts of it, which no service does again."""
    reason: str = ""
    """Fault of the form; empty if it can be compiled."""


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    caller: str
    wanted: StructuredOutput
    done: asyncio.Future[FormCost]
    limit: asyncio.TimerHandle | None = None


class FormSandbox:
    """Compiles forms of one vocabulary in a child process that is started with the first form.

    A caller has one form compiled at a time, and callers take turns. All methods run on the event loop.
    """

    def __init__(self, vocabulary: Callable[[], FormVocabulary], budget: FormBudget | None = None) -> None:
        """Starts nothing. `vocabulary` is called on a thread; `budget` is that of the callers, by default new."""
        self._vocabulary = vocabulary
        self._budget = FormBudget() if budget is None else budget
        self._known = OrderedDict[bytes, FormCost]()
        self._jobs: dict[tuple[str, bytes], _Job] = {}  # by caller and hash of the form
        self._queues: dict[str, deque[_Job]] = {}  # by caller, in the order of their turns
        self._running: dict[int, _Job] = {}
        self._last_number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def measure(self, wanted: StructuredOutput, caller: str = "") -> FormCost:
        """Returns what compiling a form costs; it is within the bounds.

        Args:
            wanted: the form.
            caller: whose budget pays; empty for peers, which have none.

        Raises:
            InvalidRequestError: the form cannot be compiled, or exceeds the bounds.
            NoRoomError: the caller's budget is used up, too many forms wait, or the sandbox is stopped.
        """
        key = _hash_of(wanted)
        cost = self._known.get(key)
        if cost is None or not cost.reason:
            self._check(caller)
        if cost is None:
            cost = await self._wait(key, wanted, caller)
        else:
            self._known.move_to_end(key)
            self.charge(caller, max(0.0, cost.cpu_s - CHEAP_S))  # services compile it for each request
        if cost.reason:
            raise InvalidRequestError(cost.reason)
        return cost

    def charge(self, caller: str, cpu_s: float) -> None:
        """Makes a caller pay for CPU time that a form of its has taken, here or elsewhere; nothing if it is not
        positive. Peers have no budget.
        """
        if caller:
            self._budget.charge(caller, cpu_s)

    def stop(self) -> None:
        """Ends the process, with all that it compiles. Forms that wait are refused, and all that follow."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._end_process()
        for job in list(self._jobs.values()):
            _fail(job, NoRoomError(_STOPPED))

    async def _wait(self, key: bytes, wanted: StructuredOutput, caller: str) -> FormCost:
        job = self._jobs.get((caller, key)) or self._submit(key, wanted, caller)
        try:
            # Not `wait_for`: before Python 3.12 it loses a cancellation that arrives when the result is ready.
            async with asyncio.timeout(SECONDS):
                return await asyncio.shield(job.done)
        except TimeoutError:
            raise NoRoomError("other forms are being compiled") from None

    def _submit(self, key: bytes, wanted: StructuredOutput, caller: str) -> _Job:
        if self._is_stopped:
            raise NoRoomError(_STOPPED)
        queue = self._queues.get(caller, deque())
        if len(self._jobs) >= MAX_WAITING or (caller and len(queue) >= MAX_WAITING_OF_CALLER):
            raise NoRoomError(f"{len(self._jobs)} forms wait to be compiled, {len(queue)} of this caller")
        self._last_number += 1
        loop = asyncio.get_running_loop()
        job = self._jobs[caller, key] = _Job(self._last_number, caller, wanted, loop.create_future())
        job.limit = loop.call_later(SECONDS, self._give_up, job)
        queue.append(job)
        self._queues[caller] = queue
        job.done.add_done_callback(lambda done: self._settle(key, job, done))
        self._next()
        return job

    def _settle(self, key: bytes, job: _Job, done: asyncio.Future[FormCost]) -> None:
        """Remembers the cost, makes the caller pay, and lets the next form run."""
        del self._jobs[job.caller, key]
        self._running.pop(job.number, None)
        if job.caller in self._queues:
            self._queues[job.caller] = self._queues.pop(job.caller)  # to the end of the line
        if job.limit is not None:
            job.limit.cancel()
        if not done.cancelled() and done.exception() is None:
            cost = done.result()
            self._known[key] = cost
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
            self.charge(job.caller, cost.cpu_s + cost.trial_s)
        self._next()

    def _give_up(self, job: _Job) -> None:
        """Ends a form whose time is over: it waited for others, or the machine is too busy to say what it costs."""
        if job.done.done():
            return
        if job.number in self._running:
            self._send({"kill": job.number})
            self.charge(job.caller, CPU_SECONDS)
        else:
            self._queues[job.caller].remove(job)
        _fail(job, NoRoomError("other forms are being compiled"))

    def _next(self) -> None:
        """Starts forms of those callers whose turn it is."""
        if self._is_stopped:
            return
        for caller in list(self._queues):
            queue = self._queues[caller]
            is_busy = bool(caller) and any(job.caller == caller for job in self._running.values())
            if not queue:
                del self._queues[caller]
            elif not is_busy and len(self._running) < MAX_RUNNING:
                job = queue.popleft()
                self._start(job)

    def _start(self, job: _Job) -> None:
        try:
            self._check(job.caller)  # the forms before it may have used it up
        except NoRoomError as error:
            _fail(job, error)
            return
        self._running[job.number] = job
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run_process(), context=context_of_no_request())
        self._send(_request(job))

    def _send(self, request: object) -> None:
        if self._writer is not None:  # else it is sent when the process has been started
            self._writer.write(_line(request))

    async def _run_process(self) -> None:
        """Starts the process, and takes its answers until it ends."""
        try:
            vocabulary = await asyncio.to_thread(lambda: _line(asdict(self._vocabulary())))
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = _start_process(theirs)
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._writer.write(vocabulary)
            for job in list(self._running.values()):
                self._send(_request(job))
            while line := await reader.readline():
                self._take(json.loads(line))
            log.error("forms.sandbox_lost")
        except OSError as error:
            log.error("forms.sandbox_lost", reason=type(error).__name__)
        finally:
            self._end_process()

    def _take(self, answer: dict[str, object]) -> None:
        job = self._running.get(int(str(answer["id"])))
        if job is None or job.done.done():
            return
        cpu_s, memory, trial_s, reason = (answer[name] for name in ("cpu_s", "memory_bytes", "trial_s", "reason"))
        if not isinstance(cpu_s, float) or not isinstance(memory, int) or not isinstance(trial_s, float):
            cost = FormCost(CPU_SECONDS, MAX_MEMORY_BYTES, reason=_TOO_COSTLY)
        elif not reason and (cpu_s > MAX_CPU_S or memory > MAX_MEMORY_BYTES):
            cost = FormCost(cpu_s, memory, trial_s, _TOO_COSTLY)
        else:
            cost = FormCost(cpu_s, max(1, memory), trial_s, str(reason))
        job.done.set_result(cost)

    def _end_process(self) -> None:
        writer, process = self._writer, self._process
        self._writer = self._process = None
        if writer is not None:
            with suppress(RuntimeError):  # the loop has ended
                writer.close()
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its forks too
            # The kernel may take its time to end it, and nobody has to wait for that.
            threading.Thread(target=process.wait, name="form_sandbox_wait", daemon=True).start()
        for job in list(self._running.values()):
            _fail(job, NoRoomError("the process that compiles forms has ended; retry"))

    def _check(self, caller: str) -> None:
        if caller:
            self._budget.check(caller)


def _start_process(end: socket.socket) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **_ONE_THREAD}
    descriptor = end.fileno()
    return subprocess.Popen(_COMMAND, stdin=descriptor, stdout=descriptor, env=environment, start_new_session=True)


def _line(content: object) -> bytes:
    """Encodes a message to the process."""
    return json.dumps(content).encode() + b"\n"


def _request(job: _Job) -> dict[str, object]:
    return {
        "id": job.number,
        "form": job.wanted.form.value,
        "texts": job.wanted.texts,
        "cpu_seconds": CPU_SECONDS,
        "memory_bytes": ADDRESS_SPACE_BYTES,
    }


def _fail(job: _Job, error: NoRoomError) -> None:
    """Refuses a form, unless it is decided already."""
    if not job.done.done():
        job.done.set_exception(error)
        job.done.exception()  # retrieved: perhaps nobody waits any more


def _hash_of(wanted: StructuredOutput) -> bytes:
    digest = blake2b(wanted.form.value.encode(), digest_size=16)
    for text in wanted.texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return digest.digest()
