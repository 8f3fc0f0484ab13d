"""vLLM's scheduler and request behind the gate. Imports vLLM."""

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from draftwire_verifier.vllm.gate import LimitedReading, SessionGate


class GatedRequest(LimitedReading, Request):  # type: ignore[misc]
    """One session's text in vLLM. It never ends by itself."""

    @classmethod
    def open(cls, core: Any, name: str, token_ids: Sequence[int], salt: str, reuses: bool) -> None:
        """Adds a session to vLLM.

        Args:
            core: an EngineCore.
            name: of the session.
            token_ids: its committed tokens.
            salt: of the prefix cache; empty is none.
            reuses: whether it may take over blocks of others.
        """
        limit = core.vllm_config.model_config.max_model_len
        sampling = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=limit, skip_reading_prefix_cache=not reuses
        )
        hasher = core.request_block_hasher
        core.add_request(cls(name, list(token_ids), sampling, None, cache_salt=salt or None, block_hasher=hasher))


class GatedScheduler(SessionGate, Scheduler):  # type: ignore[misc]
    """`scheduler_cls` of the engine."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.open_gate()
        # Without it, vLLM pads requests of one unread token with placeholders that nobody drafted.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
