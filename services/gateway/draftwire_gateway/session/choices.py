"""The choices of one request, side by side. Knows neither gRPC nor models.

    the first choice of all opens its session; then, of each prompt, one choice starts
    the others start when its first tokens have come: then its verifier holds the prompt, which is so computed once

A choice that was complete before reads nothing, so the next one takes its place.

Every choice is a session of its own, with random numbers of its own. What comes of all of them goes through one queue
with a bound: whoever does not read it holds up the choices of this request, and nothing else.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from draftwire.errors import NoRoomError
from draftwire.requests.logprobs import PromptPart
from draftwire_gateway.session.committed_text import Delta, Finish
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.loop import GenerationLoop
from draftwire_gateway.session.verifier_seat import FIRST_PAUSE_S

MAX_UNREAD_EVENTS = 64
"""Of all choices of a request, which nobody has read yet."""


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """A prompt, as it was read."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """Something that came of one choice."""

    generation: Generation
    event: Delta | PromptPart | Finish | PromptEcho


@dataclass(frozen=True, slots=True)
class _End:
    """No more events come."""

    error: Exception | None


class _Gate:
    """Lets in one after the other, each when the one before has left, in the order in which they come. Once it is
    open, all at once.
    """

    def __init__(self) -> None:
        self._is_free = asyncio.Event()
        self._is_free.set()
        self.is_open = False

    async def enter(self) -> None:
        """Waits; `leave` comes after it."""
        while not self._is_free.is_set():
            await self._is_free.wait()
        if not self.is_open:
            self._is_free.clear()

    def leave(self) -> None:
        """Lets in the next one."""
        self._is_free.set()

    def open(self) -> None:
        """Lets in everybody, from now on."""
        self.is_open = True
        self._is_free.set()


@dataclass(slots=True)
class _SharedPrompt:
    """How far the choice that reads a prompt for the others has come."""

    gate: _Gate = field(default_factory=_Gate)
    """Open when a verifier holds the prompt."""
    verifier: str = ""
    """Address of that one."""


MakeLoop = Callable[[Generation], Awaitable[GenerationLoop]]


class ChoiceRunner:
    """Carries out the choices of one request. Use once."""

    def __init__(self, generations: Sequence[Generation], make_loop: MakeLoop) -> None:
        """Prepares; `run` does the work."""
        self._generations = generations
        self._make_loop = make_loop
        self._arrived_at = time.perf_counter()
        self._events: asyncio.Queue[ChoiceEvent | _End] = asyncio.Queue(MAX_UNREAD_EVENTS)
        self._gate = _Gate()
        """Open when a session was: two that wait for room would else be refused, each because the other has none."""
        self._running: set[int] = set()
        """Choices that hold a session, or move one. They make room when they end."""

    async def run(self) -> AsyncGenerator[ChoiceEvent]:
        """Yields what comes of the choices, of each in order. When one fails, all end; when this ends, all have.

        Raises:
            DraftwireError: what the one that failed raised, after all that came before; see `GenerationLoop.run`.
        """
        work = asyncio.create_task(self._work())
        try:
            while not isinstance(said := await self._events.get(), _End):
                yield said
            if said.error is not None:
                raise said.error
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
                    group.create_task(self._carry_out(generation, prompt))
        except ExceptionGroup as failures:
            error = failures.exceptions[0]
        await self._events.put(_End(error))

    async def _carry_out(self, generation: Generation, prompt: _SharedPrompt) -> None:
        """Carries out one choice, when it is its turn."""
        await prompt.gate.enter()
        await self._gate.enter()
        try:
            await self._relay_when_there_is_room(generation, prompt)
        finally:
            self._gate.leave()
            prompt.gate.leave()

    async def _relay_when_there_is_room(self, generation: Generation, prompt: _SharedPrompt) -> None:
        """Tries to relay a choice again and again.

        The first of a request is refused where there is no room, as a request of one choice is. The others wait for
        room: for `failover_timeout_s`, and for as long as others run, which make room when they end.
        """
        while True:
            others_ran = bool(self._running)  # one that has ended since may have made room just after it was asked for
            try:
                await self._relay(generation, prompt)
                return
            except NoRoomError as error:
                if not others_ran and not self._running:
                    raise
                await asyncio.sleep(max(FIRST_PAUSE_S, error.retry_after_s))

    async def _relay(self, generation: Generation, prompt: _SharedPrompt) -> None:
        """Puts what comes of one choice among the events of all."""
        loop = await self._make_loop(generation)
        run = loop.run(
            arrived_at=self._arrived_at,
            verifier=prompt.verifier,
            waits_for_room=self._gate.is_open,
            on_open=partial(self._note_open, generation),
        )
        try:
            async with aclosing(run) as events:
                async for event in events:
                    await self._events.put(ChoiceEvent(generation, event))
                    is_complete = generation.choice not in self._running  # it was before, and needs no verifier
                    if not isinstance(event, PromptPart) and not is_complete and not prompt.gate.is_open:
                        prompt.verifier = loop.verifier_address
                        prompt.gate.open()
        finally:
            self._running.discard(generation.choice)

    def _note_open(self, generation: Generation) -> None:
        self._running.add(generation.choice)
        self._gate.open()
