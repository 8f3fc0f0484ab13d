"""Runs that the verifier's own head drafts: under the real scheduler and engine, on tiny models."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from session_specs import target_spec
from tiny_models import tiny_network
from toy_heads import ToyHead, without_rows

from draftwire.engine.admission import Room
from draftwire.engine.prefill import PrefillPacer
from draftwire.engine.step_drafts import OrderedSource
from draftwire.engine.target_session import NO_DRAFTER, Step, StepResult, TargetSession
from draftwire.errors import InvalidRequestError
from draftwire.method.keys import KEY_BYTES, DrawKey, Role, derive_key, local_drafting_key
from draftwire.method.randomness import uniforms
from draftwire.method.round_parts import WatchedGuess
from draftwire.method.rounds import LocalDraft, PlainRun, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.torch_models import torch_model
from draftwire.options.heads.head_drafter import HeadDrafter
from draftwire.options.heads.head_drafts import HeadDrafts
from draftwire.options.heads.taps import FeatureSource
from draftwire.options.model_free.local_texts import LocalText
from draftwire.options.model_free.registry import TextDrafters
from draftwire.requests.automaton import Automaton
from draftwire.requests.parameters import SamplingParams
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.local_sources import LocalSources
from draftwire_verifier.scheduler import Scheduler
from tests.cache_integrity import check_integrity
from tests.unit.verdict_parts import strategy_of, watched_of

torch.set_num_threads(1)

VOCAB_SIZE = 5
CACHE_TOKENS = 4096
PROMPT = [1, 2, 3, 4, 0, 2]
HEAD = "eagle3"
SEEDS = range(2)


@dataclass
class Verifier:
    """Scheduler and engine in turn."""

    decoder: str = "lean"
    is_static: bool = False
    head: ToyHead = field(default_factory=lambda: ToyHead(VOCAB_SIZE))
    is_trusted: bool = True
    steps: list[tuple[Step, StepResult]] = field(default_factory=list)

    def __post_init__(self) -> None:
        source = FeatureSource(self.head.config.taps, self.head.fuse)
        runs = decoder_of(tiny_network("llama", VOCAB_SIZE), self.decoder)
        self.model = torch_model(runs, CACHE_TOKENS, self.is_static, features=source)
        self.engine = TargetEngine(
            self.model, CACHE_TOKENS, {HEAD: HeadDrafts(HeadDrafter(self.head, self.model), VOCAB_SIZE)}
        )
        self.scheduler = Scheduler(
            context_length=CACHE_TOKENS,
            vocab_size=VOCAB_SIZE,
            max_draft_tokens=8,
            room=Room(8, CACHE_TOKENS),
            pacer=PrefillPacer(1e-9),
            local=LocalSources(
                [
                    partial(OrderedSource.open, HEAD, lambda: self.is_trusted),
                    partial(LocalText.open, TextDrafters(), VOCAB_SIZE),
                ]
            ).find,
        )

    def open(
        self,
        session_id: int = 1,
        token_ids: list[int] | None = None,
        automaton: Automaton | None = None,
        **changes: Any,
    ) -> TargetSession:
        ids = PROMPT if token_ids is None else token_ids
        given = {"plain_rounds": 1, "max_len": len(ids) + 30, "max_draft_tokens": 4} | changes
        return self.scheduler.open(
            target_spec(session_id=session_id, token_ids=ids, **given), lease_id=0, automaton=automaton
        )

    def opened(self, session_id: int = 1, token_ids: list[int] | None = None, **changes: Any) -> TargetSession:
        """Returns a session whose first round is decided."""
        session = self.open(session_id, token_ids, **changes)
        self.decide()
        return session

    def run(self, session: TargetSession, num_rounds: int = 40, num_draft_tokens: int = 3) -> None:
        draft = LocalDraft(HEAD, num_draft_tokens) if num_draft_tokens else None
        self.scheduler.run_plain(PlainRun(session.fence, num_rounds, draft))

    def decide(self) -> list[Verdict]:
        """Runs steps until nothing is left to do, and returns the verdicts in order."""
        verdicts = []
        while True:
            while (step := self.scheduler.next_step()) is None and self.scheduler.holds_for_s is not None:
                time.sleep(self.scheduler.holds_for_s)
            if step is None:
                return verdicts
            result = self.engine.step(step)
            self.steps.append((step, result))
            for _, event in self.scheduler.complete(step, result):
                assert isinstance(event, Verdict)
                verdicts.append(event)
            check_integrity(self.model.cache)

    def text(self, num_draft_tokens: int, **changes: Any) -> tuple[list[int], list[Verdict]]:
        """Returns a whole completion, and its verdicts."""
        session = self.open(**changes)
        verdicts = self.decide()
        self.run(session, num_draft_tokens=num_draft_tokens)
        verdicts += self.decide()
        ids = session.committed.ids[len(PROMPT) :]
        self.close(session)
        return ids, verdicts

    def close(self, session: TargetSession) -> None:
        self.scheduler.close(*session.key)
        self.engine.forget(session.key)


SUBJECTS: dict[str, Callable[[], Verifier]] = {
    "lean": Verifier,
    "static": lambda: Verifier(is_static=True),
    "transformers": lambda: Verifier("transformers"),
}


@pytest.fixture(params=SUBJECTS)
def verifier(request: pytest.FixtureRequest) -> Verifier:
    return SUBJECTS[request.param]()


@pytest.mark.parametrize(
    ("rule", "sampling"), [("coupled", SamplingParams()), ("block", SamplingParams(temperature=0.0))]
)
def test_texts_are_the_same_with_the_head_and_without(verifier: Verifier, rule: str, sampling: SamplingParams) -> None:
    """Where the text for a seed does not depend on the drafts."""
    num_drafted = num_accepted = 0
    for seed in SEEDS:
        given = {"rule": rule, "sampling": sampling, "verifying_key": derive_key(seed, Role.COUPLING)}
        with_head, verdicts = verifier.text(3, **given)
        without, plain = verifier.text(0, **given)
        assert with_head == without
        assert len(with_head) == 30
        assert not any(verdict.num_draft_tokens for verdict in plain)
        drafted = [verdict for verdict in verdicts if verdict.num_draft_tokens]
        assert {strategy_of(verdict) for verdict in drafted} == {HEAD}
        assert len(drafted) >= len(verdicts) - 2, "all rounds but the first, and one at the end without room"
        num_drafted += sum(verdict.num_draft_tokens for verdict in drafted)
        num_accepted += sum(verdict.num_accepted_tokens for verdict in drafted)
    assert 0 < num_accepted < num_drafted


def test_round_that_reads_the_prompt_is_plain_and_later_ones_are_drafted() -> None:
    verifier = Verifier()
    session = verifier.open(plain_rounds=0)
    verifier.run(session, 3)
    first, second, third = verifier.decide()
    assert (first.num_draft_tokens, strategy_of(first), first.extra) == (0, "", TokenSource.PLAIN)
    assert (second.num_draft_tokens, strategy_of(second)) == (3, HEAD)
    assert second.timings.draft_us > 0
    assert second.verify_us == verifier.steps[1][1].verify_us - second.timings.draft_us
    assert (third.num_draft_tokens, third.plain_rounds_left) == (3, 0)
    _, result = verifier.steps[-1]
    (block,) = result.drafted.values()
    assert block is not None
    assert (block.fence, block.drafter_id) == (third.fence, NO_DRAFTER)
    assert result.draft_s > 0.0
    (sums,) = result.audit()
    assert sums is not None, "what was drawn is audited against what is declared"
    assert sums.num_positions == 3


def test_rounds_of_a_plain_run_have_no_draft() -> None:
    verifier = Verifier()
    session = verifier.opened()
    verifier.run(session, 2)
    verifier.decide()
    verifier.run(session, 2, num_draft_tokens=0)
    assert [verdict.num_draft_tokens for verdict in verifier.decide()[-2:]] == [0, 0]
    verifier.scheduler.run_plain(PlainRun(session.fence, 1, LocalDraft("suffix", 3)))
    assert strategy_of(verifier.decide()[-1]) in ("", "suffix")
    verifier.run(session, 1)
    assert strategy_of(verifier.decide()[-1]) == HEAD


def test_no_draft_reaches_beyond_the_end_of_the_text() -> None:
    verifier = Verifier()
    session = verifier.opened(max_len=len(PROMPT) + 6)
    verifier.run(session, 40)
    verdicts = verifier.decide()
    assert len(session.committed) == len(PROMPT) + 6
    for verdict in verdicts:
        assert verdict.fence.prefix_len + verdict.num_draft_tokens < session.spec.max_len
    assert verdicts[-1].plain_rounds_left == 0


@pytest.mark.parametrize("rule", ["block", "token"])
def test_what_is_drawn_depends_on_no_number_that_the_rule_reads(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the draft is one of its own; under a coupled rule both sides share the noise of the text."""
    keys: list[DrawKey] = []

    def noted(given: list[DrawKey], count: int) -> torch.Tensor:
        keys.extend(given)
        return uniforms(given, count)

    monkeypatch.setattr("draftwire.drafting.drawing.uniforms", noted)
    verifier, verifying_key = Verifier(), derive_key(3, Role.VERIFYING)
    verifier.text(3, rule=rule, verifying_key=verifying_key, choice=2)
    assert {key.key for key in keys} == {local_drafting_key(verifying_key)}
    assert len({key.round_words for key in keys}) == len(keys), "numbers of its own for every round"
    assert {key.choice for key in keys} == {2}
    assert local_drafting_key(verifying_key) not in (verifying_key, derive_key(3, Role.DRAFTING))
    assert len(local_drafting_key(verifying_key)) == KEY_BYTES


