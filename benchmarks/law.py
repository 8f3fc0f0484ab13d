"""Chi-square test of the three services' output distribution against that of a target that can be enumerated.

    python -m benchmarks.law --samples 20000 --concurrency 16

starts drafter, verifier and gateway with two tiny models, draws many completions for each verification rule, and
compares how often each outcome came with the target's exact probability of it (chi-square). The models have two layers
and random weights: every distribution depends on the whole context.

The completions share steps of both models with each other and with requests of all other kinds, which are not tested:
other prompts, parameters, rules and block lengths, some of them cancelled.
"""

import argparse
import json
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.report import progress
from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client, Completion
from draftwire.method.sampling import Span, probabilities_of_spans
from draftwire.method.tree_limits import MAX_TREE_NODES
from draftwire.requests.parameters import PARAMETERS, SamplingParams
from draftwire.verification import RULES
from draftwire.verification.rule import facts_of
from tests.tiny_models import save_tiny_model

VOCAB_SIZE = 3
PROMPT = [0, 2, 0, 2, 2, 2, 0, 0, 0, 2, 1, 1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 1, 2, 2, 2, 2, 1, 1, 2, 2, 0, 1, 2, 1]
"""Longer than a block of the KV cache, so that most completions hit the prefix cache."""
LENGTH = 9
"""Tokens of each completion."""
JUDGED = 5
"""The last tokens of each completion, whose joint law is compared; the drafter joins some tokens after the first."""
COMPARED = (JUDGED, 3)
"""Numbers of last tokens that tests compare, each at its share of the odds: fewer have fewer outcomes, whose law some
hundred completions show; see `tests/served/test_law.py`.
"""
BLOCK_LENGTH = 3
CONTEXT_LENGTH = 96
CONCURRENCY = 16
LOSSLESS = [name for name, rule in RULES.items() if rule.is_lossless]
SMALLEST_CELL = 5.0
"""Outcomes expected less often are merged."""


@dataclass(frozen=True, slots=True)
class LawResult:
    """One comparison."""

    rule: str
    concurrency: int
    samples: int
    chi_square: float
    degrees_of_freedom: int
    p_value: float
    """Probability of a chi-square this large if the law is right."""
    block_efficiency: float
    acceptance_rate: float
    share_of_rounds_with_draft: float


def save_tiny_pair(folder: Path) -> tuple[Path, Path]:
    """Writes target and drafter, whose laws overlap by about a half."""
    target = save_tiny_model(folder / "target", VOCAB_SIZE, seed=6, context_length=CONTEXT_LENGTH)
    drafter = save_tiny_model(folder / "drafter", VOCAB_SIZE, seed=9, context_length=CONTEXT_LENGTH)
    return target, drafter


@torch.inference_mode()
def exact_law(
    model_folder: Path, sampling: SamplingParams, logits_of: Callable[[Tensor], Tensor] | None = None
) -> dict[tuple[int, ...], float]:
    """Returns the model's own law of the last `JUDGED` of `LENGTH` tokens after `PROMPT`.

    Args:
        model_folder: of the model.
        sampling: parameters of the texts.
        logits_of: returns the logits after each token of `[texts, tokens]` ids, `[texts, tokens, vocab]`; by default
            transformers does, in float64.
    """
    texts = list(product(range(VOCAB_SIZE), repeat=LENGTH - 1))
    ids = torch.tensor([[*PROMPT, *text] for text in texts])
    logits = (logits_of or _logits_of(model_folder))(ids)[:, len(PROMPT) - 1 :]
    spans = [Span(sampling, LENGTH, [*PROMPT, *text], len(PROMPT)) for text in texts]
    rows = probabilities_of_spans(logits.flatten(0, 1), spans).reshape(logits.shape)  # [texts, LENGTH, vocab]
    masses = rows[:, :-1].gather(-1, ids[:, len(PROMPT) :].unsqueeze(-1)).prod(1) * rows[:, -1]  # [texts, vocab]
    law: Counter[tuple[int, ...]] = Counter()
    for text, last in zip(texts, masses.tolist(), strict=True):
        for token, mass in enumerate(last):
            law[(*text, token)[-JUDGED:]] += mass
    return dict(law)


