"""What the schedulers of drafter and verifier both promise, written once and run on each of them."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftwire.engine.admission import ClosedEarly
from draftwire.engine.prefill import LARGEST_CHUNK, SMALLEST_CHUNK, ChunkCost, PrefillPacer
from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError, ProtocolViolationError, UnavailableError
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for

CONTEXT_LENGTH = 12
PROMPT = [1, 2, 3, 4]
UNSHRUNK = settings(max_examples=250, stateful_step_count=40, phases=(Phase.explicit, Phase.generate))
"""Of tests of messages in any order: shrinking takes longer than a test may."""
BOTH_OUT_OF_RANGE: list[dict[str, Any]] = [
    {"token_ids": []},
    {"token_ids": [1] * CONTEXT_LENGTH},
    {"prompt_len": 0},
    {"prompt_len": len(PROMPT) + 1},
    {"max_draft_tokens": 6},
    {"max_len": CONTEXT_LENGTH + 1},
    {"max_len": len(PROMPT)},
    {"max_len": 0},
]
BOTH_AT_THE_EDGE: list[dict[str, Any]] = [
    {"token_ids": [1] * (CONTEXT_LENGTH - 1)},
    {"prompt_len": 1},
    {"max_draft_tokens": 5},
    {"rule": "token"},
    {"max_len": len(PROMPT) + 1},
    {"max_len": CONTEXT_LENGTH},
]


@dataclass(slots=True)
class FixedPacer(PrefillPacer):
    """Allows the same number of prompt tokens in every step, and notes what it was told."""

    max_added_latency_s: float = 1.0
    tokens: int = 1000
    asked: list[bool] = field(default_factory=list)
    alone_asked: list[bool] = field(default_factory=list)
    unread_asked: list[Sequence[int]] = field(default_factory=list)

    def budget(self, unread: Sequence[int], sessions_run: bool, is_alone: bool = False) -> int:
        self.asked.append(sessions_run)
        self.alone_asked.append(is_alone)
        self.unread_asked.append(unread)
        return self.tokens


class SmallestPacer(PrefillPacer):
    """Allows the smallest chunk in each step beside sessions that run."""

    def __init__(self) -> None:
        super().__init__(max_added_latency_s=1.0)

    def budget(self, unread: Sequence[int], sessions_run: bool, is_alone: bool = False) -> int:
        return SMALLEST_CHUNK if sessions_run else LARGEST_CHUNK


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two schedulers, as the contract sees it."""

    make_scheduler: Callable[..., Any]
    make_spec: Callable[..., Any]
    """Makes a session that has work for a step as soon as it is open."""
    engine: Callable[..., Any]
    """Makes what carries steps out with `run`; takes how many tokens of every prompt it need not read."""
    ask: Callable[[Any, Any], object]
    """Gives a session without work some for one step."""
    done: Callable[[Any], list[int]]
    """Returns the sessions that a completed step did more for than read a part of their prompts."""
    timed: Callable[[Any, float], Any]
    """Lets a step have taken so many seconds."""
    out_of_range: list[dict[str, Any]]
    at_the_edge: list[dict[str, Any]]

    def long_spec(self, session_id: int, prompt_len: int) -> Any:
        return self.make_spec(session_id, token_ids=[1] * prompt_len, prompt_len=prompt_len, max_len=prompt_len + 30)

    def run_steps(self, scheduler: Any, limit: int = 99, engine: Any = None) -> list[list[int]]:
        """Runs at most so many steps, all to their end, and returns for whom each of them was more than reading."""
        engine, done = engine or self.engine(), []
        while len(done) < limit and (step := scheduler.next_step()) is not None:
            done.append(self.done(scheduler.complete(step, engine.run(step))))
        return done


def next_step(scheduler: Any) -> Any:
    step = scheduler.next_step()
    assert step is not None
    return step


def ids_of(step: Any) -> list[int]:
    return [item.session.spec.session_id for item in step.items]


def fail(result: Any, index: int, error: DraftwireError) -> Any:
    """Lets one session of a step fail."""
    return replace(result, outcomes=[error if at == index else each for at, each in enumerate(result.outcomes)])


