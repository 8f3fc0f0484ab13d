"""Several choices of one request: side by side, each for itself, and together when one fails."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
from gateway_fakes import (
    PROMPT,
    STOP_TOKEN,
    STORY,
    FakeDrafter,
    FakePeers,
    FakeTarget,
    Fate,
    LetterTokenizer,
    describe,
    make_generation,
    text_of,
)
from virtual_time import in_virtual_time, now, run

from draftwire.errors import CompletionInterruptedError, InvalidRequestError, NoRoomError, UnavailableError
from draftwire.method.rounds import TargetSessionSpec
from draftwire.requests.logprobs import LogprobsRequest, PromptPart
from draftwire.runtime.metrics import PREFIX
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.request_record import RequestRecord
from draftwire_gateway.session import choices as choices_module
from draftwire_gateway.session import loop as loop_module
from draftwire_gateway.session.choices import MAX_UNREAD_EVENTS, ChoiceEvent, PromptEcho
from draftwire_gateway.session.committed_text import Delta, Finish, FinishReason
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.ports import Inbox, TargetPort
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.session.statistics import Statistics

PLAIN = LoopSettings(plain_run_rounds=4)


def make_core(targets: Any, drafters: Sequence[FakeDrafter] = (), **config: Any) -> GatewayCore:
    peers = targets if isinstance(targets, FakePeers) else FakePeers([targets], drafters)
    core = GatewayCore(GatewayConfig(**({"loop": PLAIN, "max_waiting_requests": 0} | config)), peers)
    core.description, core._tokenizer = describe("target"), LetterTokenizer()  # type: ignore[assignment]
    return core


def make_choices(count: int, *, prompts: int = 1, **changes: Any) -> list[Generation]:
    return [
        make_generation(choice=choice, prompt_index=choice // count, **changes) for choice in range(count * prompts)
    ]


@dataclass
class Came:
    """What came of one choice."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    prompt: list[int] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def end(self) -> Finish:
        assert self.finish is not None, "it is not finished"
        return self.finish


async def admitted(core: GatewayCore, choices: Sequence[Generation]) -> dict[int, Came]:
    return await collect(events_of(core, choices))


async def events_of(core: GatewayCore, choices: Sequence[Generation]) -> AsyncGenerator[ChoiceEvent]:
    """Yields the events of an admitted request."""
    async with core.queue.place(len(choices)) as place, aclosing(core.generate(choices, place)) as events:
        async for event in events:
            yield event


async def collect(
    events: AsyncGenerator[ChoiceEvent], found: dict[int, Came] | None = None, pause_s: float = 0.0
) -> dict[int, Came]:
    """Returns what came of each choice; a given `found` has got it all when an error is raised."""
    found = {} if found is None else found
    async with aclosing(events):
        async for said in events:
            came = found.setdefault(said.generation.choice, Came())
            assert came.finish is None, "nothing comes after a finish"
            match said.event:
                case Delta(token_ids, text):
                    came.ids += token_ids
                    came.text += text
                case PromptPart(tokens=tokens):
                    came.prompt += [token.token_id for token in tokens]
                case Finish() as finish:
                    came.finish = finish
            await asyncio.sleep(pause_s)
    return found


def generated(core: GatewayCore, choices: Sequence[Generation]) -> dict[int, Came]:
    """Generates in virtual time."""
    return run(collect(events_of(core, choices)))


def assert_whole(found: dict[int, Came], count: int) -> None:
    """Each of so many choices tells the whole story."""
    assert {choice: (came.ids, came.text) for choice, came in found.items()} == dict.fromkeys(
        range(count), (STORY[:20], text_of(STORY[:20]))
    )


def slow_target(*seconds: float) -> FakeTarget:
    """Its verdicts take so long, and all that come later as long as the last of these."""
    target = FakeTarget()
    target.delay_s = lambda count: seconds[min(count, len(seconds) - 1)]
    return target


def all_is_closed(*targets: FakeTarget) -> bool:
    return not any(session.is_open for target in targets for session in target.sessions)


def count_of(core: GatewayCore, result: str) -> float:
    return core.metrics.registry.get_sample_value("draftwire:requests_total", {"result": result}) or 0.0


# Side by side


