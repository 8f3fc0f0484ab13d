"""Verifiers and drafters for tests of the gateway's loop."""

import asyncio
import string
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from session_specs import FACTS
from virtual_time import now, run

from draftwire.errors import UnavailableError
from draftwire.method.round_parts import LogprobsPart
from draftwire.method.rounds import (
    BlockSent,
    Calibration,
    CommittedTokens,
    DraftSessionSpec,
    DraftTimings,
    Fence,
    FenceVerdict,
    Permit,
    PlainRun,
    PromptRead,
    SendDrafted,
    TargetSessionSpec,
    Verdict,
    judge_fence,
)
from draftwire.method.token_source import TokenSource
from draftwire.models.description import FLUSH_REPLIES, PARTIAL_BLOCKS, ModelDescription
from draftwire.requests.logprobs import PromptPart, TokenLogprob
from draftwire.requests.parameters import SamplingParams
from draftwire_gateway.session.committed_text import Delta, Finish, FinishReason
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.loop import GenerationLoop
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_gateway.session.ports import DrafterPort, Inbox, SessionEvent, TargetLost, TargetPort
from draftwire_gateway.session.round_times import RoundObserver
from draftwire_gateway.session.round_trip_estimate import RoundTripEstimate
from draftwire_gateway.session.spans import ChoiceSpans
from draftwire_gateway.session.statistics import Statistics
from draftwire_gateway.session_plugs import plugs_of
from draftwire_gateway.speculation.pairs import Pairs
from draftwire_gateway.text.text import TextStream

LETTERS = string.ascii_lowercase + string.ascii_uppercase
STOP_TOKEN = len(LETTERS)
PROMPT = [3, 1, 4]
DRAFTER = 7
STORY = [(7 * position) % len(LETTERS) for position in range(200)]  # no token twice within 52
GONE = UnavailableError("gone")
TOO_SLOW = "a peer reads its stream too slowly"


# Verifiers


def said_of(position: int, token: int, num_top: int) -> TokenLogprob:
    """What the fake target says of a token in a place of the text."""
    best = [((token + place) % STOP_TOKEN, -float(place)) for place in range(num_top)]
    return TokenLogprob(token, -float(position), best)


class Fate(Enum):
    """What becomes of a round that a verifier decides."""

    TOLD = "told"
    TOLD_TWICE = "told twice"
    TOLD_AND_LOST = "told and lost"
    LOST_UNTOLD = "lost untold"
    SILENT = "silent"
    """The verdict never comes, and neither does any other."""
    LATE = "late"
    """So it seems, but they come, long after the session went on elsewhere; then the loss, too."""


DEADLY = {Fate.TOLD_AND_LOST, Fate.LOST_UNTOLD, Fate.SILENT, Fate.LATE}
LATE_SECONDS = 50.0


@dataclass(eq=False)
class TargetSession:
    """The verifier's side of one session."""

    spec: TargetSessionSpec
    inbox: Inbox
    committed: CommittedTokens
    round: int
    plain_rounds_left: int = 0
    busy: bool = False
    permit_number: int = -1
    drafter_id: int | None = None
    is_open: bool = True
    is_mute: bool = False
    fates: list[Fate] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        return self.spec.session_id, self.spec.epoch

    @property
    def fence(self) -> Fence:
        return Fence(*self.key, self.round, len(self.committed), self.committed.hash)

    @property
    def may_be_left(self) -> bool:
        """Whether it gave its gateway a reason to go on elsewhere."""
        return bool(DEADLY.intersection(self.fates))


