"""Starts services of a `LocalStack` again that were lost, unless one of them cannot stay up."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from draftwire.cli.local_stack import LocalStack, ServiceProcess
from draftwire.cli.process_end import ProcessEnd

STEADY_SECONDS = 60.0
"""A service that has served for so long is well: earlier losses do not count any more."""
MAX_LOSSES = 3
"""Losses in a row with which a service is given up."""
FIRST_PAUSE_S = 0.5
"""Pause before the first restart; before each further one it is four times as long."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of a service that nobody asked for."""

    name: str
    ending: ProcessEnd
    number: int
    """Number of its losses in a row."""
    pause_s: float | None
    """Seconds until it is started again; None if it is given up."""

    def __str__(self) -> str:
        """Returns the sentence about it."""
        again = f", for the {_ordinal(self.number)} time without a minute of service between" if self.number > 1 else ""
        return f"the {self.name} {self.ending}{again}"


@dataclass(slots=True)
class Supervisor:
    """Watches the services of a stack that serves. The others go on while one is away."""

    stack: LocalStack
    on_loss: Callable[[Loss], None]
    """Called for each loss, on the thread of `run`."""
    restarts: bool = True
    _losses: dict[str, int] = field(default_factory=dict)
    """Losses in a row of each service."""
    _due: dict[str, float] = field(default_factory=dict)
    """Times at which services are started again, by `time.monotonic`."""

    def run(self) -> Loss:
        """Returns the loss of the first service that is given up.

        Raises:
            BaseException: what the stack's `on_log` raised.
        """
        while True:
            until = min(self._due.values(), default=None)
            ended = self.stack.next_end(None if until is None else max(0.0, until - time.monotonic()))
            if ended is not None:
                loss = self._count(ended)
                self.on_loss(loss)
                if loss.pause_s is None:
                    return loss
                self._due[loss.name] = time.monotonic() + loss.pause_s
            for name in [name for name, due in self._due.items() if due <= time.monotonic()]:
                del self._due[name]
                self.stack.restart(name)

    def _count(self, ended: ServiceProcess) -> Loss:
        assert ended.ending is not None
        is_steady = ended.is_serving and time.monotonic() - ended.served_at >= STEADY_SECONDS
        number = self._losses[ended.name] = 1 if is_steady else self._losses.get(ended.name, 0) + 1
        goes_on = self.restarts and number < MAX_LOSSES
        return Loss(ended.name, ended.ending, number, FIRST_PAUSE_S * 4.0 ** (number - 1) if goes_on else None)


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
