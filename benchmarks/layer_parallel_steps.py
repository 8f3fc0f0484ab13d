"""Step times of a layer-parallel drafter.

Part `steps` of `benchmarks.layer_parallel`: a step over one more token of each sequence, in one process with one and
with two threads, and in two processes of one thread each, which share the attention; also the part of the first of two
and of four such processes alone, without exchanges and other processes, that is the time of a step if exchanges took no
time. With N = 1 in several processes, each computes all layers. Weights are random except those of the embedded drafter
of eight layers. Times are medians over all steps, ratios medians over repetitions, in each of which the settings
alternate, with 95 % intervals. `plan` is the broadcast of a step's inputs, `exchange` that of layers' outputs, both at
rank 0, including the wait for rank 1. The draft phase of a round of 5 tokens is an exact pass over 6 tokens and 4
steps; of the ordinary drafter, 5 steps.
"""

import argparse
import itertools
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.paired import Ratio, ratio_of
from benchmarks.relay import free_port
from benchmarks.report import progress
from draftwire.cli.named_models import embedded_model
from draftwire.models.cached_model import CachedModel
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.lean_decoder import LeanDecoder
from draftwire.models.loading import load_model
from draftwire.models.parallel.process_group import GroupSettings, ProcessGroup
from draftwire.models.parallel.tensor_parallel import ParallelModel, follow
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_engine import TorchEngine
from draftwire.models.torch_models import torch_model
from draftwire.options.layer_parallel.layer_groups import LayerGroups, groups_of_size, runs_in_parallel, written
from draftwire.options.layer_parallel.layer_parallel import LayerParallelDecoder, Ranks
from tools.synth.synthesis import SHAPES, ModelShape, build_target

EIGHT_LAYERS = "drafter-8-layers"
"""The embedded drafter, which has layers enough to run some of them together."""
BLOCK_LENGTH = 5
MODELS = {
    "embedded": None,
    "qwen2.5-0.5b": ModelShape(896, 4864, 24, 14, 2, 151_936, tie_word_embeddings=True),
    "llama-3.2-1b": ModelShape(2048, 8192, 16, 32, 8, 128_256, head_dim=64, tie_word_embeddings=True),
    "half-llama-3.2-1b": ModelShape(2048, 8192, 8, 32, 8, 128_256, head_dim=64, tie_word_embeddings=True),
    **{name: SHAPES[name] for name in ("tiny", "150m")},
}
CACHE_TOKENS = 4096
PROMPT_TOKENS = 40
BATCH_SIZES = (1, 4, 16)
NUM_RANKS = 2
PATIENCE_S = 600.0
"""Timeout of a rank while the other one measures alone."""
CALIBRATED_TOKENS = BLOCK_LENGTH + 1
"""Tokens of the exact pass after a fully accepted block: its tokens and the bonus token."""
PLAN, EXCHANGE = "plan", "exchange"
CALIBRATION = "calibration"


class TimedGroup(ProcessGroup):
    """A process group that times its collectives."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seconds = dict.fromkeys((PLAN, EXCHANGE), 0.0)
        self.num_exchanges = 0

    @override
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        started = time.perf_counter()
        super().broadcast(tensor, source)
        # Plans are integers, outputs of layers are floating-point.
        self._count(EXCHANGE if tensor.is_floating_point() else PLAN, started)

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        started = time.perf_counter()
        gathered = super().all_gather(tensor)
        self._count(EXCHANGE, started)
        return gathered

    def _count(self, kind: str, started: float) -> None:
        self.seconds[kind] += time.perf_counter() - started
        self.num_exchanges += kind == EXCHANGE


class SilentGroup(ProcessGroup):
    """Rank 0 of a group without communication: data of other ranks is 0."""

    def __init__(self, size: int) -> None:
        """Starts no communication."""
        self._settings = GroupSettings(0, size, "localhost:1", "cpu")

    @override
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if source:
            tensor.zero_()

    @override
    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.new_zeros(self.size, *tensor.shape)


@dataclass(slots=True)
class Times:
    """Times of one kind of step, in seconds."""

    steps: list[float] = field(default_factory=list)
    repetitions: list[float] = field(default_factory=list)
    """The median of each."""
    parts: dict[str, list[float]] = field(default_factory=lambda: {PLAN: [], EXCHANGE: []})
    num_exchanges: int = 0

    def faster_than(self, baseline: "Times") -> Ratio:
        """Returns the speed-up over other times."""
        return ratio_of(baseline.repetitions, self.repetitions)


@dataclass(frozen=True, slots=True)
class Way:
    """Processes and threads of a drafter."""

    num_ranks: int = 1
    threads: int = 1
    """Of each rank."""
    is_silent: bool = False
    """Whether rank 0 computes its part alone, without communication."""

    @property
    def in_one_process(self) -> "Way":
        """With as many threads as are used here in all."""
        return Way() if self.is_silent else Way(1, self.num_ranks * self.threads)


TWO_PROCESSES = "two processes"
WAYS = {
    "one process, 1 thread": Way(),
    "one process, 2 threads": Way(1, 2),
    TWO_PROCESSES: Way(NUM_RANKS, 1),
    "one of two ranks": Way(2, 1, is_silent=True),
    "one of four ranks": Way(4, 1, is_silent=True),
}


def with_compared(names: Sequence[str]) -> list[str]:
    """Returns ways and their baselines, in the order of `WAYS`."""
    compared = {WAYS[name].in_one_process for name in names}
    return [name for name, way in WAYS.items() if name in names or way in compared]


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of step of one setting; `kind` is how many sequences become one token longer, or `CALIBRATION`."""

    way: Way
    size: int
    kind: int | str