class FakeTarget:
    """A verifier that tells a known story and accepts of each block as many tokens as its script says.

    Works like the real one: one piece of work per round, each in a turn of the event loop of its own; messages about a
    round that is over or being decided are dropped, and only who shows a permit is listened to. A message that an
    honest gateway cannot send is noted.
    """

    def __init__(
        self, story: Sequence[int] = STORY, accepts: list[int] | None = None, address: str = "target:1"
    ) -> None:
        self.connected = True
        self.description = describe("target")
        self.address = address
        self.story = list(story)
        self.accepts = deque(accepts or [])
        self.prompt_len = len(PROMPT)
        self.open_error: Exception | None = None
        self.on_opening: Callable[[TargetSessionSpec], Exception | None] = lambda spec: self.open_error
        """Returns why an opening is refused."""
        self.refuses_too_late = False
        """Whether a session that is refused is open all the same."""
        self.next_fate: Callable[[], Fate] = lambda: Fate.TOLD
        self.after_verdict: Callable[[int], None] = lambda count: None
        self.silent = False
        self.delay_s: Callable[[int], float] = lambda count: 0.0
        """By the number of verdicts so far: how long the next one takes."""
        self.num_cached_tokens = 0
        self.prompt_parts: list[PromptPart] | None = None
        """What it says of its prompts; None says what is to be said, one token in a part."""
        self.leaves_out = False
        """Whether verdicts lack log-probabilities."""
        self.alter: Callable[[Verdict], Verdict] = lambda verdict: verdict
        """What is sent in the place of a verdict."""
        self.work_us = 0
        """What each verdict says that deciding took, beside a few that tell verdicts apart."""
        self.quarantined: set[int] = set()
        self.attempts: list[TargetSessionSpec] = []
        """Of all openings, refused ones included."""
        self.sessions: list[TargetSession] = []
        self.verdicts: list[Verdict] = []
        self.plain_runs: list[PlainRun] = []
        self.closed: list[tuple[int, int]] = []
        self.violations: list[Any] = []
        self.progress = asyncio.Event()

    @property
    def session(self) -> TargetSession:
        return self.sessions[-1]

    @property
    def spec(self) -> TargetSessionSpec:
        return self.session.spec

    async def open(self, spec: TargetSessionSpec, inbox: Inbox) -> None:
        self.attempts.append(spec)
        error = self.on_opening(spec)
        await asyncio.sleep(0)
        if error is None or self.refuses_too_late:
            session = TargetSession(spec, inbox, CommittedTokens(spec.token_ids), spec.first_round)
            self.sessions.append(session)
            self._tell_prompt(session)
            self._start_plain(session, spec.plain_rounds)
        if error is not None:
            raise error

    def run_plain(self, run: PlainRun) -> None:
        self.plain_runs.append(run)
        session = self._of(run.fence)
        if session is not None and self._takes(session, run.fence):
            self._start_plain(session, run.num_rounds)

    def takes_blocks_of(self, drafter_id: int) -> bool:
        return drafter_id not in self.quarantined

    def offer_block(self, fence: Fence, num_draft_tokens: int, drafter_id: int, permit: Permit | None) -> None:
        """See `draftwire_verifier.scheduler.Scheduler.offer_block`."""
        session = self._of(fence)
        if session is None:
            return
        if permit is not None:
            if not permit.is_made_with(session.spec.permit_key):
                self.violations.append(permit)
            if permit.number < session.permit_number:
                return
            session.permit_number, session.drafter_id = permit.number, drafter_id
        is_stale = judge_fence(fence, session.fence) is FenceVerdict.STALE
        if session.drafter_id != drafter_id and not is_stale:
            self.violations.append((drafter_id, fence))
        if self._takes(session, fence):
            if not 1 <= num_draft_tokens <= session.spec.parameters.max_draft_tokens:
                self.violations.append(num_draft_tokens)
            self._begin(session, num_draft_tokens)

    def close(self, session_id: int, epoch: int) -> None:
        self.closed.append((session_id, epoch))
        for session in self.sessions:
            if session.key == (session_id, epoch):
                session.is_open = False

    def tell(self, event: SessionEvent) -> None:
        self.session.inbox.put_nowait(event)

    def _tell_prompt(self, session: TargetSession) -> None:
        num_top, ids = session.spec.logprobs.prompt_logprobs, session.spec.token_ids
        if num_top is None:
            return
        every = [
            PromptPart(place, [said_of(place, ids[place], num_top)])
            for place in range(1, session.spec.parameters.prompt_len)
        ]
        for part in every if self.prompt_parts is None else self.prompt_parts:
            session.inbox.put_nowait(PromptRead(*session.key, part))

    def _of(self, fence: Fence) -> TargetSession | None:
        key = (fence.session_id, fence.epoch)
        return next((session for session in self.sessions if session.key == key and session.is_open), None)

    def _takes(self, session: TargetSession, fence: Fence) -> bool:
        if judge_fence(fence, session.fence) is FenceVerdict.VIOLATION:
            self.violations.append(fence)
        return fence == session.fence and not session.busy

    def _start_plain(self, session: TargetSession, num_rounds: int) -> None:
        if num_rounds:
            session.plain_rounds_left = num_rounds
            self._begin(session, 0)

    def _begin(self, session: TargetSession, num_draft_tokens: int) -> None:
        session.busy = True
        delay_s = self.delay_s(len(self.verdicts))
        asyncio.get_running_loop().call_later(delay_s, self._decide, session, num_draft_tokens)

    def _decide(self, session: TargetSession, num_draft_tokens: int) -> None:
        if not session.is_open or self.silent:
            return
        verdict = self.alter(self._verdict(session, num_draft_tokens))
        session.committed.append(verdict.token_ids)
        session.round += 1
        session.busy = False
        session.verdicts.append(verdict)
        self.verdicts.append(verdict)
        self._meet_fate(session, verdict, self.next_fate())
        self.after_verdict(len(self.verdicts))
        self.progress.set()
        self.progress = asyncio.Event()
        if session.plain_rounds_left and session.is_open:
            self._start_plain(session, session.plain_rounds_left)

    def _verdict(self, session: TargetSession, num_draft_tokens: int) -> Verdict:
        accepted = min(self.accepts.popleft() if self.accepts else 0, num_draft_tokens) if num_draft_tokens else 0
        start = len(session.committed) - self.prompt_len
        tokens = self.story[start : start + accepted + 1]
        extra = TokenSource.BONUS if accepted == num_draft_tokens else TokenSource.RECOVERED
        if num_draft_tokens == 0:
            extra = TokenSource.PLAIN
            stops = tokens[-1] in session.spec.parameters.stop_token_ids
            session.plain_rounds_left = 0 if stops else session.plain_rounds_left - 1
        count = len(self.verdicts) + 1
        num_top, length = session.spec.logprobs.logprobs, len(session.committed)
        reports = num_top is not None and not self.leaves_out
        target = [said_of(place, token, num_top or 0) for place, token in enumerate(tokens, length)] if reports else []
        draft = [-float(token) for token in tokens] if session.spec.reports_draft_logprobs else []
        return Verdict(
            fence=session.fence,
            token_ids=tokens,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=accepted,
            extra=extra,
            plain_rounds_left=session.plain_rounds_left,
            verify_us=self.work_us + 3 * count,
            queue_us=5 * count,
            timings=DraftTimings(count, 2 * count) if num_draft_tokens else DraftTimings(),
            num_cached_tokens=self.num_cached_tokens,
            logprobs=LogprobsPart(target, draft) if target or draft else None,
        )

    def _meet_fate(self, session: TargetSession, verdict: Verdict, fate: Fate) -> None:
        session.fates.append(fate)
        session.is_mute = session.is_mute or fate in (Fate.SILENT, Fate.LATE)
        loss = TargetLost(GONE)
        if fate is Fate.LATE:
            for event in (verdict, loss):
                asyncio.get_running_loop().call_later(LATE_SECONDS, session.inbox.put_nowait, event)
        if session.is_mute:
            return
        if fate is not Fate.LOST_UNTOLD:
            session.inbox.put_nowait(verdict)
        if fate is Fate.TOLD_TWICE:
            session.inbox.put_nowait(verdict)
        if fate in (Fate.TOLD_AND_LOST, Fate.LOST_UNTOLD):
            session.is_open = False
            session.inbox.put_nowait(loss)


