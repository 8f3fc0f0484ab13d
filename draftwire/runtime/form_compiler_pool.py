"""Reads forms beside the event loop."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.requests.automaton import Automaton, FormCompiler
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime.time_limits import Deadline

COMPILE_THREADS = 2
"""So that one form that takes long does not hold back all others."""
COMPILE_SECONDS = 10.0
"""How long a form may wait and be read."""
MAX_WAITING = 256
"""Forms that are read or are to be."""


class FormCompilerPool:
    """The forms of one model's texts. They are read on threads that do nothing else: bad ones, which can take a second,
    delay neither the event loop nor what else runs on threads, such as the reading of prompts.
    """

    def __init__(self, compiler: FormCompiler) -> None:
        """Takes what reads them."""
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="form")
        self._num_waiting = 0

    async def compile(self, wanted: StructuredOutput, generated_ids: Sequence[int] = ()) -> Automaton:
        """Returns an automaton that has followed what was generated. Runs on the event loop.

        Raises:
            InvalidRequestError: as `FormCompiler.compile`, or it takes longer than `COMPILE_SECONDS`.
            NoRoomError: too many forms are read, or this one waited for others for so long that its time was over.
        """
        if self._num_waiting >= MAX_WAITING:
            raise NoRoomError(f"{MAX_WAITING} forms wait to be read, which is the limit")
        deadline = Deadline(COMPILE_SECONDS)
        job = self._threads.submit(self._compile, wanted, generated_ids, deadline)
        self._num_waiting += 1
        try:
            # Not `wait_for`: until Python 3.12 it forgets a cancellation that comes when the result is already there.
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
