"""The output of the three processes follows the target's law, however many requests share their steps."""

from pathlib import Path

import pytest
from observing import read_metric
from tiny_models import save_tiny_model

from benchmarks.law import (
    CONTEXT_LENGTH,
    LOSSLESS,
    VOCAB_SIZE,
    compare,
    draw_completions,
    exact_law,
    stack_options,
)
from draftwire.cli.local_stack import LocalStack
from draftwire.requests.parameters import SamplingParams
from tests.in_process import InProcessStack, slow_verifiers

ALPHA = 1e-6
"""Probability of a false alarm of each test. Seeds are fixed, but block borders depend on timing."""

NODES = 8
SLOW_STEPS = Path(__file__).parents[1] / "injected" / "slow_steps"
"""Its `sitecustomize` does to processes what `slow_verifiers` does to this one."""


@pytest.fixture(scope="module")
def law(pair: tuple[Path, Path]) -> dict[tuple[int, ...], float]:
    return exact_law(pair[0], SamplingParams())


@pytest.fixture(scope="module")
def deep_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    return save_tiny_model(folder, VOCAB_SIZE, seed=4, context_length=CONTEXT_LENGTH, num_layers=6)


FAST = [("block", 0, 16, 400), ("block", NODES, 16, 120)]
"""Rules, with chains or with token trees of so many tokens, requests that run at once, and completions."""
SLOW = [
    ("block", 0, 1, 150),
    ("block", 0, 3, 500),
    ("token", 0, 16, 400),
    ("coupled", NODES, 16, 400),
    ("coupled", NODES, 3, 500),
]
EVIDENCE = [
    *((rule, 0, *run) for rule in LOSSLESS[1:] for run in ((1, 150), (3, 500))),
    ("block", NODES, 3, 500),
    *((rule, 0, 16, 2_000) for rule in LOSSLESS),
    *((rule, NODES, 16, 2_000) for rule in ("block", "coupled")),
]


@pytest.mark.parametrize(
    ("rule", "nodes", "concurrency", "samples"),
    [
        *FAST,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.evidence) for case in EVIDENCE),
    ],
)
def test_sampled_outputs_follow_the_law_of_the_target(
    stack: InProcessStack,
    law: dict[tuple[int, ...], float],
    rule: str,
    nodes: int,
    concurrency: int,
    samples: int,
) -> None:
    """Beside requests of all other kinds, which share steps and cached prefixes. False alarm: 1e-6, by chi-square."""
    drawing = draw_completions(stack.address, rule, SamplingParams(), range(samples), concurrency, nodes)
    completions = list(drawing)
    result = compare(rule, completions, law, concurrency)
    print(result)
    assert result.share_of_rounds_with_draft > 0.1, "the drafter took part"
    assert 0.15 < result.acceptance_rate < 0.8, "some draft tokens were rejected and some accepted"
    num_trees = sum(completion.statistics.num_trees for completion in completions)
    num_drafts = sum(completion.statistics.num_drafts for completion in completions)
    assert num_trees > 0.8 * num_drafts if nodes else num_trees == 0
    assert all(not completion.drafter_error for completion in completions)
    assert sum(completion.statistics.num_cached_prompt_tokens > 0 for completion in completions) > 0.9 * samples
    assert result.p_value > ALPHA, result


@pytest.mark.slow
@pytest.mark.parametrize(
    "decoders",
    [("transformers", "transformers"), pytest.param(("lean", "transformers"), marks=pytest.mark.evidence)],
)
def test_the_law_is_the_same_on_either_decoder(
    pair: tuple[Path, Path],
    law: dict[tuple[int, ...], float],
    decoders: tuple[str, str],
) -> None:
    """The tests above run on the lean one on both sides. False alarm: 1e-6, by chi-square."""
    options = stack_options(*pair)
    for service, decoder in zip(("verifier", "drafter"), decoders, strict=True):
        options[service]["decoder"] = decoder
    with slow_verifiers(), InProcessStack(options) as running:
        completions = list(draw_completions(running.address, "block", SamplingParams(), range(400), 32))
    result = compare("block", completions, law, 32)
    assert result.share_of_rounds_with_draft > 0.1, "the drafter took part"
    assert result.p_value > ALPHA, result


LAYERS: dict[str, tuple[str, dict[str, object]]] = {
    "pairs": ("block", {"layer_parallel_size": 2}),
    "groups of three": ("token", {"layer_parallel_size": 3}),
    "all layers at once": ("coupled", {"layer_groups": "0-5"}),
    "groups of four, without calibration": ("block", {"layer_parallel_size": 4, "bonus_calibration": False}),
    "groups of four on two ranks": ("token", {"layer_parallel_size": 4, "layer_parallel_ranks": 2}),
}
SLOW_LAYERS = ("all layers at once", "groups of four on two ranks")
"""The others are evidence."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        pytest.param(*case, marks=[] if name in SLOW_LAYERS else pytest.mark.evidence, id=name)
        for name, case in LAYERS.items()
    ],
)
def test_the_law_is_the_same_however_approximately_is_drafted(
    pair: tuple[Path, Path],
    deep_drafter: Path,
    law: dict[tuple[int, ...], float],
    rule: str,
    layers: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a drafter of six layers, of which some run at the same time. False alarm: 1e-6, by chi-square."""
    options = stack_options(pair[0], deep_drafter)
    options["drafter"] |= layers
    has_ranks = "layer_parallel_ranks" in layers
    monkeypatch.setenv("PYTHONPATH", str(SLOW_STEPS))
    monkeypatch.setenv("SLOW_STEP_SECONDS", "0.1")  # five processes on two cores: blocks would be late at 30 ms
    with slow_verifiers(), LocalStack(options) if has_ranks else InProcessStack(options) as running:
        completions = list(draw_completions(running.address, rule, SamplingParams(), range(400), 32))
        result = compare(rule, completions, law, 32)
        print(result)
        assert result.share_of_rounds_with_draft > 0.1, "the drafter took part"
        assert 0.15 < result.acceptance_rate < 0.8, "some draft tokens were rejected and some accepted"
        assert all(not completion.drafter_error for completion in completions)
        assert result.p_value > ALPHA, result
        for name in ("calibration_seconds", "draft_pass_seconds"):
            assert read_metric(running, "drafter", f"{name}_count") > 10, "how many depends on how many share a step"
        first, second = (f'spec_decode_num_draft_tokens_per_pos_total{{position="{place}"}}' for place in (0, 1))
        assert read_metric(running, "verifier", first) >= read_metric(running, "verifier", second) > 0
