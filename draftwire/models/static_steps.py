"""Steps of a few tokens per sequence in recurring shapes, replayed by CUDA graphs.

Decoding a token with a large model takes hundreds of small kernels, and launching them one by one takes longer than
running them. A CUDA graph launches all of them at once, but always on the same memory in the same shapes. So the
numbers of sequences, tokens per sequence and keys are rounded up to recurring sizes. Padding repeats the last real
token of a row, or the last row, so it only rewrites the same values. Steps that padding would enlarge many times, such
as one long text among short ones, do not fit and run without static steps.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.method.devices import upload
from draftwire.models.decoder import Decoder
from draftwire.models.kv_cache import slots_of
from draftwire.models.kv_storage import KvStorage
from draftwire.models.packing import laid_out_trees
from draftwire.models.paged_attention import Masks, PackedStep, SegmentGroup, Trees
from draftwire.models.sequence_model import Segment

MOST_QUERIES = 32
"""Upper bound of new tokens per sequence; prefill does not use static steps."""
MOST_TREE_QUERIES = 80
"""The same for sequences with token trees: 64 nodes and some committed tokens."""
EXACT_QUERIES = 8
"""Up to this many queries, as draft blocks have, are not rounded; more are rounded up to powers of 2."""
QUERIES_STEP = 16
"""More than `MOST_QUERIES` are rounded up to multiples of this."""
LEAST_KEYS = 256
"""Lower bound of keys per row. More are rounded up to powers of 2."""
MOST_PADDING = 4
"""Upper bound of padded over real keys, beyond `LEAST_KEYS` in each row."""
MOST_SHAPES = 96
"""Number of shapes that are kept; the least recently used is evicted."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes that a step is rounded up to."""

    rows: int
    queries: int
    keys: int
    nodes: int = 0
    """Nodes of trees; 0 if no sequence has one."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "StepShape":
        """Returns the shape for some segments."""
        longest = max(segment.sequence.length for segment in segments)
        most = max(segment.num_tokens for segment in segments)
        if most > MOST_QUERIES:
            queries = -(-most // QUERIES_STEP) * QUERIES_STEP
        else:
            queries = most if most <= EXACT_QUERIES else _power_of_two(most)
        keys, nodes = max(LEAST_KEYS, _power_of_two(longest)), max(segment.num_nodes for segment in segments)
        return cls(_power_of_two(len(segments)), queries, keys, _power_of_two(nodes) if nodes else 0)


class Recorder:
    """Captures CUDA graphs that share one memory pool: at most one of them runs at a time, and its results are consumed
    before another one starts.

    The graphs are captured on a stream of their own, on which nothing else runs. So the workspace that cuBLAS keeps for
    that stream lies in the shared pool too, and the other graphs survive when torch destroys one of them, and with it
    the workspace of its stream (pytorch/pytorch#193402).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._warm_up, self._capture = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._anchor: torch.cuda.CUDAGraph | None = None  # the first graph, keeps the shared pool alive

    def record(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Captures `work`; returns the graph and the tensor that holds its result after each replay.

        Runs `work` once before the capture, so that libraries initialise themselves.
        """
        current = torch.cuda.current_stream(self._device)
        self._warm_up.wait_stream(current)
        with torch.cuda.stream(self._warm_up):
            work()
        current.wait_stream(self._warm_up)
        graph = torch.cuda.CUDAGraph()
        pool = None if self._anchor is None else self._anchor.pool()
        # The outer context restores the current stream even if the capture fails, which `graph` does not.
        with torch.cuda.stream(current), torch.cuda.graph(graph, pool=pool, stream=self._capture):
            result = work()
        self._anchor = self._anchor or graph
        return graph, result


class Results:
    """Buffers of the logits, shared by all steps of similar size, because logits are only valid until the next step."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def keep(self, logits: Tensor) -> Tensor:
        """Copies `[rows, any]` to the buffer, which the next step of similar size overwrites."""
        size = _power_of_two(max(1, len(logits)))
        if size not in self._buffers:  # never during a capture: the work has run once before
            self._buffers[size] = logits.new_empty(size, *logits.shape[1:])
        return self._buffers[size][: len(logits)].copy_(logits)


class StaticStep:
    """The input buffers of one shape and, on a GPU, the CUDA graph that reads them."""

    def __init__(
        self, shape: StepShape, decoder: Decoder, storage: KvStorage, results: Results, recorder: Recorder | None
    ) -> None:
        """Allocates the layout; the first run captures the graph, if there is a recorder."""
        self._results = results
        self._recorder = recorder
        self._shape = shape
        self._decoder = decoder
        self._storage = storage
        num_tokens = shape.rows * shape.queries
        sizes = [num_tokens, num_tokens, num_tokens, shape.rows * shape.keys]
        if shape.nodes:
            sizes += [shape.rows, num_tokens * shape.nodes]
        self._layout = torch.zeros(sum(sizes), dtype=torch.int64, device=decoder.device)
        self._sources, self._slots, self._positions, self._table, *trees = self._layout.split(sizes)
        self._trees = Trees(trees[0], trees[1].view(shape.rows, shape.queries, shape.nodes)) if trees else None
        self._token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=decoder.device)
        self._all = torch.arange(num_tokens, device=decoder.device)
        self._recorded: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def run(self, segments: Sequence[Segment], token_ids: Tensor) -> tuple[Tensor, NDArray[np.int64]]:
        """Computes the forward pass of some segments.

        Args:
            segments: fit into the shape, in the order of their tokens.
            token_ids: `[num_tokens] int64` on the decoder's device.

        Returns:
            Logits of all rows and queries, `[rows * queries, vocab]`, valid until the next run of any shape, and the
            row of each token in them, `[num_tokens]`.
        """
        layout, places = self._laid_out(segments)
        self._layout.copy_(upload(layout, self._decoder.device), non_blocking=True)
        torch.index_select(token_ids, 0, self._sources, out=self._token_ids)
        if self._recorder is None:
            return self._forward(), places
        if self._recorded is None:
            self._recorded = self._recorder.record(self._forward)
        graph, logits = self._recorded
        graph.replay()
        return logits, places

    def _laid_out(self, segments: Sequence[Segment]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the contents of the layout buffer, and the index of each token among rows and queries."""
        shape = self._shape
        counts = np.array([segment.num_tokens for segment in segments])[:, None]
        lengths = np.array([segment.sequence.length for segment in segments])[:, None]
        query = np.minimum(np.arange(shape.queries), counts - 1)
        sources = counts.cumsum()[:, None] - counts + query
        places = positions = lengths - counts + query
        table = slots_of([segment.sequence for segment in segments], shape.keys)
        slots = np.take_along_axis(table, places, axis=1)
        trees: list[NDArray[np.int64]] = []
        if shape.nodes:
            *trees, positions = laid_out_trees(segments, places, shape.nodes)
        filled = np.minimum(np.arange(shape.rows), len(segments) - 1)  # unused rows repeat the last one
        layout = np.concatenate([part[filled].ravel() for part in (sources, slots, positions, table, *trees)])
        is_real = (np.arange(shape.queries) < counts).ravel()
        return layout, np.flatnonzero(is_real)

    def _forward(self) -> Tensor:
        shape = self._shape
        group = SegmentGroup(
            tokens=self._all.view(shape.rows, shape.queries),
            real=None,
            slots=self._table.view(shape.rows, shape.keys),
            masks=Masks(self._positions.view(shape.rows, shape.queries), shape.keys, sees_all=False, trees=self._trees),
        )
        step = PackedStep(self._storage, self._slots, self._positions, [group])
        return self._results.keep(self._decoder.logits(self._token_ids, step, self._all))


class StaticSteps:
    """LRU cache of static steps by shape."""

    def __init__(self, decoder: Decoder, storage: KvStorage) -> None:
        self._decoder = decoder
        self._storage = storage
        self._results = Results()
        self._recorder = Recorder(decoder.device) if decoder.device.type == "cuda" else None
        self._steps: OrderedDict[StepShape, StaticStep] = OrderedDict()

    def fit(self, segments: Sequence[Segment]) -> bool:
        """Whether all segments have few tokens, and texts of similar lengths, so that padding is cheap."""
        if any(one.num_tokens > (MOST_TREE_QUERIES if one.num_nodes else MOST_QUERIES) for one in segments):
            return False
        shape, num_keys = StepShape.of(segments), sum(segment.sequence.length for segment in segments)
        return shape.rows * shape.keys <= MOST_PADDING * num_keys + shape.rows * LEAST_KEYS

    def logits(self, segments: Sequence[Segment], token_ids: Tensor, kept: Sequence[int]) -> Tensor:
        """Returns the logits of the kept tokens, as `Decoder.logits`; `kept` indexes the tokens of all segments."""
        shape = StepShape.of(segments)
        step = self._steps.pop(shape, None)
        if step is None:
            step = StaticStep(shape, self._decoder, self._storage, self._results, self._recorder)
        self._steps[shape] = step
        if len(self._steps) > MOST_SHAPES:
            self._steps.popitem(last=False)
        with torch.cuda.device_of(token_ids):
            logits, places = step.run(segments, token_ids)
            if len(kept) == len(logits):  # all rows: no index to upload
                return logits.clone()
            return logits.index_select(0, upload(places[list(kept)], self._decoder.device))


def _power_of_two(number: int) -> int:
    """Returns the smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()
