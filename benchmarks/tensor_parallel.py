"""Host cost per step of tensor parallelism over two processes, on one machine's CPU.

    python -m benchmarks.tensor_parallel --output benchmarks/results/tensor_parallel.json

The models are so small that computing them takes no time. Rank 0 alternates: a step with the whole model in its own
process, then one with both processes. The difference is the cost of communication, split as measured at rank 0, waiting
for rank 1 included:

    plan        broadcasting the step's inputs
    all-reduce  the sums after attention and MLP, two per layer
    gather      bringing the columns of the logits together
    rest        everything else: the computing of rank 0's half, and building the plan

Each number is a median over the steps of all repetitions, in microseconds. On GPUs, the sums and the gather are NCCL's.
"""

import argparse
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar
from typing_extensions import override

from benchmarks.report import progress, write_report
from draftwire.cli.named_models import embedded_model
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.loading import load_model
from draftwire.models.parallel.process_group import GroupSettings, ProcessGroup
from draftwire.models.parallel.sharded_loading import ModelSource, load_parallel_target
from draftwire.models.parallel.tensor_parallel import ParallelModel, follow
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_engine import TorchEngine
from draftwire.models.torch_models import torch_model

PLAN, SUM, GATHER = "plan", "all-reduce", "gather"
CACHE_TOKENS = 4096
PROMPT_TOKENS = 40
SIZE = 2


class TimedGroup(ProcessGroup):
    """A process group that times its collectives."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.seconds = dict.fromkeys((PLAN, SUM, GATHER), 0.0)
        self.num_sums = 0

    @override
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        started = time.perf_counter()
        super().broadcast(tensor, source)
        self.seconds[PLAN] += time.perf_counter() - started

    @override
    def all_reduce(self, tensor: Tensor) -> None:
        started = time.perf_counter()
        super().all_reduce(tensor)
        self.seconds[SUM] += time.perf_counter() - started
        self.num_sums += 1

    @override
    def gather_columns(self, tensor: Tensor) -> Tensor:
        started = time.perf_counter()
        result = super().gather_columns(tensor)
        self.seconds[GATHER] += time.perf_counter() - started
        return result


@dataclass
class Steps:
    """Times of steps of one shape, in seconds."""

    whole: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {PLAN: [], SUM: [], GATHER: []})
    num_sums: int = 0

    def report(self) -> dict[str, float]:
        """Returns medians in microseconds."""

        def median_us(seconds: Sequence[float]) -> float:
            return statistics.median(seconds) * 1e6

        known = [sum(times) for times in zip(*self.parts.values(), strict=True)]
        rest = [step - part for step, part in zip(self.spread, known, strict=True)]
        cost = [step - whole for step, whole in zip(self.spread, self.whole, strict=True)]
        return {
            "one_process_us": median_us(self.whole),
            "two_processes_us": median_us(self.spread),
            "cost_us": median_us(cost),
            "plan_us": median_us(self.parts[PLAN]),
            "all_reduces_us": median_us(self.parts[SUM]),
            "one_all_reduce_us": median_us(self.parts[SUM]) / self.num_sums,
            "gather_us": median_us(self.parts[GATHER]),
            "rest_us": median_us(rest),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--shapes", nargs="+", default=["1x1", "4x5", "16x5"], help="sequences x tokens of each")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    results = {}
    for layers in progress(arguments.layers, "layers"):
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder, layers)
            for shape, steps in measured(folder, arguments).items():
                results[f"{layers} layers, {shape} tokens"] = steps.report()
    write_report(arguments, {"microseconds": results})


def save_model(folder: str, layers: int) -> None:
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded_model("target")).save_pretrained(folder)


def measured(folder: str, arguments: argparse.Namespace) -> dict[str, Steps]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    other = multiprocessing.get_context("spawn").Process(target=serve_rank, args=(1, address, folder), daemon=True)
    other.start()
    group = TimedGroup.join(GroupSettings(0, SIZE, address, "cpu"))
    assert isinstance(group, TimedGroup)
    spread = load(group, folder)
    whole = torch_model(decoder_of(load_model(folder, "float32").model), CACHE_TOKENS)
    found = {shape: Steps() for shape in arguments.shapes}
    for _ in range(arguments.repetitions):
        for shape, steps in found.items():
            sequences, tokens = map(int, shape.split("x"))
            measure(group, (whole, spread), (sequences, tokens), arguments.steps, steps)
    spread.stop()
    group.leave()
    other.join(30)
    return found


def load(group: ProcessGroup, folder: str) -> ParallelModel:
    decoder = load_parallel_target(ModelSource(folder, "float32"), group).decoder
    return ParallelModel(TorchEngine(decoder), CACHE_TOKENS, group=group)


def serve_rank(rank: int, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    group = ProcessGroup.join(GroupSettings(rank, SIZE, address, "cpu"))
    follow(load(group, folder))
    group.leave()


def measure(
    group: TimedGroup, models: tuple[CachedModel, CachedModel], shape: tuple[int, int], count: int, steps: Steps
) -> None:
    """Adds the times of steps over the same tokens."""
    whole, spread = models
    texts = [open_texts(model, shape[0]) for model in models]
    for number in range(count + 20):
        alone = step_seconds(whole, texts[0], shape[1])
        before, num_sums = dict(group.seconds), group.num_sums
        together = step_seconds(spread, texts[1], shape[1])
        if number < 20:  # the first ones are slower
            continue
        steps.whole.append(alone)
        steps.spread.append(together)
        steps.num_sums = group.num_sums - num_sums
        for name, times in steps.parts.items():
            times.append(group.seconds[name] - before[name])
    for model, sequences in zip(models, texts, strict=True):
        for sequence in sequences:
            model.cache.close(sequence)


def open_texts(model: CachedModel, count: int) -> list[CachedSequence]:
    sequences = [model.cache.open() for _ in range(count)]
    model.read([Reading(sequence, [1] * PROMPT_TOKENS, 0) for sequence in sequences])
    return sequences


def step_seconds(model: CachedModel, sequences: list[CachedSequence], num_tokens: int) -> float:
    readings = [Reading(sequence, [2] * num_tokens, num_tokens) for sequence in sequences]
    started = time.perf_counter()
    model.read(readings)
    seconds = time.perf_counter() - started
    for sequence in sequences:
        model.cache.truncate(sequence, PROMPT_TOKENS)
    return seconds


if __name__ == "__main__":
    main()
