"""Sampled texts of running services follow the target's law, whatever drafts for them, and under `coupled` are those of
plain decoding.

`tests/enumerated` and the unit tests prove that the rules and the services' code keep the law exactly; these cases show
that services do so as they run, beside requests of all other kinds, which share steps and cached prefixes. A new way to
draft is one more `LawStack` and some rows of `CASES`.

Laws of another form have files of their own: of each parameter (`test_parameters.py`), of constrained texts
(`test_structured_output.py`), of several choices (`test_choices.py`), of lengths that past rounds choose
(`test_chosen_lengths_served.py`), over HTTP (`test_http_law.py`, `test_http_tools.py`), while services are lost
(`tests/slow/test_law_under_faults.py`) and of groups of ranks (`tests/slow/test_tensor_parallel.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from benchmarks.law import (
    COMPARED,
    CONTEXT_LENGTH,
    LOSSLESS,
    PROMPT,
    SMALLEST_CELL,
    VOCAB_SIZE,
    compare,
    draw_completions,
    exact_law,
    law_of_last,
    stack_options,
)
from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client, Completion
from draftwire.models.card import load_card
from draftwire.options.model_free import cascade_drafter
from draftwire.options.model_free.store_building import build_store
from draftwire.requests.parameters import SamplingParams
from tests.in_process import InProcessStack, slow_verifiers
from tests.observing import read_metric
from tests.tiny_heads import EAGLE3, MEDUSA, REMOTE, head_options, save_tiny_head
from tests.tiny_models import save_tiny_model

Law = dict[tuple[int, ...], float]
Options = dict[str, dict[str, object]]
Running = InProcessStack | LocalStack

ALPHA = 1e-6
"""Probability of a false alarm of each case. Seeds are fixed, but block borders depend on timing."""
POWER = 0.99
"""Probability with which `SAMPLES` find `NEEDED_DEVIATION`; see `share_found`."""
NEEDED_DEVIATION = 0.15
"""A total variation of the law of the last three tokens, towards the drafter's."""
SAMPLES = 400
"""No case but evidence draws more."""
NODES = 8
"""Draft tokens of a token tree."""
SHARED_TOKENS = 5000
SLOW_STEPS = Path(__file__).parents[1] / "injected" / "slow_steps"
"""Its `sitecustomize` does to processes what `slow_verifiers` does to this one."""


@dataclass(frozen=True)
class Models:
    """Folders of the tiny pair, and of what else drafts for its target, written when they are first needed."""

    target: Path
    drafter: Path
    folder: Path
    """Takes what is written."""

    @cached_property
    def deep_drafter(self) -> Path:
        """A drafter of six layers."""
        folder = self.folder / "deep"
        return save_tiny_model(folder, VOCAB_SIZE, seed=4, context_length=CONTEXT_LENGTH, num_layers=6)

    @cached_property
    def store(self) -> Path:
        """A retrieval store of texts that tell little of what the target writes."""
        folder = self.folder / "store"
        description = load_card(str(self.target)).description
        tokens = np.random.default_rng(1).integers(0, description.vocab_size, 2000)
        build_store(folder, [tokens], description.vocabulary_fingerprint, description.vocab_size)
        return folder

    def head(self, kind: str) -> Path:
        """Returns a head of the target."""
        of_kind = EAGLE3 if kind == REMOTE else kind
        folder = self.folder / of_kind
        return folder if folder.exists() else save_tiny_head(folder, self.target, of_kind)


