"""Trees that a language model draws, or that it grows: what is sent of them, and what they may depend on."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from session_specs import salted
from test_tree_drafts import DRAFTER, KEY, PROMPT, SAMPLINGS, SHAPES, STOPS, TARGET, VOCAB_SIZE, drafted, plain_text

from benchmarks.planned_trees import shape_by_acceptance, shape_of_widths
from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.method.encoding import Claim, Supports, decode_one
from draftwire.method.keys import DrawKey
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.randomness import uniforms
from draftwire.models.cached_model import CachedModel
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_engine import TorchEngine
from draftwire.models.torch_models import torch_model
from draftwire.options.trees.growth_plan import GrowthPlan, WantedTree
from draftwire.options.trees.token_tree import ROOT, TokenTree
from draftwire.options.trees.tree_model_drafter import TreeModelDrafter
from draftwire.options.trees.tree_shapes import shape_by_rank
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire.verification import RULES
from draftwire.verification.deciding import Judgement
from draftwire.verification.target import judge
from tests.cache_integrity import check_integrity
from tests.judged import judging_of

torch.set_num_threads(1)


def drafter_of(decoder: Any = DRAFTER, **quantization: Any) -> TreeModelDrafter:
    return TreeModelDrafter(torch_model(decoder, 2048), 512, quantization=Quantization(**quantization))


def drawn_request(sampling: SamplingParams, shape: TokenTree | None, num_tokens: int = 0, **more: Any) -> DraftRequest:
    key, given = DrawKey(KEY, 0, 0), {"prompt_len": len(PROMPT), "stop_token_ids": STOPS} | more
    tree = None if shape is None else WantedTree(shape)
    return DraftRequest(num_tokens or len(shape or ()), sampling, key, VOCAB_SIZE, False, True, tree=tree, **given)


def supports_of(draft: Draft) -> Supports:
    tree = TokenTree.of(draft.parents, len(draft.token_ids))
    decoded = decode_one(Claim(draft.token_ids, draft.distributions, tree), VOCAB_SIZE)
    assert isinstance(decoded, Supports)
    return decoded


@pytest.mark.parametrize("name", ["plain", "truncated", "penalised"])
def test_children_are_drawn_from_the_sent_row_by_numbers_of_their_own(name: str) -> None:
    """Without those before them, as anybody can compute from what is sent. The first children are the chain's."""
    shape, drafter = SHAPES["wide"], drafter_of(mass=0.9)
    request = drawn_request(SAMPLINGS[name], shape)
    (draft,) = drafted(drafter, (drafter.open(PROMPT, ALONE), request))
    tree, supports = TokenTree(draft.parents), supports_of(draft)
    numbers = uniforms([request.key], len(shape))[0].tolist()
    places, node_of = {ROOT: ROOT}, iter(range(len(tree)))
    for place, parent in enumerate(shape.parents):  # which nodes of the shape are there
        siblings = shape.children(parent)
        if parent in places and siblings.index(place) < len(tree.children(places[parent])):
            places[place] = next(node_of)
    assert len(places) == len(tree) + 1
    for row, inner in enumerate(tree.inner_nodes):
        ids, weights = supports.token_ids[row].tolist(), supports.weights[row].tolist()
        for child in tree.children(inner):
            place = next(place for place, node in places.items() if node == child)
            left = numbers[place] * sum(weights)
            chosen = next(entry for entry in range(len(ids)) if sum(weights[: entry + 1]) > int(left))
            assert draft.token_ids[child] == ids[chosen]
            weights[chosen] = 0
    assert len(tree) == len(shape) or name == "truncated", "nodes are missing where few tokens are possible"