def describe(name: str, context_length: int = 10_000) -> ModelDescription:
    """Returns a model that can do whatever a verifier's or a drafter's can."""
    described = ModelDescription(name, "", "float32", b"", STOP_TOKEN + 1, context_length, (STOP_TOKEN,))
    return replace(described, capabilities=frozenset({FLUSH_REPLIES, PARTIAL_BLOCKS}), rules=tuple(FACTS.values()))


# Drafters


@dataclass(eq=False)
class DraftSession:
    """The drafter's side of one session."""

    spec: DraftSessionSpec
    inbox: Inbox
    known: CommittedTokens
    is_open: bool = True
    is_ready: bool = False
    has_shown_permit: bool = False
    last_round: int = -1
    is_faulty: bool = False
    """Whether it gave its gateway a reason to go on without it."""
    sent: set[int] = field(default_factory=set)
    """Rounds whose blocks were sent."""
    flushed: set[int] = field(default_factory=set)
    """Rounds whose blocks were asked for as far as they were drawn."""

    @property
    def key(self) -> tuple[int, int]:
        return self.spec.session_id, self.spec.epoch


class FakeDrafter:
    """A drafter whose blocks go straight to the fake target. Checks what it is told as the real one does."""

    def __init__(self, *targets: FakeTarget, context_length: int = 10_000, instance_id: int = DRAFTER) -> None:
        self.connected = True
        self.description = describe("drafter", context_length)
        self.instance_id = instance_id
        self.identity: int | None = None
        """What verifiers know it by, if they give identities."""
        self.round_trip = RoundTripEstimate()
        self.targets = {target.address: target for target in targets}
        self.ready_after = 0
        """Verdicts that come before the prompt is read."""
        self.when_ready: Callable[[], int] = lambda: self.ready_after
        self.open_error: Exception | None = None
        self.on_opening: Callable[[DraftSession], Exception | None] = lambda session: self.open_error
        self.on_calibration: Callable[[Calibration], None] = self.send_block
        self.on_hurry: Callable[[SendDrafted], None] = lambda command: None
        self.sessions: list[DraftSession] = []
        self.open_cancelled = False
        self.replies = True
        """Whether it says when a block that is asked for is sent, where it can."""
        self.calibrations: list[Calibration] = []
        self.hurried: list[SendDrafted] = []
        self.closed: list[tuple[int, int]] = []
        self.violations: list[Any] = []

    @property
    def opened(self) -> int:
        return len(self.sessions)

    @property
    def session(self) -> DraftSession:
        return self.sessions[-1]

    @property
    def spec(self) -> DraftSessionSpec:
        return self.session.spec

    async def open(self, spec: DraftSessionSpec, inbox: Inbox) -> None:
        session = DraftSession(spec, inbox, CommittedTokens(spec.token_ids))
        self.sessions.append(session)
        target, num_verdicts = self.targets[spec.verifier_address], self.when_ready()
        if not len(spec.token_ids) < spec.max_len <= self.description.context_length:
            self.violations.append(spec)
        try:
            while len(target.verdicts) < num_verdicts:
                await target.progress.wait()
        except asyncio.CancelledError:
            self.open_cancelled = True
            raise
        error = self.on_opening(session)
        if error is not None:
            session.is_faulty = True
            raise error
        session.is_ready = True

    def known_as(self, address: str) -> int:
        return self.instance_id if self.identity is None else self.identity

    def calibrate(self, calibration: Calibration) -> None:
        self.calibrations.append(calibration)
        session, fence = self._of(calibration.fence.session_id, calibration.fence.epoch), calibration.fence
        if (
            session is None
            or not session.is_ready
            or fence.round <= session.last_round
            or calibration.base_len != len(session.known)
        ):
            self.violations.append(calibration)
            return
        session.known.append(calibration.token_ids)
        session.last_round = fence.round
        if fence != Fence(*session.key, fence.round, len(session.known), session.known.hash):
            self.violations.append(calibration)
        if len(session.known) + calibration.num_draft_tokens > session.spec.max_len:
            self.violations.append(calibration)
        self.on_calibration(calibration)

    def send_drafted(self, command: SendDrafted) -> None:
        self.hurried.append(command)
        session = self._of(command.session_id, command.epoch)
        if session is None or command.round != session.last_round:
            self.violations.append(command)
            return
        session.flushed.add(command.round)
        if command.round in session.sent:
            self.reply(session, command.round)
        self.on_hurry(command)

    def send_block(self, calibration: Calibration, num_draft_tokens: int | None = None) -> None:
        key = (calibration.fence.session_id, calibration.fence.epoch)
        session = next(session for session in self.sessions if session.key == key)
        permit = None if session.has_shown_permit else session.spec.permit
        session.has_shown_permit = True
        num = calibration.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        self.targets[session.spec.verifier_address].offer_block(calibration.fence, num, self.instance_id, permit)
        session.sent.add(calibration.fence.round)
        if calibration.fence.round in session.flushed:
            self.reply(session, calibration.fence.round)

    def reply(self, session: DraftSession, number: int) -> None:
        """Says that a block which was asked for is sent."""
        if self.replies and session.is_open and FLUSH_REPLIES in self.description.capabilities:
            session.inbox.put_nowait(BlockSent(*session.key, number))

    def answer_block(self, number: int, act: Callable[[Calibration], Any]) -> None:
        """Answers the `number`-th calibration, from 0, in another way than with a block, which the others get."""

        def on_calibration(calibration: Calibration) -> None:
            (act if len(self.calibrations) == number + 1 else self.send_block)(calibration)

        self.on_calibration = on_calibration

    def close(self, session_id: int, epoch: int) -> None:
        self.closed.append((session_id, epoch))
        session = self._of(session_id, epoch)
        if session is not None:
            session.is_open = False

    def tell(self, event: SessionEvent) -> None:
        self.session.inbox.put_nowait(event)

    def _of(self, session_id: int, epoch: int) -> DraftSession | None:
        key = (session_id, epoch)
        return next((session for session in self.sessions if session.key == key and session.is_open), None)


