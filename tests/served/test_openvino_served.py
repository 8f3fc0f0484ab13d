"""Services whose models OpenVINO runs: the law of its own rows, and the texts of our own decoder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.law import LENGTH, PROMPT, compare, draw_completions, exact_law, stack_options
from draftwire.cli.named_models import embedded_model
from draftwire.client import Client
from draftwire.engine.openvino_loading import load_for_openvino
from draftwire.models.cached_model import CachedModel
from draftwire.models.openvino import runtime
from draftwire.models.openvino.openvino_engine import OpenVinoEngine
from draftwire.models.sequence_model import Reading
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime.settings import ModelSettings
from tests.conftest import why_no_openvino
from tests.in_process import InProcessStack

pytestmark = pytest.mark.skipif(bool(why_no_openvino()), reason=why_no_openvino())

ALPHA = 1e-6
"""Probability of a false alarm of each comparison of laws."""
TEXTS_AT_ONCE = 81


@pytest.fixture(scope="module", autouse=True)
def _openvino_is_used() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "why_not_here", why_no_openvino)
        yield


@pytest.fixture(scope="module")
def running(pair: tuple[Path, Path]) -> Iterator[InProcessStack]:
    """A target with weights of eight bits. A drafter that grows trees is run by our own decoder."""
    options = stack_options(*pair, max_tree_nodes=12)
    options["verifier"] |= {"engine": "openvino", "weights": "u8"}
    with InProcessStack(options) as running:
        yield running


@pytest.fixture(scope="module")
def law(pair: tuple[Path, Path]) -> dict[tuple[int, ...], float]:
    """The law of the engine's own rows."""
    chosen = load_for_openvino(ModelSettings(str(pair[0]), engine="openvino", weights="u8"))
    assert chosen is not None
    assert chosen.quantizes
    model = CachedModel(OpenVinoEngine(chosen.network, threads=1, quantizes=True), TEXTS_AT_ONCE * 64)

    def logits_of(ids: Tensor) -> Tensor:
        rows = []
        for texts in ids.split(TEXTS_AT_ONCE):
            readings = [Reading(model.cache.open(), text, len(text)) for text in texts.tolist()]
            rows.append(model.read(readings).double().reshape(len(texts), -1, model.vocab_size))
            for reading in readings:
                model.cache.close(reading.sequence)
        return torch.cat(rows)

    return exact_law(pair[0], SamplingParams(), logits_of)


@pytest.mark.parametrize(
    ("samples", "nodes"), [(150, 0), (100, 8), pytest.param(1500, 0, marks=pytest.mark.slow)], ids=str
)
def test_sampled_outputs_follow_the_law_of_weights_of_eight_bits(
    running: InProcessStack, law: dict[tuple[int, ...], float], samples: int, nodes: int
) -> None:
    """Chains and trees, beside requests of other kinds. False alarm: 1e-6."""
    at_once = 8 if nodes else 16  # trees are late for more, where the cores are busy, and few rounds have one
    drawing = draw_completions(running.address, "block", SamplingParams(), range(samples), at_once, nodes)
    completions = list(drawing)
    result = compare("block", completions, law, at_once, judged=3)
    assert result.share_of_rounds_with_draft > 0.1
    assert 0.1 < result.acceptance_rate < 0.9
    num_trees, num_drafts = (
        sum(getattr(one.statistics, name) for one in completions) for name in ("num_trees", "num_drafts")
    )
    assert num_trees > 0.8 * num_drafts if nodes else num_trees == 0
    assert result.p_value > ALPHA, result


def test_draw_repeats_with_its_seed(running: InProcessStack) -> None:
    with Client(running.address) as client:
        texts = [
            client.generate(PROMPT, max_tokens=LENGTH, seed=5, num_speculative_tokens=0, cache_salt=salt).token_ids
            for salt in ("a", "b", "a")
        ]
    assert texts[0] == texts[1] == texts[2]


def test_greedy_texts_are_those_of_our_own_decoder() -> None:
    """Of the embedded pair in float32, with drafts by OpenVINO too."""
    prompts = ["def merge(a, b):", "import os\n", "class Node:", "The list of", "for i in range("]
    texts = []
    for engine in ("openvino", "draftwire"):
        models = {"verifier": embedded_model("target"), "drafter": embedded_model("drafter")}
        options = {name: {"model": model, "engine": engine, "threads": 1} for name, model in models.items()}
        with InProcessStack({**options, "gateway": {}}) as running, Client(running.address) as client:
            made = client.generate_batch(prompts, concurrency=5, max_tokens=48, temperature=0.0, ignore_eos=True)
            texts.append([one.token_ids for one in made])
    assert texts[0] == texts[1]
