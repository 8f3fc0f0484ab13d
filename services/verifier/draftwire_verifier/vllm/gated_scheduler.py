"""vLLM's scheduler and request behind the gate. Imports vLLM."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from draftwire_verifier.vllm.gate import LimitedReading, SessionGate


class GatedRequest(LimitedReading, Request):  # type: ignore[misc]
    """One session's text in vLLM."""


class GatedScheduler(SessionGate, Scheduler):  # type: ignore[misc]
    """`scheduler_cls` of the engine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Takes vLLM's arguments."""
        super().__init__(*arguments, **options)
        self.open_gate()
        # Without it, vLLM pads requests of one unread token with placeholders that nobody drafted.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