class FakePeers:
    """Peers that are preferred in the order in which they are listed."""

    def __init__(self, targets: Sequence[Any], drafters: Sequence[Any] = ()) -> None:
        self.all_targets, self.all_drafters = targets, drafters
        self.usable_at: float | None = None
        """When a verifier was last usable, in the loop's time; None is now."""

    def why_no_target(self) -> str:
        return "" if self.targets() else "no verifier can be reached"

    def last_usable_at(self) -> float:
        return now() if self.usable_at is None else self.usable_at

    def targets(self) -> Sequence[TargetPort]:
        return [target for target in self.all_targets if target.connected]

    def draft_models(self) -> Collection[str]:
        return {drafter.description.name for drafter in self.all_drafters}

    def drafters_for(self, target: TargetPort, but: Collection[int]) -> Sequence[DrafterPort]:
        usable = (drafter for drafter in self.all_drafters if drafter.connected and drafter.instance_id not in but)
        return [drafter for drafter in usable if target.takes_blocks_of(drafter.instance_id)]


# Generations


class LetterTokenizer:
    """One letter per token."""

    all_special_ids = ()
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012 - as in transformers

    def get_vocab(self) -> dict[str, int]:
        return {letter: token for token, letter in enumerate(LETTERS)}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(LETTERS[token] for token in ids)