@pytest.mark.parametrize("name", ["plain", "penalised"])
def test_rows_are_those_of_the_model_after_each_path(name: str) -> None:
    sampling, drafter = SAMPLINGS[name], drafter_of(mass=1.0)
    (draft,) = drafted(drafter, (drafter.open(PROMPT, ALONE), drawn_request(sampling, SHAPES["wide"])))
    tree, supports = TokenTree(draft.parents), supports_of(draft)
    for row, inner in enumerate(tree.inner_nodes):
        path = [draft.token_ids[node] for node in tree.path_to(inner)]
        fresh = drafter_of(mass=1.0)
        sequence = fresh.open(PROMPT, ALONE)
        sequence.calibrate(len(PROMPT), path)
        (chain,) = drafted(fresh, (sequence, replace(drawn_request(sampling, None, 1), prompt_len=len(PROMPT))))
        own = decode_one(Claim(chain.token_ids, chain.distributions), VOCAB_SIZE)
        assert isinstance(own, Supports)
        expected = dict(zip(own.token_ids[0].tolist(), own.weights[0].tolist(), strict=True))
        found = dict(zip(supports.token_ids[row].tolist(), supports.weights[row].tolist(), strict=True))
        assert found.keys() == expected.keys()
        assert all(abs(found[token] - expected[token]) <= 2 for token in found), "shapes of passes differ"


def test_chain_is_drawn_as_a_tree_to_the_bit() -> None:
    drafter, sampling = drafter_of(), SAMPLINGS["plain"]
    tree, chain = drafted(
        drafter,
        (drafter.open(PROMPT, ALONE), drawn_request(sampling, TokenTree.chain(4))),
        (drafter.open(PROMPT, salted("another")), drawn_request(sampling, None, 4)),
    )
    assert (tree.token_ids, tree.parents, tree.distributions) == (chain.token_ids, (), chain.distributions)


def test_dense_distributions_are_not_drawn_as_trees() -> None:
    assert drafter_of().draws_trees
    assert not drafter_of(encoding=Encoding.DENSE_FLOAT32).draws_trees


PLAN = GrowthPlan.eagle2(12, 5, 3)
GROWN = WantedTree(growth=PLAN)


