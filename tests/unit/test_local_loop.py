"""The loop in one process: what the rule sees is the target's, round after round."""

import copy
from dataclasses import dataclass

import pytest
import torch
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.local_loop import LocalRun, speculate
from draftwire.models.cached_model import CachedModel
from draftwire.sampling import SamplingParams, probabilities
from draftwire.verification import RULES

PROMPT = [1, 3, 0, 2, 2]
VOCAB_SIZE = 5


torch.set_num_threads(1)


@dataclass
class Pair:
    """Two models under test, and copies that keep transformers' own attention."""

    target: CachedModel
    strategy: LanguageModelDrafter
    target_reference: PreTrainedModel
    drafter_reference: PreTrainedModel


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(save_tiny_model(folder / str(seed), VOCAB_SIZE, seed), dtype=torch.float32)
        for seed in (0, 2)
    )
    references = copy.deepcopy(target), copy.deepcopy(drafter)
    strategy = LanguageModelDrafter(CachedModel(drafter, 64), context_length=64)
    return Pair(CachedModel(target, 64), strategy, *references)


@torch.inference_mode()
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_length", [0, 1, 4, 7])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.7, top_k=3, top_p=0.9), SamplingParams(0.0)])
def test_rule_sees_the_targets_and_the_drafters_own_rows_at_every_position(
    pair: Pair, rule: str, block_length: int, sampling: SamplingParams
) -> None:
    """Together with the enumeration of the rules this proves the law of the output: caches and indices are right."""
    target, drafter = pair.target_reference, pair.drafter_reference
    committed = list(PROMPT)
    lengths = set()
    for judgement in speculate(pair.target, pair.strategy, PROMPT, LocalRun(sampling, 40, block_length, rule, 9)):
        blocks = judgement.blocks
        tokens = blocks.draft_tokens[0].tolist()
        text = torch.tensor([committed + tokens])
        rows = slice(len(committed) - 1, None)
        expected_target = probabilities(target(input_ids=text).logits[0, rows], sampling)
        assert (blocks.target_probs[0] - expected_target).abs().max() < 1e-5
        if tokens:
            expected_draft = probabilities(drafter(input_ids=text).logits[0, rows][:-1], sampling)
            assert (blocks.draft_probs[0] - expected_draft).abs().max() < 1e-5
        assert judgement.token_ids[:-1] == tokens[: judgement.num_accepted]
        lengths.add(judgement.num_accepted)
        committed += judgement.token_ids
    assert len(committed) == len(PROMPT) + 40
    if block_length == 4 and sampling.temperature == 1.0:
        assert len(lengths) >= 3, "blocks were accepted in full, in part and not at all"


@torch.inference_mode()
@pytest.mark.parametrize("rule", RULES)
def test_greedy_text_is_the_targets_own(pair: Pair, rule: str) -> None:
    run = LocalRun(SamplingParams(0.0), 40, 4, rule, 0)
    rounds = speculate(pair.target, pair.strategy, PROMPT, run)
    ids = [token for judgement in rounds for token in judgement.token_ids]
    expected = pair.target_reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert ids == expected[0, len(PROMPT) :].tolist()


def text(pair: Pair, seed: int, prompt: list[int] = PROMPT) -> list[int]:
    rounds = speculate(pair.target, pair.strategy, prompt, LocalRun(SamplingParams(), 30, 4, "block", seed))
    return [token for judgement in rounds for token in judgement.token_ids]


def test_same_seed_gives_the_same_text_and_another_seed_another(pair: Pair) -> None:
    assert text(pair, 1) == text(pair, 1)
    assert text(pair, 1) != text(pair, 2)


def test_prompt_that_was_read_before_gives_the_same_text(pair: Pair) -> None:
    prompt = [number % VOCAB_SIZE for number in range(33)]
    sequence = pair.target.cache.open(prompt)
    pair.target.cache.close(sequence)
    assert sequence.num_reused == 0
    first = text(pair, 1, prompt)
    sequence = pair.target.cache.open(prompt)
    pair.target.cache.close(sequence)
    assert sequence.num_reused == 32
    assert text(pair, 1, prompt) == first


def test_finished_and_abandoned_runs_give_their_room_back(pair: Pair) -> None:
    text(pair, 1)
    rounds = speculate(pair.target, pair.strategy, PROMPT, LocalRun(SamplingParams(), 30, 4, "block", 1))
    next(rounds)
    caches = (pair.target.cache, pair.strategy.model.cache)
    assert all(len(cache.sequences) == 1 for cache in caches)
    rounds.close()
    for cache in caches:
        assert cache.sequences == set()
        assert cache.num_free_blocks == cache.num_blocks
        cache.check_integrity()
