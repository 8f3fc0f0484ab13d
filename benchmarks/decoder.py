"""Time of a forward pass beside the time that reading its weights takes, by number of sessions and text length.

    python -m benchmarks.decoder --sessions 1 4 8 16 --output benchmarks/results/decoder.json

The decoder runs alone in this process, with random weights of a shape of `tools.synth`; each session reads one
token in a step. A small step is limited by the memory: it has to read every weight once. How long that takes is
measured beside every series of steps, by summing up an array of the same size. The operations of a step are listed as
torch's profiler counts them, without what they call. `copied_mb_per_token` are keys and values that a step copies
before it attends to them; `attended_mb_per_token` are all of them, which a step that gathers would copy.
"""

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from benchmarks.paired import ratio_of
from benchmarks.report import write_report
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_storage import KvStorage
from draftwire.models.packing import pack
from draftwire.models.sequence_model import Reading, Segment
from draftwire.models.torch_models import torch_model
from tools.synth.synthesis import SHAPES

DTYPES = ("float32", "bfloat16")
NUM_LISTED = 12
"""Operations that a profile lists."""


class Sessions:
    """Texts of equal length, each of which a step extends by a token."""

    def __init__(self, model: CachedModel, count: int, length: int) -> None:
        """Opens `count` texts of `length` tokens, with whatever keys and values are in the memory."""
        self._model, self._length = model, length
        self._sequences = [model.cache.open() for _ in range(count)]
        for sequence in self._sequences:
            model.cache.append(sequence, length)

    def step(self) -> None:
        """Reads a token of each text, and forgets it again, so that all steps are alike."""
        self._model.read([Reading(sequence, [sequence.length % 97], 1) for sequence in self._sequences])
        for sequence in self._sequences:
            self._model.cache.truncate(sequence, self._length)

    def copied_bytes(self) -> int:
        """Keys and values that a step gathers, in all layers, padding included."""
        for sequence in self._sequences:
            self._model.cache.append(sequence, 1)
        storage = storage_of(self._model)
        segments = [Segment(sequence, 1) for sequence in self._sequences]
        groups = pack(segments, storage, self._model.device).groups
        for sequence in self._sequences:
            self._model.cache.truncate(sequence, self._length)
        return sum(group.slots.numel() for group in groups) * storage.token_bytes * len(storage._layers)

    def close(self) -> None:
        """Frees the texts."""
        for sequence in self._sequences:
            self._model.cache.close(sequence)


def storage_of(model: CachedModel) -> KvStorage:
    """Returns the tensors of a model's cache."""
    assert isinstance(model._storage, KvStorage)
    return model._storage


@torch.inference_mode()
def fill(model: CachedModel) -> None:
    """Fills the KV cache with small random numbers: to read long texts would take minutes."""
    sequence = model.cache.open()
    model.read([Reading(sequence, [1], 1)])  # which allocates it
    model.cache.close(sequence)
    for layer in storage_of(model)._layers.values():
        for tensor in layer:
            tensor.normal_(std=0.1)


def milliseconds(work: Any, count: int) -> list[float]:
    """Returns the times of `count` calls."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def by_operation(work: Any, count: int) -> dict[str, dict[str, float]]:
    """Returns for the costliest operations, of `count` calls: milliseconds and calls per call of `work`."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(count):
            work()
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return {
        event.key: {"ms": event.self_cpu_time_total / 1e3 / count, "calls": event.count / count}
        for event in events[:NUM_LISTED]
    }


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="370m")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--length", type=int, default=64, help="tokens of each text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="per series")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="list the operations of a step")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape, dtype = SHAPES[arguments.shape], getattr(torch, arguments.dtype)
    network = AutoModelForCausalLM.from_config(shape.config(shape.num_layers, dtype), dtype=dtype).eval()
    embedding = network.get_input_embeddings().weight
    is_tied = embedding is network.get_output_embeddings().weight
    num_bytes = sum(weight.nbytes for weight in network.parameters()) - (0 if is_tied else embedding.nbytes)
    weights = torch.ones(num_bytes // 4)
    model = torch_model(
        decoder_of(network, "lean", consumes=True), 2 * max(arguments.sessions) * (arguments.length + 32)
    )
    fill(model)
    reads: dict[int, list[float]] = defaultdict(list)
    steps: dict[int, list[float]] = defaultdict(list)
    copied: dict[int, int] = {}
    operations = {}
    for _ in range(arguments.repetitions):
        for count in arguments.sessions:
            sessions = Sessions(model, count, arguments.length)
            sessions.step()
            copied[count] = sessions.copied_bytes()
            reads[count].append(statistics.median(milliseconds(weights.sum, 3)))
            steps[count].append(statistics.median(milliseconds(sessions.step, arguments.steps)))
            if arguments.profile and count not in operations:
                operations[count] = by_operation(sessions.step, arguments.steps)
            sessions.close()
    storage = storage_of(model)
    attended_bytes = (arguments.length + 1) * storage.token_bytes * len(storage._layers)
    read_ms = statistics.median([each for times in reads.values() for each in times])
    write_report(
        arguments,
        {
            "million_parameters_read": num_bytes / 1e6 / embedding.itemsize,
            "gigabytes_per_second": num_bytes / read_ms / 1e6,
            "attended_mb_per_token": attended_bytes / 1e6,
            "steps": {
                f"{count} sessions": {
                    "step_ms": statistics.median(steps[count]),
                    "reading_ms": statistics.median(reads[count]),
                    "ratio": ratio_of(steps[count], reads[count]),
                    "copied_mb_per_token": copied[count] / count / 1e6,
                    **({"operations": operations[count]} if count in operations else {}),
                }
                for count in arguments.sessions
            },
        },
    )


if __name__ == "__main__":
    main()
