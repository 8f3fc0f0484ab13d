"""Records when a round passes the stations of a service. Python loads this file if its folder is on the path.

The clock is the machine's, so spans of different processes can be ordered. Read by `benchmarks.round_profile`.
"""

import atexit
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("ROUND_TRACE_FOLDER", "")

spans: list[tuple[str, float, float, list[int], float]] = []
"""Name, beginning and end by `time.perf_counter` in seconds, what the call was about, and its CPU time in seconds, of
every watched call."""


def watch(owner: Any, name: str, span: str, about: Callable[..., list[int]] | None = None) -> None:
    """Records every call of a function.

    Args:
        owner: the class or module of the function.
        name: the attribute that callers look up at each call.
        span: name of the recorded spans.
        about: returns numbers to record, from the arguments of a call.
    """
    original: Callable[..., Any] = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        began, cpu_s = time.perf_counter(), time.thread_time()
        result = original(*args, **kwargs)
        cpu_s, ended = time.thread_time() - cpu_s, time.perf_counter()
        spans.append((span, began, ended, about(*args) if about else [], cpu_s))
        return result

    setattr(owner, name, noted)


def watch_service(command: str) -> str:
    """Traces the service that this process runs and returns its name; empty for any other process."""
    if "serve gateway" in command:
        watch_gateway()
        return "gateway"
    if "serve drafter" in command:
        watch_drafter()
        return "drafter"
    if "serve verifier" in command:
        watch_verifier()
        return "verifier"
    return ""


def watch_gateway() -> None:
    """Traces what becomes of a verdict, and the work on the text."""
    from draftwire.method.rounds import Verdict
    from draftwire_gateway.session.committed_text import CommittedText

    def judged(_text: CommittedText, verdict: Verdict) -> list[int]:
        timings = verdict.timings
        reported_us = timings.calibration_us + timings.draft_us + verdict.verify_us
        return [verdict.num_draft_tokens, len(verdict.token_ids), reported_us]

    watch(CommittedText, "commit", "verdict committed", judged)
    watch(CommittedText, "show", "text made")


def watch_drafter() -> None:
    """Traces from the outcome of a round until the next block is sent."""
    from draftwire.drafting.drawing import Drawer
    from draftwire.models.cached_model import CachedModel
    from draftwire.runtime import messages
    from draftwire_drafter.core import DrafterCore
    from draftwire_drafter.engine import DraftEngine

    watch(messages, "outcome_from_proto", "outcome decoded")
    watch(DrafterCore, "learn", "outcome taken")
    watch(DraftEngine, "step", "draft step")
    watch(CachedModel, "read", "drafter's forward pass")
    watch(CachedModel, "extend", "drafter's forward pass")
    watch(Drawer, "draw", "tokens drawn")
    watch(Drawer, "drafts", "distributions encoded")
    watch(messages, "block_to_proto", "block encoded")


def watch_verifier() -> None:
    """Traces from a block's arrival until its outcome is sent."""
    from draftwire.models.cached_model import CachedModel
    from draftwire.models.scripted import ScriptedTarget
    from draftwire.runtime import messages
    from draftwire.verification import deciding
    from draftwire_verifier import engine

    watch(messages, "blocks_from_proto", "block decoded")
    watch(engine.TargetEngine, "step", "verify step")
    watch(CachedModel, "read", "target's forward pass")
    watch(ScriptedTarget, "read", "target's forward pass")
    watch(deciding, "_decide", "rule applied")
    watch(messages, "outcome_to_proto", "outcome encoded")


if FOLDER:
    service = watch_service(Path("/proc/self/cmdline").read_text().replace("\0", " "))
    if service:
        atexit.register(lambda: (Path(FOLDER) / f"{service}.json").write_text(json.dumps(spans)))
