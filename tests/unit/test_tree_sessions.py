"""Sessions with token trees: what each service accepts, reserves, asks for and counts, without tensors or transport."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
import test_drafter_scheduler as drafter
import test_verifier_scheduler as verifier
from test_request import MINIMAL, TARGET
from test_verifier_scheduler import PROMPT, first_fence, offer

from draftwire.engine.target_session import StepResult
from draftwire.errors import (
    BlockViolationError,
    InvalidRequestError,
    NoRoomError,
    ProtocolViolationError,
    Violation,
)
from draftwire.method.encoding import Supports
from draftwire.method.quantization import Encoding
from draftwire.method.round_parts import BranchLimits, TreePart
from draftwire.method.rounds import DraftTree, ReceivedBlock, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.method.tree_limits import num_read_nodes
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.script import Script
from draftwire.options.ahead.ahead_drafting import AheadDrafting
from draftwire.options.scripted.scripted_drafter import ScriptedDrafter
from draftwire.options.trees.session_trees import SessionTrees
from draftwire.options.trees.token_tree import TokenTree
from draftwire.options.trees.tree_choice import tree_rule_for
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.rules import RuleFacts
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire.verification.deciding import Judgement
from draftwire_drafter.config import DrafterConfig, DraftSettings
from draftwire_drafter.core import DrafterCore
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.options.tree_drafts import TreeDrafts
from draftwire_gateway.requested_generation import SpeculationDefaults, complete_request
from draftwire_gateway.session.expected_verdict import ExpectedVerdict
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.policy import PLAIN, Arm, DraftSource
from draftwire_gateway.session.round_times import RoundTimes, RoundWatch, WhyPlain
from draftwire_gateway.session.session_option import BlockRequest
from draftwire_gateway.session.session_state import SessionState
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.metrics import VerifierMetrics
from draftwire_verifier.scheduler import Scheduler
from tests.unit.verdict_parts import depth_of

GREEDY = SamplingParams(0.0)
TREE = TokenTree((-1, -1, 0, 0, 3))
"""Two first tokens, of which the first is followed by two, and the second of these by another."""
TOKENS = [10, 11, 12, 13, 14]


def judging(**changes: Any) -> Scheduler:
    """Returns a scheduler with a session that may have trees of eight tokens, three on a path."""
    scheduler = verifier.make_scheduler()
    scheduler.max_tree_nodes, scheduler.tree_rule_for = 8, tree_rule_for
    scheduler.open(verifier.make_spec(**({"max_tree_nodes": 8, "rule": "coupled"} | changes)), 1)
    return scheduler


def tree_block(tree: TokenTree = TREE, tokens: list[int] | None = None, **changes: Any) -> ReceivedBlock:
    tokens = TOKENS[: len(tree)] if tokens is None else tokens
    return verifier.make_block(first_fence(), tokens, Encoding.NONE, tree=tree, **changes)


def verdict_of(scheduler: Scheduler, path: tuple[int, ...], extra: int) -> Verdict:
    """Returns the verdict of the queued block, of which a path is accepted."""
    step = scheduler.next_step()
    assert step is not None
    (item,) = step.items
    assert item.block is not None
    judgement = Judgement([*(item.block.token_ids[node] for node in path), extra], len(path), path=path)
    ((_, event),) = scheduler.complete(step, StepResult([judgement], [1], [0], 9, 7))
    assert isinstance(event, Verdict)
    return event


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        *(((), TokenSource.RECOVERED), ((0,), TokenSource.RECOVERED), ((0, 3), TokenSource.RECOVERED)),
        *(((1,), TokenSource.BONUS), ((0, 2), TokenSource.BONUS), ((0, 3, 4), TokenSource.BONUS)),
    ],
)
def test_verdict_reports_the_depth_of_a_tree_and_how_its_path_ended(path: tuple[int, ...], extra: TokenSource) -> None:
    scheduler = judging()
    offer(scheduler, tree_block())
    verdict = verdict_of(scheduler, path, 20)
    assert (verdict.num_draft_tokens, depth_of(verdict), verdict.num_draft_positions) == (5, 3, 3)
    assert (verdict.num_accepted_tokens, verdict.extra) == (len(path), extra)
    told: list[RoundTimes] = []
    watch = RoundWatch([told.append])
    watch.ask(WhyPlain.NO_ROOM)
    watch.take(verdict, 0.0)
    watch.end()
    assert [(times.verdict.extra, depth_of(times.verdict)) for times in told] == [(extra, 3)], "of the round's span"
    assert verdict.token_ids == [*(TOKENS[node] for node in path), 20]


def test_verdict_of_a_chain_says_nothing_of_depth() -> None:
    scheduler = judging()
    offer(scheduler, verifier.make_block(first_fence(), [10, 11], Encoding.NONE))
    verdict = verdict_of(scheduler, (), 20)
    assert (depth_of(verdict), verdict.num_draft_positions) == (0, 2)


def test_drafters_log_probabilities_are_those_along_the_path() -> None:
    """One row for each token with children: after the last of a path there is none."""
    tree = TokenTree((-1, -1, 1))
    draft = Supports(
        token_ids=np.array([[10, 11], [12, 20]]),
        weights=np.array([[2**15, 2**15], [2**14, 3 * 2**14]]),
        vocab_size=verifier.VOCAB_SIZE,
    )
    for path, extra, expected in (
        ((1, 2), 5, [0.5, 0.25, math.nan]),
        ((1,), 20, [0.5, 0.75]),
        ((0,), 5, [0.5, math.nan]),
        ((), 11, [0.5]),
        ((), 7, [0.0]),
    ):
        scheduler = judging(rule="block", reports_draft_logprobs=True)
        block = replace(tree_block(tree, [10, 11, 12]), draft=draft, has_distributions=True)
        offer(scheduler, block)
        told = verdict_of(scheduler, path, extra).logprobs.draft
        assert [math.exp(value) for value in told] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("changes", "block", "violation"),
    [
        ({"max_tree_nodes": 0}, tree_block(), Violation.ENCODING),
        ({"max_tree_nodes": 4}, tree_block(), Violation.LENGTH),
        ({"max_draft_tokens": 2}, tree_block(), Violation.LENGTH),
        ({"max_len": len(PROMPT) + 3}, tree_block(), Violation.LENGTH),
        ({"rule": "block"}, tree_block(), Violation.NO_DISTRIBUTIONS),
        ({"rule": "block"}, verifier.make_block(first_fence(), encoding=Encoding.NONE), Violation.NO_DISTRIBUTIONS),
        ({"max_tree_nodes": 0, "rule": "block", "sampling": GREEDY}, tree_block(TokenTree((-1,))), Violation.ENCODING),
        ({}, verifier.make_block(first_fence(), [1] * 4, Encoding.NONE), Violation.LENGTH),
    ],
)
def test_tree_that_the_session_does_not_have_is_a_violation(
    changes: dict[str, Any], block: ReceivedBlock, violation: Violation
) -> None:
    scheduler = judging(**changes)
    with pytest.raises(BlockViolationError) as raised:
        offer(scheduler, block)
    assert raised.value.violation is violation
    assert scheduler.next_step() is None


@pytest.mark.parametrize("rule", ["block", "token", "typical", "coupled"])
def test_greedy_trees_and_chains_come_without_distributions(rule: str) -> None:
    for block in (tree_block(), verifier.make_block(first_fence(), [10, 11], Encoding.NONE)):
        scheduler = judging(rule=rule, sampling=GREEDY)
        offer(scheduler, block)
        assert scheduler.next_step() is not None
    offer(judging(max_len=len(PROMPT) + 4), tree_block())  # just as long as the deepest path allows


def test_session_with_trees_reserves_room_or_is_refused_without_it() -> None:
    scheduler = verifier.make_scheduler(context_length=BLOCK_SIZE, kv_cache_tokens=BLOCK_SIZE)
    wanted = {"rule": "coupled", "max_len": BLOCK_SIZE - 4}
    scheduler.max_tree_nodes, scheduler.tree_rule_for = 8, tree_rule_for
    with pytest.raises(NoRoomError):
        scheduler.open(verifier.make_spec(max_tree_nodes=8, **wanted), 1)
    scheduler.open(verifier.make_spec(max_tree_nodes=4, **wanted), 1)
    for changes, said in (
        ({"max_tree_nodes": 9}, "above the verifier's limit 8"),
        ({"rule": "token"}, "token takes no token trees"),
        ({"max_held_blocks": 1}, "holds blocks has no token trees"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            judging(**changes)
    judging(rule="token", sampling=GREEDY)


def test_positions_that_are_counted_are_depths() -> None:
    metrics = VerifierMetrics()
    scheduler = judging()
    offer(scheduler, tree_block())
    verdict = verdict_of(scheduler, (0, 3), 20)
    metrics.of_model.model_name = "any"
    metrics.count(verdict)
    session = SessionState(generation(num_draft_nodes=5))
    TreeDrafts(session).end_round(verdict, was_held=False)
    statistics = session.statistics
    statistics.count(verdict)
    families = {sample.name: 0.0 for family in metrics.registry.collect() for sample in family.samples}
    for family in metrics.registry.collect():
        for sample in family.samples:
            families[sample.name] += sample.value
    names = ("spec_decode_num_draft_tokens_per_pos", "spec_decode_num_accepted_tokens_per_pos", "draft_trees")
    assert [next(value for name, value in families.items() if name.endswith(f":{own}_total")) for own in names] == [
        *(3, 2, 1)
    ]
    assert statistics.num_accepted_tokens_per_pos == [1, 1, 0]
    assert statistics.acceptance_histogram == [0, 0, 1, 0]
    assert statistics.draft_length_histogram == [0, 0, 0, 0, 0, 1]
    assert (statistics.num_trees, statistics.num_draft_positions, statistics.num_draft_tokens) == (1, 3, 5)
    assert statistics.draft_acceptance_rate == pytest.approx(2 / 3)


def drafting(**changes: Any) -> Any:
    """Returns a drafter's scheduler with a session that may have trees of eight tokens, and is past its prefill."""
    scheduler = drafter.make_scheduler()
    scheduler.options = [SessionTrees(8)]
    scheduler.open(drafter.make_spec(**({"max_tree_nodes": 8, "rule": "coupled"} | changes)), 1)
    step = scheduler.next_step()
    scheduler.complete(step, drafter.Engine().run(step))
    return scheduler


