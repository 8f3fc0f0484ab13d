"""Trees are judged as their paths would be as chains: the text is the same, and nothing of a tree is left behind."""

import random
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tiny_models import tiny_network

from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.method.distributions import DenseRows
from draftwire.method.keys import DrawKey
from draftwire.method.sampling import Span, probabilities_of_spans
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_engine import TorchEngine
from draftwire.models.torch_models import torch_model
from draftwire.options.logprobs.session_logprobs import LogprobsReport
from draftwire.options.trees.token_tree import TokenTree
from draftwire.options.trees.walk import COUPLED_WALK, TargetOnlyRule, walking_rule
from draftwire.requests.automaton import BlockMasks
from draftwire.requests.logprobs import LogprobsMode, LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES
from draftwire.verification.deciding import Judgement
from draftwire.verification.rule import VerificationRule
from draftwire.verification.target import Judging, judge
from draftwire_verifier.auditing import audits_of
from tests.cache_integrity import check_integrity
from tests.judged import judging_of

torch.set_num_threads(1)

VOCAB_SIZE = 7
PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3]
COUPLED, TARGET_ONLY, BLOCK = RULES["coupled"], TargetOnlyRule(), RULES["block"]
DECODER = decoder_of(tiny_network("qwen2", VOCAB_SIZE, 512))
SAMPLINGS = {
    "plain": SamplingParams(3.0),
    "greedy": SamplingParams(0.0),
    "truncated": SamplingParams(4.0, top_k=5, top_p=0.9),
    "penalised": SamplingParams(3.0, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.4),
    "long": SamplingParams(3.0, min_tokens=9, frequency_penalty=-0.5),
    "at least": SamplingParams(3.0, min_tokens=9),
}
STOPS = frozenset({0, 4})


def fresh() -> CachedModel:
    return torch_model(DECODER, 4096)


class Parity:
    """Automaton of texts whose tokens are even after even sums and odd after odd ones, and less than 6 in any case."""

    def __init__(self, faults: frozenset[int] = frozenset()) -> None:
        self.faults = faults
        """Tokens after which it cannot be followed."""

    def row(self, text: list[int]) -> np.ndarray[Any, Any]:
        return np.packbits([token < 6 and token % 3 != sum(text) % 3 for token in range(8)], bitorder="little")

    def along(self, generated: list[int], drafted: list[int], first_place: int = 0) -> BlockMasks:
        rows = np.full((len(drafted) + 1, 1), 255, dtype=np.uint8)
        for place in range(len(drafted) + 1):
            if place and drafted[place - 1] in self.faults:
                fault = InvalidRequestError("cannot be followed")
                return BlockMasks(rows, dict.fromkeys(range(place, len(rows)), fault))
            rows[place] = self.row([*generated, *drafted[:place]])
        return BlockMasks(rows)


def random_tree(generator: random.Random, num_nodes: int, right: list[int]) -> tuple[list[int], TokenTree]:
    """Returns the tokens and shape of a tree; many nodes are the tokens that come."""
    parents = tuple(generator.randint(max(node - 4, -1), node - 1) for node in range(num_nodes))
    tree = TokenTree(parents)
    tokens = [
        right[depth - 1] if generator.random() < 0.6 and depth <= len(right) else generator.randrange(VOCAB_SIZE)
        for depth in tree.depths
    ]
    return tokens, tree


@dataclass
class Session:
    """A text that is generated round by round."""

    model: CachedModel
    rule: VerificationRule
    sampling: SamplingParams
    options: dict[str, Any]

    def __post_init__(self) -> None:
        self.ids = list(PROMPT)
        self.sequence: CachedSequence = self.model.cache.open(self.ids)
        self.round = 0

    def judging(self, tokens: list[int], tree: TokenTree | None) -> Judging:
        key = DrawKey(bytes(range(16)), 0, self.round)
        given: dict[str, Any] = {"prompt_len": len(PROMPT), "stop_token_ids": STOPS} | self.options
        return judging_of(self.sequence, self.ids, tokens, None, self.sampling, self.rule, key, tree=tree, **given)

    def commit(self, judgement: Judgement) -> None:
        self.ids = [*self.ids, *judgement.token_ids]
        self.round += 1
        assert self.sequence.parents == ()
        assert self.sequence.length == len(self.ids) - 1
        check_integrity(self.model.cache)