def load_base(name: str) -> LeanDecoder:
    """Returns the weights of one of `MODELS`, the same in every process."""
    shape = MODELS[name]
    if shape is None:
        return LeanDecoder(load_model(embedded_model(EIGHT_LAYERS), "float32").model, consumes=True)
    return LeanDecoder(build_target(shape, torch.float32, "cpu", seed=0), consumes=True)


def cached(base: LeanDecoder, groups: LayerGroups, cache_tokens: int) -> CachedModel:
    """Returns a model in this process that drafts with groups of layers; exactly if there are none."""
    drafting = LayerParallelDecoder(base, groups) if runs_in_parallel(groups) else None
    return torch_model(base, cache_tokens, drafting=drafting)


def parts_of(
    base: LeanDecoder, groups: LayerGroups, group: ProcessGroup
) -> tuple[LayerParallelDecoder, LayerParallelDecoder | None]:
    """Returns this rank's way to read exactly, and to draft if that is another. As `load_layer_parallel` makes them,
    but that all have the weights of all attention, so that settings, which share it out differently, can take turns.
    """
    ranks = Ranks(group, groups)
    exact = LayerParallelDecoder(base, groups_of_size(1, base.num_layers), ranks)
    return exact, LayerParallelDecoder(base, groups, ranks) if runs_in_parallel(groups) else None


def shared_out(base: LeanDecoder, groups: LayerGroups, group: ProcessGroup) -> ParallelModel:
    """Returns this rank's part of a model."""
    exact, drafting = parts_of(base, groups, group)
    return ParallelModel(TorchEngine(exact, drafting=drafting), CACHE_TOKENS, group=group)


def model_of(way: Way, base: LeanDecoder, groups: LayerGroups, group: ProcessGroup) -> CachedModel:
    """Returns what rank 0 drafts with."""
    if way.is_silent:
        exact, drafting = parts_of(base, groups, SilentGroup(way.num_ranks))
        return torch_model(exact, CACHE_TOKENS, drafting=drafting)
    return cached(base, groups, CACHE_TOKENS) if way.num_ranks == 1 else shared_out(base, groups, group)


def serve_rank(address: str, name: str, sizes: list[int], turns: int) -> None:
    """Main of rank 1: runs the settings in turn, as often as rank 0 measures them."""
    torch.set_num_threads(1)
    group = ProcessGroup.join(GroupSettings(1, NUM_RANKS, address, "cpu", PATIENCE_S))
    base = load_base(name)
    lone_exchange_s(group, base)
    models = [shared_out(base, groups_of_size(size, base.num_layers), group) for size in sizes]
    for model in models * turns:
        follow(model)
    group.leave()