@pytest.mark.parametrize(
    ("changes", "tree", "said"),
    [
        ({}, DraftTree(9), "9 draft tokens wanted, the limit is 8"),
        ({"max_tree_nodes": 0}, DraftTree(1), "the limit is 0"),
        ({}, DraftTree(5, TREE), "deeper"),
        ({"rule": "block"}, DraftTree(5), "has no shape"),
        ({"rule": "block"}, DraftTree(2, TokenTree((-1, -1))), None),
        ({"rule": "block", "sampling": GREEDY}, DraftTree(8), None),
        ({}, DraftTree(8), None),
    ],
)
def test_tree_that_is_asked_for_is_checked(changes: dict[str, Any], tree: DraftTree, said: str | None) -> None:
    scheduler, calibration = drafting(**changes), drafter.make_calibration(PROMPT, [7], tree=tree)
    if said is None:
        scheduler.calibrate(calibration)
        (item,) = scheduler.next_step().items
        assert item.calibration.tree == tree
        return
    with pytest.raises(ProtocolViolationError, match=said):
        scheduler.calibrate(calibration)


@pytest.mark.parametrize(("tree", "is_learnt"), [(DraftTree(8), False), (None, True)])
def test_price_of_rows_is_not_learnt_from_trees(tree: DraftTree | None, is_learnt: bool) -> None:
    """One session's tree has many rows in a pass."""
    scheduler = drafting()
    strategy, nothing = ScriptedDrafter(Script()), lambda *_: None
    ahead = AheadDrafting(strategy, {}, scheduler, post=nothing, count=nothing)
    scheduler.options.append(ahead)
    scheduler.calibrate(drafter.make_calibration(PROMPT, [7], tree=tree))
    step = scheduler.next_step()
    result = drafter.Engine()
    result.sequences = [[scheduler.sessions[step.items[0].session.key], PROMPT, len(PROMPT)]]
    scheduler.complete(step, replace(result.run(step), num_passes=2, draft_s=0.1))
    assert (ahead.lookahead.pass_times._first_s is not None) is is_learnt


