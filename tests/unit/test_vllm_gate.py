"""The gate in front of vLLM's scheduler, without vLLM: against a record of what vLLM's scheduler does behind it.

`tests/on_vllm/test_recording.py` makes the record, and fails if vLLM does something else.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.options.logprobs.session_logprobs import LogprobsReport
from draftwire.requests.logprobs import LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from draftwire.verification.deciding import Judgement
from draftwire_verifier.vllm.gate import NEVER, LimitedReading, SessionGate
from draftwire_verifier.vllm.items import RoundItem, StepReport
from draftwire_verifier.vllm.no_drafts import NoDrafts

RECORD = json.loads((Path(__file__).parents[1] / "vectors" / "vllm_steps.json").read_text(encoding="utf-8"))


def make_item(num_text: int, draft_tokens: list[int], max_read: int, prompt_len: int, reports: bool) -> RoundItem:
    return RoundItem(
        draft_tokens=draft_tokens,
        draft=None,
        sampling=SamplingParams(),
        rule="block",
        is_used=True,
        key=DrawKey(bytes(KEY_BYTES), 0, 0),
        num_committed=num_text,
        max_read=max_read,
        prompt_len=prompt_len,
        stop_token_ids=frozenset(),
        report=LogprobsReport(LogprobsRequest(prompt_logprobs=1)) if reports else None,
    )


class Request(LimitedReading):
    """As much of a request of vLLM as the gate touches."""

    def __init__(self, request_id: str, num_text: int) -> None:
        self.request_id = request_id
        self._all_token_ids = [0] * num_text
        self.spec_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.next_decode_eligible_step = 0


class Queue(list[Request]):
    """As much of vLLM's queue."""

    def remove_requests(self, requests: list[Request]) -> None:
        self[:] = [one for one in self if one not in requests]

    def add_request(self, request: Request) -> None:
        self.append(request)


class RecordedScheduler:
    """Does what vLLM's scheduler did in one step, if it sees what that saw."""

    step: dict[str, Any]

    def schedule(self, throttle_prefills: bool) -> Any:
        step = self.step
        gate: Any = self
        assert [one.request_id for one in gate.running] == step["running"]
        assert [one.request_id for one in gate.waiting] == step["waiting"]
        eligible = [one for one in (*gate.running, *gate.waiting) if one.next_decode_eligible_step < NEVER]
        assert {one.request_id: [one.num_tokens, one.num_tokens_with_spec] for one in eligible} == step["seen"]
        gate.running = [gate.requests[name] for name in step["running_after"]]
        gate.waiting[:] = [gate.requests[name] for name in step["waiting_after"]]
        for name, num_computed in step["computed_scheduled"].items():
            gate.requests[name].num_computed_tokens = num_computed
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=num) for name, num in step["new"].items()
            ],
            num_scheduled_tokens=step["scheduled"],
            scheduled_spec_decode_tokens=step["drafted"],
            total_num_scheduled_tokens=sum(step["scheduled"].values()),
        )

    def update_from_output(self, output: Any, result: Any) -> dict[str, Any]:
        gate: Any = self
        for name, tokens in self.step["decided"].items():
            gate.requests[name]._all_token_ids.extend(tokens)
        for name, num_computed in self.step["computed_updated"].items():
            gate.requests[name].num_computed_tokens = num_computed
        return {}


class RecordedGate(SessionGate, RecordedScheduler):
    """The gate over the record."""

    def __init__(self) -> None:
        self.open_gate()
        self.running: list[Any] = []
        self.waiting = Queue()
        self.requests: dict[str, Any] = {}
        self.kv_cache_manager = SimpleNamespace(
            get_computed_blocks=lambda request: (None, self.step["hits"][request.request_id], 0)
        )

    def follow(self, step: dict[str, Any]) -> Any:
        """Puts the requests where the step found them, and runs it."""
        self.step = step
        for name, num_text in step["texts"].items():
            if name not in self.requests:
                self.requests[name] = Request(name, num_text)
                self.waiting.append(self.requests[name])
            assert len(self.requests[name]._all_token_ids) == num_text
            assert self.requests[name].num_computed_tokens == step["computed"][name]
        for name in [name for name in self.requests if name not in step["texts"]]:
            request = self.requests.pop(name)
            self.running = [one for one in self.running if one is not request]
            self.waiting.remove_requests([request])
        resting = [one.request_id for one in self.waiting if one.request_id not in step["items"]]
        assert not set(resting) & set(step["waiting"]), "who has no item is not started"
        self.items = {name: make_item(step["texts"][name], **item) for name, item in step["items"].items()}
        return self.schedule()


