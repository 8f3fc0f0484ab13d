"""Cost of verification: from the target's logits to the decision, relative to `log_softmax` over the same logits.

    python -m benchmarks.rules --output benchmarks/results/rules.json

A case is a batch of blocks of 8 draft tokens with sparse draft distributions over the vocabulary of a large model.
Timed is all work of a verifier after its forward pass: processing the logits, the random numbers, the rule, the extra
token. Every time is paired with one of `log_softmax` right before it, on the same logits; medians of the ratios are
reported, and of the ratio to a `log_softmax` that writes into memory which is there already (a large fresh tensor costs
more than the arithmetic).
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.paired import ratio_of
from benchmarks.report import write_report
from draftwire.method.distributions import DraftRows, SparseRows
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.sampling import Span, is_distribution, probabilities_of_spans
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES, BlockBatch, KeyedNoise, verify

CASES = {
    "block": ("block", SamplingParams(0.7)),
    "token": ("token", SamplingParams(0.7)),
    "typical": ("typical", SamplingParams(0.7)),
    "coupled": ("coupled", SamplingParams(0.7)),
    "block, temperature 1": ("block", SamplingParams()),
    "block, min-p 0.05": ("block", SamplingParams(0.7, min_p=0.05)),
    "block, top-k 50": ("block", SamplingParams(0.7, top_k=50)),
    "block, top-p 0.95": ("block", SamplingParams(0.7, top_p=0.95)),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the blocks."""

    vocab_size: int = 151_936
    block_length: int = 8
    support: int = 32
    """Entries of each draft distribution."""


class Step:
    """The blocks of one step, and their logits."""

    def __init__(self, shape: Shape, batch_size: int, device: str, made_on: str = "cpu") -> None:
        """Makes blocks whose drafts resemble the target, the same on every device unless they are made elsewhere than
        on a CPU, which for many blocks takes long.
        """
        generator = torch.Generator(made_on).manual_seed(batch_size)
        length, vocab_size, support = shape.block_length, shape.vocab_size, shape.support
        self.batch_size, self.length, self.device = batch_size, length, torch.device(device)
        size = (batch_size * (length + 1), vocab_size)
        order = torch.rand(size, generator=generator, device=made_on).argsort(dim=1).to(torch.float32)
        logits = -order.add_(1.0).log_().mul_(1.2)  # as in text: the r-th likeliest of all tokens has mass r^-1.2
        rows = torch.arange(len(logits), device=made_on).reshape(batch_size, length + 1)[:, :-1].flatten()
        noise = torch.randn(len(rows), vocab_size, generator=generator, device=made_on)
        noisy = logits[rows] / 0.7 + 0.5 * noise
        best = noisy.topk(support)
        probs = best.values.softmax(-1)
        drawn = torch.multinomial(probs, 1, generator=generator)
        self.tokens = best.indices.gather(1, drawn).reshape(batch_size, length).tolist()
        self.drafts: list[DraftRows] = [
            SparseRows(ids, weights, vocab_size)
            for ids, weights in zip(best.indices.cpu().split(length), probs.cpu().split(length), strict=True)
        ]
        self.logits = logits.to(self.device)
        self.buffer = torch.empty_like(self.logits)
        self.keys = [DrawKey(bytes([index] * KEY_BYTES), 0, 0) for index in range(batch_size)]

    def decide(self, rule: str, params: SamplingParams) -> list[list[int]]:
        """Runs a verifier's work after its forward pass; overwrites the buffer.

        Returns:
            Accepted draft tokens and extra token of each block.
        """
        probs = probabilities_of_spans(self.buffer, [Span(params, self.length + 1)] * self.batch_size)
        assert bool(is_distribution(probs).all())
        starts = [index * (self.length + 1) for index in range(self.batch_size)]
        blocks = BlockBatch.packed(probs, self.drafts, self.tokens, starts)
        noise = KeyedNoise(self.keys, [100] * self.batch_size, self.device)
        outcome = verify(RULES[rule], blocks, noise)
        decisions: list[list[int]] = torch.stack([outcome.num_accepted, outcome.extra_tokens], dim=1).tolist()
        return decisions

    def decide_afresh(self, rule: str, params: SamplingParams) -> list[list[int]]:
        """Returns decisions about the logits as they were made."""
        self.buffer.copy_(self.logits)
        return self.decide(rule, params)

    def timed(self, work: Callable[[], object]) -> float:
        """Returns the time of a call on fresh logits, in seconds."""
        self.buffer.copy_(self.logits)
        self._synchronize()
        started = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@torch.inference_mode()
def measure(shape: Shape, batch_size: int, device: str, repeats: int) -> dict[str, object]:
    """Returns the times of one batch size."""
    step = Step(shape, batch_size, device)
    spare: Tensor = torch.empty_like(step.logits)
    times: dict[str, list[float]] = {name: [] for name in CASES}
    plain: dict[str, list[float]] = {name: [] for name in CASES}
    in_place: dict[str, list[float]] = {name: [] for name in CASES}
    accepted: dict[str, float] = {}
    for name, (rule, params) in CASES.items():
        for _ in range(repeats + 1):  # the first call is slower
            plain[name].append(step.timed(lambda: torch.log_softmax(step.buffer, -1)))
            in_place[name].append(step.timed(lambda: torch.log_softmax(step.buffer, -1, out=spare)))
            times[name].append(step.timed(partial(step.decide, rule, params)))
    for name, (rule, params) in CASES.items():
        accepted[name] = sum(count for count, _ in step.decide_afresh(rule, params)) / batch_size
    return {
        name: {
            "milliseconds": median(times[name][1:]) * 1e3,
            "ratio_to_log_softmax": ratio_of(times[name][1:], plain[name][1:]),
            "ratio_to_log_softmax_into_given_memory": ratio_of(times[name][1:], in_place[name][1:]),
            "accepted": accepted[name],
        }
        for name in CASES
    }


def main() -> None:
    """Measures, prints, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--block-length", type=int, default=8)
    parser.add_argument("--support", type=int, default=32)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = Shape(arguments.vocab_size, arguments.block_length, arguments.support)
    results = {
        f"batch_{size}": measure(shape, size, arguments.device, arguments.repeats) for size in arguments.batch_sizes
    }
    write_report(arguments, {"threads": arguments.threads, **results})


if __name__ == "__main__":
    main()