def test_coupled_drafts_are_drawn_with_the_noise_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[DrawKey] = []
    verifier, coupling_key = Verifier(), derive_key(3, Role.COUPLING)
    draft = HeadDrafter.draft

    def noted(drafter: HeadDrafter, draftings: Any) -> Any:
        keys.extend(drafting.request.key for drafting in draftings)
        assert all(drafting.request.is_coupled for drafting in draftings)
        return draft(drafter, draftings)

    monkeypatch.setattr(HeadDrafter, "draft", noted)
    verifier.text(3, rule="coupled", verifying_key=coupling_key, choice=2)
    assert {(key.key, key.choice) for key in keys} == {(coupling_key, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block", pytest.param("token", marks=pytest.mark.slow)])
def test_first_tokens_of_drafted_rounds_follow_the_targets_law(rule: str) -> None:
    """The pairs of tokens that two drafted rounds begin with, of 800 seeds, against texts without drafts of as many
    others: a chi-square of 24 degrees of freedom is above 64 in 1 of 50,000 runs, and the seeds are fixed.
    """
    counts = torch.zeros(2, VOCAB_SIZE**2, dtype=torch.float64)
    for row, num_draft_tokens in enumerate((3, 0)):
        verifier = Verifier(head=ToyHead(VOCAB_SIZE, sharpness=1.0))
        for first in range(row * 800, row * 800 + 800, 100):
            verifier.scheduler.room = Room(100, 10**9)
            keys = [derive_key(seed, Role.VERIFYING) for seed in range(first, first + 100)]
            given = {"rule": rule, "plain_rounds": 1, "max_len": len(PROMPT) + 4}
            sessions = [verifier.open(one, verifying_key=key, **given) for one, key in enumerate(keys)]
            verifier.decide()
            for session in sessions:
                verifier.run(session, 2, num_draft_tokens)
            verifier.decide()
            for session in sessions:
                # The second and third token: behind the plain first one, by a drafted round, or by two.
                ids = session.committed.ids[len(PROMPT) + 1 : len(PROMPT) + 3]
                counts[row, ids[0] * VOCAB_SIZE + ids[1]] += 1
                verifier.close(session)
    expected = counts.sum(0) / 2
    seen = expected > 0
    statistic = float((((counts - expected) ** 2)[:, seen] / expected[seen]).sum())
    assert statistic < 64.0


def test_prompt_from_the_prefix_cache_gives_the_drafts_of_a_cold_one() -> None:
    prompt = [(3 * place) % VOCAB_SIZE for place in range(3 * BLOCK_SIZE + 2)]
    drafts = []
    verifier = Verifier()
    for session_id in (1, 2):
        session = verifier.open(session_id, prompt, max_draft_tokens=4)
        verifier.decide()
        verifier.run(session, 3)
        verifier.decide()
        drafts.append([block.token_ids for _, result in verifier.steps for block in result.drafted.values() if block])
        assert (session.num_reused == 3 * BLOCK_SIZE) is (session_id == 2)
        verifier.steps.clear()
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 3


def test_sessions_closed_in_the_middle_of_a_step_leave_nothing_behind() -> None:
    verifier = Verifier()
    sessions = [verifier.open(one) for one in range(3)]
    verifier.decide()
    for session in sessions:
        verifier.run(session)
    step = verifier.scheduler.next_step()
    assert step is not None
    verifier.scheduler.close(*sessions[0].key)
    result = verifier.engine.step(step)
    assert len(verifier.scheduler.complete(step, result)) == 2
    for session in sessions:
        verifier.engine.forget(session.key)
    assert not verifier.head.sequences
    assert not verifier.model.cache.sequences


def test_session_goes_on_elsewhere_with_another_head_and_the_same_law() -> None:
    """As after a verifier was lost: the committed tokens are read as a prompt there, and a coupled text goes on."""
    given = {"rule": "coupled", "verifying_key": derive_key(1, Role.COUPLING)}
    whole, _ = Verifier().text(0, **given)
    first, second = Verifier(), Verifier()
    session = first.open(**given)
    first.decide()
    first.run(session, 3)
    first.decide()
    ids = session.committed.ids
    moved = second.open(token_ids=ids, prompt_len=len(PROMPT), first_round=9, max_len=len(PROMPT) + 30, **given)
    second.decide()
    second.run(moved)
    second.decide()
    assert moved.committed.ids[len(PROMPT) :] == whole


def test_head_without_finite_logits_costs_the_draft_and_not_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = Verifier()
    session = verifier.opened()
    state_of = verifier.head._state
    monkeypatch.setattr(verifier.head, "_state", lambda *given: without_rows(state_of(*given)))
    verifier.run(session, 2)
    assert [(verdict.num_draft_tokens, strategy_of(verdict)) for verdict in verifier.decide()] == [(0, "")] * 2


def test_head_that_is_not_trusted_any_more_drafts_nothing() -> None:
    verifier = Verifier()
    session = verifier.opened()
    verifier.is_trusted = False
    verifier.run(session, 2)
    assert [verdict.num_draft_tokens for verdict in verifier.decide()] == [0, 0]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (LocalDraft(HEAD, 0), "1 to 4"),
        (LocalDraft(HEAD, 5), "1 to 4"),
        (LocalDraft("medusa", 2), "nothing drafts by"),
        (LocalDraft(HEAD, 2, instead="hydra"), "nothing drafts by"),
    ],
)
def test_draft_that_the_head_cannot_make_is_refused(draft: LocalDraft, message: str) -> None:
    verifier = Verifier()
    session = verifier.opened()
    with pytest.raises(InvalidRequestError, match=message):
        verifier.scheduler.run_plain(PlainRun(session.fence, 1, draft))
    with pytest.raises(InvalidRequestError, match=message):
        verifier.open(2, watched=draft)
    assert verifier.scheduler.next_step() is None


