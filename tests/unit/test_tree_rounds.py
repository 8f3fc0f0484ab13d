"""Whole rounds with token trees on small transformers: drafted, read in one pass, judged, and the path kept."""

from collections.abc import Sequence

import pytest
import torch
from cases import every
from tiny_models import tiny_network

from benchmarks.planned_trees import shape_of_widths
from benchmarks.tree_efficiency import Arm, Setting, Text, arms_of, calibrate, opt_tree, spec_exec
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.quantization import Quantization
from draftwire.method.randomness import exponentials
from draftwire.method.sampling import probabilities
from draftwire.models.decoders import decoder_of
from draftwire.models.torch_models import torch_model
from draftwire.options.trees.growth_plan import GrowthPlan
from draftwire.options.trees.token_tree import TokenTree
from draftwire.requests.parameters import SamplingParams
from tests.cache_integrity import check_integrity

torch.set_num_threads(1)

VOCAB_SIZE = 7
PROMPT = [1, 3, 0, 2, 2]
NUM_TOKENS = 12
SHAPES = {
    "nothing": TokenTree(()),
    "chain": TokenTree.chain(4),
    "wide": shape_of_widths((3, 2, 1)),
    "deep": TokenTree((-1, -1, 0, 1, 2, 3, 5)),
}
PLANS = {
    "EAGLE-2": GrowthPlan.eagle2(8, 4, 3),
    "OPT-Tree": opt_tree(8, 4, 0.05),
    "SpecExec": spec_exec(12, 4, 2, 6),
}


def setting(temperature: float, seed: int = 4) -> Setting:
    target, drafter = (torch_model(decoder_of(tiny_network("llama", VOCAB_SIZE, 128, own)), 512) for own in (3, seed))
    return Setting(target, drafter, SamplingParams(temperature), Quantization())


def written(own: Setting, arm: Arm, seed: int = 1) -> tuple[list[int], list[int]]:
    """Returns a text and how many tokens each of its rounds accepted."""
    free, text, accepted = own.target.cache.num_free_blocks, Text(own, PROMPT, seed), []
    while len(text.ids) < len(PROMPT) + NUM_TOKENS:
        accepted.append(text.round(len(accepted), arm)[0])
    text.close()
    for model in (own.target, own.drafter):
        check_integrity(model.cache)
        assert model.cache.num_free_blocks == free
    return text.ids[len(PROMPT) :][:NUM_TOKENS], accepted


@torch.inference_mode()
def plain(temperature: float, seed: int) -> list[int]:
    """Returns what the bare model writes, by its likeliest tokens or by argmax p / e, one after the other."""
    network, text = tiny_network("llama", VOCAB_SIZE, 128, 3), list(PROMPT)
    words = torch.tensor([DrawKey(derive_key(seed, Role.COUPLING), 0, 0).text_words])
    for _ in range(NUM_TOKENS):
        logits = network(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        probs = probabilities(logits, SamplingParams(temperature))
        times = exponentials(words, torch.tensor([len(text)]), VOCAB_SIZE)[0]
        text.append(int((probs / times).argmax()))
    return text[len(PROMPT) :]


def arms(rule: str) -> Sequence[Arm]:
    return [
        *(Arm(name, rule, shape) for name, shape in SHAPES.items()),
        *(Arm(name, rule, plan=plan) for name, plan in PLANS.items()),
    ]


def test_greedy_text_is_that_of_the_bare_target_whatever_the_tree() -> None:
    own, expected = setting(0.0), plain(0.0, 1)
    for rule in ("target_only", "coupled"):
        for arm in arms(rule):
            text, accepted = written(own, arm)
            assert text == expected, arm.name
            assert (max(accepted) > 0) == (arm.name not in ("nothing", "chain")), arm.name


@every(("temperature", "seed"), [(0.7, 1), (1.5, 2)])
def test_coupled_text_is_that_of_plain_draws_whatever_the_tree(temperature: float, seed: int) -> None:
    own, expected = setting(temperature), plain(temperature, seed)
    for arm in arms("coupled"):
        assert written(own, arm, seed)[0] == expected, arm.name


@every("rule", ["target_only", "coupled", "traversal", "multi_round", "without_replacement"])
def test_targets_own_tree_is_followed_to_the_leaves_along_first_children(rule: str) -> None:
    """Drawn from equal distributions, a first child is accepted with certainty, up to their quantization."""
    own = setting(0.0 if rule == "target_only" else 1.0, seed=3)
    _, accepted = written(own, Arm("wide", rule, SHAPES["wide"]))
    assert set(accepted) == ({3} if rule in ("target_only", "coupled") else set(accepted))
    assert sum(accepted) / len(accepted) > 2.5


def test_calibration_counts_ranks_and_the_benchmark_compares_all_arms() -> None:
    for temperature in (0.0, 1.0):
        own = setting(temperature)
        found = calibrate(own, [PROMPT, PROMPT[::-1]], 12)
        for chances in (found.walked, found.raced, found.drawn):
            assert 0.0 < sum(chances) <= 1.0 + 1e-6
            assert sum(chances[:VOCAB_SIZE]) == pytest.approx(sum(chances))
        assert sum(found.walked) == pytest.approx(1.0), "each of seven tokens has a rank"
        baseline, *others = arms_of(found, own.sampling.greedy)
        assert baseline.shape == TokenTree.chain(8)
        assert all((arm.shape is None) != (arm.plan is None) for arm in others)
        assert [len(arm.shape) for arm in others if arm.shape is not None][-1] == 64
