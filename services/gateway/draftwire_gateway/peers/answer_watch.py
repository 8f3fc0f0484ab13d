"""Whether a verifier answers: it is asked once a second, because a frozen process keeps its connections open.

Keep-alive of gRPC asks only where nothing arrives, and gives an answer's whole time to each attempt. New sessions have
to avoid such a verifier much sooner than running ones have to leave it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import NoReturn

from draftwire.errors import UnavailableError

BEAT_SECONDS = 1.0
"""Seconds from an answer to the next question."""
ANSWER_SECONDS = 2.0
"""How long an answer may take. After that no session is opened on the verifier until it answers again."""
RETRY_SECONDS = 0.1
"""Seconds from a question that was not answered to the next one."""
LEAST_MISSED = 2
"""So many questions have to be left without an answer before sessions leave: one may have been asked just before this
process was stopped for a while itself."""

Ask = Callable[[float], Awaitable[bool]]
"""Returns whether the service is ready. Raises UnavailableError if it does not answer within so many seconds."""


class AnswerWatch:
    """Asks one verifier for as long as it is connected. Questions are counted and not seconds: while this process is
    stopped no verifier gets silent.
    """

    def __init__(self, ask: Ask, lost_after_s: float, on_silence: Callable[[], None]) -> None:
        """Asks nothing before `run`. The verifier is lost after a silence of `lost_after_s`, seconds; `on_silence` is
        called when an answer is missing: calls that wait for the verifier should not wait on.
        """
        self._ask = ask
        self._most_missed = max(LEAST_MISSED, math.ceil(lost_after_s / ANSWER_SECONDS))
        self._on_silence = on_silence
        self._num_missed = 0
        self._is_ready = True

    @property
    def is_silent(self) -> bool:
        """Whether the last question was not answered in time, and nothing else has come since."""
        return self._num_missed > 0

    @property
    def is_well(self) -> bool:
        """Whether sessions can be opened: it answers, and takes them."""
        return self._is_ready and not self.is_silent

    def note_sign(self) -> None:
        """Takes any message of the verifier as an answer."""
        self._num_missed = 0

    async def run(self) -> NoReturn:
        """Asks again and again.

        Raises:
            UnavailableError: the verifier is lost.
        """
        while True:
            try:
                self._is_ready = await self._ask(ANSWER_SECONDS)
            except UnavailableError:
                self._num_missed += 1
                self._on_silence()
                if self._num_missed >= self._most_missed:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._num_missed = 0
                await asyncio.sleep(BEAT_SECONDS)