@pytest.mark.parametrize("count", [1, 5])
def test_every_choice_is_generated_whole_as_a_session_of_its_own(count: int) -> None:
    target = FakeTarget(accepts=[2] * 400)
    drafter = FakeDrafter(target)
    core = make_core(target, [drafter])
    found = generated(core, make_choices(count))
    assert_whole(found, count)
    ends = [(came.end.reason, came.end.statistics.num_generated_tokens) for came in found.values()]
    assert ends == [(FinishReason.LENGTH, 20)] * count
    for of_peer in (target.attempts, [session.spec for session in drafter.sessions]):
        assert sorted(spec.parameters.choice for spec in of_peer) == list(range(count)), (
            "random numbers are keyed by it"
        )
    assert len({spec.verifying_key for spec in target.attempts}) == 1
    assert len({spec.session_id for spec in target.attempts}) == count
    assert target.violations == drafter.violations == []
    assert all_is_closed(target)
    assert (core.num_requests, count_of(core, "length")) == (0, count)


def openings(target: FakeTarget) -> list[tuple[int, int]]:
    """Notes, for each opening, its choice and how many verdicts came before."""
    noted: list[tuple[int, int]] = []
    target.on_opening = lambda spec: noted.append((spec.parameters.choice, len(target.verdicts)))  # type: ignore[func-returns-value]
    return noted


def test_others_start_when_the_first_choice_of_their_prompt_has_begun() -> None:
    target = slow_target(100.0, 1.0)
    noted = openings(target)
    found = generated(make_core(target), make_choices(3, prompts=2))
    assert_whole(found, 6)
    assert noted[:2] == [(0, 0), (3, 0)], "of each prompt one starts at once"
    assert sorted(choice for choice, _ in noted[2:]) == [1, 2, 4, 5]
    assert all(1 <= num_verdicts <= 8 for _, num_verdicts in noted[2:]), "not before its first verdict, and soon after"


@pytest.mark.parametrize("was_finished", [False, True])
def test_choice_that_was_complete_before_leaves_the_prompt_to_the_next(was_finished: bool) -> None:
    """All its tokens came before the interruption; its finish did, too, or did not."""
    target = slow_target(0.2, 0.0)
    noted = openings(target)
    first, *others = make_choices(4)
    before = [] if was_finished else [replace(first, generated_ids=tuple(STORY[:20]))]
    found = asyncio.run(collect(events_of(make_core(target), [*before, *others])))  # texts are skipped on a thread
    assert {choice: came.ids for choice, came in found.items() if came.ids} == dict.fromkeys((1, 2, 3), STORY[:20])
    assert noted[0] == (1, 0)
    assert sorted(choice for choice, _ in noted[1:]) == [2, 3]
    assert all(num_verdicts >= 1 for _, num_verdicts in noted[1:]), "the prompt is read once"
    assert run(collect(events_of(make_core(target), []))) == {}, "if all are"


class TurningPeers(FakePeers):
    """Prefers another verifier each time."""

    def targets(self) -> Sequence[TargetPort]:
        self.all_targets = [*self.all_targets[1:], self.all_targets[0]]
        return super().targets()


@pytest.mark.parametrize(("room", "shares"), [(5, [0, 0, 5]), (2, [1, 2, 2])])
def test_choices_of_a_prompt_go_to_the_verifier_holding_it_if_it_has_room(room: int, shares: list[int]) -> None:
    targets = [FakeTarget(address=f"target:{number}") for number in range(3)]
    for target in targets:
        limit(target, room)
        target.delay_s = lambda count: 1.0
    assert_whole(generated(make_core(TurningPeers(targets)), make_choices(5)), 5)
    assert sorted(len(target.sessions) for target in targets) == shares


def test_resumed_choices_go_on_each_behind_its_own_tokens() -> None:
    target = FakeTarget()
    generations = [
        make_generation(choice=choice, generated_ids=tuple(STORY[:length])) for choice, length in enumerate([3, 0, 20])
    ]
    found = asyncio.run(collect(events_of(make_core(target), generations)))  # texts are skipped on a thread
    assert [found[choice].ids for choice in range(3)] == [STORY[3:20], STORY[:20], []]
    assert {spec.parameters.choice: spec.first_round for spec in target.attempts} == {0: 3, 1: 0}