def _logits_of(model_folder: Path) -> Callable[[Tensor], Tensor]:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    return lambda ids: cast(Tensor, model(input_ids=ids).logits)


def draw_completions(
    address: str,
    rule: str,
    sampling: SamplingParams,
    seeds: Sequence[int],
    concurrency: int = CONCURRENCY,
    num_draft_nodes: int = 0,
) -> Iterator[Completion]:
    """Draws one completion per seed through a running gateway, beside requests of other kinds.

    Args:
        address: host:port of the gateway.
        rule: how the completions are verified.
        sampling: their parameters.
        seeds: one for each completion.
        concurrency: requests that run at once; about a quarter of them are of other kinds, of 1 none.
        num_draft_nodes: draft tokens of the token tree in each of their rounds; 0 drafts chains.
    """
    num_others = (concurrency + 1) // 4

    def draw(seed: int) -> Completion:
        return client.generate(
            PROMPT,
            max_tokens=LENGTH,
            seed=seed,
            num_speculative_tokens=BLOCK_LENGTH,
            num_draft_nodes=num_draft_nodes,
            rejection_sample_method=rule,
            **options_of(sampling),
        )

    with (
        Client(address) as client,
        other_requests(client, num_others),
        ThreadPoolExecutor(concurrency - num_others) as pool,
    ):
        yield from pool.map(draw, seeds)


@contextmanager
def other_requests(client: Client, count: int) -> Iterator[None]:
    """Keeps this many requests of all kinds running; raises an error of theirs at the end."""
    ended = threading.Event()

    def keep_asking(seed: int) -> None:
        generator = random.Random(seed)
        while not ended.is_set():
            stream = client.stream(**other_request(generator))
            num_pieces = generator.choice([1, 3, CONTEXT_LENGTH, CONTEXT_LENGTH])  # then it is cancelled
            for number, _ in enumerate(stream, 1):
                if number == num_pieces:
                    stream.cancel()
                    break

    with ThreadPoolExecutor(max(count, 1)) as pool:
        running = [pool.submit(keep_asking, seed) for seed in range(count)]
        try:
            yield
        finally:
            ended.set()
        for other in running:
            other.result()


def other_request(generator: random.Random) -> dict[str, Any]:
    """Returns a request with random parameters, whose prompt may share a prefix with `PROMPT`."""
    shared = PROMPT[: generator.choice([0, 16, len(PROMPT)])]
    rule, temperature = generator.choice(list(RULES)), generator.choice([0.0, 0.5, 1.0, 2.0])
    takes_trees = facts_of(RULES[rule]).takes_trees or temperature == 0.0
    prompt = [*shared, *(generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 30)))]
    return {
        "prompt": prompt,
        "max_tokens": generator.randint(1, CONTEXT_LENGTH - len(prompt)),
        "temperature": temperature,
        "top_k": generator.choice([0, 0, 1, 2]),
        "top_p": generator.choice([1.0, 1.0, 0.5, 0.9]),
        "seed": generator.getrandbits(64),
        "num_speculative_tokens": generator.randint(0, 8),
        "num_draft_nodes": generator.choice([0, 0, 5, MAX_TREE_NODES]) if takes_trees else 0,
        "rejection_sample_method": rule,
        "min_p": generator.choice([0.0, 0.0, 0.2]),
        "repetition_penalty": generator.choice([1.0, 1.0, 1.3]),
        "presence_penalty": generator.choice([0.0, 0.0, 0.5, -1.0]),
        "frequency_penalty": generator.choice([0.0, 0.0, 0.5]),
        "logit_bias": generator.choice([{}, {}, {1: 2.0}]),
        "allowed_token_ids": generator.choice([None, None, (0, 2)]),
        "cache_salt": generator.choice(["", "", "other"]),
    }


