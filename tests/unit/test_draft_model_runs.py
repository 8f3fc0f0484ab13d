"""A draft model beside the target: when it drafts, on how many threads, and when it has failed too often."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwire.drafting.strategy import Drafting, DraftStep
from draftwire.engine.target_session import DraftOrder, OrderedBlocks
from draftwire.options.draft_model import model_drafts
from draftwire.options.draft_model.model_drafts import FAILURES_S, MOST_FAILURES, ModelDrafts

VOCAB_SIZE = 5


@dataclass
class KnownSequence:
    """A text of which all but the last token was read before it was told of."""

    num_committed: int
    num_read: int = 0
    is_closed: bool = False

    @property
    def num_unread(self) -> int:
        return self.num_committed - self.num_read

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        self.num_committed = base_len + len(token_ids)
        self.num_read = min(self.num_read, self.num_committed - 1)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Drafter:
    """A strategy that draws nothing."""

    context_length: int = 1000
    fails: bool = False
    steps: list[list[Drafting]] = field(default_factory=list)
    opened: list[KnownSequence] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def open(self, token_ids: list[int], _: Any) -> KnownSequence:
        self.opened.append(KnownSequence(len(token_ids)))
        return self.opened[-1]

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        self.threads.append(torch.get_num_threads())
        if self.fails:
            raise RuntimeError("it fails")
        self.steps.append(list(draftings))
        for one in draftings:
            sequence: Any = one.sequence
            sequence.num_read += min(sequence.num_unread, one.max_read or sequence.num_unread)
        return DraftStep([None] * len(draftings))


@dataclass
class Committed:
    """The ids of a text."""

    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


def order_of(session_id: int, num_committed: int, num_draft_tokens: int = 4) -> DraftOrder:
    parameters = SimpleNamespace(sampling=None, choice=0, prompt_len=0, stop_token_ids=frozenset())
    session: Any = SimpleNamespace(
        key=(session_id, 0),
        committed=Committed([0] * num_committed),
        spec=SimpleNamespace(verifying_key=bytes(32), parameters=parameters),
        rule=SimpleNamespace(is_coupled=False, needs_draft_probs=True),
        round=1,
        automaton=None,
    )
    return DraftOrder(session, "model", num_draft_tokens)


def drafts_by(drafter: Any, *more: Any, **options: Any) -> ModelDrafts:
    return ModelDrafts(drafter, VOCAB_SIZE, *more, **options)


def read_of(drafter: Drafter) -> list[int | None]:
    """Returns the limits of what the latest step read, by text."""
    return [one.max_read for one in drafter.steps[-1]]


def test_texts_together_have_one_chunk_of_a_step_beside_what_rounds_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_drafts, "LARGEST_CHUNK", 100)
    drafter = Drafter()
    drafts = drafts_by(drafter)
    orders = [order_of(1, 80), order_of(2, 90), order_of(3, 70), order_of(4, 10)]
    seen = []
    for _ in range(4):
        drafts.draft(orders, {})
        seen.append(read_of(drafter))
    assert seen == [[80, 20, None], [None, 70, 30, None], [None, None, 40, None], [None] * 4]


def test_text_that_the_models_context_cannot_hold_is_not_drafted_for() -> None:
    drafter = Drafter(context_length=20)
    drafts = drafts_by(drafter)
    assert drafts.draft([order_of(1, 16), order_of(2, 15)], {}).by_session == {}
    assert [len(step) for step in drafter.steps] == [1]
    assert drafts.draft([order_of(1, 17)], {}) == OrderedBlocks()


def test_own_number_of_threads_is_that_of_its_steps_alone() -> None:
    before, drafter = torch.get_num_threads(), Drafter()
    try:
        torch.set_num_threads(1)
        drafts_by(drafter, (2, 1)).draft([order_of(1, 8)], {})
        assert (drafter.threads, torch.get_num_threads()) == ([2], 1)
        drafter.fails = True
        drafts_by(drafter, (2, 1)).draft([order_of(1, 8)], {})
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("pause_s", [FAILURES_S / MOST_FAILURES, FAILURES_S])
def test_it_is_off_after_some_failures_in_a_row_of_seconds(pause_s: float) -> None:
    now, drafter = 0.0, Drafter(fails=True)
    drafts = drafts_by(drafter, clock=lambda: now)
    for _ in range(MOST_FAILURES + 2):
        drafts.draft([order_of(1, 8)], {})
        now += pause_s
    assert all(sequence.is_closed for sequence in drafter.opened)
    assert drafts.is_off is (pause_s < FAILURES_S)
    assert len(drafter.threads) == (MOST_FAILURES if drafts.is_off else MOST_FAILURES + 2)
    drafter.fails = False
    drafts.draft([order_of(1, 8)], {})
    assert len(drafter.steps) == (not drafts.is_off), "it is off until the verifier is started again"