def plain_text(rule: VerificationRule, sampling: SamplingParams, length: int, **options: Any) -> list[Judgement]:
    """Generates token by token."""
    session, judgements = Session(fresh(), rule, sampling, options), []
    for _ in range(length):
        (outcome,) = judge(session.model, [session.judging([], None)]).outcomes
        assert isinstance(outcome, Judgement)
        session.commit(outcome)
        judgements.append(outcome)
    return judgements


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "with a form": {"automaton": Parity()},
    "with raw logprobs": {"report": LogprobsReport(LogprobsRequest(3, None, LogprobsMode.RAW))},
    "with processed logprobs": {"report": LogprobsReport(LogprobsRequest(2, None, LogprobsMode.PROCESSED))},
}


@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=[pytest.mark.slow] if name == "with raw logprobs" else []) for name in OPTIONS]
)
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("rule", [COUPLED, BLOCK], ids=lambda rule: rule.name)
def test_text_by_trees_is_the_text_token_by_token(rule: VerificationRule, name: str, options: str) -> None:
    """Under a coupled rule, and greedily under any; with its log-probabilities. Beside chains in the same steps."""
    sampling = SAMPLINGS[name]
    if rule is BLOCK:
        sampling = replace(sampling, temperature=0.0)
    expected = plain_text(rule, sampling, 40, **OPTIONS[options])
    right = [judgement.token_ids[0] for judgement in expected]
    generator, model = random.Random(3), fresh()
    by_trees, by_chains = (Session(model, rule, sampling, OPTIONS[options]) for _ in range(2))
    kept, depths = [], []
    while len(by_trees.ids) - len(PROMPT) < 30:
        num_generated = len(by_trees.ids) - len(PROMPT)
        tokens, tree = random_tree(generator, generator.choice([1, 5, 12, 24]), right[num_generated:])
        chain = right[len(by_chains.ids) - len(PROMPT) :][: generator.randint(0, 3)]
        parts = [by_trees.judging(tokens, tree), by_chains.judging([], None)]
        if rule is COUPLED:
            parts[1] = by_chains.judging(chain, None)
        outcomes = judge(model, parts).outcomes
        for session, outcome in zip((by_trees, by_chains), outcomes, strict=True):
            assert isinstance(outcome, Judgement)
            session.commit(outcome)
        (judgement, _) = outcomes
        assert isinstance(judgement, Judgement)
        assert [tokens[node] for node in judgement.path] == judgement.token_ids[:-1]
        assert list(judgement.path) == list(tree.path_to(judgement.path[-1] if judgement.path else -1))
        depths.append(judgement.num_accepted)
        kept += judgement.logprobs
        nodes = tree.children(judgement.path[-1] if judgement.path else -1)
        assert judgement.token_ids[-1] not in [tokens[node] for node in nodes], "no further node was right"
    for session in (by_trees, by_chains):
        generated = session.ids[len(PROMPT) :][:40]
        assert generated == right[: len(generated)]
    assert max(depths) >= 2, "paths that are accepted"
    for own, other in zip(kept, [one for judgement in expected for one in judgement.logprobs], strict=False):
        assert own.token_id == other.token_id
        assert own.logprob == pytest.approx(other.logprob, abs=1e-6)
        assert [token for token, _ in own.top] == [token for token, _ in other.top]


