"""Detection delay of the drafter audit for drafters that do not draw from what they declare, and its cost.

    python -m benchmarks.audit --output benchmarks/results/audit.json

The embedded pair continues prompts at temperature 1. For each drafted position the target's distribution is recorded
and the one that the drafter declared (its 64 likeliest tokens). Drafters are simulated at random positions of that
recording: tokens are drawn from the drafter's actual distribution, the sums are `audit_sums` of the declared one. A
life ends at the alarm or after `--max-positions`. Only draft tokens whose distribution is not one-hot are counted.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from benchmarks.rules import Shape, Step
from draftwire.audit import AuditSums, audit_sums
from draftwire.audit.sequential import DrafterAudit
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.local_loop import LocalRun, speculate
from draftwire.method.distributions import DenseRows, SparseRows
from draftwire.models.decoders import decoder_of
from draftwire.models.loading import load_model
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import BlockBatch

SUPPORT = 64
BLOCK = 4
"""Draft tokens that are reported together."""
CHUNK = 4096
"""Draft tokens that are simulated at a time."""


@dataclass(frozen=True, slots=True)
class Places:
    """Recorded drafted positions of real texts, in order."""

    target: Tensor
    """`[places, vocab] float32`."""
    token_ids: Tensor
    """`[places, SUPPORT] int64`."""
    probs: Tensor
    """`[places, SUPPORT] float64`: the declared distribution of an honest drafter; 0 in unused entries."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """Declared and actual distributions of a simulated drafter."""

    token_ids: Tensor
    """`[places, SUPPORT] int64`."""
    declared: Tensor
    """`[places, SUPPORT] float64`."""
    drawn_from: Tensor
    """`[places, SUPPORT] float64`: 0 where nothing is declared."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Quantiles of the number of draft tokens until the alarm."""

    num_lives: int
    num_flagged: int
    median: float | None
    """None if fewer were flagged."""
    percentile_95: float | None


