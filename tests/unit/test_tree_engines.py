"""Rounds with token trees through the engines and schedulers of both services, and through bytes between them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from scheduler_contract import FixedPacer
from session_specs import draft_spec, target_spec
from test_tree_drafts import DRAFTER, TARGET, VOCAB_SIZE

from draftwire.audit import AuditSums
from draftwire.engine.admission import Room
from draftwire.method.rounds import Calibration, CommittedTokens, DraftBlock, DraftTree, Fence, Permit, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.models.cached_model import CachedModel
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.torch_models import torch_model
from draftwire.options.trees.session_trees import SessionTrees
from draftwire.options.trees.token_tree import TokenTree
from draftwire.options.trees.tree_choice import tree_rule_for
from draftwire.options.trees.tree_model_drafter import TreeModelDrafter
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime import messages
from draftwire_drafter.engine import DraftEngine
from draftwire_drafter.scheduler import Scheduler as DraftScheduler
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.scheduler import Scheduler as TargetScheduler
from tests.cache_integrity import check_integrity

torch.set_num_threads(1)

PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3] * 2
LENGTH, ROOM = 32, 64
KEY = bytes(range(16))
NODES, DEPTH = 12, 4
WIDE = DraftTree(9, TokenTree((-1, -1, -1, 0, 0, 1, 3, 3, 5)))
"""A tree of nine tokens, three on a path."""


@dataclass
class Rounds:
    """One session, whose rounds are drafted and judged in turn."""

    rule: str
    sampling: SamplingParams
    tree: DraftTree | None
    ids: list[int] = field(default_factory=lambda: list(PROMPT))
    target: CachedModel = field(default_factory=lambda: torch_model(TARGET, 128))
    audits: list[AuditSums | None] = field(default_factory=list)
    is_trusted: bool = True

    def __post_init__(self) -> None:
        model = TreeModelDrafter(torch_model(DRAFTER, 160), 512)
        options: Any = [SessionTrees(NODES)]
        self.drafting, self.judging = DraftEngine(model, options), TargetEngine(self.target, 512)
        pacer, shared = FixedPacer(), {"context_length": 512, "max_draft_tokens": 8}
        self.drafts = DraftScheduler(room=Room(2, 160), pacer=pacer, options=options, **shared)
        shared |= {"max_tree_nodes": NODES, "tree_rule_for": tree_rule_for}
        self.verdicts = TargetScheduler(room=Room(2, 128), pacer=pacer, vocab_size=VOCAB_SIZE, **shared)
        own: dict[str, Any] = {"token_ids": PROMPT, "rule": self.rule, "sampling": self.sampling}
        own |= {"max_draft_tokens": DEPTH, "max_tree_nodes": NODES, "max_len": len(PROMPT) + ROOM}
        self.verdicts.open(target_spec(verifying_key=KEY, plain_rounds=1, permit_key=KEY, **own), 1)
        key = KEY if self.rule == "coupled" else bytes(16)
        permit = Permit.make(KEY, 0)
        self.drafts.open(draft_spec(drafting_key=key, target_vocab_size=VOCAB_SIZE, permit=permit, **own), 1)
        self.commit(self.judge())
        step = self.drafts.next_step()
        assert step is not None
        self.drafts.complete(step, self.drafting.step(step))

    @property
    def fence(self) -> Fence:
        committed = CommittedTokens(self.ids)
        return Fence(1, 0, self.number, len(committed), committed.hash)

    number: int = 0
    known: int = len(PROMPT)

    def commit(self, verdict: Verdict) -> None:
        self.number += 1
        self.ids += verdict.token_ids

    def draft(self) -> DraftBlock:
        new, base = self.ids[self.known :], self.known
        self.known = len(self.ids)
        self.drafts.calibrate(Calibration(self.fence, base, new, DEPTH, tree=self.tree))
        step = self.drafts.next_step()
        assert step is not None
        ((completed),) = self.drafts.complete(step, self.drafting.step(step))
        assert isinstance(completed.outcome, DraftBlock)
        return completed.outcome

    def judge(self) -> Verdict:
        step = self.verdicts.next_step()
        assert step is not None
        result = self.judging.step(step)
        self.audits += result.audit()
        ((_, verdict),) = self.verdicts.complete(step, result)
        assert isinstance(verdict, Verdict)
        return verdict

    def round(self) -> Verdict:
        (block,) = messages.blocks_from_proto([messages.block_to_proto(self.draft())], 7, VOCAB_SIZE, 8, NODES)
        self.verdicts.take_permit(block)
        session = self.verdicts.offer_block(block)
        assert session is not None
        if not self.is_trusted:
            self.verdicts.set_aside(session)
        verdict = self.judge()
        self.commit(verdict)
        return verdict

    def all(self) -> Iterator[Verdict]:
        while len(self.ids) < len(PROMPT) + LENGTH:
            yield self.round()


def plain(rule: str, sampling: SamplingParams) -> list[int]:
    rounds = Rounds(rule, sampling, None)
    session = rounds.verdicts.sessions[1, 0]
    while len(rounds.ids) < len(PROMPT) + LENGTH:
        session.plain_rounds_left = 1
        rounds.verdicts._enqueue(session)
        rounds.commit(rounds.judge())
    return rounds.ids[: len(PROMPT) + LENGTH]


@pytest.mark.slow
@pytest.mark.parametrize("tree", [DraftTree(NODES), WIDE], ids=["grows", "shaped"])
@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        ("coupled", SamplingParams(2.0)),
        ("coupled", SamplingParams(2.0, repetition_penalty=1.3, top_k=6)),
        ("block", SamplingParams(0.0)),
        ("token", SamplingParams(0.0, presence_penalty=0.5)),
    ],
)
def test_text_with_trees_is_the_targets_own(rule: str, sampling: SamplingParams, tree: DraftTree) -> None:
    """And takes fewer rounds. The caches hold what was reserved, and are right to the end."""
    rounds = Rounds(rule, sampling, tree)
    verdicts = list(rounds.all())
    assert rounds.ids[: len(PROMPT) + LENGTH] == plain(rule, sampling)
    assert any(verdict.num_accepted_tokens > 1 for verdict in verdicts)
    assert all(verdict.num_draft_tokens <= NODES and verdict.num_draft_positions <= DEPTH for verdict in verdicts)
    assert sum(verdict.tree is not None for verdict in verdicts) > len(verdicts) / 2
    assert all(audit is None for audit in rounds.audits), "nobody can bias such a text"
    check_integrity(rounds.target.cache)


@pytest.mark.parametrize("sampling", [SamplingParams(2.0), SamplingParams(1.0, top_k=5)], ids=["plain", "truncated"])
def test_drawn_trees_are_judged_and_audited(sampling: SamplingParams) -> None:
    rounds = Rounds("block", sampling, WIDE)
    verdicts = list(rounds.all())
    assert sum(verdict.num_accepted_tokens for verdict in verdicts) > 5
    assert {verdict.extra for verdict in verdicts} >= {TokenSource.RECOVERED}
    seen = [audit for audit in rounds.audits if audit is not None]
    assert len(seen) == len(verdicts) == len(rounds.audits) - 1, "all but the first round"
    assert sum(audit.num_positions for audit in seen) > 3 * len(seen)
    check_integrity(rounds.target.cache)


def test_tree_that_is_set_aside_is_audited_and_the_round_is_plain() -> None:
    sampling = SamplingParams(2.0)
    rounds = Rounds("block", sampling, WIDE)
    rounds.is_trusted = False
    verdicts = [rounds.round() for _ in range(LENGTH - 1)]
    assert all((len(one.token_ids), one.num_draft_tokens, one.tree) == (1, 0, None) for one in verdicts)
    assert all(one.extra is TokenSource.PLAIN for one in verdicts)
    assert rounds.ids[: len(PROMPT) + LENGTH] == plain("block", sampling)
    assert all(audit is not None and audit.num_positions > 0 for audit in rounds.audits[1:])


def test_what_is_shared_after_trees_is_the_text() -> None:
    """Another session that goes on where this one was finds the blocks of its text, and writes the same."""
    sampling = SamplingParams(2.0)
    rounds = Rounds("coupled", sampling, DraftTree(NODES))
    list(rounds.all())
    own = {"token_ids": rounds.ids[:-1], "rule": "coupled", "sampling": sampling, "prompt_len": len(PROMPT)}
    given = {"session_id": 2, "first_round": 9, "plain_rounds": 1, "max_len": len(rounds.ids)}
    rounds.verdicts.close(1, 0)
    rounds.judging.forget((1, 0))
    rounds.verdicts.open(target_spec(verifying_key=KEY, **{**own, **given}), 1)
    verdict = replace(rounds.judge(), fence=rounds.fence)
    assert verdict.num_cached_tokens >= BLOCK_SIZE > len(PROMPT), "beyond the prompt"
    assert verdict.token_ids == rounds.ids[-1:]