@dataclass(frozen=True, slots=True)
class LawStack:
    """The services that texts are drawn from."""

    name: str
    options: Callable[[Models], Options] | None = None
    """Returns the options of a stack; None for the stack of the tiny pair, which other files share."""
    step_s: float = 0.0
    """Seconds that a verifier's step takes longer, so that a slow drafter takes part in most rounds."""
    has_processes: bool = False
    """Whether the services need processes: those of several ranks do."""
    patches: tuple[tuple[object, str, object], ...] = ()
    """Attributes of this process while the stack runs: whose, which, value."""

    @contextmanager
    def run(self, models: Models) -> Iterator[Running]:
        """Runs services of one's own."""
        assert self.options is not None
        with pytest.MonkeyPatch.context() as patch, ExitStack() as exits:
            if self.step_s:
                exits.enter_context(slow_verifiers(self.step_s))
            for owner, name, value in self.patches:
                patch.setattr(owner, name, value)
            if self.has_processes:
                patch.setenv("PYTHONPATH", str(SLOW_STEPS))
                patch.setenv("SLOW_STEP_SECONDS", str(self.step_s))
            options = self.options(models)
            yield exits.enter_context(LocalStack(options) if self.has_processes else InProcessStack(options))


def on_decoders(verifier: str, drafter: str) -> LawStack:
    """Returns the pair on decoders by name; all other stacks run on the lean one on both sides."""

    def options(models: Models) -> Options:
        options = stack_options(models.target, models.drafter)
        options["verifier"]["decoder"], options["drafter"]["decoder"] = verifier, drafter
        return options

    return LawStack(f"decoders {verifier} and {drafter}", options, step_s=0.03)


def with_layers(name: str, step_s: float = 0.03, has_processes: bool = False, **layers: object) -> LawStack:
    """Returns a stack whose drafter drafts approximately: some of its six layers run at the same time."""

    def options(models: Models) -> Options:
        options = stack_options(models.target, models.deep_drafter)
        options["drafter"] |= layers
        return options

    return LawStack(f"layers in {name}", options, step_s, has_processes)


def with_head(kind: str) -> LawStack:
    """Returns a stack with a head in the verifier or, if the kind is `REMOTE`, in the drafter."""
    return LawStack(f"head {kind}", lambda models: head_options(models.target, models.head(kind), kind))


def with_local_drafts(strategy: str) -> LawStack:
    """Returns a stack without a drafter, whose verifier drafts by itself."""

    def options(models: Models) -> Options:
        options = stack_options(models.target, models.target)
        del options["drafter"]
        options["gateway"]["local_drafts"] = strategy
        options["verifier"] |= {"shared_tokens": SHARED_TOKENS, "retrieval_store": models.store}
        return options

    return LawStack(f"verifier's {strategy}", options)


def with_strategy(strategy: str) -> LawStack:
    """Returns a stack whose drafter has no weights."""

    def options(models: Models) -> Options:
        options = stack_options(models.target, models.drafter)
        options["drafter"] = {"model": models.target, "strategy": strategy, "metrics_port": 0}
        options["drafter"] |= {"retrieval_store": models.store} if "retrieval" in strategy else {}
        options["drafter"] |= {"shared_tokens": SHARED_TOKENS} if "suffix" in strategy else {}
        return options

    return LawStack(f"drafter's {strategy}", options)


def cascade(models: Models) -> Options:
    options = stack_options(models.target, models.drafter)
    options["drafter"] |= {"strategy": "model+suffix+retrieval", "retrieval_store": models.store}
    return options


def ahead(models: Models) -> Options:
    options = stack_options(models.target, models.drafter)
    options["gateway"]["draft_ahead_rounds"] = 2
    return options


PAIR = LawStack("pair")
AHEAD = LawStack("two rounds ahead", ahead, step_s=0.02)  # during which the drafter drafts ahead
CASCADE = LawStack("guesses continued", cascade, patches=((cascade_drafter, "LEAST_MATCH", 2),))  # in short texts
HEADS = {kind: with_head(kind) for kind in (EAGLE3, REMOTE, MEDUSA)}
STRATEGIES = {"suffix": "", "lookup": "evidence", "retrieval": "evidence", "suffix+retrieval": "slow"}
"""Names, and the least tier of each; see `LawCase.tier`."""
LOCAL = {strategy: with_local_drafts(strategy) for strategy in STRATEGIES}
LAYERS = [
    ("block", "evidence", with_layers("pairs", layer_parallel_size=2)),
    ("token", "evidence", with_layers("groups of three", layer_parallel_size=3)),
    ("coupled", "slow", with_layers("one group", layer_groups="0-5")),
    ("block", "evidence", with_layers("fours, uncalibrated", layer_parallel_size=4, bonus_calibration=False)),
    # Five processes on two cores: blocks would be late at 30 ms.
    ("token", "slow", with_layers("fours on two ranks", 0.1, True, layer_parallel_size=4, layer_parallel_ranks=2)),
]