def test_record_is_followed_step_by_step() -> None:
    gate = RecordedGate()
    for step in RECORD:
        output = gate.follow(step)
        taken = output.draftwire_items
        assert sorted(taken.deciding) == step["deciding"]
        assert {name: [one.start, one.num_rows] for name, one in taken.prompts.items()} == step["prompts"]
        assert taken.reading.keys() == step["scheduled"].keys()
        assert gate.items == {}
        assert all(one.readable is None and not one.spec_token_ids for one in gate.requests.values())
        assert gate.num_scheduled == sum(step["scheduled"].values())
        decided = {name: Judgement(tokens, 0) for name, tokens in step["decided"].items() if tokens}
        gate.update_from_output(output, SimpleNamespace(draftwire_report=StepReport(dict(decided))))
        assert {name: one.num_computed_tokens for name, one in gate.requests.items()} == step["computed_after"]


def test_record_shows_what_it_is_for() -> None:
    """Blocks, chunks, prefix hits, reported prompts, waiting sessions, and a preemption."""
    assert any(step["drafted"] for step in RECORD)
    assert any(set(step["scheduled"]) - set(step["deciding"]) for step in RECORD)
    assert any(num for step in RECORD for num in step["new"].values())
    assert any(step["prompts"] for step in RECORD)
    assert any(set(step["running"]) - set(step["items"]) for step in RECORD)
    assert any(step["waiting_after"] for step in RECORD)


@pytest.mark.parametrize(
    ("num_text", "num_computed", "drafted", "max_read", "started", "seen"),
    [
        (40, 0, 0, 40, False, (40, 40)),  # a prompt, whole
        (40, 0, 0, 39, False, (39, 39)),  # in chunks
        (40, 16, 0, 8, True, (24, 24)),
        (40, 39, 3, 1, True, (40, 43)),  # a block behind the last token
        (40, 39, 3, 1, False, (40, 40)),  # vLLM takes no drafts of a request that it starts
        (40, 0, 3, 40, True, (39, 39)),  # the last token is left for the block
        (1, 0, 3, 1, False, (1, 1)),
    ],
)
def test_request_shows_what_is_to_be_read(
    num_text: int, num_computed: int, drafted: int, max_read: int, started: bool, seen: tuple[int, int]
) -> None:
    gate = RecordedGate()
    request = Request("one", num_text)
    request.num_computed_tokens = num_computed if started else 0
    gate.requests["one"] = request
    (gate.running if started else gate.waiting).append(request)
    gate.items = {"one": make_item(num_text, list(range(drafted)), max_read, num_text, False)}
    name = ["one"]
    gate.step = {
        "running": name if started else [],
        "waiting": [] if started else name,
        "hits": {"one": num_computed},
        "seen": {"one": list(seen)},
        "running_after": name,
        "waiting_after": [],
        "computed_scheduled": {"one": min(num_text, num_computed + max_read)},
        "new": {},
        "scheduled": {"one": max_read},
        "drafted": {},
    }
    gate.schedule()


@pytest.mark.parametrize(("num_read", "is_cut"), [(0, True), (1, True), (3, False), (None, False)])
def test_block_of_which_a_part_was_read_is_noticed(num_read: int | None, is_cut: bool) -> None:
    """None is a step in which vLLM found no place for the request, and which is not the block's fault."""
    gate = RecordedGate()
    request = Request("one", 40)
    request.num_computed_tokens = 39
    gate.requests["one"] = request
    gate.running.append(request)
    gate.items = {"one": make_item(40, [0, 1, 2], 1, 40, False)}
    has_place = num_read is not None
    gate.step = {
        "running": ["one"],
        "waiting": [],
        "seen": {"one": [40, 43]},
        "running_after": ["one"],
        "waiting_after": [],
        "computed_scheduled": {"one": 40 + num_read} if has_place else {},
        "new": {},
        "scheduled": {"one": 1 + num_read} if has_place else {},
        "drafted": {"one": list(range(num_read))} if num_read else {},
    }
    gate.schedule()
    assert gate.cut_blocks == (frozenset({"one"}) if is_cut else frozenset())


def test_report_is_the_last_steps_own() -> None:
    gate = RecordedGate()
    gate.step = {"decided": {}, "computed_updated": {}}
    report = StepReport()
    output = SimpleNamespace(num_scheduled_tokens={})
    gate.update_from_output(output, SimpleNamespace(draftwire_report=report))
    assert gate.report is report
    gate.update_from_output(output, SimpleNamespace())
    assert gate.report is None


def test_drafter_of_vllm_drafts_nothing() -> None:
    drafter = NoDrafts(None)
    drafter.load_model(None)
    assert drafter.propose([[1], [2, 3]], None, num_speculative_tokens=4) == [[], []]
    gate = RecordedGate()
    gate.update_draft_token_ids(SimpleNamespace(draft_token_ids=[[1]]))
    assert gate.requests == {}