@dataclass
class Result:
    """All that a consumer saw."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    deltas: list[Delta] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def end(self) -> Finish:
        assert self.finish is not None, "it is not finished"
        return self.finish

    @property
    def reason(self) -> FinishReason:
        return self.end.reason

    @property
    def statistics(self) -> Statistics:
        return self.end.statistics

    @property
    def drafter_error(self) -> str:
        return self.end.drafter_error

    def assert_whole(self, max_tokens: int = 20, start: int = 0) -> None:
        """Asserts that the story was shown from some token on until the budget ended."""
        assert self.ids == STORY[start:max_tokens]
        assert (self.text, self.reason) == (text_of(self.ids), FinishReason.LENGTH)


def text_of(ids: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in ids)


def make_generation(**changes: Any) -> Generation:
    generation = Generation(
        prompt_ids=list(PROMPT),
        sampling=SamplingParams(),
        max_tokens=20,
        stop=(),
        stop_token_ids=frozenset({STOP_TOKEN}),
        seed=5,
        num_speculative_tokens=4,
        rule=FACTS["block"],
    )
    if isinstance(rule := changes.get("rule"), str):
        changes["rule"] = FACTS[rule]
    return replace(generation, **changes)


def make_loop(
    targets: Any,
    drafters: Any,
    loop_settings: LoopSettings | None = None,
    tokenizer: Any = None,
    observers: Sequence[RoundObserver] = (),
    spans: ChoiceSpans | None = None,
    pairs: Pairs | None = None,
    **changes: Any,
) -> GenerationLoop:
    """Makes a loop on one peer of a kind, on several, or (drafters) on none."""
    generation = make_generation(**changes)
    text = TextStream(tokenizer or LetterTokenizer(), generation.prompt_ids, generation.stop, generation.token_details)
    text.skip(list(generation.generated_ids), generation.stop_token_ids)
    peers = FakePeers(_listed(targets), _listed(drafters))
    plugs = plugs_of(generation, pairs or Pairs(16, 4), observers, spans)
    return GenerationLoop(generation, peers, text, loop_settings or LoopSettings(), plugs)


def whole_story(
    targets: Any, drafters: Any, loop_settings: LoopSettings | None = None, max_tokens: int = 20, **changes: Any
) -> Result:
    """Generates in virtual time; the text is the story, and nobody was told what an honest gateway cannot say."""
    loop = make_loop(targets, drafters, loop_settings, max_tokens=max_tokens, **changes)
    result = run(collect(loop))
    result.assert_whole(max_tokens)
    assert [peer.violations for peer in (*_listed(targets), *_listed(drafters)) if peer.violations] == []
    return result


def refuse(*_: Any) -> None:
    """What a link's outbox does when the peer reads its stream too slowly."""
    raise UnavailableError(TOO_SLOW)


def _listed(peers: Any) -> list[Any]:
    if peers is None:
        return []
    return peers if isinstance(peers, list) else [peers]


async def collect(loop: GenerationLoop, result: Result | None = None) -> Result:
    """Returns what a generation yields; a given result has got it all when an error is raised."""
    result = Result() if result is None else result
    async for event in loop.run():
        assert result.finish is None, "nothing comes after the finish"
        if isinstance(event, Delta):
            result.deltas.append(Delta(list(event.token_ids), event.text, list(event.logprobs)))
            result.logprobs += event.logprobs
            result.ids += event.token_ids
            result.text += event.text
        elif isinstance(event, PromptPart):
            assert not result.deltas, "the prompt comes first"
            assert event.first_position == len(result.prompt) + 1
            result.prompt += event.tokens
        else:
            result.finish = event
    return result
