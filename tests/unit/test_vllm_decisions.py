"""What rank 0 decides from vLLM's logits is what our own engine decides; without vLLM, from a model of our own."""

import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_target import KEY, VOCAB_SIZE, fresh_model, random_ids

from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.method.distributions import DenseRows
from draftwire.method.keys import DrawKey
from draftwire.models.sequence_model import Reading
from draftwire.options.logprobs.session_logprobs import LogprobsReport
from draftwire.requests.automaton import BlockMasks
from draftwire.requests.logprobs import LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES
from draftwire.verification.deciding import Judgement, StillReading
from draftwire.verification.target import judge
from draftwire_verifier.vllm.items import PromptToReport, RoundItem, StepItems, StepReport
from draftwire_verifier.vllm.rank_decisions import RankDecisions, agreed
from tests.judged import judging_of

SAMPLINGS = [
    SamplingParams(0.0),
    SamplingParams(),
    SamplingParams(1.2, repetition_penalty=1.5, presence_penalty=0.8),
    SamplingParams(0.9, top_p=0.8, logit_bias=((1, 1.5),), min_tokens=3),
]


def make_item(generator: random.Random, number: int, rule: str, committed: list[int], **changes: Any) -> RoundItem:
    length = generator.randint(0, 4)
    rows = torch.rand(length, VOCAB_SIZE, generator=torch.Generator().manual_seed(number)) + 0.05
    rows /= rows.sum(1, keepdim=True)
    item = RoundItem(
        draft_tokens=[generator.randrange(VOCAB_SIZE) for _ in range(length)],
        draft=DenseRows(rows) if length else None,
        sampling=generator.choice(SAMPLINGS),
        rule=rule,
        is_used=generator.random() < 0.8,
        key=DrawKey(KEY, 0, number),
        num_committed=len(committed),
        max_read=999,
        prompt_len=len(committed) - 1 or 1,
        stop_token_ids=frozenset({2}),
        report=LogprobsReport(LogprobsRequest(2)) if generator.random() < 0.5 else None,
        committed=committed,
    )
    return replace(item, **changes)


def judged(items: dict[str, RoundItem]) -> dict[str, Any]:
    """Returns what our own engine decides about them, each in its sequence."""
    model = fresh_model()
    judgings = [
        judging_of(
            model.cache.open(),
            list(item.committed),
            item.draft_tokens,
            item.draft,
            item.sampling,
            RULES[item.rule],
            item.key,
            item.prompt_len,
            item.stop_token_ids,
            report=item.report,
            is_used=item.is_used,
        )
        for item in items.values()
    ]
    return dict(zip(items, judge(model, judgings).outcomes, strict=True))


def logits_of(items: dict[str, RoundItem], order: list[str]) -> tuple[torch.Tensor, dict[str, int]]:
    """Returns logits as vLLM's runner has them: the rows of each request in the order of its batch."""
    model, parts, starts, at = fresh_model(), [], {}, 0
    for name in order:
        item = items[name]
        keep = len(item.draft_tokens) + 1
        parts.append(model.read([Reading(model.cache.open(), [*item.committed, *item.draft_tokens], keep)]).clone())
        starts[name] = at
        at += keep
    return torch.cat(parts), starts


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("num_undecided", [0, 2])
def test_decisions_are_those_of_our_own_engine(rule: str, num_undecided: int) -> None:
    generator = random.Random(rule + str(num_undecided))
    for trial in range(6):
        items = {
            f"r{index}": make_item(generator, trial * 8 + index, rule, random_ids(generator, generator.randint(1, 9)))
            for index in range(8)
        }
        order = generator.sample(list(items), 8)
        undecided = set(order[:num_undecided])
        logits, starts = logits_of(items, order)
        step = StepItems(items, frozenset(items) - undecided)
        report = RankDecisions(RULES).decide(step, starts, logits, {})
        expected = judged(items)
        assert report.outcomes.keys() == items.keys() - undecided
        for name, outcome in report.outcomes.items():
            assert isinstance(outcome, Judgement)
            assert outcome.token_ids == expected[name].token_ids
            assert outcome.num_accepted == expected[name].num_accepted
            assert [one.token_id for one in outcome.logprobs] == [one.token_id for one in expected[name].logprobs]
        assert all(report.tokens_of(name) == [] for name in undecided)
        if RULES[rule].needs_draft_probs:
            drafted = [name for name in report.outcomes if items[name].draft_tokens]
            assert all(report.audits[name] for name in drafted)