@pytest.mark.parametrize("is_own", [False, True], ids=["other model", "own model"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_text_with_trees_that_grow_is_the_text_without(name: str, *, is_own: bool) -> None:
    """Under `coupled` and at temperature 0. A drafter that has read trees drafts as one that reads the text for the
    first time; that which drafts for its own model is right to the end.
    """
    sampling, model, decoder = SAMPLINGS[name], torch_model(TARGET, 2048), TARGET if is_own else DRAFTER
    drafter, expected = drafter_of(decoder), plain_text(sampling, 30)
    sequence, reading, ids = model.cache.open(PROMPT), drafter.open(PROMPT, ALONE), list(PROMPT)
    request = replace(drawn_request(sampling, None, 12), tree=GROWN, is_coupled=True, needs_probs=False)
    number, new, depths = 0, list[int](), []
    while len(ids) < len(expected):
        if number:
            reading.calibrate(len(ids) - len(new), new)
        fresh = drafter_of(decoder)
        (draft,) = drafted(drafter, (reading, request))
        (other,) = drafted(fresh, (fresh.open(ids, ALONE), request))
        assert (draft.token_ids, draft.parents) == (other.token_ids, other.parents)
        assert draft.distributions.encoding is Encoding.NONE
        tree = TokenTree.of(draft.parents, len(draft.token_ids))
        assert len(tree) <= PLAN.num_nodes
        key = DrawKey(KEY, 0, number)
        one = judging_of(
            sequence, ids, draft.token_ids, None, sampling, RULES["coupled"], key, len(PROMPT), STOPS, tree=tree
        )
        (outcome,) = judge(model, [one]).outcomes
        assert isinstance(outcome, Judgement)
        depths.append((outcome.num_accepted, tree.depth))
        number, new, ids = number + 1, outcome.token_ids, ids + outcome.token_ids
        check_integrity(drafter.model.cache)
    assert ids[: len(expected)] == expected
    if is_own and not sampling.greedy:
        assert sum(accepted for accepted, _ in depths) > 0.8 * sum(depth for _, depth in depths)


def test_tree_that_grows_is_of_the_best_chances_and_is_cut_short() -> None:
    drafter = drafter_of()
    request = replace(drawn_request(SAMPLINGS["greedy"], None, 12), tree=GROWN)
    (draft,) = drafted(drafter, (drafter.open(PROMPT, ALONE), request))
    tree = TokenTree(draft.parents)
    model, chances = torch_model(DRAFTER, 2048), []
    with torch.inference_mode():
        for node in range(len(tree)):
            *path, last = (draft.token_ids[each] for each in tree.path_to(node))
            sequence = model.cache.open()
            rows = model.read([Reading(sequence, [*PROMPT, *path], len(path) + 1)]).double().softmax(dim=1)
            model.cache.close(sequence)
            chances.append(float(rows[range(len(path) + 1), [*path, last]].prod()))
    assert len(tree) == 12
    assert tree.depth > 1
    order = sorted(range(12), key=lambda node: -chances[node])
    assert chances[order[-1]] <= min(chances[parent] for parent in tree.parents if parent != ROOT)
    (cut,) = drafted(drafter, (drafter.open(PROMPT, salted("other")), replace(request, is_cut=lambda: True)))
    assert TokenTree.of(cut.parents, len(cut.token_ids)).depth == 1
    assert (draft.is_whole, cut.is_whole) == (True, False)


def test_row_without_numbers_ends_what_grows_there() -> None:
    class Spoilt(CachedModel):
        def extend(self, *arguments: Any) -> Any:
            return super().extend(*arguments) * torch.nan

    drafter = TreeModelDrafter(Spoilt(TorchEngine(DRAFTER), 2048), 512)
    request = replace(drawn_request(SAMPLINGS["plain"], None, 12), tree=GROWN, is_coupled=True, needs_probs=False)
    (draft,) = drafted(drafter, (drafter.open(PROMPT, ALONE), request))
    assert TokenTree.of(draft.parents, len(draft.token_ids)).depth == 1
    drawn = drawn_request(SAMPLINGS["plain"], SHAPES["wide"])
    (drawn_draft,) = drafted(drafter, (drafter.open(PROMPT, salted("other")), drawn))
    assert drawn_draft.parents == (-1,) * 4
    assert len(drawn_draft.distributions.support_sizes) == 1
    for number, asked in enumerate((request, drawn)):
        answers = itertools.chain([False], itertools.repeat(True))
        late = replace(asked, is_cut=lambda answers=answers: next(answers))
        (cut,) = drafted(drafter, (drafter.open(PROMPT, salted(f"cut {number}")), late))
        assert cut.token_ids == (draft, drawn_draft)[number].token_ids
        assert cut.is_whole, "nothing could follow any more when it was cut"


def test_shapes_by_rank_are_those_of_dynamic_programming() -> None:
    chances = (0.6, 0.15, 0.07, 0.04)
    for num_nodes in (1, 5, 16, 40):
        for depth in (1, 3, 6):
            shape = shape_by_rank(chances, num_nodes, depth)
            best = shape_by_acceptance([chances] * depth, num_nodes)
            assert sorted(shape.parents) == list(shape.parents)
            assert len(shape) == len(best)
            assert value(shape, chances) == pytest.approx(value(best, chances))
    assert shape_by_rank(chances, 64, 0) == TokenTree(())
    assert shape_by_rank((0.5,), 4, 3) == TokenTree.chain(3)
    assert shape_by_rank((0.5, 0.4), 6, 2) == shape_of_widths((2, 2))


def value(shape: TokenTree, chances: tuple[float, ...]) -> float:
    values = []
    for node, parent in enumerate(shape.parents):
        before = 1.0 if parent == ROOT else values[parent]
        values.append(before * chances[shape.children(parent).index(node)])
    return sum(values)
