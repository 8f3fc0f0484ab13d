"""Compilation of structured output off the event loop."""

import asyncio
import threading
import weakref
from collections.abc import Sequence
from functools import partial

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.models.card import ModelCard
from draftwire.options.structured_output.form_sandbox import FormSandbox
from draftwire.options.structured_output.grammar_automaton import FormCompiler, FormVocabulary
from draftwire.requests.automaton import Automaton
from draftwire.requests.parameters import TextForm
from draftwire.requests.structured_output import StructuredOutput, structured
from draftwire.runtime.daemon_threads import DaemonThreads
from draftwire.runtime.time_limits import Deadline

COMPILE_THREADS = 2
"""More than one, so that a slow form does not block all others."""
COMPILE_SECONDS = 10.0
"""Time limit of a form, waiting included."""
MAX_WAITING = 256
"""Forms that may be queued or compiling."""
MAX_OPEN_BYTES = 2 * 2**30
"""Memory of the forms of all open sessions, as measured."""


class FormCompilerPool:
    """Compiles the structured output forms of one model on dedicated threads: those that a sandbox has measured.

    A form can take a second. It delays neither the event loop nor other work on threads, such as tokenization.
    """

    def __init__(self, compiler: FormCompiler, sandbox: FormSandbox) -> None:
        """Starts the pool; `compiler` runs on its threads, and `sandbox` measures forms that no peer has measured."""
        self._compiler = compiler
        self._sandbox = sandbox
        self._threads = DaemonThreads(COMPILE_THREADS, "form")
        self._num_waiting = 0
        self._lock = threading.RLock()  # dropping an automaton may happen anywhere, also while it is held
        self._num_open_bytes = 0

    @classmethod
    def of(cls, card: ModelCard) -> "FormCompilerPool":
        """Returns the pool of a model. Takes a second for the largest vocabularies."""
        described = card.description
        vocabulary = partial(FormVocabulary.of, card.tokenizer, described.vocab_size, described.stop_token_ids)
        return cls(FormCompiler(vocabulary()), FormSandbox(vocabulary))

    async def compile(self, form: TextForm, generated_ids: Sequence[int] = (), memory_bytes: int = 0) -> Automaton:
        """Returns the automaton of a form; see `FormCompilation`.

        Raises:
            InvalidRequestError: as `FormCompiler.compile` and `FormSandbox.measure`, or it takes longer than
                `COMPILE_SECONDS`.
            NoRoomError: too many forms are queued or open, or this one waited for others until its time limit.
        """
        wanted = structured(form)
        if self._num_waiting >= MAX_WAITING:
            raise NoRoomError(f"{MAX_WAITING} forms wait to be read, which is the limit")
        self._num_waiting += 1
        try:
            measured = memory_bytes or (await self._sandbox.measure(wanted)).memory_bytes
            self._reserve(measured)
            try:
                automaton = await self._compiled(wanted, generated_ids)
            except BaseException:
                self._release(measured)
                raise
        finally:
            self._num_waiting -= 1
        weakref.finalize(automaton, self._release, measured).atexit = False
        return automaton

    def stop(self) -> None:
        """Ends the threads, once they are idle, and the sandbox. Nothing waits for a form that is being compiled."""
        self._threads.stop()
        self._sandbox.stop()

    async def _compiled(self, wanted: StructuredOutput, generated_ids: Sequence[int]) -> Automaton:
        deadline = Deadline(COMPILE_SECONDS)

        def compiled() -> Automaton:
            deadline.begin()
            return self._compiler.compile(wanted, generated_ids)

        job = self._threads.submit(compiled)
        try:
            # Not `wait_for`: before Python 3.12 it loses a cancellation that arrives when the result is ready.
            async with asyncio.timeout(COMPILE_SECONDS):
                return await asyncio.wrap_future(job)
        except TimeoutError as error:
            if deadline.has_waited:
                raise NoRoomError("other forms are being read") from error
            raise InvalidRequestError(f"structured_output: reading it needs more than {COMPILE_SECONDS:g} s") from error

    def _reserve(self, num_bytes: int) -> None:
        with self._lock:
            if self._num_open_bytes + num_bytes > MAX_OPEN_BYTES:
                raise NoRoomError(f"forms of open sessions take {self._num_open_bytes // 2**20} MiB; retry later")
            self._num_open_bytes += num_bytes

    def _release(self, num_bytes: int) -> None:
        """Called on the thread that drops an automaton."""
        with self._lock:
            self._num_open_bytes -= num_bytes