class SchedulerContract:
    """Tests of any scheduler; a class that inherits them says of which."""

    side: Side

    def opened(self, *session_ids: int, **options: Any) -> tuple[Any, list[Any]]:
        scheduler = self.side.make_scheduler(**options)
        return scheduler, [scheduler.open(self.side.make_spec(each), lease_id=each % 2) for each in session_ids]

    # Admission

    def test_session_without_room_is_refused_until_another_closes(self) -> None:
        for options, opened in (
            ({"max_sessions": 2}, [{}, {}]),
            (
                {"kv_cache_tokens": 10 * BLOCK_SIZE},
                [{"max_len": 7 * BLOCK_SIZE - 12}, {"max_len": 3 * BLOCK_SIZE}],
            ),  # all
            (
                {"kv_cache_tokens": 10 * BLOCK_SIZE},
                [{"max_len": 7 * BLOCK_SIZE - 12}],
            ),  # 3 blocks are left, and 4 wanted
        ):
            scheduler = self.side.make_scheduler(context_length=1000, **options)
            for number, changes in enumerate(opened, 1):
                scheduler.open(self.side.make_spec(number, **changes), lease_id=0)
            before = set(scheduler.sessions), scheduler.room.num_free_blocks
            with pytest.raises(NoRoomError):
                scheduler.open(self.side.make_spec(9, max_len=3 * BLOCK_SIZE + 1), lease_id=0)
            assert (set(scheduler.sessions), scheduler.room.num_free_blocks) == before
            assert ids_of(next_step(scheduler)) == list(range(1, len(opened) + 1))
            scheduler.close(1, 0)
            scheduler.open(self.side.make_spec(9, max_len=3 * BLOCK_SIZE + 1), lease_id=0)
            assert set(scheduler.sessions) == (before[0] - {(1, 0)}) | {(9, 0)}

    def test_spec_out_of_range_is_refused_and_reserves_nothing(self) -> None:
        scheduler, _ = self.opened()
        for changes in BOTH_OUT_OF_RANGE + self.side.out_of_range:
            with pytest.raises(InvalidRequestError):
                scheduler.open(self.side.make_spec(**changes), lease_id=0)
            assert (scheduler.sessions, scheduler.next_step(), scheduler.room.usage) == ({}, None, 0.0), changes

    def test_spec_at_the_edge_of_its_range_is_admitted(self) -> None:
        for changes in BOTH_AT_THE_EDGE + self.side.at_the_edge:
            scheduler, _ = self.opened()
            scheduler.open(self.side.make_spec(**changes), lease_id=0)
            assert set(scheduler.sessions) == {(1, 0)}, changes

    def test_session_is_opened_once_and_not_after_it_was_closed(self) -> None:
        """Opening and closing travel on different connections; nobody would close it again."""
        scheduler, (session,) = self.opened(1)
        with pytest.raises(InvalidRequestError):
            scheduler.open(self.side.make_spec(1), lease_id=1)
        assert scheduler.sessions == {(1, 0): session}
        usage = scheduler.room.usage
        assert scheduler.close(1, 5) is None
        assert scheduler.close(2, 0) is None
        assert (scheduler.sessions, scheduler.room.usage) == ({(1, 0): session}, usage)
        with pytest.raises(ProtocolViolationError):
            scheduler.open(self.side.make_spec(2), lease_id=0)
        assert scheduler.room.usage == usage
        scheduler.close(1, 0)
        assert scheduler.room.usage == 0.0
        scheduler.open(self.side.make_spec(2, epoch=1), lease_id=0)

    def test_refusal_says_what_is_wrong_alike_on_both_sides(self) -> None:
        beyond = "from one token beyond the ids to the context"
        for changes, message in (
            ({}, "session is open already"),
            ({"session_id": 2, "prompt_len": 0}, "prompt_len 0 is not within the 4 ids"),
            ({"session_id": 2, "prompt_len": 5}, "prompt_len 5 is not within the 4 ids"),
            ({"session_id": 2, "max_len": 4}, f"max_len 4 is not in 5..12, {beyond}"),
            ({"session_id": 2, "max_len": 13}, f"max_len 13 is not in 5..12, {beyond}"),
            ({"session_id": 2, "prompt_len": 0, "max_len": 4}, "prompt_len 0 is not within the 4 ids"),
        ):
            scheduler, _ = self.opened(1)
            with pytest.raises(InvalidRequestError) as raised:
                scheduler.open(self.side.make_spec(**{"session_id": 1, **changes}), lease_id=0)
            assert str(raised.value) == message

    def test_sessions_are_found_by_their_lease(self) -> None:
        scheduler, opened = self.opened(1, 2, 3)
        assert scheduler.of_lease(1) == [opened[0], opened[2]]
        assert scheduler.of_lease(5) == []

    # Steps of several sessions

    def test_failed_session_is_reported_once_and_spares_others_in_the_step(self) -> None:
        scheduler, sessions = self.opened(1, 2, 3)
        engine, error = self.side.engine(), UnavailableError("no finite logits")
        self.side.run_steps(scheduler, engine=engine)
        for session in sessions:
            self.side.ask(scheduler, session)
        committed = list(sessions[1].committed.ids)
        step = next_step(scheduler)
        told = scheduler.complete(step, fail(engine.run(step), 1, error))
        assert self.side.done(told) == [1, 2, 3]
        assert error in (told[1] if isinstance(told[1], tuple) else [told[1].outcome])
        assert sessions[1].committed.ids == committed
        assert scheduler.next_step() is None
        scheduler.close(2, 0)
        for session in sessions[::2]:
            self.side.ask(scheduler, session)
        assert ids_of(next_step(scheduler)) == [1, 3]

    def test_step_leaves_out_a_closed_session_and_reports_nothing_for_it(self) -> None:
        """Not even where another session was opened under its key, which has a step of its own."""
        scheduler, (closed, _) = self.opened(1, 2)
        engine, step = self.side.engine(), next_step(scheduler)
        scheduler.close(*closed.key)
        again = scheduler.open(self.side.make_spec(1), lease_id=0)
        assert not scheduler.is_open(closed)
        assert scheduler.is_open(again)
        waiting = scheduler.open(self.side.make_spec(3), lease_id=0)
        scheduler.close(*waiting.key)
        assert self.side.done(scheduler.complete(step, engine.run(step))) == [2]
        assert (again.committed.ids, again.num_unread, again.num_reused) == (PROMPT, len(PROMPT), None)
        step = next_step(scheduler)
        assert [item.session for item in step.items] == [again]
        assert self.side.done(scheduler.complete(step, engine.run(step))) == [1]

    # Prompts

    def test_prompt_is_read_in_parts_and_is_done_with_the_last(self) -> None:
        for prompt_len in (1, 9, 10, 11, 20, 25):
            scheduler, _ = self.opened(context_length=100, budget=10)
            scheduler.open(self.side.long_spec(1, prompt_len), lease_id=0)
            assert self.side.run_steps(scheduler) == [[]] * (-(-prompt_len // 10) - 1) + [[1]], prompt_len

    def test_pacer_knows_what_is_unread_of_each_prompt(self) -> None:
        scheduler, _ = self.opened(context_length=100, budget=10)
        for session_id, prompt_len in ((1, 25), (2, 15)):
            scheduler.open(self.side.long_spec(session_id, prompt_len), lease_id=0)
        self.side.run_steps(scheduler, 3)
        assert scheduler.pacer.unread_asked == [[25, 15], [20, 10], [15, 5]]

    def test_pacer_knows_whether_a_session_is_past_its_prompt(self) -> None:
        """A session counts even while nothing is asked of it: its next message may come at any time."""
        scheduler, _ = self.opened(context_length=100, budget=10)
        for session_id, prompt_len, num_steps in ((1, 15, 2), (2, 5, 1), (3, 5, 1)):
            scheduler.open(self.side.long_spec(session_id, prompt_len), lease_id=0)
            self.side.run_steps(scheduler, num_steps)
            if session_id == 2:
                scheduler.close(1, 0)
                scheduler.close(2, 0)
        assert scheduler.pacer.asked == [False, False, True, False]

    def test_pacer_knows_whether_a_step_does_nothing_but_read_prompts(self) -> None:
        scheduler, _ = self.opened(context_length=100, budget=10)
        running, engine = scheduler.open(self.side.make_spec(1, max_len=100), lease_id=0), self.side.engine()
        self.side.run_steps(scheduler, engine=engine)
        scheduler.open(self.side.long_spec(2, 40), lease_id=0)
        scheduler.pacer.alone_asked.clear()
        for asks in (False, True, False):
            if asks:
                self.side.ask(scheduler, running)
            self.side.run_steps(scheduler, 1, engine)
        assert scheduler.pacer.alone_asked == [True, False, True]

    def test_prompts_share_the_budget_while_running_sessions_always_get_in(self) -> None:
        scheduler, _ = self.opened(max_sessions=9, context_length=1000, budget=30)
        running, engine = scheduler.open(self.side.make_spec(1, max_len=100), lease_id=0), self.side.engine()
        self.side.run_steps(scheduler, engine=engine)
        for session_id, length in ((4, 100), (5, 50), (6, 100)):
            scheduler.open(self.side.long_spec(session_id, length), lease_id=0)
        for number in range(8):
            self.side.ask(scheduler, running)
            step = next_step(scheduler)
            limits = {item.session.spec.session_id: item.max_read for item in step.items}
            assert limits.pop(1) in (None, 1)  # all that a round commits
            assert sum(limits.values()) == 30 or number > 6
            assert number or limits == {4: 15, 5: 15}
            scheduler.complete(step, engine.run(step))

    def test_short_prompt_passes_long_ones_even_more_than_tokens_may_be_read(self) -> None:
        """One long prompt is under way; or 20 share 16 tokens a step, of which 8 are for the shortest: three steps."""
        for num_long, short_len, budget, num_steps in ((1, 10, 20, 1), (20, 20, 16, 3)):
            scheduler, _ = self.opened(max_sessions=64, context_length=1000, budget=budget)
            engine = self.side.engine()
            for session_id in range(1, num_long + 1):
                scheduler.open(self.side.long_spec(session_id, 500), lease_id=0)
            if num_long == 1:
                self.side.run_steps(scheduler, 1, engine)
            scheduler.open(self.side.long_spec(99, short_len), lease_id=0)
            assert list(itertools.chain(*self.side.run_steps(scheduler, num_steps, engine))) == [99]

    def test_long_prompt_gets_on_although_shorter_ones_keep_coming(self) -> None:
        """As many short prompts come as leave, always more than tokens may be read."""
        scheduler, _ = self.opened(max_sessions=64, context_length=1000, budget=4)
        engine, done = self.side.engine(), set()
        newcomers = itertools.count(8)
        for session_id in range(1, 8):
            scheduler.open(self.side.long_spec(session_id, 40 if session_id == 1 else 3), lease_id=0)
        for _ in range(300):
            for session_id in itertools.chain(*self.side.run_steps(scheduler, 1, engine)):
                done.add(session_id)
                scheduler.close(session_id, 0)
                scheduler.open(self.side.long_spec(next(newcomers), 3), lease_id=0)
        assert {1, 2, 20} <= done

    def test_tokens_that_others_had_read_are_counted_once(self) -> None:
        scheduler, _ = self.opened(context_length=100, budget=2)
        session, engine = scheduler.open(self.side.long_spec(1, 20), lease_id=0), self.side.engine(reused=16)
        for _ in range(3):
            self.side.run_steps(scheduler, engine=engine)
            self.side.ask(scheduler, session)
        assert scheduler.prefix_tokens == {"queried": 20, "reused": 16}

    def test_durations_with_and_without_prompt_tokens_teach_the_pacer(self) -> None:
        """A step costs a second and 10 ms for each prompt token that was really read."""
        scheduler, _ = self.opened(context_length=1000, budget=400)
        first, engine = scheduler.open(self.side.long_spec(1, 17), lease_id=0), self.side.engine(reused=16)
        self.side.run_steps(scheduler, engine=engine)

        def run_step(seconds: float) -> None:
            self.side.ask(scheduler, first)
            step = next_step(scheduler)
            scheduler.complete(step, self.side.timed(engine.run(step), seconds))

        run_step(1.0)
        scheduler.pacer.beside = ChunkCost()
        run_step(1.0)
        for session_id, (prompt_len, num_steps) in enumerate([(216, 1), (816, 2)], start=2):
            scheduler.open(self.side.long_spec(session_id, prompt_len), lease_id=0)
            for _ in range(num_steps):
                run_step(1.0 + 0.01 * (prompt_len - 16) / num_steps)
                assert scheduler.pacer.beside.seconds_per_token == pytest.approx(0.01)


class AnyOrder(RuleBasedStateMachine):
    """Sessions of few names that open, get messages, take part in steps and close in any order.

    What an open session must be is kept in `expected` and `known`; a scheduler's own machine adds messages and the end
    of steps.
    """

    KEYS = st.tuples(st.integers(1, 2), st.integers(0, 1))
    ROOMS = st.integers(1, 4) | st.integers(1, 40)
    """Tokens that a session may generate: some are soon full."""
    PROMPTS = st.integers(1, 3) | st.integers(1, 20)
    """Their tokens: some are read in one step."""
    WHO = st.integers(0, 11)
    """Whom a message is for; see `key_of`."""
    side: Side

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = self.side.make_scheduler(max_sessions=3, context_length=64, kv_cache_tokens=160, budget=3)
        self.scheduler.closed_early = ClosedEarly(bound=0)  # so that every session can be opened sooner or later
        self.engine = self.side.engine()
        self.step: Any = None
        self.expected: dict[tuple[int, int], list[int]] = {}
        """Committed tokens of each open session."""
        self.known: dict[tuple[int, int], Any] = {}
        """What else each of them should be."""
        self.dropped: Counter[str] = Counter()
        """Messages that had no effect, by reason."""

    @initialize(rooms=st.lists(ROOMS, min_size=2, max_size=2))
    def open_some(self, rooms: list[int]) -> None:
        """So that messages have somebody to be for, even in runs that open no more."""
        for number, room in enumerate(rooms, 1):
            self.open((number, 0), 2, room)

    def open(self, key: tuple[int, int], prompt_len: int, room: int) -> None:
        """Opens a session with a prompt and room for so many tokens, if it can be opened."""
        raise NotImplementedError

    def key_of(self, who: int) -> tuple[int, int]:
        """Returns the name of a session that is open, or now and then one that may not be."""
        names = sorted(self.expected)
        return names[who % len(names)] if names and who < 10 else (1 + who % 2, 1)

    def open_session(self, key: tuple[int, int], spec: Any, known: Any) -> None:
        fits = len(self.expected) < 3 and blocks_for(spec.max_len) <= self.scheduler.room.num_free_blocks
        if key in self.expected or not fits:
            with pytest.raises(InvalidRequestError if key in self.expected else NoRoomError):
                self.scheduler.open(spec, lease_id=0)
            return
        self.scheduler.open(spec, lease_id=0)
        self.expected[key], self.known[key] = list(spec.token_ids), known

    @precondition(lambda self: self.step is None)
    @rule()
    def begin_step(self) -> None:
        queued = [session for session in self.scheduler.sessions.values() if session.queued]
        running = [
            session
            for session in queued
            if not session.is_reading
            and session.num_unread <= session.spec.parameters.max_draft_tokens + 1  # as a round commits
        ]
        self.step = self.scheduler.next_step()
        assert (self.step is not None) == bool(queued)
        if self.step is not None:
            members = [item.session for item in self.step.items]
            assert len({session.key for session in members}) == len(members)
            assert all(any(session is member for member in members) for session in running)
            assert sum(item.max_read for item in self.step.items if item.session.is_reading) <= 3

    def finish(self) -> None:
        """Ends the step that runs, if one does, in the most ordinary way."""
        raise NotImplementedError

    @rule(key=KEYS)
    def close(self, key: tuple[int, int]) -> None:
        closed = self.scheduler.close(*key)
        assert (closed is not None) == (self.expected.pop(key, None) is not None)
        self.known.pop(key, None)

    @invariant()
    def accounts_add_up(self) -> None:
        scheduler = self.scheduler
        assert set(scheduler.sessions) == set(self.expected)
        assert scheduler.dropped == self.dropped
        ready = scheduler._ready
        assert len({id(session) for session in ready}) == len(ready)
        assert all(scheduler.sessions.get(session.key) is session for session in ready)
        in_step = [item.session for item in self.step.items] if self.step else []
        for key, session in scheduler.sessions.items():
            assert session.queued == any(session is other for other in [*ready, *in_step])
            assert session.committed.ids == self.expected[key]
            assert len(session.committed) <= session.spec.max_len
        reserved = sum(blocks_for(session.spec.max_len) for session in scheduler.sessions.values())
        assert scheduler.room.num_free_blocks == blocks_for(160) - reserved

    @invariant()
    def sessions_are_as_their_messages_made_them(self) -> None:
        """Compares each open session with what is known of it."""
        raise NotImplementedError

    def teardown(self) -> None:
        """Whoever has work is served, sooner or later."""
        for _ in range(300):  # sessions hold at most 3 * 60 tokens
            if self.step is not None:
                self.finish()
            self.begin_step()
            if self.step is None:
                break
        assert self.step is None
        assert not any(session.queued for session in self.scheduler.sessions.values())
        self.sessions_are_as_their_messages_made_them()