@dataclass(frozen=True, slots=True)
class LawCase:
    """Texts that are drawn and compared with the law, and what must have happened meanwhile."""

    stack: LawStack
    rule: str
    samples: int
    concurrency: int = 16
    """Requests that run at once, those of other kinds included."""
    nodes: int = 0
    """Draft tokens of the token tree in each round; 0 drafts chains."""
    tier: str = ""
    """The mark that leaves it to `make test-slow`, "slow", or `make evidence`, "evidence"."""
    least_drafted: float = 0.1
    """Share of rounds with drafts: the drafter took part."""
    accepted: tuple[float, float] = (0.15, 0.8)
    """Bounds of the share of accepted draft tokens: some were rejected and some accepted."""
    least_ahead: float = 0.0
    """Blocks for each text that were there before they were requested, and that were drafted in vain."""
    check: Callable[[Running], None] | None = None
    """What the services report, if anything must have happened that texts do not show."""

    @property
    def name(self) -> str:
        trees = " trees" if self.nodes else ""
        return f"{self.stack.name}, {self.rule}{trees}, {self.samples} at {self.concurrency}"


def layers_ran_together(running: Running) -> None:
    for name in ("calibration_seconds", "draft_pass_seconds"):
        assert read_metric(running, "drafter", f"{name}_count") > 10, "how many depends on how many share a step"
    first, second = (f'spec_decode_num_draft_tokens_per_pos_total{{position="{place}"}}' for place in (0, 1))
    assert read_metric(running, "verifier", first) >= read_metric(running, "verifier", second) > 0


def cases_of_heads() -> Iterator[LawCase]:
    for kind, stack in HEADS.items():
        for rule, tier in (("block", "slow" if kind == MEDUSA else ""), ("token", "slow"), ("coupled", "evidence")):
            samples = 150 if kind == REMOTE else 300
            yield LawCase(stack, rule, samples, tier=tier, least_drafted=0.3, accepted=(0.05, 0.95))


def cases_of_guesses() -> Iterator[LawCase]:
    """Yields those of drafts without a model, of which there are many: a text of three tokens repeats itself."""
    options: dict[str, Any] = {"samples": 300, "least_drafted": 0.3, "accepted": (0.1, 0.9)}
    for strategy, tier in STRATEGIES.items():
        for rule in ("block", "token", "coupled"):
            yield LawCase(LOCAL[strategy], rule, **options, tier=tier or ("slow" if rule != "block" else ""))
    for strategy, tier in STRATEGIES.items():
        yield LawCase(with_strategy(strategy), "block", **options, tier=tier or "slow")
    yield LawCase(CASCADE, "block", **options, tier="slow")


