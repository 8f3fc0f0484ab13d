"""Services that this process starts do not outlive it, however it ends."""

import os
import signal
import subprocess
import sys

from observing import is_alive, wait_until

PARENT = """
import time
from draftwire.cli.local_stack import LocalStack
with LocalStack({"verifier": {"model": "scripted:", "drain_seconds": 0.5}}) as stack:
    print(stack.services["verifier"].process.pid, flush=True)
    time.sleep(600)
"""


def test_service_ends_when_the_process_that_started_it_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        service = int(parent.stdout.readline())
        assert is_alive(service)
        os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(service), "the service ends when its parent is gone")
