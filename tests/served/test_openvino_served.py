"""Services whose models OpenVINO runs: the law of its own rows, and the texts of our own decoder."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from benchmarks.law import CONTEXT_LENGTH, LENGTH, PROMPT, compare, draw_completions, exact_law, stack_options
from draftwire.cli.named_models import embedded_model
from draftwire.client import Client
from draftwire.engine.openvino_loading import load_for_openvino
from draftwire.models.cached_model import CachedModel
from draftwire.models.openvino import runtime
from draftwire.models.openvino.kept_weights import KeptWeights
from draftwire.models.openvino.openvino_engine import OpenVinoEngine
from draftwire.models.sequence_model import Reading
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime.settings import ModelSettings
from tests.conftest import why_no_openvino
from tests.in_process import InProcessStack, slow_verifiers
from tests.observing import read_metric
from tests.tiny_models import save_tiny_model

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
    model = CachedModel(OpenVinoEngine(chosen.network, threads=1, packed=KeptWeights()), TEXTS_AT_ONCE * 64)

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
    ("samples", "nodes"),
    [
        (150, 0),
        pytest.param(100, 8, marks=pytest.mark.slow),
        pytest.param(1500, 0, marks=pytest.mark.evidence),
    ],
    ids=str,
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


@pytest.mark.parametrize(
    ("vocab_size", "nodes", "samples"),
    [
        (64, 8, 60),
        *(
            pytest.param(size, nodes, samples, marks=pytest.mark.slow)
            for size, samples in ((64, 150), (512, 240))
            for nodes in (0, 8)
        ),
    ],
    ids=str,
)
def test_tokens_of_larger_vocabularies_follow_the_rows_before_them(
    tmp_path: Path, vocab_size: int, nodes: int, samples: int
) -> None:
    """No law of so many texts can be enumerated, but each token has one, given those before it: what it reaches of its
    cumulative law, tokens that the drafter prefers last, is uniform. False alarm: 1e-6.
    """
    sharpness = 3.0 if vocab_size == 64 else 1.0  # sharper, fewer tokens of such a pair are accepted
    pair = [
        save_tiny_model(tmp_path / str(seed), vocab_size, seed, CONTEXT_LENGTH, sharpness=sharpness) for seed in (6, 9)
    ]
    options = stack_options(pair[0], pair[1], max_tree_nodes=12)
    options["verifier"] |= {"engine": "openvino", "weights": "u8"}
    with slow_verifiers(0.01), InProcessStack(options) as running:
        completions = list(draw_completions(running.address, "block", SamplingParams(), range(samples), 8, nodes))
    rounds, accepted = (
        sum(getattr(one.statistics, name) for one in completions) for name in ("num_rounds", "num_accepted_tokens")
    )
    assert accepted > 0.05 * rounds, "their laws overlap by a fifth or less"
    texts = [list(completion.token_ids) for completion in completions]
    target, drafter = (rows_after_prompt(*of, texts) for of in zip(pair, ("u8", "f32"), strict=True))
    assert p_value_of_uniform(texts, target, drafter) > ALPHA
    assert p_value_of_uniform(texts, (target + drafter) / 2.0, drafter) < ALPHA, "another law would be noticed"


def rows_after_prompt(folder: Path, weights: str, texts: Sequence[list[int]]) -> Tensor:
    """Returns a model's law of each token of some texts after `PROMPT`, `[texts, tokens, vocab]`."""
    chosen = load_for_openvino(ModelSettings(str(folder), engine="openvino", weights=weights))
    assert chosen is not None
    model = CachedModel(OpenVinoEngine(chosen.network, threads=1, packed=chosen.packed()), 64)
    rows = []
    for text in texts:
        reading = Reading(model.cache.open(), [*PROMPT, *text[:-1]], len(text))
        rows.append(model.read([reading]).double().softmax(-1))
        model.cache.close(reading.sequence)
    return torch.stack(rows)


def p_value_of_uniform(texts: Sequence[list[int]], laws: Tensor, drafts: Tensor, num_cells: int = 16) -> float:
    """Returns the probability of counts as unequal as those of where tokens fall in their laws, if these are right."""
    draws, counts = random.Random(0), [0] * num_cells
    for text, law, draft in zip(texts, laws, drafts, strict=True):
        for token, row, drawn_from in zip(text, law, draft, strict=True):
            ranks = (drawn_from / row).log()
            below = row[ranks < ranks[token]].sum().item()
            counts[min(num_cells - 1, int(num_cells * (below + draws.random() * row[token].item())))] += 1
    return float(chisquare(counts).pvalue)


@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_session_moves_to_another_verifier_with_its_text(pair: tuple[Path, Path], rule: str) -> None:
    """Under `coupled` with the tokens that it would have had: equal weights, engine and seeds draw them again."""
    options = {"model": pair[0], "metrics_port": 0, "threads": 1, "engine": "openvino", "weights": "u8"}
    with slow_verifiers(), InProcessStack({"verifier": options}) as one, InProcessStack({"verifier": options}) as other:
        addresses = ",".join(f"127.0.0.1:{stack.services['verifier'].port}" for stack in (one, other))
        gateway = {"verifier": addresses, "local_drafts": "none"}
        with InProcessStack({"gateway": gateway}) as running, Client(running.address) as client:
            asked = {"max_tokens": 24, "seed": 3, "rejection_sample_method": rule, "ignore_eos": True}
            undisturbed = client.generate(PROMPT, **asked)
            stream, ids = client.stream(PROMPT, **asked), []
            for delta in stream:
                ids += delta.token_ids
                if len(ids) == len(delta.token_ids):  # the first one
                    busy = one if read_metric(one, "verifier", "num_sessions") else other
                    busy.kill("verifier")
            assert stream.completion.statistics.num_verifiers_lost == 1
    assert len(ids) == len(undisturbed.token_ids) == 24
    if rule == "coupled":
        assert ids == undisturbed.token_ids


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
