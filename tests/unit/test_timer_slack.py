"""The slack of threads that vLLM's process groups start."""

import ctypes
import sys
from threading import Thread

import pytest

from draftwire_verifier.vllm.timer_slack import COARSE_NS, FINE_NS, PR_GET_TIMERSLACK, coarse_timers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")


def slack_ns() -> int:
    return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))


def slack_of_new_thread() -> int:
    found: list[int] = []
    thread = Thread(target=lambda: found.append(slack_ns()))
    thread.start()
    thread.join()
    return found[0]


def test_only_threads_that_are_started_meanwhile_may_be_woken_late() -> None:
    def fail() -> None:
        with coarse_timers():
            assert slack_of_new_thread() == COARSE_NS
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert slack_ns() == slack_of_new_thread() == FINE_NS
