"""Runs the choices of one request concurrently. Independent of gRPC and models.

    the first choice of the request opens its session; then one choice of each other prompt starts
    the other choices of a prompt start after its first tokens: its KV cache is then at that verifier, so that the
    prefill runs once

A resumed choice that is already complete does no prefill, so the next one takes its place.

Every choice is a session of its own, with its own random numbers. A client that does not read stops the choices of its
own request only: a single one by itself, several by one bounded queue.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from draftwire.errors import NoRoomError
from draftwire.requests.logprobs import PromptPart
from draftwire_gateway.session.committed_text import Delta, Finish
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.loop import GenerationLoop
from draftwire_gateway.session.verifier_seat import FIRST_PAUSE_S, LONGEST_NAMED_PAUSE_S

MAX_UNREAD_EVENTS = 64
"""Bound of the queue of all choices of a request."""


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt's token ids and their text."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """An event of one choice."""

    generation: Generation
    event: Delta | PromptPart | Finish | PromptEcho


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


class _Gate(asyncio.Semaphore):
    """Admits waiting tasks one at a time, in order of arrival, each when the one before has left, until it is open."""

    is_open = False

    def open(self, num_tasks: int) -> None:
        """Admits so many tasks at once, which are all that there are."""
        self.is_open = True
        for _ in range(num_tasks):
            self.release()


@dataclass(slots=True)
class _SharedPrompt:
    """Progress of the choice that runs the prefill of a prompt for all of its choices."""

    gate: _Gate = field(default_factory=_Gate)
    """Open when a verifier has the prompt in its KV cache."""
    verifier: str = ""
    """Address of that verifier."""


@dataclass(slots=True, eq=False)
class ChoiceRunner:
    """Runs the choices of one request. Use once."""

    _generations: Sequence[Generation]
    _make_loop: Callable[[Generation], Awaitable[GenerationLoop]]
    """Makes the loop of a choice, anew for each attempt."""
    _wait_for_room: Callable[[NoRoomError], Awaitable[None]]
    """Called when no verifier has room for the request's first session. Returns when it is to be tried again, or raises
    the refusal."""
    _on_open: Callable[[], None]
    """Called when the first session is open."""
    _arrived_at: float = field(default_factory=lambda: time.perf_counter())
    _events: asyncio.Queue[ChoiceEvent | _End] = field(default_factory=lambda: asyncio.Queue(MAX_UNREAD_EVENTS))
    _gate: _Gate = field(default_factory=_Gate)
    """Opened with the first session: two choices that wait for room would otherwise refuse each other."""
    _running: set[int] = field(default_factory=set)
    """Choices with a session, open or being moved. They free capacity when they end."""

    async def run(self) -> AsyncGenerator[ChoiceEvent]:
        """Yields the events of the choices, in order within each choice. A failed choice cancels all others; at the end
        of the generator none runs.

        Raises:
            DraftwireError: the error of the failed choice, after all earlier events; see `GenerationLoop.run`.
        """
        if len(self._generations) == 1:
            async with aclosing(self._run_with_retries(self._generations[0], _SharedPrompt())) as events:
                async for event in events:
                    yield event
            return
        work = asyncio.create_task(self._work())
        try:
            while not isinstance(received := await self._events.get(), _End):
                yield received
            if received.error is not None:
                raise received.error
        finally:
            work.cancel()
            await asyncio.wait([work])

    async def _work(self) -> None:
        prompts: dict[int, _SharedPrompt] = {}
        error: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for generation in self._generations:
                    prompt = prompts.setdefault(generation.prompt_index, _SharedPrompt())
                    group.create_task(self._run_in_turn(generation, prompt))
        except ExceptionGroup as failures:
            error = failures.exceptions[0]
        await self._events.put(_End(error))

    async def _run_in_turn(self, generation: Generation, prompt: _SharedPrompt) -> None:
        """Runs one choice when both gates admit it, and puts its events into the common queue."""
        async with prompt.gate, self._gate, aclosing(self._run_with_retries(generation, prompt)) as events:
            async for event in events:
                await self._events.put(event)

    async def _run_with_retries(self, generation: Generation, prompt: _SharedPrompt) -> AsyncGenerator[ChoiceEvent]:
        """Runs one choice, and retries it while verifiers are full. Yields its events.

        The first choice of a request waits among all requests. The others wait for room: for `failover_timeout_s`, and
        for as long as other choices run, which free capacity when they end.
        """
        while True:
            others_ran = bool(self._running)  # one that ends meanwhile may free capacity just after the refusal
            loop = await self._make_loop(generation)
            try:
                async with aclosing(self._run_choice(loop, generation, prompt)) as events:
                    async for event in events:
                        yield event
                return
            except NoRoomError as error:
                generation = replace(generation, is_retried=generation.is_retried or loop.verifier.may_have_drawn)
                del loop  # it holds a copy of the prompt
                if not self._gate.is_open:
                    await self._wait_for_room(error)
                    continue
                if not others_ran and not self._running:
                    raise
                await asyncio.sleep(min(max(FIRST_PAUSE_S, error.retry_after_s), LONGEST_NAMED_PAUSE_S))

    async def _run_choice(
        self, loop: GenerationLoop, generation: Generation, prompt: _SharedPrompt
    ) -> AsyncGenerator[ChoiceEvent]:
        """Runs one attempt at a choice, and yields its events."""
        run = loop.run(
            arrived_at=self._arrived_at,
            verifier=prompt.verifier,
            waits_for_room=self._gate.is_open,
            on_open=partial(self._mark_open, generation),
        )
        try:
            async with aclosing(run) as events:
                async for event in events:
                    yield ChoiceEvent(generation, event)
                    is_complete = generation.choice not in self._running  # a resumed choice that opened no session
                    if not isinstance(event, PromptPart) and not is_complete and not prompt.gate.is_open:
                        prompt.verifier = loop.verifier.address
                        prompt.gate.open(len(self._generations))
        finally:
            self._running.discard(generation.choice)

    def _mark_open(self, generation: Generation) -> None:
        self._running.add(generation.choice)
        if not self._gate.is_open:
            self._gate.open(len(self._generations))
        self._on_open()