def test_drafter_reserves_what_a_growing_tree_reads_and_refuses_larger() -> None:
    assert num_read_nodes(0, 5) == 0
    assert num_read_nodes(8, 1) == 8
    assert num_read_nodes(8, 3) == 20
    assert num_read_nodes(64, 3) == 64
    scheduler = drafting()
    assert scheduler.room.num_reserved == 32  # 12 of the text and 20 nodes
    for changes, said in (({"max_tree_nodes": 9}, "drafter's limit 8"), ({"ahead": BranchLimits(1)}, "no token trees")):
        with pytest.raises(InvalidRequestError, match=said):
            drafting(**changes)


def generation(defaults: SpeculationDefaults | None = None, max_tree_nodes: int = 64, **changes: Any) -> Generation:
    defaults = defaults or SpeculationDefaults(4, 16, "block")
    facts = {"block": RuleFacts("block", takes_trees=True), "token": RuleFacts("token")}
    facts["coupled"] = RuleFacts("coupled", needs_draft_probs=False, is_coupled=True, takes_trees=True)
    target = replace(TARGET, rules=tuple(facts.values()), max_tree_nodes=max_tree_nodes)
    (own,) = complete_request(replace(MINIMAL, **changes), target, defaults)
    return own


def test_request_gets_trees_where_its_rule_takes_them() -> None:
    trees = SpeculationDefaults(4, 16, "block", adapts_length=True, rounds_ahead=2, max_branches=8, num_draft_nodes=9)
    for defaults, changes, nodes in (
        (None, {}, 0),
        (None, {"num_draft_nodes": 12}, 12),
        (None, {"num_draft_nodes": 12, "num_speculative_tokens": 0}, 0),
        (None, {"num_draft_nodes": 12, "rule": "token", "sampling": GREEDY}, 12),
        (trees, {}, 9),
        (trees, {"num_draft_nodes": 0}, 0),
        (trees, {"rule": "token"}, 0),
        (trees, {"rule": "token", "sampling": GREEDY}, 9),
        (trees, {"max_tree_nodes": 4}, 9),
        (trees, {"max_tree_nodes": 0}, 0),
        (trees, {"max_tree_nodes": 0, "num_draft_nodes": 12}, 0),
    ):
        own = generation(defaults, **changes)
        assert own.num_draft_nodes == nodes
        if nodes:
            assert (own.num_speculative_tokens, own.adapts_length) == (4, False)
            assert (own.rounds_ahead, own.max_branches) == (0, 0)
        elif defaults:
            assert (own.adapts_length, own.rounds_ahead, own.max_branches) == (True, 2, 8)
    for changes, said in (
        ({"num_draft_nodes": 65}, r"must be in 0\.\.64"),
        ({"num_draft_nodes": 1, "rule": "token"}, "takes no token trees"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            generation(**changes)


def test_trees_are_asked_for_and_never_chosen() -> None:
    """Not even room for them is: a session would have that many more rows of the KV cache."""
    adaptive = SpeculationDefaults(4, 16, "block", adapts_length=True)
    for changes, nodes in (({}, 0), ({"num_draft_nodes": 0}, 0), ({"num_draft_nodes": 8}, 8)):
        own = generation(adaptive, **changes)
        assert (own.num_draft_nodes, own.adapts_length) == (nodes, nodes == 0)


def requested(generation: Generation, arm: Arm) -> tuple[DraftTree | None, int]:
    """Returns the tree that a drafter is asked for, and how deep the gateway takes it to be."""
    session = SessionState(generation)
    block = BlockRequest(arm, arm.length)
    TreeDrafts(session).request(block)
    return block.tree, block.depth


def test_shape_is_given_where_distributions_are_sent_alone() -> None:
    """It depends on numbers alone, and is no deeper than what is drafted."""
    drawn = generation(num_draft_nodes=12)
    assert requested(drawn, PLAIN) == (None, 0)
    assert requested(drawn, Arm(DraftSource.DRAFTER, 4)) == (None, 4)
    tree, depth = requested(drawn, Arm(DraftSource.DRAFTER, 4, 12))
    assert tree is not None
    assert tree.shape is not None
    assert (len(tree.shape), tree.num_nodes, tree.shape.depth, depth) == (12, 12, 4, 4)
    flat = DraftTree(8, TokenTree((-1,) * 8))
    assert requested(drawn, Arm(DraftSource.DRAFTER, 1, 12)) == (flat, 1), "no more children than have a chance"
    deep, depth = requested(drawn, Arm(DraftSource.DRAFTER, 8, 3))
    assert (deep and deep.num_nodes, depth) == (3, 3), "its nodes run out before it is as deep"
    for changes in ({"rule": "coupled"}, {"sampling": GREEDY}):
        chosen = generation(num_draft_nodes=12, **changes)
        assert requested(chosen, Arm(DraftSource.DRAFTER, 4, 12)) == (DraftTree(12), 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_draft_tokens": 9}, "larger token tree"),
        ({"tree": TreePart(4)}, "more draft tokens than were requested"),
        ({"num_draft_tokens": 2}, "deeper than it has tokens"),
        ({"num_accepted_tokens": 4, "token_ids": [1] * 5}, "accepts more"),
        ({"tree": None}, "more draft tokens than were requested"),
        ({}, None),
    ],
)
def test_verdict_of_a_tree_is_of_the_tree_that_was_requested(changes: dict[str, Any], said: str | None) -> None:
    expected = ExpectedVerdict(generation(num_draft_nodes=8))
    expected.request_block(3, num_nodes=8)
    good = Verdict(replace(first_fence(), prefix_len=1), [1, 1], 5, 1, TokenSource.RECOVERED, 0, tree=TreePart(3))
    verdict = replace(good, **changes)
    if said is None:
        expected.check(verdict, 10)
        expected.request_block(5)
        said = "larger token tree"  # of a chain
    with pytest.raises(ProtocolViolationError, match=said):
        expected.check(verdict, 10)


def test_trees_are_not_promised_by_who_has_none() -> None:
    with pytest.raises(InvalidRequestError, match="vllm reads no token trees"):
        VerifierConfig(ModelSettings("m", engine="vllm"), engine=EngineSettings(max_tree_nodes=8))
    with pytest.raises(InvalidRequestError, match=r"max_tree_nodes must be in 0\.\.64"):
        EngineSettings(max_tree_nodes=65)
    with pytest.raises(InvalidRequestError, match=r"num_draft_nodes must be in 0\.\.64, not 65"):
        GatewayConfig(num_draft_nodes=65)
    drafts, engine = DraftSettings(strategy="suffix"), EngineSettings(max_tree_nodes=8)
    core = DrafterCore(DrafterConfig(ModelSettings("scripted:"), engine=engine, drafts=drafts), AsyncMock())
    with pytest.raises(InvalidRequestError, match="drafts no token trees"):
        core._load_engine()
