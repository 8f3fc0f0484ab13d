"""Steps of a few tokens per sequence in shapes that recur, so that a GPU can replay them.

Decoding a token with a large model takes hundreds of small kernels, and launching them one by one takes longer than
running them. A CUDA graph launches all of them at once, but always on the same memory in the same shapes. So sequences,
tokens of each and keys are rounded up to sizes that recur; what is added repeats the last real token of a row, or the
last row: it writes once more what is written anyway.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.devices import upload
from draftwire.models.decoder import Decoder
from draftwire.models.kv_cache import slots_of
from draftwire.models.paged_attention import KvStorage, PackedStep, Segment, SegmentGroup

MOST_QUERIES = 32
"""New tokens of a sequence, at most; prompts are read otherwise."""
LEAST_KEYS = 256
"""Keys of a row, at least. More are rounded up to powers of 2."""
MOST_SHAPES = 96
"""Shapes that are kept; the one not used for longest gives way."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes that a step is rounded up to."""

    rows: int
    queries: int
    keys: int

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "StepShape":
        """Returns the shape for some segments."""
        longest = max(segment.sequence.length for segment in segments)
        queries = max(segment.num_tokens for segment in segments)
        return cls(_power_of_two(len(segments)), queries, max(LEAST_KEYS, _power_of_two(longest)))


class StaticStep:
    """The memory of one shape and, on a GPU, the graph that reads it."""

    def __init__(self, shape: StepShape, decoder: Decoder, storage: KvStorage) -> None:
        """Makes room for the layout; the graph is captured when it runs first."""
        self._shape = shape
        self._decoder = decoder
        self._storage = storage
        num_tokens = shape.rows * shape.queries
        self._layout = torch.zeros(3 * num_tokens + shape.rows * shape.keys, dtype=torch.int64, device=decoder.device)
        sizes = [num_tokens, num_tokens, num_tokens, shape.rows * shape.keys]
        self._sources, self._slots, self._positions, self._table = self._layout.split(sizes)
        self._token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=decoder.device)
        self._all = torch.arange(num_tokens, device=decoder.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor

    def run(self, segments: Sequence[Segment], token_ids: Tensor) -> tuple[Tensor, NDArray[np.int64]]:
        """Reads the tokens of some segments.

        Args:
            segments: which fit into the shape, in the order of their tokens.
            token_ids: `[num_tokens] int64` on the decoder's device.

        Returns:
            Logits of all rows and queries, `[rows * queries, vocab]`, valid until the next run of any shape, and which
            of them each token's are, `[num_tokens]`.
        """
        layout, places = self._laid_out(segments)
        self._layout.copy_(upload(layout, self._decoder.device), non_blocking=True)
        torch.index_select(token_ids, 0, self._sources, out=self._token_ids)
        if self._decoder.device.type != "cuda":
            return self._forward(), places
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()
        return self._logits, places

    def _laid_out(self, segments: Sequence[Segment]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the layout, as it is in memory, and where each token is among rows and queries."""
        shape = self._shape
        counts = np.array([segment.num_tokens for segment in segments])[:, None]
        lengths = np.array([segment.sequence.length for segment in segments])[:, None]
        query = np.minimum(np.arange(shape.queries), counts - 1)
        sources = counts.cumsum()[:, None] - counts + query
        positions = lengths - counts + query
        table = slots_of([segment.sequence for segment in segments], shape.keys)
        slots = np.take_along_axis(table, positions, axis=1)
        filled = np.minimum(np.arange(shape.rows), len(segments) - 1)  # rows that are left repeat the last one
        layout = np.concatenate([part[filled].ravel() for part in (sources, slots, positions, table)])
        is_real = (np.arange(shape.queries) < counts).ravel()
        return layout, np.flatnonzero(is_real)

    def _forward(self) -> Tensor:
        shape = self._shape
        group = SegmentGroup(
            tokens=self._all.view(shape.rows, shape.queries),
            real=None,
            slots=self._table.view(shape.rows, shape.keys),
            positions=self._positions.view(shape.rows, shape.queries),
            run=None,
            sees_all=False,
        )
        step = PackedStep(self._storage, self._slots, self._positions, [group])
        return self._decoder.logits(self._token_ids, step, self._all)

    def _capture(self) -> None:
        """Records a forward pass. One that is not recorded comes first: libraries initialise themselves in it."""
        stream = torch.cuda.Stream(self._decoder.device)
        stream.wait_stream(torch.cuda.current_stream(self._decoder.device))
        with torch.cuda.stream(stream):
            self._forward()
        torch.cuda.current_stream(self._decoder.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._forward()


class StaticSteps:
    """Static steps by shape."""

    def __init__(self, decoder: Decoder, storage: KvStorage) -> None:
        """Prepares; shapes are made as they come up."""
        self._decoder = decoder
        self._storage = storage
        self._steps: OrderedDict[StepShape, StaticStep] = OrderedDict()

    def fit(self, segments: Sequence[Segment]) -> bool:
        """Whether segments are few tokens each."""
        return max(segment.num_tokens for segment in segments) <= MOST_QUERIES

    def logits(self, segments: Sequence[Segment], token_ids: Tensor, kept: Sequence[int]) -> Tensor:
        """Reads tokens; see `Decoder.logits`. `kept` counts the tokens of all segments."""
        shape = StepShape.of(segments)
        step = self._steps.pop(shape, None) or StaticStep(shape, self._decoder, self._storage)
        self._steps[shape] = step
        if len(self._steps) > MOST_SHAPES:
            self._steps.popitem(last=False)
        with torch.cuda.device_of(token_ids):
            logits, places = step.run(segments, token_ids)
            return logits.index_select(0, upload(places[list(kept)], self._decoder.device))


def _power_of_two(number: int) -> int:
    """Returns the smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()
