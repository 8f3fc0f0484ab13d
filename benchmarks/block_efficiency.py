"""Tokens per forward pass of the target and acceptance rate of each verification rule, with confidence intervals.

    python -m benchmarks.block_efficiency --output benchmarks/results/block_efficiency.json

Measured: every prompt is continued through the three services, once with each rule, at the same settings. `typical` is
there for comparison: its texts are not the target's. Predicted, for `block` and `token`: the prompts are continued in
one process, and the expected number of accepted tokens of each drafted block is computed for both rules,

    token: sum over i of prod over j <= i of min(1, r_j)        block: sum over i of a_i

with r_j the ratio of target to draft probability of draft token j and a_i the block weights. The prediction is paired:
both sums come from the same blocks. Drafts are as `draftwire up` makes them, with up to 512 tokens a position.
Intervals are 95 %, by bootstrap over the prompts.

    python -m benchmarks.block_efficiency --trees --prompts 24 --max-tokens 64

compares token trees of 16, 32 and 64 nodes, by shape and rule, with a chain of eight instead, in one process and at
temperatures 0, 0.6 and 1 (`benchmarks/tree_efficiency.py`).

    python -m benchmarks.block_efficiency --ids --prompts 24 --block-length 4

compares `block` with the likeliest tokens, judged by ids alone as vLLM does it (docs/vllm.md), in one process.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from benchmarks.tree_efficiency import CALIBRATION_PROMPTS, tree_counts
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.up_command import stack_options
from draftwire.client import Client
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import Drafting, DraftStep
from draftwire.local_loop import LocalRun, speculate
from draftwire.method.quantization import Quantization
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoder import decoder_of
from draftwire.models.loading import load_model
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES, LawRule
from draftwire.verification.block import BlockRule
from draftwire.verification.token import TokenRule

Counts = NDArray[np.float64]
"""`[prompts, 3]`: draft tokens accepted (or expected to be), blocks, and draft tokens, per prompt."""

PREDICTED: dict[str, LawRule] = {rule.name: rule for rule in (BlockRule(), TokenRule())}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def block_efficiency(counts: Counts) -> float:
    """Returns tokens per forward pass over the rounds that judged a block."""
    accepted, blocks, _ = counts.sum(axis=0)
    return float(accepted / blocks) + 1.0


def acceptance_rate(counts: Counts) -> float:
    """Returns accepted draft tokens over draft tokens."""
    accepted, _, drafted = counts.sum(axis=0)
    return float(accepted / drafted)


def estimate(measure_of: Callable[[Counts], float], counts: Counts) -> Estimate:
    """Returns a measure with its interval."""
    values = [measure_of(counts[picked]) for picked in _resamples(len(counts))]
    return Estimate(measure_of(counts), *np.percentile(values, [2.5, 97.5]).tolist())


def gain(counts: Counts, baseline: Counts) -> Estimate:
    """Returns by how many percent `counts` is above `baseline`, paired by prompt."""
    values = [_gain(counts[picked], baseline[picked]) for picked in _resamples(len(counts))]
    return Estimate(_gain(counts, baseline), *np.percentile(values, [2.5, 97.5]).tolist())


def _gain(counts: Counts, baseline: Counts) -> float:
    return (block_efficiency(counts) / block_efficiency(baseline) - 1.0) * 100.0


def _resamples(count: int, repeats: int = 2_000) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, count, (repeats, count))


def measure(prompts: list[str], arguments: argparse.Namespace) -> dict[str, Counts]:
    """Continues every prompt through the services with every rule."""
    counts: dict[str, list[tuple[int, int, int]]] = {rule: [] for rule in RULES}
    options = stack_options(arguments.target, arguments.drafter, arguments.block_length)
    with LocalStack(options) as stack, Client(stack.address) as client:
        for seed, prompt in progress(list(enumerate(prompts)), "services"):
            for rule in RULES:
                statistics = client.generate(
                    prompt,
                    max_tokens=arguments.max_tokens,
                    temperature=arguments.temperature,
                    seed=seed,
                    num_speculative_tokens=arguments.block_length,
                    rejection_sample_method=rule,
                ).statistics
                one = (statistics.num_accepted_tokens, statistics.num_drafts, statistics.num_draft_tokens)
                counts[rule].append(one)
    return {rule: np.array(rows, dtype=np.float64) for rule, rows in counts.items()}


def predict(prompts: list[str], arguments: argparse.Namespace) -> dict[str, Counts]:
    """Continues every prompt in this process and asks each block what either rule would accept."""
    return _expected(prompts, arguments, LanguageModelDrafter, "block", PREDICTED)


def predict_ids(prompts: list[str], arguments: argparse.Namespace) -> dict[str, Counts]:
    """Continues every prompt in this process: drafted by `block`, and by the likeliest tokens without distributions."""
    by_block = _expected(prompts, arguments, LanguageModelDrafter, "block", {"block": BlockRule()})
    return by_block | _expected(prompts, arguments, LikeliestTokens, "token", {"ids": TokenRule()})


class LikeliestTokens(LanguageModelDrafter):
    """Drafts the likeliest tokens, as for vLLM, which takes no distributions: each is accepted as often as the target
    draws it.
    """

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Drafts as at temperature 0."""
        greedy = SamplingParams(0.0)
        return super().step(
            [replace(one, request=one.request and replace(one.request, sampling=greedy)) for one in draftings]
        )


