"""How much later than it asked for the kernel may wake a thread, so that it wakes several at once. No vLLM here.

Each process group of torch's gloo has a thread that looks around every 10 ms, and vLLM makes 13 groups on a CPU, with
one rank too: 1,300 wake-ups a second of an idle verifier. A thread inherits its slack from the one that starts it. What
arrives on a connection wakes it at once, as ever. Source: prctl(2), PR_SET_TIMERSLACK.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
COARSE_NS = 200_000_000
"""Timer slack of threads that only look around."""
FINE_NS = 50_000
"""Linux' default."""


def set_timer_slack(slack_ns: int) -> None:
    """Sets the slack of this thread, and of those that it starts from now on. Does nothing where that is unknown."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(slack_ns), 0, 0, 0)


@contextmanager
def coarse_timers() -> Iterator[None]:
    """Threads and processes that are started meanwhile may be woken late; this thread itself only meanwhile."""
    set_timer_slack(COARSE_NS)
    try:
        yield
    finally:
        set_timer_slack(FINE_NS)