class Reports:
    """Precomputed audit sums of every token that a drafter can draw, at every position."""

    def __init__(self, places: Places, drafter: Drafter) -> None:
        place, entry = drafter.drawn_from.nonzero(as_tuple=True)
        declared = SparseRows(drafter.token_ids, drafter.declared, places.target.shape[1])
        tokens = drafter.token_ids[place, entry]
        table: list[AuditSums] = []
        for rows, drawn in zip(place.split(16384), tokens.split(16384), strict=True):
            own, lengths = rows.unsqueeze(1), torch.ones_like(rows)
            table += audit_sums(
                BlockBatch(places.target, declared, drawn.unsqueeze(1), lengths, own.expand(-1, 2), own)
            )
        # One-hot distributions carry no information.
        used = np.array([sums.num_positions for sums in table]) > 0
        self.table = np.array([astuple(sums) for sums in table])[used]
        law = drafter.drawn_from[place, entry].numpy()[used]
        self.cumulated: NDArray[np.float64] = np.cumsum(law) / law.sum()

    def draw(self, num_positions: int, generator: np.random.Generator) -> list[AuditSums]:
        """Draws blocks and returns their audit sums."""
        rows = np.searchsorted(self.cumulated, generator.random(num_positions // BLOCK * BLOCK), side="right")
        sums = self.table[rows.clip(max=len(self.table) - 1)].reshape(-1, BLOCK, 5).sum(axis=1)
        return [AuditSums(int(count), *rest) for count, *rest in sums.tolist()]

    def live(self, audit: DrafterAudit, num_positions: int, generator: np.random.Generator) -> int | None:
        """Drafts until the alarm and returns how many tokens that took; None if there was none."""
        seen = 0
        while seen < num_positions:
            for sums in self.draw(min(CHUNK, num_positions - seen), generator):
                audit.add(sums)
                seen += BLOCK
                if audit.alarm is not None:
                    return seen
        return None


def collect(prompts: list[str], max_tokens: int) -> tuple[Places, float]:
    """Continues the prompts; returns the positions, and the share of them that is not one-hot."""
    options = stack_options(EMBEDDED, None, BLOCK)
    target, drafter = (load_model(options[name]["model"]) for name in ("verifier", "drafter"))
    context_length = drafter.description.context_length
    cached_target = torch_model(decoder_of(target.model), context_length)
    strategy = LanguageModelDrafter(torch_model(decoder_of(drafter.model), context_length), context_length)
    tokenizer = AutoTokenizer.from_pretrained(options["verifier"]["model"])
    targets, drafts = [], []
    for seed, prompt in progress(list(enumerate(prompts)), "collecting"):
        run = LocalRun(SamplingParams(), max_tokens, BLOCK, "block", seed)
        for done in speculate(cached_target, strategy, tokenizer(prompt)["input_ids"], run):
            length = int(done.blocks.lengths[0])
            if length:
                targets.append(done.blocks.padded_target_probs()[0, :length].to(torch.float32).clone())
                drafts.append(done.blocks.padded_draft_probs()[0, :length].to(torch.float64).clone())
    best = torch.cat(drafts).topk(SUPPORT)
    probs = best.values / best.values.sum(dim=1, keepdim=True)
    has_choice = ((probs > 0.0).sum(dim=1) > 1).to(torch.float64)
    return Places(torch.cat(targets), best.indices, probs), float(has_choice.mean())


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=1, keepdim=True)


def honest(places: Places) -> Drafter:
    return Drafter(places.token_ids, places.probs, places.probs)


def draws_at(temperature: float) -> Callable[[Places], Drafter]:
    """Declares temperature 1."""
    return lambda places: Drafter(places.token_ids, places.probs, normalised(places.probs ** (1.0 / temperature)))


def declares_at(temperature: float) -> Callable[[Places], Drafter]:
    """Draws at temperature 1."""
    return lambda places: Drafter(places.token_ids, normalised(places.probs ** (1.0 / temperature)), places.probs)


def takes_the_best(places: Places) -> Drafter:
    drawn_from = torch.zeros_like(places.probs).scatter_(1, places.probs.argmax(dim=1, keepdim=True), 1.0)
    return Drafter(places.token_ids, places.probs, drawn_from)


def ignores_weights(places: Places) -> Drafter:
    return Drafter(places.token_ids, places.probs, normalised((places.probs > 0.0).to(torch.float64)))


def repeats_a_token(places: Places) -> Drafter:
    """Draws the token that is possible at most positions wherever it is possible."""
    favourite = places.token_ids[places.probs > 0.0].mode().values
    is_it = (places.token_ids == favourite) & (places.probs > 0.0)
    drawn_from = torch.where(is_it.any(dim=1, keepdim=True), is_it.to(torch.float64), places.probs)
    return Drafter(places.token_ids, places.probs, drawn_from)


def declares_the_place_before(places: Places) -> Drafter:
    """Declares the previous position's distribution and draws a token that both share, or else as declared."""
    dense = torch.zeros(places.target.shape, dtype=torch.float64).scatter_(1, places.token_ids, places.probs)
    token_ids, declared = places.token_ids.roll(1, 0), places.probs.roll(1, 0)
    common = torch.where(declared > 0.0, dense.gather(1, token_ids), 0.0)
    drawn_from = torch.where(common.sum(dim=1, keepdim=True) > 0.0, common, declared)
    return Drafter(token_ids, declared, normalised(drawn_from))


DISHONEST: dict[str, Callable[[Places], Drafter]] = {
    **{f"draws at temperature {t}, declares 1": draws_at(t) for t in (0.7, 0.9, 0.95, 1.05, 1.1, 1.4)},
    **{f"draws at temperature 1, declares {t}": declares_at(t) for t in (0.7, 0.9, 1.1, 1.4)},
    "takes the likeliest token, declares a softmax": takes_the_best,
    "draws all tokens of the support alike": ignores_weights,
    "repeats one token wherever it can": repeats_a_token,
    "declares the distribution of the place before": declares_the_place_before,
}

LATE = {f"draws at temperature {t} after an honest start": draws_at(t) for t in (0.7, 0.9, 0.95)}


def delay(lives: list[int | None]) -> Delay:
    """Returns the quantiles; one that falls among the lives without an alarm is None."""
    flagged = sorted(life for life in lives if life is not None)

    def quantile(share: float) -> float | None:
        index = int(np.ceil(share * len(lives))) - 1
        return float(flagged[index]) if index < len(flagged) else None

    return Delay(len(lives), len(flagged), quantile(0.5), quantile(0.95))


def simulate(places: Places, arguments: argparse.Namespace) -> dict[str, object]:
    """Runs all drafters."""
    generator = np.random.default_rng(0)
    never_wrong, runs, longest = Reports(places, honest(places)), range(arguments.runs), arguments.max_positions
    delays: dict[str, Delay] = {}
    for name, drafter in progress(DISHONEST.items(), "dishonest drafters"):
        reports = Reports(places, drafter(places))
        delays[name] = delay([reports.live(DrafterAudit(), longest, generator) for _ in runs])
    false_alarms = 0
    for name, drafter in progress(LATE.items(), "honest starts"):
        reports, lives = Reports(places, drafter(places)), []
        for _ in runs:
            audit = DrafterAudit()
            false_alarms += never_wrong.live(audit, arguments.honest_start, generator) is not None
            lives.append(reports.live(audit, longest, generator))
        delays[name] = delay(lives)
    flagged = 0
    for _ in progress(range(arguments.honest_runs), "honest drafters"):
        flagged += never_wrong.live(DrafterAudit(), arguments.honest_positions, generator) is not None
    return {
        "tokens_until_flagged": delays,
        "false_alarms": {
            "of_honest_drafters": flagged,
            "num_honest_drafters": arguments.honest_runs,
            "tokens_of_each": arguments.honest_positions,
            "of_honest_starts": false_alarms,
        },
    }


def microseconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):  # the first step is slower
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times[1:]) * 1e6


