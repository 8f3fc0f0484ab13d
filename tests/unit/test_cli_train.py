"""`draftwire train`: every option reaches the recipe that it is for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run

from draftwire.options.heads.head_names import HeadKind
from draftwire.training.heads import head_training
from draftwire.training.heads.head_recipe import HeadRecipe
from draftwire.training.plan import Phase

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the training was called with, which is left out."""
    calls: dict[str, Any] = {}

    def record(target: Path, sources: Any, held_out: Any, recipe: HeadRecipe, out: Path, *more: Any, **options: Any):
        calls.update(target=target, ids=sources[0].ids, held_out=held_out, recipe=recipe, out=out, **options)

    monkeypatch.setattr(head_training, "train_head", record)
    return calls


def test_options_are_those_of_the_recipe(trained: dict[str, Any], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 40, encoding="utf-8")
    sizes = ("--tokens", "5000", "--steps", "3", "--batch-tokens", "512", "--window", "64", "--seed", "7")
    of_eagle = ("--layers", "1", "--layers", "5", "--draft-vocabulary", "900", "--mlp-width", "80", "--target-output")
    files = ("--target", str(MODELS / "target"), "--data", str(text), "--out", str(tmp_path / "head"))
    result = run("train", "eagle3", *files, *sizes, *of_eagle, "--device", "cuda:3")
    assert result.returncode == 0, result.stderr
    assert trained["recipe"] == HeadRecipe(
        kind=HeadKind.EAGLE3,
        total_tokens=5000,
        num_steps=3,
        taps=(1, 5),
        draft_vocab_size=900,
        intermediate_size=80,
        trains_output=False,
        batch_tokens=512,
        phases=(Phase(1.0, 64),),
        seed=7,
    )
    assert (trained["target"], trained["out"]) == (MODELS / "target", tmp_path / "head")
    assert trained["device"] == "cuda:3"
    share = len(trained["held_out"]) / (len(trained["held_out"]) + len(trained["ids"]))
    assert np.isclose(share, 0.05, atol=0.005)