def _expected(
    prompts: list[str],
    arguments: argparse.Namespace,
    drafter: type[LanguageModelDrafter],
    rule: str,
    judged_by: Mapping[str, LawRule],
) -> dict[str, Counts]:
    """Continues every prompt with a rule, and returns what each of some rules accepts of its blocks on average."""
    models = _models(arguments)
    cached_target, cached_drafter, context_length, quantization = _loaded(arguments)
    strategy = drafter(cached_drafter, context_length, quantization=quantization)
    tokenizer = AutoTokenizer.from_pretrained(models[0]["model"])
    counts: dict[str, list[tuple[float, int, int]]] = {name: [] for name in judged_by}
    sampling = SamplingParams(arguments.temperature)
    for seed, prompt in progress(list(enumerate(prompts)), "prediction"):
        expected = dict.fromkeys(judged_by, 0.0)
        blocks = drafted = 0
        run = LocalRun(sampling, arguments.max_tokens, arguments.block_length, rule, seed)
        prompt_ids = tokenizer(prompt)["input_ids"]
        for done in speculate(cached_target, strategy, prompt_ids, run):
            if done.blocks.lengths[0] == 0:
                continue
            blocks += 1
            drafted += int(done.blocks.lengths[0])
            for name, judge in judged_by.items():
                expected[name] += float(judge.stop_law(done.blocks).expected_accepted()[0])
        for name in judged_by:
            counts[name].append((expected[name], blocks, drafted))
    return {name: np.array(rows, dtype=np.float64) for name, rows in counts.items()}


def compare_trees(prompts: list[str], arguments: argparse.Namespace) -> dict[str, object]:
    """Continues every prompt with trees of each shape, prints what was accepted, and returns it for the report."""
    target, drafter, _, quantization = _loaded(arguments)
    others = load_prompts()[-CALIBRATION_PROMPTS:]
    name = _models(arguments)[0]["model"]
    found = tree_counts(prompts, others, arguments, target, drafter, quantization, name)
    report: dict[str, object] = {}
    for temperature, counts in found.items():
        baseline, *_ = counts.values()
        for arm, own in counts.items():
            efficiency, ratio = estimate(block_efficiency, own), gain(own, baseline)
            nodes = float(own[:, 2].sum() / own[:, 1].sum())
            report[f"temperature_{temperature:g}_{arm}"] = {"block_efficiency": efficiency, "gain_percent": ratio}
            print(f"T = {temperature:3g} {arm:>22}: {efficiency} tokens a round, {nodes:4.1f} drafted, {ratio} %")
    return report


def compare_ids(prompts: list[str], arguments: argparse.Namespace) -> None:
    """Prints tokens a round of `block`, and of the likeliest tokens without distributions, and writes the report."""
    counts = predict_ids(prompts, arguments)
    report: dict[str, object] = {name: estimate(block_efficiency, own) for name, own in counts.items()}
    report["gain_percent_ids_over_block"] = gain(counts["ids"], counts["block"])
    accepted = {name: float(own[:, 0].sum() / own[:, 1].sum()) for name, own in counts.items()}
    report["accepted_per_round"] = accepted
    for name, value in report.items():
        print(f"{name}: {value}")
    write_report(arguments, report)


def _loaded(arguments: argparse.Namespace) -> tuple[CachedModel, CachedModel, int, Quantization]:
    """Returns target and drafter, the tokens that each holds, and the drafter's quantization."""
    models = _models(arguments)
    target, drafter = (load_model(options["model"]) for options in models)
    quantization = Quantization(mass=models[1]["draft_mass"], max_support=models[1]["draft_max_support"])
    context_length = drafter.description.context_length
    cached_target, cached_drafter = (CachedModel(decoder_of(own.model), context_length) for own in (target, drafter))
    return cached_target, cached_drafter, context_length, quantization


def _models(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    options = stack_options(arguments.target, arguments.drafter, arguments.block_length)
    return options["verifier"], options["drafter"]


def main() -> None:
    """Measures, predicts, prints both side by side, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--block-length", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--trees", action="store_true", help="compare token trees with a chain instead")
    parser.add_argument("--ids", action="store_true", help="compare with the likeliest tokens by ids alone instead")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0], help="of --trees")
    parser.add_argument("--arms", nargs="+", default=[], help="of --trees, beside the chain; default all")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    prompts = load_prompts()[: arguments.prompts]
    if arguments.trees:
        torch.set_num_threads(1)
        write_report(arguments, compare_trees(prompts, arguments))
        return
    if arguments.ids:
        torch.set_num_threads(1)
        compare_ids(prompts, arguments)
        return
    torch.set_num_threads(2)
    results = {"measured": measure(prompts, arguments), "predicted": predict(prompts, arguments)}
    report: dict[str, object] = {}
    for kind, counts in results.items():
        for rule, own in counts.items():
            efficiency, acceptance = estimate(block_efficiency, own), estimate(acceptance_rate, own)
            report[f"{kind}_{rule}"] = {"block_efficiency": efficiency, "acceptance_rate": acceptance}
            print(f"{kind:>9} {rule:>7}: block efficiency {efficiency}, acceptance rate {acceptance}")
        for rule in [rule for rule in counts if rule != "token"]:
            gained = gain(counts[rule], counts["token"])
            report[f"{kind}_gain_percent_{rule}_over_token"] = gained
            print(f"{kind:>9} {rule:>7}: over token {gained} %")
    write_report(arguments, report)


if __name__ == "__main__":
    main()