CASES = [
    LawCase(PAIR, "block", SAMPLES),
    LawCase(PAIR, "block", 120, concurrency=8, nodes=NODES),  # of 16, few have a tree in time, where the cores are busy
    LawCase(PAIR, "block", 150, concurrency=1, tier="slow"),
    LawCase(PAIR, "block", SAMPLES, concurrency=3, tier="slow"),
    LawCase(PAIR, "token", SAMPLES, tier="slow"),
    LawCase(PAIR, "coupled", SAMPLES, nodes=NODES, tier="slow"),
    *(
        LawCase(PAIR, rule, samples, concurrency, tier="evidence")
        for rule in LOSSLESS[1:]
        for concurrency, samples in ((1, 150), (3, 500))
    ),
    *(LawCase(PAIR, rule, 500, concurrency=3, nodes=NODES, tier="evidence") for rule in ("block", "coupled")),
    *(LawCase(PAIR, rule, 2_000, tier="evidence") for rule in LOSSLESS),
    *(LawCase(PAIR, rule, 2_000, nodes=NODES, tier="evidence") for rule in ("block", "coupled")),
    LawCase(on_decoders("transformers", "transformers"), "block", SAMPLES, 32, tier="slow"),
    LawCase(on_decoders("lean", "transformers"), "block", SAMPLES, 32, tier="evidence"),
    *(LawCase(stack, rule, SAMPLES, 32, tier=tier, check=layers_ran_together) for rule, tier, stack in LAYERS),
    *cases_of_heads(),
    *cases_of_guesses(),
    LawCase(AHEAD, "block", 100, 4, tier="slow", least_ahead=0.2),
    LawCase(AHEAD, "coupled", 300, 4, tier="slow", least_ahead=0.2),
    *(LawCase(AHEAD, rule, 300, 4, tier="evidence", least_ahead=0.2) for rule in ("block", "token")),
]


def marks_of(tier: str) -> Sequence[pytest.MarkDecorator]:
    return [getattr(pytest.mark, tier)] if tier else []


