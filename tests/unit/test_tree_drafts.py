"""Trees that a language model drafts: of the first racers, or of the likeliest; what is committed of them is not read
again; and the text is the one without drafts.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from session_specs import salted
from tiny_models import tiny_network

from benchmarks.planned_trees import shape_by_acceptance, shape_of_widths
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest
from draftwire.errors import UnavailableError
from draftwire.method.block_shape import CHAIN
from draftwire.method.keys import DrawKey
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.torch_engine import TorchEngine
from draftwire.models.torch_models import torch_model
from draftwire.options.trees.growth_plan import WantedTree
from draftwire.options.trees.token_tree import TokenTree
from draftwire.options.trees.tree_model_drafter import TreeModelDrafter, TreeSequence
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire.verification import RULES
from draftwire.verification.deciding import Judgement
from draftwire.verification.target import judge
from tests.cache_integrity import check_integrity
from tests.judged import judging_of

torch.set_num_threads(1)

VOCAB_SIZE = 11
PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3]
KEY = bytes(range(16))
STOPS = frozenset({0, 4})
TARGET = decoder_of(tiny_network("qwen2", VOCAB_SIZE, 512, dtype=torch.float32))
DRAFTER = decoder_of(tiny_network("mistral", VOCAB_SIZE, 512, seed=2, dtype=torch.float32))
SHAPES = {
    "wide": shape_of_widths((4, 2, 1, 1)),
    "planned": shape_by_acceptance([[0.6, 0.2, 0.1], [0.5, 0.2], [0.4, 0.1], [0.3]], 12),
    "flat": shape_of_widths((5,)),
    "chain": TokenTree.chain(4),
}
SAMPLINGS = {
    "plain": SamplingParams(4.0),
    "greedy": SamplingParams(0.0),
    "truncated": SamplingParams(5.0, top_k=3),
    "penalised": SamplingParams(4.0, repetition_penalty=1.7, presence_penalty=0.6, min_tokens=12),
}


def drafter_of(decoder: Any, is_static: bool = False) -> TreeModelDrafter:
    return TreeModelDrafter(torch_model(decoder, 2048, is_static), 512)


def request(sampling: SamplingParams, shape: TokenTree | None, num_tokens: int = 0, **options: Any) -> DraftRequest:
    key, given = DrawKey(KEY, 0, 0), {"prompt_len": len(PROMPT), "stop_token_ids": STOPS} | options
    tree = None if shape is None else WantedTree(shape)
    return DraftRequest(num_tokens or len(shape or ()), sampling, key, VOCAB_SIZE, True, False, tree=tree, **given)


def drafted(drafter: TreeModelDrafter, *parts: tuple[Any, DraftRequest]) -> list[Draft]:
    drafts = [draft for draft in drafter.step([Drafting(*part) for part in parts]).drafts if isinstance(draft, Draft)]
    assert len(drafts) == len(parts)
    return drafts


def plain_text(sampling: SamplingParams, length: int) -> list[int]:
    model = torch_model(TARGET, 2048)
    sequence, ids = model.cache.open(PROMPT), list(PROMPT)
    for number in range(length):
        key = DrawKey(KEY, 0, number)
        one = judging_of(sequence, ids, [], None, sampling, RULES["coupled"], key, len(PROMPT), STOPS)
        (outcome,) = judge(model, [one]).outcomes
        assert isinstance(outcome, Judgement)
        ids = ids + outcome.token_ids
    return ids


@pytest.mark.parametrize(
    "is_own", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["other model", "own model"]
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_text_with_drafted_trees_is_the_text_without(name: str, shape: str, is_own: bool) -> None:
    """In every round the tree is that of a drafter that reads the text for the first time; one that drafts for its own
    model is right to the end.
    """
    sampling, tree = SAMPLINGS[name], SHAPES[shape]
    model, decoder = torch_model(TARGET, 2048), TARGET if is_own else DRAFTER
    drafter = drafter_of(decoder, is_static=is_own)
    sequence, reading, ids = model.cache.open(PROMPT), drafter.open(PROMPT, ALONE), list(PROMPT)
    expected = plain_text(sampling, 30)
    number, new = 0, []
    while len(ids) < len(expected):
        if number:
            reading.calibrate(len(ids) - len(new), new)
        fresh = drafter_of(decoder)
        (draft,) = drafted(drafter, (reading, request(sampling, tree)))
        (other,) = drafted(fresh, (fresh.open(ids, ALONE), request(sampling, tree)))
        assert (draft.token_ids, draft.parents) == (other.token_ids, other.parents)
        own = TokenTree.of(draft.parents, len(draft.token_ids))
        key = DrawKey(KEY, 0, number)
        one = judging_of(
            sequence, ids, draft.token_ids, None, sampling, RULES["coupled"], key, len(PROMPT), STOPS, tree=own
        )
        (outcome,) = judge(model, [one]).outcomes
        assert isinstance(outcome, Judgement)
        if is_own:
            assert outcome.num_accepted == own.depth == tree.depth
        number, new, ids = number + 1, outcome.token_ids, ids + outcome.token_ids
        check_integrity(drafter.model.cache)
    assert ids[: len(expected)] == expected


@pytest.mark.parametrize("name", SAMPLINGS)
def test_first_children_are_the_chain_and_siblings_come_next(name: str) -> None:
    sampling, shape = SAMPLINGS[name], SHAPES["wide"]
    drafter = drafter_of(DRAFTER)
    chain, tree = drafted(
        drafter,
        (drafter.open(PROMPT, ALONE), request(sampling, None, 4)),
        (drafter.open(PROMPT, salted("another")), request(sampling, shape)),
    )
    assert chain.parents == CHAIN
    own = TokenTree(tree.parents)
    path, node = [], -1
    while own.children(node):
        children = own.children(node)
        assert len({tree.token_ids[child] for child in children}) == len(children)
        node = children[0]
        path.append(tree.token_ids[node])
    assert path == chain.token_ids
    assert len(own) == len(shape) or sampling.top_k, "nodes are left out where few tokens are possible"


def test_committed_path_is_not_read_again() -> None:
    drafter, shape = drafter_of(DRAFTER), SHAPES["wide"]
    sequence = drafter.open(PROMPT, ALONE)
    assert isinstance(sequence, TreeSequence)
    (draft,) = drafted(drafter, (sequence, request(SAMPLINGS["plain"], shape)))
    own = TokenTree(draft.parents)
    path = own.path_to(len(own) - 1)
    committed = [draft.token_ids[node] for node in path]
    sequence.calibrate(len(PROMPT), [*committed[:2], committed[2] ^ 1])
    assert sequence.num_unread == 1
    assert sequence.cached.length == len(PROMPT) + 2
    assert sequence.cached.parents == ()


def test_tree_that_is_cut_has_fewer_depths_and_bad_rows_end_paths() -> None:
    drafter, shape = drafter_of(DRAFTER), SHAPES["wide"]
    (whole,) = drafted(drafter, (drafter.open(PROMPT, ALONE), request(SAMPLINGS["plain"], shape)))
    (cut,) = drafted(drafter, (drafter.open(PROMPT, ALONE), request(SAMPLINGS["plain"], shape, is_cut=lambda: True)))
    assert cut.token_ids == whole.token_ids[:4]
    assert cut.parents == (-1,) * 4
    assert (whole.is_whole, cut.is_whole) == (True, False)
    flat = TokenTree((-1,) * 4)
    (draft,) = drafted(drafter, (drafter.open(PROMPT, ALONE), request(SAMPLINGS["plain"], flat, is_cut=lambda: True)))
    assert draft.is_whole, "it was cut behind its last depth"

    class Spoilt(CachedModel):
        def extend(self, sequences: Any, token_ids: Any, parents: Any = ()) -> Any:
            logits = super().extend(sequences, token_ids, parents)
            logits[token_ids == whole.token_ids[0]] = torch.nan
            return logits

    spoilt = TreeModelDrafter(Spoilt(TorchEngine(DRAFTER), 2048), 512)
    (draft,) = drafted(spoilt, (spoilt.open(PROMPT, ALONE), request(SAMPLINGS["plain"], shape)))
    own = TokenTree(draft.parents)
    ends = [node for node, token in enumerate(draft.token_ids) if token == whole.token_ids[0]]
    assert ends
    assert all(not own.children(node) for node in ends)
    assert own.depth == 4


def test_sequence_without_finite_logits_has_no_tree_and_harms_no_other() -> None:
    class Bad(CachedModel):
        def read(self, readings: Any, fuzzily: bool = False) -> Any:
            logits = super().read(readings, fuzzily)
            logits[0] = torch.nan
            return logits

    drafter = TreeModelDrafter(Bad(TorchEngine(DRAFTER), 2048), 512)
    wanted = request(replace(SAMPLINGS["plain"], top_k=8), SHAPES["planned"])
    step = drafter.step([Drafting(drafter.open(PROMPT, salted(salt)), wanted) for salt in ("a", "b")])
    first, second = step.drafts
    assert isinstance(first, UnavailableError)
    assert isinstance(second, Draft)
    assert len(second.token_ids) == 12