def test_prompt_is_reported_as_our_own_engine_does() -> None:
    generator = random.Random(1)
    ids = random_ids(generator, 12)
    report = LogprobsReport(LogprobsRequest(1, 2))
    item = make_item(generator, 1, "block", ids, prompt_len=12, report=report, draft_tokens=[], draft=None)
    model = fresh_model()
    rows = model.read([Reading(model.cache.open(), ids, 12)]).clone()
    (expected,) = judged({"one": item}).values()
    decisions = RankDecisions(RULES)
    first = StepItems({"one": item}, frozenset(), {"one": PromptToReport(0, 5)})
    part = decisions.decide(first, {}, None, {"one": rows[:5]}).outcomes["one"]
    assert isinstance(part, StillReading)
    last = StepItems({"one": item}, frozenset({"one"}), {"one": PromptToReport(5, 6)})
    rest = decisions.decide(last, {"one": 0}, rows[11:12].clone(), {"one": rows[5:11]}).outcomes["one"]
    assert isinstance(rest, Judgement)
    assert rest.token_ids == expected.token_ids
    assert (part.prompt.first_position, rest.prompt.first_position) == (1, 6)
    tokens = part.prompt.tokens + rest.prompt.tokens
    assert [one.token_id for one in tokens] == ids[1:]
    assert [one.logprob for one in tokens] == pytest.approx([one.logprob for one in expected.prompt.tokens], abs=1e-6)


def test_prompt_that_is_not_finite_fails_alone() -> None:
    generator = random.Random(1)
    report = LogprobsReport(LogprobsRequest(None, 0))
    item = make_item(generator, 1, "block", [1, 2, 3], prompt_len=3, report=report)
    step = StepItems({"one": item}, frozenset(), {"one": PromptToReport(0, 2)})
    decided = RankDecisions(RULES).decide(step, {}, None, {"one": torch.full((2, VOCAB_SIZE), torch.nan)})
    assert isinstance(decided.outcomes["one"], UnavailableError)
    assert decided.tokens_of("one") == []


def test_fault_of_a_form_reaches_the_session() -> None:
    generator = random.Random(1)
    rows = torch.full((1, 1), 255, dtype=torch.uint8).numpy()
    masks = BlockMasks(rows, {0: InvalidRequestError("no form")})
    item = make_item(generator, 1, "block", [1, 2, 3], draft_tokens=[], draft=None, masks=masks)
    logits, starts = logits_of({"one": item}, ["one"])
    report = RankDecisions(RULES).decide(StepItems({"one": item}, frozenset({"one"})), starts, logits, {})
    assert isinstance(report.outcomes["one"], InvalidRequestError)


def test_items_and_reports_survive_the_way_to_another_process() -> None:
    generator = random.Random(1)
    item = make_item(generator, 1, "block", [1, 2, 3], is_used=True)
    logits, starts = logits_of({"one": item}, ["one"])
    sent = pickle.loads(pickle.dumps(StepItems({"one": item}, frozenset({"one"}))))
    report = RankDecisions(RULES).decide(sent, starts, logits.clone(), {})
    again = RankDecisions(RULES).decide(StepItems({"one": item}, frozenset({"one"})), starts, logits, {})
    assert pickle.loads(pickle.dumps(report)).outcomes == again.outcomes
    error = pickle.loads(pickle.dumps(StepReport(error=UnavailableError("full"))))
    assert str(error.error) == "full"


def test_every_rank_gets_what_rank_0_decided() -> None:
    sent: list[StepReport] = []

    def share(report: StepReport | None) -> StepReport:
        if report is not None:
            sent.append(report)
        return sent[-1]

    decided = StepReport({"one": Judgement([3], 0)})
    assert agreed(lambda: decided, share, 0) is decided
    assert agreed(lambda: 1 / 0, share, 1) is decided, "another rank decides nothing"


@pytest.mark.parametrize("error", [ZeroDivisionError("prompt 1 2 3"), InvalidRequestError("too much")])
def test_error_while_deciding_is_shared_so_that_nobody_waits(error: Exception) -> None:
    sent: list[StepReport | None] = []

    def fail() -> StepReport:
        raise error

    def share(report: StepReport | None) -> StepReport:
        sent.append(report)
        assert report is not None
        return report

    report = agreed(fail, share, 0)
    assert sent == [report], "once"
    assert report.error is not None
    assert "1 2 3" not in str(report.error)
    assert report.outcomes == {}


def test_edits_of_ended_requests_are_dropped() -> None:
    generator = random.Random(1)
    item = make_item(generator, 1, "block", [1, 2, 3])
    logits, starts = logits_of({"one": item}, ["one"])
    decisions = RankDecisions(RULES)
    decisions.decide(StepItems({"one": item}, frozenset({"one"})), starts, logits, {})
    assert decisions._edits
    decisions.forget(["one", "other"])
    assert not decisions._edits
