"""Does the text that comes out of the three services follow the target's law? A test on a model that can be enumerated.

    python -m benchmarks.law --samples 20000

starts drafter, verifier and gateway with two tiny models, draws many completions for each verification rule, and
compares how often each outcome came with the target's exact probability of it (chi-square). The models have two layers
and random weights: every distribution depends on the whole context.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM

from draftwire.client import Client
from draftwire.client.sync import Completion
from draftwire.sampling import SamplingParams, probabilities
from draftwire.services.local_stack import LocalStack
from draftwire.verification import RULES
from tests.tiny_models import save_tiny_model

VOCAB_SIZE = 3
PROMPT = [0, 2, 1]
LENGTH = 9
"""Tokens of each completion."""
JUDGED = 5
"""The last tokens of each completion, whose joint law is compared; the drafter joins some tokens after the first."""
BLOCK_LENGTH = 3
SMALLEST_CELL = 5.0
"""Outcomes expected less often are merged."""


@dataclass(frozen=True, slots=True)
class LawResult:
    """One comparison."""

    rule: str
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
    target = save_tiny_model(folder / "target", VOCAB_SIZE, seed=6)
    drafter = save_tiny_model(folder / "drafter", VOCAB_SIZE, seed=9)
    return target, drafter


@torch.inference_mode()
def exact_law(model_folder: Path, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Returns the model's own law of the last `JUDGED` of `LENGTH` tokens after `PROMPT`."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    texts = list(product(range(VOCAB_SIZE), repeat=LENGTH))
    ids = torch.tensor([[*PROMPT, *text] for text in texts])
    rows = probabilities(model(input_ids=ids).logits[:, len(PROMPT) - 1 : -1], sampling)  # [texts, LENGTH, vocab]
    masses = rows.gather(-1, ids[:, len(PROMPT) :].unsqueeze(-1)).squeeze(-1).prod(-1)
    law: Counter[tuple[int, ...]] = Counter()
    for text, mass in zip(texts, masses.tolist(), strict=True):
        law[text[-JUDGED:]] += mass
    return dict(law)


def draw_completions(address: str, rule: str, sampling: SamplingParams, seeds: Sequence[int]) -> Iterator[Completion]:
    """Draws one completion per seed through a running gateway, eight at a time."""

    def draw(seed: int) -> Completion:
        return client.generate(
            PROMPT,
            max_tokens=LENGTH,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=seed,
            num_speculative_tokens=BLOCK_LENGTH,
            rejection_sample_method=rule,
        )

    with Client(address) as client, ThreadPoolExecutor(8) as pool:
        yield from pool.map(draw, seeds)


def compare(rule: str, completions: Sequence[Completion], law: dict[tuple[int, ...], float]) -> LawResult:
    """Compares drawn completions with the exact law."""
    count = len(completions)
    observed = Counter(tuple(completion.token_ids[-JUDGED:]) for completion in completions)
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
    drafted = sum(completion.statistics.num_draft_tokens for completion in completions)
    return LawResult(
        rule=rule,
        samples=count,
        chi_square=statistic,
        degrees_of_freedom=cells - 1,
        p_value=float(chi2.sf(statistic, cells - 1)),
        block_efficiency=sum(completion.statistics.num_emitted_tokens for completion in completions) / rounds,
        acceptance_rate=sum(c.statistics.num_accepted_tokens for c in completions) / max(drafted, 1),
        share_of_rounds_with_draft=sum(c.statistics.num_drafts for c in completions) / rounds,
    )


def stack_options(target: Path, drafter: Path) -> dict[str, dict[str, object]]:
    """Returns the options of a stack of one-threaded services on free ports."""
    return {
        "verifier": {"model": target, "metrics_port": 0, "threads": 1},
        "drafter": {"model": drafter, "metrics_port": 0, "threads": 1},
        "gateway": {},
    }


def main() -> None:
    """Runs the comparison for every rule and prints a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sampling = SamplingParams(arguments.temperature, arguments.top_k, arguments.top_p)
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = save_tiny_pair(Path(folder))
        law = exact_law(target, sampling)
        with LocalStack(stack_options(target, drafter)) as stack:
            for rule in arguments.rules:
                completions = list(draw_completions(stack.address, rule, sampling, range(arguments.samples)))
                print(json.dumps(asdict(compare(rule, completions, law))), flush=True)


if __name__ == "__main__":
    main()