def options_of(sampling: SamplingParams) -> dict[str, Any]:
    """Returns the options of a request with these parameters: those that differ from the defaults."""
    default = SamplingParams()
    values = {name: getattr(sampling, name) for name in PARAMETERS}
    options = {name: value for name, value in values.items() if value != getattr(default, name)}
    if sampling.allowed_token_ids is not None:
        options["allowed_token_ids"] = sorted(sampling.allowed_token_ids)
    return options | {"logit_bias": dict(sampling.logit_bias)}


def law_of_last(law: dict[tuple[int, ...], float], judged: int) -> dict[tuple[int, ...], float]:
    """Returns the law of the last tokens of texts with this law."""
    masses: dict[tuple[int, ...], float] = {}
    for text, mass in law.items():
        masses[text[-judged:]] = masses.get(text[-judged:], 0.0) + mass
    return masses


def compare(
    rule: str,
    completions: Sequence[Completion],
    law: dict[tuple[int, ...], float],
    concurrency: int = CONCURRENCY,
    judged: int = JUDGED,
) -> LawResult:
    """Compares drawn completions with the exact law.

    Args:
        rule: how they were verified.
        completions: all of one law.
        law: of their last `JUDGED` tokens.
        concurrency: requests that ran at once.
        judged: compares so many of the last tokens, at most `JUDGED`.
    """
    count, law = len(completions), law_of_last(law, judged)
    observed = Counter(tuple(completion.token_ids[-judged:]) for completion in completions)
    statistic, cells, rest_expected, rest_observed = 0.0, 0, 0.0, 0
    for text, mass in law.items():
        if mass * count >= SMALLEST_CELL:
            statistic += (observed[text] - mass * count) ** 2 / (mass * count)
            cells += 1
        else:
            rest_expected += mass * count
            rest_observed += observed[text]
    if rest_expected > 0.0:
        statistic += (rest_observed - rest_expected) ** 2 / rest_expected
        cells += 1
    rounds = sum(completion.statistics.num_rounds for completion in completions)
    drafted = sum(completion.statistics.num_draft_positions for completion in completions)
    return LawResult(
        rule=rule,
        concurrency=concurrency,
        samples=count,
        chi_square=statistic,
        degrees_of_freedom=cells - 1,
        p_value=float(chi2.sf(statistic, cells - 1)),
        block_efficiency=sum(completion.statistics.num_emitted_tokens for completion in completions) / rounds,
        acceptance_rate=sum(c.statistics.num_accepted_tokens for c in completions) / max(drafted, 1),
        share_of_rounds_with_draft=sum(c.statistics.num_drafts for c in completions) / rounds,
    )


def stack_options(target: Path, drafter: Path, max_tree_nodes: int = 0) -> dict[str, dict[str, object]]:
    """Returns the options of a stack of one-threaded services on free ports. Drafts have a fixed length, since such
    small models are faster without, and are the drafter's alone.

    Args:
        target: model folder, or a script.
        drafter: the same.
        max_tree_nodes: draft tokens of a token tree at most; 0 for none.
    """
    trees = {"max_tree_nodes": max_tree_nodes} if max_tree_nodes else {}
    return {
        "verifier": {"model": target, "metrics_port": 0, "threads": 1, **trees},
        "drafter": {"model": drafter, "metrics_port": 0, "threads": 1, **trees},
        "gateway": {"speculation": "fixed", "local_drafts": "none"},
    }


def main() -> None:
    """Runs the comparison for every rule and prints a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rules", nargs="+", choices=LOSSLESS, default=LOSSLESS)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help="requests that run at once")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    arguments = parser.parse_args()
    if arguments.concurrency < 1:
        parser.error("--concurrency must be at least 1")
    torch.set_num_threads(1)
    sampling = SamplingParams(arguments.temperature, arguments.top_k, arguments.top_p)
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = save_tiny_pair(Path(folder))
        law = exact_law(target, sampling)
        with LocalStack(stack_options(target, drafter)) as stack:
            for rule in arguments.rules:
                seeds, concurrency = range(arguments.samples), arguments.concurrency
                drawing = draw_completions(stack.address, rule, sampling, seeds, concurrency)
                completions = list(progress(drawing, rule, len(seeds)))
                print(json.dumps(asdict(compare(rule, completions, law, concurrency))), flush=True)


if __name__ == "__main__":
    main()
