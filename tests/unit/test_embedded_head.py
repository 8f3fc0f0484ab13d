"""The embedded target's head is small, loads, and drafts what its target says."""

from pathlib import Path

import pytest
import torch

from benchmarks.prompts import load_prompts
from draftwire.models.card import load_card
from draftwire.options.heads.head_loading import load_head
from draftwire.options.heads.head_names import HeadKind
from tools.embedded_pair.evaluation import measure_acceptance
from tools.embedded_pair.pair import CONTEXT_LENGTH, load_float32

MODELS = Path(__file__).parents[2] / "models"
MOST_BYTES = 6_000_000


def test_head_is_small() -> None:
    assert sum(file.stat().st_size for file in (MODELS / "head").iterdir()) <= MOST_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "least"), [(0.0, 2.4), (1.0, 0.9)])
def test_head_is_accepted_on_prompts_that_nobody_was_trained_on(temperature: float, least: float) -> None:
    """The bounds are far below what it has on many prompts, which models/README.md names: four prompts say little."""
    head = load_head(MODELS / "head", MODELS / "target", CONTEXT_LENGTH, torch.float32)
    assert head.config.kind is HeadKind.EAGLE3
    tokenizer = load_card(str(MODELS / "target")).tokenizer
    prompts = [tokenizer.encode(text)[:64] for text in load_prompts()[:4]]
    found = measure_acceptance(load_float32(MODELS / "target"), head, prompts, "block", temperature, 4)
    assert found.accepted_per_round >= least