def test_time_of_every_choice_counts_from_the_arrival_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choices_module, loop_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=now))
    target = slow_target(100.0, 1.0)
    found = generated(make_core(target), make_choices(2))
    first, second = (found[choice].end.statistics.time_to_first_token_us for choice in range(2))
    assert second > first == 100_000_000


# Echoes and prompts


async def test_prompts_come_back_before_all_else_under_their_first_choices() -> None:
    generations = [make_generation(choice=choice, prompt_index=choice, echo=choice != 1) for choice in range(3)]
    told = [said async for said in events_of(make_core(FakeTarget()), generations)]
    assert [(said.generation.choice, said.event) for said in told[:2]] == [
        (choice, PromptEcho(PROMPT, text_of(PROMPT))) for choice in (0, 2)
    ]
    assert not any(isinstance(said.event, PromptEcho) for said in told[2:])


def test_prompt_is_reported_once_and_before_all_tokens_of_its_choices() -> None:
    target = FakeTarget()
    noted = openings(target)
    first, *others = make_choices(3)
    asking = make_generation(logprobs=LogprobsRequest(prompt_logprobs=1))
    assert first.choice == asking.choice
    found = generated(make_core(target), [asking, *others])
    assert [found[choice].prompt for choice in range(3)] == [PROMPT[1:], [], []]
    assert [spec.logprobs.prompt_logprobs for spec in target.attempts] == [1, None, None]
    assert all(num_verdicts >= 1 for _, num_verdicts in noted[1:]), "a part of the prompt is not all of it"


def test_choices_of_no_tokens_need_no_verifier() -> None:
    found = run(collect(events_of(make_core(FakePeers([])), make_choices(2, max_tokens=0))))
    assert [(came.ids, came.text, came.end.reason) for came in found.values()] == [([], "", FinishReason.LENGTH)] * 2


def test_prompt_is_reported_also_where_no_token_is_asked_for() -> None:
    """A verifier says nothing of a prompt without a token, which is dropped."""
    target = FakeTarget()
    asking = make_generation(logprobs=LogprobsRequest(2, prompt_logprobs=1), max_tokens=0, num_speculative_tokens=0)
    drafter = FakeDrafter(target)
    came = generated(make_core(target, [drafter]), [asking])[0]
    assert (came.prompt, came.ids, came.text, came.end.reason) == (PROMPT[1:], [], "", FinishReason.LENGTH)
    numbers = came.end.statistics
    assert (numbers.num_generated_tokens, numbers.num_rounds, numbers.num_emitted_tokens) == (0, 1, 1)
    assert (target.spec.plain_rounds, target.spec.max_len, drafter.opened) == (1, len(PROMPT) + 1, 0)
    assert all_is_closed(target)


# Failure


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_when_one_fails_all_end_and_its_own_error_is_raised(failing: int) -> None:
    target = slow_target(1.0)
    target.on_opening = lambda spec: InvalidRequestError("no") if spec.parameters.choice == failing else None
    core = make_core(target)
    with pytest.raises(InvalidRequestError, match="no"):
        generated(core, make_choices(3, max_tokens=100))
    assert len(target.verdicts) < 50
    assert all_is_closed(target)
    assert (core.num_requests, count_of(core, "invalid"), count_of(core, "failed")) == (0, 3, 0)


@pytest.mark.parametrize(("error", "result"), [(InvalidRequestError("no"), "invalid"), (ValueError("bug"), "failed")])
def test_trace_and_metrics_tell_a_bad_request_from_a_service_failure(error: Exception, result: str) -> None:
    core = make_core(target := FakeTarget())
    target.on_opening = lambda spec: error
    told: list[tuple[str, BaseException | None]] = []
    trace = SimpleNamespace(choice=lambda generation: None, end=lambda *said: told.append(said))
    core.tracing = SimpleNamespace(begin=lambda *_: trace)  # type: ignore[assignment]
    with pytest.raises(type(error)):
        generated(core, make_choices(2))
    assert told == [(result, error)]
    counts = {name: count_of(core, name) for name in ("invalid", "failed")}
    assert counts == {"invalid": 0, "failed": 0} | {result: 2}