def drafted(tree: TokenTree, right: list[int], seed: int) -> tuple[list[int], DenseRows]:
    """Returns tokens of a tree, whose first nodes are right and whose siblings differ, and their distributions."""
    tokens = []
    for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
        tokens.append((right[depth - 1] + tree.children(parent).index(node)) % VOCAB_SIZE)
    rows = torch.rand(len(tree.inner_nodes), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) + 0.1
    return tokens, DenseRows(rows / rows.sum(1, keepdim=True))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("rule", "name"),
    [(BLOCK, "plain"), (BLOCK, "long"), (BLOCK, "greedy"), (COUPLED, "truncated"), (TARGET_ONLY, "penalised")],
)
def test_unused_tree_is_decided_as_no_draft_and_audited_as_a_used_one(
    rule: VerificationRule, name: str, options: str
) -> None:
    """With the random numbers of a plain round, beside the same tree where it is used, which is accepted in part."""
    sampling, tree = SAMPLINGS[name], TokenTree((-1, -1, -1, 0, 0, 1, 3, 3))
    right = [judgement.token_ids[0] for judgement in plain_text(rule, sampling, 16, **OPTIONS[options])]
    is_drawn = rule is BLOCK and not sampling.greedy
    model = fresh()
    aside, plain = (Session(model, rule, sampling, OPTIONS[options]) for _ in range(2))
    num_accepted = 0
    for number in range(12):
        tokens, rows = drafted(tree, right[number:], number)
        unused = replace(aside.judging(tokens, tree), draft=rows if is_drawn else None, is_used=False)
        used = replace(unused, sequence=model.cache.open(aside.ids), is_used=True)
        step = judge(model, [used, unused, plain.judging([], None)])
        of_used, own, other = step.outcomes
        assert isinstance(of_used, Judgement)
        assert isinstance(own, Judgement)
        assert isinstance(other, Judgement)
        assert (own.token_ids, own.num_accepted, own.path) == (other.token_ids, 0, ())
        assert own.num_near_ties == other.num_near_ties
        assert [one.logprob for one in own.logprobs] == pytest.approx([one.logprob for one in other.logprobs])
        of_used_tree, of_tree, nothing = audits_of(step.decided, [rule] * 3, step.shaped)
        assert (of_tree is not None) is (of_used_tree is not None) is is_drawn
        assert nothing is None
        if of_tree is not None and of_used_tree is not None:
            assert of_tree.num_positions == len(tree)
            assert astuple(of_tree) == pytest.approx(astuple(of_used_tree))
        num_accepted += of_used.num_accepted
        model.cache.close(used.sequence)
        for session, outcome in ((aside, own), (plain, other)):
            session.commit(outcome)
    assert aside.ids[len(PROMPT) :] == right[:12]
    assert num_accepted > 0


def test_tokens_of_the_walk_are_drawn_from_the_target() -> None:
    """Frequencies of 3,000 rounds of the same tree beside the target's probabilities; false alarms: one in 10^5."""
    model, sampling = fresh(), SamplingParams(4.0)
    tokens, tree = [2, 5, 2, 6, 5], TokenTree((-1, -1, 0, 0, 2))
    sequence = model.cache.open()
    rows = model.read([Reading(sequence, PROMPT + tokens, 6, tree.parents)])
    probs = probabilities_of_spans(rows.clone(), [Span(sampling, 6)]).double().numpy()
    model.cache.truncate(sequence, 0)
    expected: dict[tuple[int, ...], float] = {}

    def spread(node: int, text: tuple[int, ...], mass: float) -> None:
        children = {tokens[child]: child for child in tree.children(node)}
        for token in range(VOCAB_SIZE):
            if token in children:
                spread(children[token], (*text, token), mass * probs[node + 1, token])
            else:
                expected[(*text, token)] = mass * probs[node + 1, token]

    spread(-1, (), 1.0)
    counts = dict.fromkeys(expected, 0)
    for start in range(0, 3000, 100):
        parts = [
            judging_of(
                model.cache.open(),
                PROMPT,
                tokens,
                None,
                sampling,
                TARGET_ONLY,
                DrawKey(bytes(16), choice, 0),
                tree=tree,
            )
            for choice in range(start, start + 100)
        ]
        for part, outcome in zip(parts, judge(model, parts).outcomes, strict=True):
            assert isinstance(outcome, Judgement)
            counts[tuple(outcome.token_ids)] += 1
            model.cache.close(part.sequence)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert chisquare([counts[key] for key in expected], [3000 * expected[key] for key in expected]).pvalue > 1e-5


