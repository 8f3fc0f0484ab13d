"""The loop in one process: what the rule sees is the target's, round after round."""

import pytest
import torch
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.local_loop import LocalRun, speculate
from draftwire.sampling import SamplingParams, probabilities
from draftwire.verification import RULES

PROMPT = [1, 3, 0, 2, 2]
VOCAB_SIZE = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, PreTrainedModel]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(save_tiny_model(folder / str(seed), VOCAB_SIZE, seed), dtype=torch.float32)
        for seed in (0, 2)
    )
    return target, drafter


@torch.inference_mode()
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_length", [0, 1, 4, 7])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.7, top_k=3, top_p=0.9), SamplingParams(0.0)])
def test_rule_sees_the_targets_and_the_drafters_own_rows_at_every_position(
    models: tuple[PreTrainedModel, PreTrainedModel], rule: str, block_length: int, sampling: SamplingParams
) -> None:
    """Together with the enumeration of the rules this proves the law of the output: caches and indices are right."""
    target, drafter = models
    strategy = LanguageModelDrafter(drafter, context_length=64)
    committed = list(PROMPT)
    lengths = set()
    for judgement in speculate(target, VOCAB_SIZE, strategy, PROMPT, LocalRun(sampling, 40, block_length, rule, 9)):
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
    assert len(committed) >= len(PROMPT) + 40
    if block_length == 4 and sampling.temperature == 1.0:
        assert len(lengths) >= 3, "blocks were accepted in full, in part and not at all"


@torch.inference_mode()
@pytest.mark.parametrize("rule", RULES)
def test_greedy_text_is_the_targets_own(models: tuple[PreTrainedModel, PreTrainedModel], rule: str) -> None:
    target, drafter = models
    run = LocalRun(SamplingParams(0.0), 40, 4, rule, 0)
    rounds = speculate(target, VOCAB_SIZE, LanguageModelDrafter(drafter, 64), PROMPT, run)
    ids = [token for judgement in rounds for token in judgement.token_ids][:40]
    expected = target.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert ids == expected[0, len(PROMPT) :].tolist()


def test_same_seed_gives_the_same_text_and_another_seed_another(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    def text(seed: int) -> list[int]:
        run = LocalRun(SamplingParams(), 30, 4, "block", seed)
        rounds = speculate(models[0], VOCAB_SIZE, LanguageModelDrafter(models[1], 64), PROMPT, run)
        return [token for judgement in rounds for token in judgement.token_ids]

    assert text(1) == text(1)
    assert text(1) != text(2)