def test_interruption_names_the_failed_choices_tokens_after_its_events() -> None:
    target = FakeTarget()

    def fate() -> Fate:
        target.connected = len(target.verdicts) < 30
        return Fate.TOLD if target.connected else Fate.LOST_UNTOLD

    target.next_fate = fate
    found: dict[int, Came] = {}
    with pytest.raises(CompletionInterruptedError) as interruption:
        run(collect(events_of(make_core(target), make_choices(3, max_tokens=100)), found))
    counts = [len(came.ids) for came in found.values()]
    assert interruption.value.num_generated_tokens in counts
    assert sum(counts) >= 28


def test_what_waits_to_be_read_is_told_before_a_failure() -> None:
    target = FakeTarget()
    target.on_opening = lambda spec: InvalidRequestError("no") if spec.parameters.choice == 1 else None
    found: dict[int, Came] = {}
    with pytest.raises(InvalidRequestError):
        run(collect(events_of(make_core(target), make_choices(2, max_tokens=100)), found, pause_s=10.0))
    assert len(found[0].ids) > 1


# Cancellation and slow readers


@pytest.mark.parametrize("num_events", [1, 3, 40])
@in_virtual_time
async def test_request_that_is_left_leaves_nothing(num_events: int) -> None:
    target = slow_target(1.0)
    drafter = FakeDrafter(target)
    core = make_core(target, [drafter])
    async with aclosing(events_of(core, make_choices(4, max_tokens=100))) as events:
        for _ in range(num_events):
            await anext(events)
    assert all_is_closed(target)
    assert len(asyncio.all_tasks()) == 1
    assert all(not session.is_open for session in drafter.sessions)
    assert (core.num_requests, count_of(core, "cancelled")) == (0, 4)


@in_virtual_time
async def test_cancelling_the_task_that_reads_ends_all_choices() -> None:
    target = slow_target(1.0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collect(events_of(make_core(target), make_choices(4, max_tokens=100))), 10.0)
    assert all_is_closed(target)
    assert (len(asyncio.all_tasks()), len(target.sessions)) == (1, 4)


@in_virtual_time
async def test_slow_reader_holds_up_its_own_choices_and_no_other_request() -> None:
    count, rounds = 8, PLAIN.plain_run_rounds
    slow, other = FakeTarget(), FakeTarget(address="target:2")
    events = events_of(make_core(slow), make_choices(count, max_tokens=150))
    await anext(events)
    await asyncio.sleep(1_000.0)
    num_verdicts = len(slow.verdicts)
    assert_whole(await collect(events_of(make_core(other), make_choices(2))), 2)
    # What waits to be read, one event in each hand, and what was asked for before that came in.
    assert num_verdicts <= 1 + MAX_UNREAD_EVENTS + count * (1 + 2 * rounds)
    found = await collect(events)
    assert sorted(len(came.ids) for came in found.values()) == [149, *[150] * (count - 1)]


# Room


def limit(target: FakeTarget, num_sessions: int) -> None:
    admitted: list[TargetSessionSpec] = []

    def refusal(spec: TargetSessionSpec) -> Exception | None:
        if len(admitted) - sum(not session.is_open for session in target.sessions) >= num_sessions:
            return NoRoomError("full")
        admitted.append(spec)
        return None

    target.on_opening = refusal


@pytest.mark.parametrize(("count", "room", "seconds"), [(1, 1, [40.0, 1.0]), (3, 2, [10.0])])
def test_choices_wait_for_the_room_that_others_of_the_request_have(count: int, room: int, seconds: list[float]) -> None:
    """Far longer than another verifier would be sought, be it for a first token or for all of them."""
    target = slow_target(*seconds)
    limit(target, room)
    assert_whole(generated(make_core(target), make_choices(count, prompts=2)), 2 * count)
    assert max(len(spec.token_ids) for spec in target.attempts) == len(PROMPT)


def test_room_that_comes_just_after_it_was_asked_for_is_asked_for_again() -> None:
    """A verifier hears a little later that a session has ended."""
    target = slow_target(2.0)
    target.on_opening = lambda spec: NoRoomError("full") if spec.parameters.choice and now() < 38.5 else None
    settings = replace(PLAIN, failover_timeout_s=0.0)

    async def refuse_late(spec: TargetSessionSpec, inbox: Inbox) -> None:
        if 38.5 < now() < 40.0:
            await asyncio.sleep(2.0)
            raise NoRoomError("full")
        await opening(spec, inbox)

    opening, target.open = target.open, refuse_late  # type: ignore[method-assign]
    found = run(collect(events_of(make_core(target, loop=settings), make_choices(2))))
    assert_whole(found, 2)


