"""What vLLM's scheduler sees behind the gate, step by step, and what it makes of it: `tests/vectors/vllm_steps.json`.

`tests/unit/test_vllm_gate.py` replays the record without vLLM. A recording that differs from it is a change of the gate
or of vLLM.
"""

from contextlib import ExitStack
from typing import Any
from unittest import mock

from vllm.v1.core.sched.scheduler import Scheduler

from draftwire.verification.deciding import reports_prompt

Step = dict[str, Any]


class Recording:
    """Records the steps of one engine. A context manager."""

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[Step] = []
        self._scheduler = scheduler
        self._exits = ExitStack()

    def __enter__(self) -> "Recording":
        gate = type(self._scheduler)
        for owner, name, replaced in (
            (gate, "schedule", self._schedule),
            (Scheduler, "schedule", self._base_schedule),
            (gate, "update_from_output", self._update),
            (Scheduler, "update_from_output", self._base_update),
        ):
            original = getattr(owner, name)
            patched = lambda *given, _replaced=replaced, _original=original: _replaced(_original, *given)  # noqa: E731
            self._exits.enter_context(mock.patch.object(owner, name, patched))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _schedule(self, original: Any, scheduler: Any, *rest: Any) -> Any:
        items = {
            name: {
                "draft_tokens": item.draft_tokens,
                "max_read": item.max_read,
                "prompt_len": item.prompt_len,
                "reports": reports_prompt(item.report),
            }
            for name, item in scheduler.items.items()
        }
        self.steps.append({"items": items})
        output = original(scheduler, *rest)
        taken = output.draftwire_items
        self.steps[-1]["deciding"] = sorted(taken.deciding)
        self.steps[-1]["prompts"] = {name: [one.start, one.num_rows] for name, one in taken.prompts.items()}
        return output

    def _base_schedule(self, original: Any, scheduler: Any, *rest: Any) -> Any:
        step = self.steps[-1]
        step["running"] = [one.request_id for one in scheduler.running]
        step["waiting"] = [one.request_id for one in scheduler.waiting]
        step["texts"] = {name: len(one._all_token_ids) for name, one in scheduler.requests.items()}
        step["computed"] = {name: one.num_computed_tokens for name, one in scheduler.requests.items()}
        step["hits"] = {
            one.request_id: scheduler.kv_cache_manager.get_computed_blocks(one)[1] for one in scheduler.waiting
        }
        step["seen"] = {
            one.request_id: [one.num_tokens, one.num_tokens_with_spec]
            for one in (*scheduler.running, *scheduler.waiting)
            if one.next_decode_eligible_step <= scheduler.current_step
        }
        output = original(scheduler, *rest)
        step["new"] = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        step["scheduled"] = dict(output.num_scheduled_tokens)
        step["drafted"] = {name: list(ids) for name, ids in output.scheduled_spec_decode_tokens.items()}
        step["running_after"] = [one.request_id for one in scheduler.running]
        step["waiting_after"] = [one.request_id for one in scheduler.waiting]
        step["computed_scheduled"] = {name: one.num_computed_tokens for name, one in scheduler.requests.items()}
        return output

    def _update(self, original: Any, scheduler: Any, *rest: Any) -> Any:
        outputs = original(scheduler, *rest)
        step = self.steps[-1]
        step["computed_after"] = {name: one.num_computed_tokens for name, one in scheduler.requests.items()}
        return outputs

    def _base_update(self, original: Any, scheduler: Any, output: Any, result: Any) -> Any:
        outputs = original(scheduler, output, result)
        step = self.steps[-1]
        report = getattr(result, "draftwire_report", None)
        step["decided"] = (
            {} if report is None else {name: report.tokens_of(name) for name in output.num_scheduled_tokens}
        )
        step["computed_updated"] = {name: one.num_computed_tokens for name, one in scheduler.requests.items()}
        return outputs