class Spoilt(CachedModel):
    """Gives no finite logits after some tokens."""

    bad: frozenset[int] = frozenset()

    def read(self, readings: Any, fuzzily: bool = False) -> Any:
        logits, end = super().read(readings, fuzzily).clone(), 0
        for reading in readings:
            for token in reading.token_ids[len(reading.token_ids) - reading.keep :]:
                if token in self.bad:
                    logits[end] = torch.nan
                end += 1
        return logits


def test_path_ends_at_a_node_with_a_bad_row_and_the_next_round_fails() -> None:
    right = [judgement.token_ids[0] for judgement in plain_text(COUPLED, SAMPLINGS["plain"], 6)]
    place = next(place for place in range(1, 6) if right[place] not in {PROMPT[-1], *right[:place]})
    model = Spoilt(TorchEngine(DECODER), 4096)
    model.bad = frozenset({right[place]})
    session = Session(model, COUPLED, SAMPLINGS["plain"], {})
    other = Session(model, COUPLED, SAMPLINGS["plain"], {})
    wrong = next(token for token in range(VOCAB_SIZE) if token not in {right[0], right[place]})
    tokens = [right[place], *right, wrong]
    tree = TokenTree((-1, -1, *range(1, len(right)), 0))
    first, beside = judge(model, [session.judging(tokens, tree), other.judging([], None)]).outcomes
    assert isinstance(first, Judgement)
    assert isinstance(beside, Judgement)
    assert first.token_ids == right[: place + 1], "the token of the node whose row is bad is committed"
    assert first.path == tuple(range(1, place + 1))
    assert beside.token_ids == right[:1]
    session.commit(first)
    (failed,) = judge(model, [session.judging(tokens, tree)]).outcomes
    assert isinstance(failed, UnavailableError)
    assert (session.sequence.length, session.sequence.parents) == (len(session.ids) - 1, ())


def test_path_that_ends_where_a_form_cannot_be_followed_fails() -> None:
    form = Parity()
    right = [one.token_ids[0] for one in plain_text(COUPLED, SAMPLINGS["plain"], 5, automaton=form)]
    form.faults = frozenset({right[2]}) - set(right[:2])
    assert form.faults
    for tokens, fails in ((right[:2], False), (right[:3], True), ([*right[:2], 6], False)):
        session = Session(fresh(), COUPLED, SAMPLINGS["plain"], {"automaton": form})
        tree = TokenTree((-1, -1, *range(1, len(tokens))))
        (outcome,) = judge(session.model, [session.judging([6, *tokens], tree)]).outcomes
        assert isinstance(outcome, InvalidRequestError if fails else Judgement)


def test_trees_are_walked_by_rules_without_distributions_or_when_greedy() -> None:
    greedy, drawn = SamplingParams(0.0), SamplingParams()
    assert walking_rule(COUPLED, drawn) is COUPLED_WALK
    assert walking_rule(TARGET_ONLY, drawn) is TARGET_ONLY
    for rule in (BLOCK, RULES["token"]):
        assert walking_rule(rule, drawn) is None
        found = walking_rule(rule, greedy)
        assert found is not None
        assert found.name == "target_only"


@pytest.mark.parametrize("temperature", [3.0, 10.0, 30.0, 100.0])
def test_least_tokens_are_counted_along_paths(temperature: float) -> None:
    """The right path comes after twelve other nodes, all of which would count if these were a chain."""
    sampling = SamplingParams(temperature, min_tokens=9)
    right = [judgement.token_ids[0] for judgement in plain_text(COUPLED, sampling, 9)]
    assert STOPS.isdisjoint(right)
    wrong = next(token for token in range(VOCAB_SIZE) if token != right[0])
    session = Session(fresh(), COUPLED, sampling, {})
    tree = TokenTree((*[-1] * 13, *range(12, 19)))
    (outcome,) = judge(session.model, [session.judging([wrong] * 12 + right[:8], tree)]).outcomes
    assert isinstance(outcome, Judgement)
    assert outcome.token_ids == right