def test_attempts_that_found_no_room_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a copy of the prompt."""
    target = slow_target(20.0)
    limit(target, 1)
    core, made = make_core(target), WeakSet[Any]()
    most_alive = 0
    make = core._make_loop

    async def watched(generation: Generation, trace: Any) -> Any:
        nonlocal most_alive
        loop = await make(generation, trace)
        made.add(loop)
        gc.collect()
        most_alive = max(most_alive, len(made))
        return loop

    monkeypatch.setattr(core, "_make_loop", watched)
    gc.freeze()  # so that each collection looks at what the test makes alone
    try:
        assert_whole(generated(core, make_choices(2)), 2)
    finally:
        gc.unfreeze()
    assert len(target.attempts) > 10
    assert most_alive <= 3


@pytest.mark.parametrize("is_lost", [True, False])
def test_choice_that_may_have_begun_elsewhere_reports_it_when_retried(is_lost: bool) -> None:
    """One verifier's answer was lost before the others refused, or there was none but these: the text draws the same
    numbers again, or does not.
    """
    lost, target = FakeTarget(address="target:2"), FakeTarget()
    refusals = [NoRoomError("full")]
    target.on_opening = lambda spec: refusals.pop() if refusals else None
    lost.refuses_too_late, lost.connected = True, is_lost

    def lose(spec: TargetSessionSpec) -> Exception:
        lost.connected = False
        return UnavailableError("no answer")

    lost.on_opening = lose
    core = make_core(FakePeers([lost, target]), max_waiting_requests=1)
    assert_whole(generated(core, make_choices(1)), 1)
    assert len(lost.attempts) == is_lost
    assert [spec.epoch for spec in target.attempts] == [int(is_lost), 0]
    assert target.spec.parameters.shares_text is not is_lost


def test_losses_of_every_attempt_are_counted_once() -> None:
    core = make_core(FakeTarget())
    with RequestRecord(core.metrics, make_choices(2)) as record:
        for choice, lost in ((0, 1), (1, 2), (0, 4)):
            statistics = Statistics()
            record.begin_choice(choice, statistics)
            statistics.num_drafters_lost, statistics.num_verifiers_lost = lost, 10 * lost
            statistics.num_ahead_hits, statistics.num_ahead_late, statistics.num_ahead_misses = lost, 2 * lost, 3 * lost
    read = core.metrics.registry.get_sample_value
    assert read(PREFIX + "drafters_lost_total") == 7.0
    assert read(PREFIX + "verifiers_lost_total") == 70.0
    outcomes = ("hit", "late", "missed")
    ahead = [read(PREFIX + "ahead_rounds_total", {"outcome": outcome}) for outcome in outcomes]
    assert ahead == [7.0, 14.0, 21.0]


def test_resumed_first_choice_is_not_overtaken_by_a_fresh_other_one() -> None:
    """Its text is skipped on a thread before it can open."""
    target = FakeTarget()
    noted = openings(target)
    noting = target.on_opening
    limit(target, 1)
    limiting = target.on_opening
    target.on_opening = lambda spec: noting(spec) or limiting(spec)
    first, other = make_choices(1, prompts=2)
    resumed = replace(first, generated_ids=tuple(STORY[:3]))
    found = asyncio.run(collect(events_of(make_core(target), [resumed, other])))
    assert ([found[choice].ids for choice in range(2)], noted[0][0]) == ([STORY[3:20], STORY[:20]], 0)


@in_virtual_time
async def test_first_choice_is_refused_at_once_where_there_is_no_room() -> None:
    target = FakeTarget()
    limit(target, 0)
    with pytest.raises(NoRoomError):
        await collect(events_of(make_core(target), make_choices(3, prompts=2)))
    assert now() == 0.0
    assert all_is_closed(target)


@pytest.mark.parametrize("failover_timeout_s", [0.0, 30.0])
@in_virtual_time
async def test_room_that_does_not_come_is_given_up_if_none_of_the_request_runs(failover_timeout_s: float) -> None:
    target = slow_target(2.0)
    target.on_opening = lambda spec: NoRoomError("full") if spec.parameters.choice else None
    with pytest.raises(NoRoomError):
        await collect(
            events_of(make_core(target, loop=LoopSettings(failover_timeout_s=failover_timeout_s)), make_choices(2))
        )
    assert 20 * 2.0 <= now() < 20 * 2.0 + 2 * failover_timeout_s + 5.0
    assert len(target.attempts) < 80, "with pauses in between"


def test_verifier_that_is_lost_before_others_start_is_waited_for() -> None:
    target = slow_target(1.0)
    opened_at: list[float] = []

    def refusal(spec: TargetSessionSpec) -> Exception | None:
        opened_at.append(now())
        return UnavailableError("not now") if spec.parameters.choice and now() < 12.0 else None

    target.on_opening = refusal
    found = generated(make_core(target), make_choices(2))
    assert_whole(found, 2)
    assert max(opened_at) >= 12.0


# Admission


@in_virtual_time
async def test_every_choice_counts_and_nothing_starts_where_they_do_not_fit() -> None:
    target = slow_target(1.0)
    core = make_core(target, max_requests=4)
    with pytest.raises(InvalidRequestError, match="num_choices"):
        await admitted(core, make_choices(5))
    running = asyncio.create_task(admitted(core, make_choices(3)))
    await asyncio.sleep(5.0)
    assert core.num_requests == 3
    with pytest.raises(NoRoomError):
        await admitted(core, make_choices(2))
    assert ({spec.parameters.choice for spec in target.attempts}, len(target.attempts)) == ({0, 1, 2}, 3)
    assert len(await admitted(core, make_choices(1))) == 1
    await running
    assert core.num_requests == 0
    assert len(await admitted(core, make_choices(4))) == 4


async def test_request_counts_from_before_its_preparation_until_any_end() -> None:
    core = make_core(FakeTarget(), max_requests=3)
    async with core.queue.place(2):
        assert core.num_requests == 2
        with pytest.raises(NoRoomError):
            async with core.queue.place(2):
                raise AssertionError("is not prepared")
        with pytest.raises(ValueError, match="no ids"):
            async with core.queue.place(1):
                raise ValueError("no ids")
        assert core.num_requests == 2
    assert core.num_requests == 0


def test_results_are_counted_for_each_choice() -> None:
    target = FakeTarget([*STORY[:5], STOP_TOKEN])
    core = make_core(target)
    generations = [make_generation(choice=choice, max_tokens=[3, 20, 20][choice]) for choice in range(3)]
    generated(core, generations)
    assert (count_of(core, "length"), count_of(core, "stop"), count_of(core, "failed")) == (1, 2, 0)


async def test_requests_are_counted_by_what_they_cost_and_how_they_were_refused() -> None:
    target = FakeTarget(accepts=[2] * 100)
    core = make_core(target, [FakeDrafter(target)], max_requests=3)
    core.metrics.of_model.model_name = "target"

    def read(name: str, **labels: str) -> float | None:
        return core.metrics.registry.get_sample_value(f"draftwire:{name}", labels)

    of_model = {"model_name": "target", "engine": "0"}
    async with core.queue.place(2):
        assert read("num_requests_running", **of_model) == 2.0
        with pytest.raises(NoRoomError):
            async with core.queue.place(2):
                pass
    assert read("num_requests_running", **of_model) == 0.0
    await admitted(core, make_choices(2))
    assert read("prompt_tokens_total", **of_model) == len(PROMPT), "both choices have one prompt"
    assert (read("generation_tokens_total", **of_model), read("round_tokens_total")) == (40.0, 40.0)
    assert read("time_to_first_token_seconds_count", **of_model) == 2.0
    assert read("e2e_request_latency_seconds_count", **of_model) == 2.0
    rounds = sum(read("rounds_total", kind="plain", reason=why.value) or 0.0 for why in WhyPlain)
    rounds += read("rounds_total", kind="speculative", reason="") or 0.0
    assert rounds == len(target.verdicts)
    target.on_opening = lambda spec: NoRoomError("full")
    with pytest.raises(NoRoomError):
        await admitted(core, make_choices(1))
    assert (read("requests_refused_total", by="verifier"), count_of(core, "refused")) == (1.0, 1.0)
    assert count_of(core, "failed") == 0.0
