"""Compilation of structured output off the event loop."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.requests.automaton import Automaton, FormCompiler
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime.time_limits import Deadline

COMPILE_THREADS = 2
"""More than one, so that a slow form does not block all others."""
COMPILE_SECONDS = 10.0
"""Time limit of a form, waiting included."""
MAX_WAITING = 256
"""Forms that may be queued or compiling."""


class FormCompilerPool:
    """Compiles the structured output forms of one model on dedicated threads.

    A form can take a second. It delays neither the event loop nor other work on threads, such as tokenization.
    """

    def __init__(self, compiler: FormCompiler) -> None:
        """Starts the pool; `compiler` runs on its threads."""
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="form")
        self._num_waiting = 0

    async def compile(self, wanted: StructuredOutput, generated_ids: Sequence[int] = ()) -> Automaton:
        """Compiles a form and returns its automaton, advanced over `generated_ids`. Runs on the event loop.

        Raises:
            InvalidRequestError: as `FormCompiler.compile`, or it takes longer than `COMPILE_SECONDS`.
            NoRoomError: too many forms are queued, or this one waited for others until its time limit.
        """
        if self._num_waiting >= MAX_WAITING:
            raise NoRoomError(f"{MAX_WAITING} forms wait to be read, which is the limit")
        deadline = Deadline(COMPILE_SECONDS)
        job = self._threads.submit(self._compile, wanted, generated_ids, deadline)
        self._num_waiting += 1
        try:
            # Not `wait_for`: before Python 3.12 it loses a cancellation that arrives when the result is ready.
            async with asyncio.timeout(COMPILE_SECONDS):
                return await asyncio.wrap_future(job)
        except TimeoutError as error:
            if deadline.has_waited:
                raise NoRoomError("other forms are being read") from error
            raise InvalidRequestError(f"structured_output: reading it needs more than {COMPILE_SECONDS:g} s") from error
        finally:
            self._num_waiting -= 1

    def _compile(self, wanted: StructuredOutput, generated_ids: Sequence[int], deadline: Deadline) -> Automaton:
        deadline.begin()
        return self._compiler.compile(wanted, generated_ids)