def measure_steps(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one model in all settings, which alternate; the first turn is not counted."""
    address = f"127.0.0.1:{free_port()}"
    context = multiprocessing.get_context("spawn")
    turns = arguments.repetitions + 1
    rank = (address, name, arguments.sizes, turns if TWO_PROCESSES in arguments.ways else 0)
    other = context.Process(target=serve_rank, args=rank, daemon=True)
    other.start()
    group = TimedGroup.join(GroupSettings(0, NUM_RANKS, address, "cpu", PATIENCE_S))
    assert isinstance(group, TimedGroup)
    base = load_base(name)
    exchange_s = lone_exchange_s(group, base)
    groups = {size: groups_of_size(size, base.num_layers) for size in arguments.sizes}
    ways = [WAYS[way] for way in arguments.ways]
    models = {(way, size): model_of(way, base, own, group) for way in ways for size, own in groups.items()}
    times: dict[Cell, Times] = defaultdict(Times)
    texts: dict[CachedModel, list[CachedSequence]] = {}
    for number in progress(range(turns), name):
        for (way, size), model in models.items():
            torch.set_num_threads(way.threads)
            if model not in texts:
                texts[model] = open_texts(model)
            found = {
                kind: timed(model, texts[model], kind, group, arguments.seconds) for kind in (*BATCH_SIZES, CALIBRATION)
            }
            if isinstance(model, ParallelModel):
                model.stop()
            for kind, own in found.items() if number else ():
                _add(times[Cell(way, size, kind)], own)
    group.leave()
    other.join(PATIENCE_S)
    rows = [row(times, way, size, groups[size]) for way, size in itertools.product(arguments.ways, arguments.sizes)]
    print(f"  an exchange that nothing else comes between: {exchange_s * 1e3:.3f} ms")
    return {f"steps of {name}": rows, f"one exchange alone, ms, of {name}": exchange_s * 1e3}


@torch.inference_mode()
def lone_exchange_s(group: ProcessGroup, base: LeanDecoder) -> float:
    """Returns the time of one exchange of one token between otherwise idle ranks; call on all ranks."""
    hidden, _ = base.embed(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    times = []
    for _ in range(200):
        started = time.perf_counter()
        group.all_gather(hidden.unsqueeze(0))
        times.append(time.perf_counter() - started)
    return median(times)


def open_texts(model: CachedModel) -> list[CachedSequence]:
    """Returns the sequences of the largest batch. Their text is the same, and computed once."""
    ids = list(range(1, PROMPT_TOKENS + 1))
    first = model.cache.open()
    model.read([Reading(first, ids, 0)])
    model.cache.publish(first, ids)
    others = [model.cache.open(ids) for _ in range(max(BATCH_SIZES) - 1)]
    model.read([Reading(sequence, ids[sequence.length :], 0) for sequence in others])
    return [first, *others]


@torch.inference_mode()
def timed(model: CachedModel, texts: list[CachedSequence], kind: int | str, group: TimedGroup, seconds: float) -> Times:
    """Returns times of at least three steps over the same tokens."""
    sequences = texts[:kind] if isinstance(kind, int) else texts[:1]
    work = _calibration(model, sequences[0]) if kind == CALIBRATION else _extension(model, sequences)
    times = Times()
    began = time.perf_counter()
    while len(times.steps) < 3 or time.perf_counter() - began < seconds:
        before, num_exchanges = dict(group.seconds), group.num_exchanges
        started = time.perf_counter()
        work()
        times.steps.append(time.perf_counter() - started)
        for part, own in times.parts.items():
            own.append(group.seconds[part] - before[part])
        times.num_exchanges = group.num_exchanges - num_exchanges
        for sequence in sequences:
            model.cache.truncate(sequence, PROMPT_TOKENS)
    return times


def _extension(model: CachedModel, sequences: list[CachedSequence]) -> Callable[[], object]:
    token_ids = torch.arange(len(sequences))
    return lambda: model.extend(sequences, token_ids)


def _calibration(model: CachedModel, sequence: CachedSequence) -> Callable[[], object]:
    reading = Reading(sequence, list(range(CALIBRATED_TOKENS)), 1)
    return lambda: model.read([reading])


def _add(times: Times, more: Times) -> None:
    """Adds a repetition but for its first step, which is slower."""
    times.steps += more.steps[1:]
    times.repetitions.append(median(more.steps[1:]))
    for part, own in times.parts.items():
        own += more.parts[part][1:]
    times.num_exchanges = more.num_exchanges


def row(times: dict[Cell, Times], name: str, size: int, groups: LayerGroups) -> dict[str, Any]:
    """Returns a setting's times in milliseconds and its speed-ups over others; prints the main part."""
    way = WAYS[name]
    own = {kind: times[Cell(way, size, kind)] for kind in (*BATCH_SIZES, CALIBRATION)}
    old, in_one_process = times[Cell(way, 1, 1)], times[Cell(way.in_one_process, 1, 1)]
    first = own[CALIBRATION] if runs_in_parallel(groups) else own[1]
    step, alone, phase = own[1].faster_than(old), own[1].faster_than(in_one_process), phase_gain(old, own[1], first)
    result = {
        "way": name,
        "size": size,
        "groups": written(groups),
        **{f"batch_{kind}_ms" if kind != CALIBRATION else "calibration_ms": _ms(own[kind].steps) for kind in own},
        **{f"batch_{kind}_faster_than_1": own[kind].faster_than(times[Cell(way, 1, kind)]) for kind in BATCH_SIZES},
        "batch_1_faster_than_1_in_one_process": alone,
        "draft_phase_faster_than_1": phase,
        "draft_phase_faster_than_1_if_calibrating_were_a_step": phase_gain(old, own[1], old),
    }
    if way.num_ranks > 1 and not way.is_silent:
        result |= {f"{part}_ms": _ms(own[1].parts[part]) for part in (PLAN, EXCHANGE)}
        result |= {"exchanges": own[1].num_exchanges, "calibration_exchange_ms": _ms(own[CALIBRATION].parts[EXCHANGE])}
    shown = " ".join(f"{_ms(times.steps):8.3f}" for times in own.values())
    print(f"  {name:<22} N = {size}: {shown} ms, step {step}, than in one process {alone}, draft phase {phase}")
    return result


def phase_gain(old: Times, step: Times, first: Times) -> Ratio:
    """Returns the speed-up of the draft phase of a round over the ordinary drafter's.

    Args:
        old: steps of the ordinary drafter, one for each draft token.
        step: approximate steps, after the first.
        first: the exact pass over the committed tokens.
    """
    runs = zip(first.repetitions, step.repetitions, strict=True)
    phases = [begun + (BLOCK_LENGTH - 1) * after for begun, after in runs]
    return ratio_of([BLOCK_LENGTH * before for before in old.repetitions], phases)


def _ms(seconds: Sequence[float]) -> float:
    return median(seconds) * 1e3