@torch.inference_mode()
def cost(batch_size: int, shape: Shape) -> dict[str, float]:
    """Returns what auditing a step costs on one thread, besides the softmax over the same rows of the target."""
    step = Step(shape, batch_size, "cpu")
    probs = step.logits.softmax(-1)
    starts = [index * (shape.block_length + 1) for index in range(batch_size)]
    sparse = BlockBatch.packed(probs, step.drafts, step.tokens, starts)
    rows = [DenseRows(draft.dense()) for draft in step.drafts]
    dense = BlockBatch.packed(probs, rows, step.tokens, starts)
    audit, sums = DrafterAudit(), AuditSums(4, 0.01, 0.3, -0.01, 2.0)

    def add_often(times: int) -> None:
        for _ in range(times):
            audit.add(sums)

    of_softmax = microseconds(lambda: torch.softmax(step.logits, -1), 20)
    of_sparse = microseconds(lambda: audit_sums(sparse), 200)
    return {
        "softmax_us": of_softmax,
        "audit_sums_sparse_us": of_sparse,
        "audit_sums_sparse_percent_of_softmax": of_sparse / of_softmax * 100.0,
        "audit_sums_dense_us": microseconds(lambda: audit_sums(dense), 10),
        "add_us": microseconds(lambda: add_often(100), 50) / 100.0,
    }


def main() -> None:
    """Collects, simulates, measures, prints, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--max-positions", type=int, default=200_000)
    parser.add_argument("--honest-start", type=int, default=200_000)
    parser.add_argument("--honest-runs", type=int, default=200)
    parser.add_argument("--honest-positions", type=int, default=50_000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = cost(16, Shape(block_length=4, support=32))
    places, share = collect(load_prompts()[: arguments.prompts], arguments.max_tokens)
    simulated = simulate(places, arguments)
    own = {"alpha": DrafterAudit().alpha, "window": DrafterAudit().window}
    collected = {"places": len(places.probs), "share_with_a_choice": share}
    write_report(arguments, {**own, **collected, **simulated, "cost_of_16_blocks_of_4": measured})


if __name__ == "__main__":
    main()
