"""Notes when a round passes the stations of a service. Python loads this file in processes whose path has its folder.

The clock is the machine's, so notes of different processes can be put in one order. Used by `benchmarks.host_path`.
"""

import atexit
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("ROUND_TRACE_FOLDER", "")

notes: list[tuple[str, float]] = []


def watch(owner: type, method: str, before: str, after: str = "") -> None:
    """Notes the beginning, and the end if it has a name, of every call of a method."""
    original: Callable[..., Any] = getattr(owner, method)

    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.append((before, time.perf_counter()))
        result = original(*args, **kwargs)
        if after:
            notes.append((after, time.perf_counter()))
        return result

    setattr(owner, method, noted)


def watch_service(command: str) -> str:
    """Watches the service that this process runs and returns its name; empty for any other process."""
    if "draftwire.services.gateway" in command:
        from draftwire.services.gateway.wire import DrafterLink, VerifierLink

        watch(VerifierLink, "_receive", "verdict at gateway")
        watch(DrafterLink, "calibrate", "calibration sent")
        return "gateway"
    if "draftwire.services.drafter" in command:
        from draftwire.services.drafter.core import DrafterCore
        from draftwire.services.drafter.engine import DraftEngine
        from draftwire.services.drafter.wire import GrpcBlockLink

        watch(DrafterCore, "calibrate", "calibration at drafter")
        watch(DraftEngine, "step", "drafting begins", "drafting ends")
        watch(GrpcBlockLink, "push", "block sent")
        return "drafter"
    if "draftwire.services.verifier" in command:
        from draftwire.services.leases import Leases
        from draftwire.services.verifier.core import VerifierCore
        from draftwire.services.verifier.engine import TargetEngine

        watch(VerifierCore, "push_blocks", "block at verifier")
        watch(TargetEngine, "step", "verifying begins", "verifying ends")
        watch(Leases, "send", "verdict sent")
        return "verifier"
    return ""


if FOLDER:
    name = watch_service(Path("/proc/self/cmdline").read_text().replace("\0", " "))
    if name:
        atexit.register(lambda: (Path(FOLDER) / f"{name}.json").write_text(json.dumps(notes)))