def test_rounds_without_a_head_draft_are_reported_unless_the_head_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway must not take the one for the other: a text that is long is no text for which the head fails."""
    monkeypatch.setattr("draftwire.options.heads.head_drafter.READ_AT_ONCE", len(PROMPT) // 2)
    verifier = Verifier()
    watching, other = verifier.open(watched=LocalDraft(HEAD, 3)), verifier.open(2)
    verifier.decide()
    verifier.close(other)
    verifier.run(watching, 3)
    reading, _, drafted = verifier.decide()
    assert (reading.num_draft_tokens, watched_of(reading)) == (0, None)
    assert (strategy_of(drafted), watched_of(drafted)) == (HEAD, None)
    state_of = verifier.head._state
    monkeypatch.setattr(verifier.head, "_state", lambda *given: without_rows(state_of(*given)))
    unwatched = verifier.opened(3, PROMPT[:2])
    for session in (watching, unwatched):
        verifier.run(session, 1)
    (lacking, untold) = verifier.decide()
    assert (lacking.num_draft_tokens, watched_of(lacking)) == (0, WatchedGuess(False))
    assert (untold.num_draft_tokens, watched_of(untold)) == (0, None), "which asked for nothing"

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(verifier.head, "read", fail)
    verifier.run(watching, 1)
    assert [watched_of(verdict) for verdict in verifier.decide()] == [WatchedGuess(False)]


def test_what_a_head_would_have_drafted_is_not_watched() -> None:
    """It would cost what drafting costs."""
    verifier = Verifier()
    session = verifier.open(watched=LocalDraft(HEAD, 3))
    (verdict,) = verifier.decide()
    assert watched_of(verdict) is None
    assert session.run_source is None
    assert not verifier.head.readings


def test_rows_that_the_head_adds_are_known_before_the_step() -> None:
    verifier = Verifier()
    session = verifier.opened()
    assert session.num_rows == 1
    verifier.run(session, 1)
    assert session.num_rows == 4
    verifier.decide()
    assert session.num_rows == 1


def test_head_that_fails_costs_the_drafts_of_a_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = Verifier().text(0, sampling=SamplingParams(0.0))
    verifier, read, calls = Verifier(), ToyHead.read, []

    def fail_twice(head: ToyHead, readings: Any) -> Any:
        calls.append(len(readings))
        if len(calls) in (2, 3):
            raise RuntimeError("out of memory")
        return read(head, readings)

    monkeypatch.setattr(ToyHead, "read", fail_twice)
    ids, verdicts = verifier.text(3, sampling=SamplingParams(0.0))
    assert ids == plain
    assert sum(None in result.drafted.values() for _, result in verifier.steps) == 2
    assert any(strategy_of(verdict) for verdict in verdicts[4:]), "it drafts again"


def test_time_of_the_head_is_no_time_of_the_target_for_anybody() -> None:
    verifier = Verifier()
    drafted, plain = verifier.opened(1), verifier.opened(2)
    verifier.run(drafted, 1)
    verifier.run(plain, 1, 0)
    step = verifier.scheduler.next_step()
    assert step is not None
    result = replace(verifier.engine.step(step), verify_us=9_000, draft_s=0.004)
    verdicts = [event for _, event in verifier.scheduler.complete(step, result)]
    assert [verdict.verify_us for verdict in verdicts] == [5_000] * len(step.items)
