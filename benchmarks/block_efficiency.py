"""Tokens per forward pass of the target and acceptance rate of each verification rule, with confidence intervals.

    python -m benchmarks.block_efficiency --output benchmarks/results/block_efficiency.json

Measured: every prompt is continued through the three services, once with each rule, at the same settings. `typical` is
there for comparison: its texts are not the target's. Predicted, for `block` and `token`: the prompts are continued in
one process, and the expected number of accepted tokens of each drafted block is computed for both rules,

    token: sum over i of prod over j <= i of min(1, r_j)        block: sum over i of a_i

with r_j the ratio of target to draft probability of draft token j and a_i the block weights: term i is the probability
that draft token i is accepted, given the draft tokens up to it. The prediction is paired: both sums come from the same
blocks, drafted along texts that `block` continues. Drafts are as `draftwire up` makes them, with up to 512 tokens a
position. Intervals are 95 %, by bootstrap over the prompts.

    python -m benchmarks.block_efficiency --paired --prompts 60 --block-length 4

predicts alone, at temperatures 0, 0.6 and 1, and also by position in the block.

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
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from benchmarks.tree_efficiency import CALIBRATION_PROMPTS, tree_counts
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from draftwire.client import Client
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import Drafting, DraftStep
from draftwire.local_loop import LocalRun, speculate
from draftwire.method.quantization import Quantization
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.loading import load_model
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES
from draftwire.verification.block import block_weights
from draftwire.verification.blocks import BlockBatch

Counts = NDArray[np.float64]
"""`[prompts, 3]`: draft tokens accepted (or expected to be), blocks, and draft tokens, per prompt."""

Positions = NDArray[np.float64]
"""`[prompts, 2, block_length]`: draft tokens that are expected to be accepted, and draft tokens, at each position."""


def reached_by_token(blocks: BlockBatch) -> Tensor:
    """Returns the probability that `token` accepts each draft token, `[batch, max_len] float64`; 0 in the padding."""
    return blocks.ratios().clamp(max=1.0).cumprod(dim=1)


def reached_by_block(blocks: BlockBatch) -> Tensor:
    """Returns the probability that `block` accepts each draft token, given those up to it, `[batch, max_len] float64`.

    Given the whole block it is another one, of the same mean over what is drafted later, but not always at least that
    of `token`.
    """
    return block_weights(blocks)[:, 1:]


PREDICTED = {"block": reached_by_block, "token": reached_by_token}


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


def accepted_per_block(counts: Counts) -> float:
    """Returns accepted draft tokens for each block."""
    return block_efficiency(counts) - 1.0


def counts_of(positions: Positions) -> Counts:
    """Returns the sums over positions; every block has a first one."""
    accepted, drafted = positions.sum(axis=2).T
    return np.stack([accepted, positions[:, 1, 0], drafted], axis=1)


def by_position(positions: Positions) -> list[float]:
    """Returns accepted draft tokens over draft tokens at each position of the blocks."""
    accepted, drafted = positions.sum(axis=0)
    shares: list[float] = (accepted / drafted).tolist()
    return shares


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


def predict(prompts: list[str], arguments: argparse.Namespace, temperature: float) -> dict[str, Positions]:
    """Continues every prompt in this process and asks each block what either rule would accept."""
    return _expected(prompts, arguments, temperature, LanguageModelDrafter, "block", PREDICTED)


def predict_ids(prompts: list[str], arguments: argparse.Namespace) -> dict[str, Counts]:
    """Continues every prompt in this process: drafted by `block`, and by the likeliest tokens without distributions."""
    ways = {"block": (LanguageModelDrafter, reached_by_block), "token": (LikeliestTokens, reached_by_token)}
    found: dict[str, Positions] = {}
    for (rule, (drafter, reached)), name in zip(ways.items(), ("block", "ids"), strict=True):
        found |= _expected(prompts, arguments, arguments.temperature, drafter, rule, {name: reached})
    return {name: counts_of(own) for name, own in found.items()}


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
    temperature: float,
    drafter: type[LanguageModelDrafter],
    rule: str,
    reached_by: Mapping[str, Callable[[BlockBatch], Tensor]],
) -> dict[str, Positions]:
    """Continues every prompt with a rule, and returns what each of some rules accepts of its blocks on average."""
    models = _models(arguments)
    cached_target, cached_drafter, context_length, quantization = _loaded(arguments)
    strategy = drafter(cached_drafter, context_length, quantization=quantization)
    tokenizer = AutoTokenizer.from_pretrained(models[0]["model"])
    found = {name: np.zeros((len(prompts), 2, arguments.block_length)) for name in reached_by}
    sampling = SamplingParams(temperature)
    for seed, prompt in progress(list(enumerate(prompts)), f"prediction, temperature {temperature:g}"):
        run = LocalRun(sampling, arguments.max_tokens, arguments.block_length, rule, seed)
        prompt_ids = tokenizer(prompt)["input_ids"]
        for done in speculate(cached_target, strategy, prompt_ids, run):
            length = int(done.blocks.lengths[0])
            for name, reached in reached_by.items():
                found[name][seed, 0, :length] += reached(done.blocks)[0, :length].numpy()
                found[name][seed, 1, :length] += 1.0
    return found


def compare_paired(prompts: list[str], arguments: argparse.Namespace) -> None:
    """Prints what both rules are expected to accept of the same blocks at each temperature, and writes the report."""
    report: dict[str, object] = {}
    for temperature in arguments.temperatures:
        found = predict(prompts, arguments, temperature)
        counts = {rule: counts_of(own) for rule, own in found.items()}
        for rule, own in counts.items():
            measures = (accepted_per_block, acceptance_rate, block_efficiency)
            values = {measure.__name__: estimate(measure, own) for measure in measures}
            shares = by_position(found[rule])
            report[f"temperature_{temperature:g}_{rule}"] = {**values, "by_position": shares}
            shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
            print(f"T = {temperature:3g} {rule}: {shown}, by position {' '.join(f'{share:.3f}' for share in shares)}")
        gained = gain(counts["block"], counts["token"])
        report[f"temperature_{temperature:g}_gain_percent_block_over_token"] = gained
        print(f"T = {temperature:3g} block over token: {gained} %")
    write_report(arguments, report)


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
    cached_target, cached_drafter = (torch_model(decoder_of(own.model), context_length) for own in (target, drafter))
    return cached_target, cached_drafter, context_length, quantization


def _models(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    options = stack_options(arguments.target, arguments.drafter, arguments.block_length)
    return options["verifier"], options["drafter"]


def main() -> None:
    """Measures, predicts, prints both side by side, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=EMBEDDED)
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--block-length", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--paired", action="store_true", help="predict alone, at each of --temperatures")
    parser.add_argument("--trees", action="store_true", help="compare token trees with a chain instead")
    parser.add_argument("--ids", action="store_true", help="compare with the likeliest tokens by ids alone instead")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0], help="of --paired, --trees")
    parser.add_argument("--arms", nargs="+", default=[], help="of --trees, beside the chain; default all")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    prompts = load_prompts()[: arguments.prompts]
    if arguments.trees:
        torch.set_num_threads(1)
        write_report(arguments, compare_trees(prompts, arguments))
        return
    if arguments.paired:
        torch.set_num_threads(1)
        compare_paired(prompts, arguments)
        return
    if arguments.ids:
        torch.set_num_threads(1)
        compare_ids(prompts, arguments)
        return
    torch.set_num_threads(2)
    predicted = predict(prompts, arguments, arguments.temperature)
    results = {
        "measured": measure(prompts, arguments),
        "predicted": {rule: counts_of(own) for rule, own in predicted.items()},
    }
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