@pytest.fixture(scope="module")
def models(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(*pair, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def law(pair: tuple[Path, Path]) -> Law:
    return exact_law(pair[0], SamplingParams())


@pytest.fixture(scope="module")
def drafters_law(pair: tuple[Path, Path]) -> Law:
    return exact_law(pair[1], SamplingParams())


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, models: Models) -> Iterator[Running]:
    """The stack of a test. Tests of the same one follow each other, and share it."""
    stack: LawStack = request.param
    if stack is PAIR:
        yield request.getfixturevalue("stack")
        return
    with stack.run(models) as started:
        yield started


@pytest.mark.parametrize(
    ("running", "case"),
    [pytest.param(case.stack, case, marks=marks_of(case.tier), id=case.name) for case in CASES],
    indirect=["running"],
    scope="module",
)
def test_sampled_outputs_follow_the_law_of_the_target(running: Running, law: Law, case: LawCase) -> None:
    """False alarm: 1e-6, by chi-square of the last tokens; `share_found` says what is found."""
    drawing = draw_completions(
        running.address, case.rule, SamplingParams(), range(case.samples), case.concurrency, case.nodes
    )
    completions = list(drawing)
    results = [compare(case.rule, completions, law, case.concurrency, judged) for judged in COMPARED]
    result = results[0]
    print(results)
    assert result.share_of_rounds_with_draft > case.least_drafted
    assert case.accepted[0] < result.acceptance_rate < case.accepted[1]
    statistics = [completion.statistics for completion in completions]
    num_trees = sum(one.num_trees for one in statistics)
    assert num_trees > 0.8 * sum(one.num_drafts for one in statistics) if case.nodes else num_trees == 0
    assert all(not completion.drafter_error for completion in completions)
    assert sum(one.num_cached_prompt_tokens > 0 for one in statistics) > 0.9 * case.samples
    if case.least_ahead:
        assert sum(one.num_ahead_hits for one in statistics) > case.least_ahead * case.samples
        assert sum(one.num_ahead_misses for one in statistics) > case.least_ahead * case.samples
    if case.check is not None:
        case.check(running)
    assert min(one.p_value for one in results) > ALPHA / len(COMPARED), results


@pytest.mark.parametrize(
    ("running", "num_seeds"),
    [
        *(
            pytest.param(stack, 4, marks=marks_of("slow" if kind == MEDUSA else ""), id=stack.name)
            for kind, stack in HEADS.items()
        ),
        *(pytest.param(stack, 20, marks=marks_of(STRATEGIES[of]), id=stack.name) for of, stack in LOCAL.items()),
        pytest.param(AHEAD, 20, marks=pytest.mark.slow, id=AHEAD.name),
    ],
    indirect=["running"],
    scope="module",
)
def test_coupled_text_of_a_seed_is_the_same_with_drafts_and_without(running: Running, num_seeds: int) -> None:
    """Of so many seeds, both texts at the same time, of 40 tokens each."""

    def draw(seed: int, num_speculative_tokens: int) -> Completion:
        options: dict[str, Any] = {"rejection_sample_method": "coupled", "max_tokens": 40, "ignore_eos": True}
        return client.generate(PROMPT, seed=seed, num_speculative_tokens=num_speculative_tokens, **options)

    with Client(running.address) as client, ThreadPoolExecutor(2) as pool:
        for seed in range(num_seeds):
            drafted, plain = (one.result() for one in [pool.submit(draw, seed, 4), pool.submit(draw, seed, 0)])
            assert drafted.token_ids == plain.token_ids
            assert plain.statistics.num_draft_tokens == 0
            assert drafted.statistics.num_accepted_tokens > 0


def compared_masses(law: Law, drafters_law: Law, samples: int, judged: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probabilities of the outcomes that `compare` compares, under both laws; those that are rare under the
    first are one outcome.
    """
    law, drafters_law = law_of_last(law, judged), law_of_last(drafters_law, judged)
    is_rare = {text: mass * samples < SMALLEST_CELL for text, mass in law.items()}
    masses = [[of[text] for text in law if not is_rare[text]] for of in (law, drafters_law)]
    if any(is_rare.values()):
        masses = [[*each, 1.0 - sum(each)] for each in masses]
    right, wrong = (np.array(each) for each in masses)
    return right / right.sum(), wrong / wrong.sum()


def share_found(law: Law, drafters_law: Law, samples: int, judged: int, share: float) -> float:
    """Returns how often so many texts are found to follow another law if a share of them follows the drafter's, as with
    a rule that accepts too much: of 5,000 simulated draws, by the law of so many of the last tokens.

    The shares that are found with a probability of 99 %, and how surely one of 0.2 is, which is a total variation of
    0.15 of the last three tokens; with a shorter prompt, after which the laws were nearly as far apart:

        samples                    100    150    300    400    500  2,000
        share, by three tokens    0.58   0.44   0.25   0.19   0.16   0.05
        share, by five            none   0.96   0.54   0.39   0.31   0.10
        of 0.2, by three        0.2 %    3 %   85 %  99.6 %  100 %  100 %

    Five tokens have 243 outcomes, of which few samples leave most to the one that is for rare ones; but only their law
    shows tokens that depend on each other from one block to the next. Another law than the drafter's may be harder to
    find: of all with the same total variation, the one that is off by the same share of each probability is the
    hardest (Cauchy-Schwarz). Of it 400 samples find a total variation of 0.24, and 0.15 takes 1,200.
    """
    right, wrong = compared_masses(law, drafters_law, samples, judged)
    drawn = np.random.default_rng(0).multinomial(samples, (1.0 - share) * right + share * wrong, size=5000)
    statistics = ((drawn - samples * right) ** 2 / (samples * right)).sum(1)
    return float(np.mean(statistics > chi2.isf(ALPHA / len(COMPARED), len(right) - 1)))


def test_samples_are_as_many_as_a_deviation_of_the_law_needs(law: Law, drafters_law: Law) -> None:
    """And no case but evidence draws more."""
    many, few = COMPARED
    right, wrong = compared_masses(law, drafters_law, 1_000_000, few)
    share = NEEDED_DEVIATION / (abs(right - wrong).sum() / 2.0)
    assert share_found(law, drafters_law, SAMPLES, few, share) > POWER > share_found(law, drafters_law, 350, few, share)
    assert share_found(law, drafters_law, SAMPLES, many, share) < 0.1
    assert all(case.tier == "evidence" or case.samples <= SAMPLES for case in CASES)
