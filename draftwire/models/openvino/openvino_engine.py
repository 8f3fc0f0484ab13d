"""Runs a graph over a paged KV cache whose memory OpenVINO and torch share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.models.kv_cache import BLOCK_SIZE, NULL_BLOCK, blocks_for, slots_between
from draftwire.models.kv_storage import StoredFeatures
from draftwire.models.lean_model import LeanModel
from draftwire.models.openvino.graph import KEY_CACHE, VALUE_CACHE, GraphBuilder
from draftwire.models.openvino.kept_weights import KeptWeights
from draftwire.models.openvino.runtime import core, import_openvino
from draftwire.models.packing import distances_in, positions_of
from draftwire.models.pass_engine import IdRows
from draftwire.models.sequence_model import Segment

MOST_PADDED = 8
"""Rows of the largest steps that others are padded to: more rows cost more than preparing."""
PATIENCE = 4
"""Smaller steps in a row, after which steps are as small as the largest of them."""
GROUP = 32
"""Inputs of a row that share a scale where they are multiplied with weights of eight bits: of each row by itself, so
that no row depends on others."""


class OpenVinoEngine:
    """A compiled graph. It computes all passes alike."""

    extends_exactly, is_static = True, False

    def __init__(
        self, model: LeanModel, *, threads: int, packed: KeptWeights | None = None, taps: Sequence[int] = ()
    ) -> None:
        """Compiles a graph, which has weights of its own then; arguments as of `GraphBuilder`, and how many threads run
        it.
        """
        self.device = torch.device("cpu")
        self.vocab_size = int(model.config.vocab_size)
        self.taps = tuple(taps)
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,  # services share their cores
        }
        graph = GraphBuilder(model, packed=packed, taps=taps).build()
        self.compiled = core().compile_model(graph, "CPU", settings)

    def begin(
        self, num_slots: int, features: StoredFeatures | None
    ) -> "tuple[OpenVinoStorage, OpenVinoPass, OpenVinoPass]":
        """Starts over an empty cache; see `PassEngine`."""
        assert features is None or features.layers == self.taps, "the graph was built for them"
        storage = OpenVinoStorage(self.compiled, num_slots // BLOCK_SIZE, features)
        passes = OpenVinoPass(self.compiled, self.vocab_size, storage)
        return storage, passes, passes


class OpenVinoStorage:
    """Keys and values of all layers, `[blocks, kv_heads, 32, head_dim]` each."""

    def __init__(self, compiled: Any, num_blocks: int, features: StoredFeatures | None) -> None:
        """Allocates them, and a block more, for padding; memory is committed when it is written."""
        self.features, self.padding_block = features, num_blocks
        self.caches: dict[str, Tensor] = {}
        for port in compiled.inputs:
            if port.get_any_name().startswith((KEY_CACHE, VALUE_CACHE)):
                of_block = [size.get_length() for size in list(port.get_partial_shape())[1:]]
                assert of_block[1] == BLOCK_SIZE, "blocks of the plugin and of the block manager"
                cache = torch.empty(num_blocks + 1, *of_block)
                cache[NULL_BLOCK] = 0.0
                self.caches[port.get_any_name()] = cache

    @property
    def token_bytes_of_layers(self) -> list[int]:
        """Bytes that each layer stores of a token; the last is the features', if they are stored."""
        sizes = [cache[0, :, 0].nbytes for cache in self.caches.values()]
        of_layers = [keys + values for keys, values in zip(sizes[::2], sizes[1::2], strict=True)]
        return [*of_layers, self.features.token_bytes] if self.features is not None else of_layers

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies keys, values and features between slots, `[count] int64` each, in all layers."""
        read, written = ((slots // BLOCK_SIZE, slice(None), slots % BLOCK_SIZE) for slots in (sources, targets))
        for cache in self.caches.values():
            cache[written] = cache[read]
        if self.features is not None:
            self.features.copy(sources, targets)


class OpenVinoPass:
    """Forward passes over a storage."""

    def __init__(self, compiled: Any, vocab_size: int, storage: OpenVinoStorage) -> None:
        self._tensor = import_openvino().Tensor
        self._vocab_size, self._storage = vocab_size, storage
        self._request = compiled.create_infer_request()
        self._ports = {port.get_any_name(): index for index, port in enumerate(compiled.inputs)}
        self._held: dict[str, NDArray[Any]] = {}
        """Memory of the inputs, which OpenVINO reads where it is."""
        self._outputs: tuple[Tensor, Tensor] | None = None
        self._padding = RowPadding()
        self._feature_size = compiled.outputs[1].get_partial_shape()[1].get_length() if storage.features else 0
        for name, cache in storage.caches.items():
            self._set(name, cache.numpy())

    def logits(self, segments: list[Segment], token_ids: IdRows, kept: Sequence[int]) -> Tensor:
        """Computes a pass; see `Pass`."""
        ids = token_ids.numpy() if isinstance(token_ids, Tensor) else np.array(token_ids, np.int64)
        num_padded = self._padding.rows_beside(len(ids))
        layout = StepLayout(segments, num_padded, self._storage.padding_block)
        self._set("input_ids", np.append(ids, np.zeros(num_padded, np.int64)) if num_padded else ids)
        self._set("kept", np.array(kept if len(kept) else [0], np.int64))
        for name, array in layout.inputs().items():
            self._set(name, array)
        features = self._storage.features
        logits = torch.empty(max(1, len(kept)), self._vocab_size)
        states = torch.empty(len(ids) + num_padded, self._feature_size)
        self._outputs = logits, states  # OpenVINO knows their memory until the next pass
        self._request.set_output_tensor(0, self._tensor(logits.numpy(), shared_memory=True))
        if features is not None:
            self._request.set_output_tensor(1, self._tensor(states.numpy(), shared_memory=True))
        self._request.infer()
        if features is not None:
            tapped = states[: len(ids)].chunk(len(features.layers), dim=1)
            slots = [
                slots_between(each.sequence, each.sequence.length - each.num_tokens, each.sequence.length)
                for each in segments
            ]
            features.take(dict(zip(features.layers, tapped, strict=True)), torch.from_numpy(np.concatenate(slots)))
        return logits[: len(kept)]

    def _set(self, name: str, array: NDArray[Any]) -> None:
        self._held[name] = array
        self._request.set_input_tensor(self._ports[name], self._tensor(array, shared_memory=True))


class RowPadding:
    """Keeps the number of rows of small steps: for a step with another number than the one before, the plugin prepares
    all operations anew, which takes as long as several rows.
    """

    def __init__(self) -> None:
        self._size = 0
        """Rows of the steps at present."""
        self._largest = self._num_smaller = 0
        """Most rows that were needed lately, and for how many steps in a row fewer than the steps had."""

    def rows_beside(self, num_rows: int) -> int:
        """Returns how many rows to add to a step of so many, which is the next one.

        A step is as large as the largest of late. A large one, as of a prompt, begins anew, so that what is added to
        the steps of a text does not depend on the texts before it.
        """
        if num_rows >= self._size or num_rows > MOST_PADDED:
            self._size = num_rows if num_rows <= MOST_PADDED else 0
            self._largest = self._num_smaller = 0
            return 0
        size = self._size
        self._largest, self._num_smaller = max(self._largest, num_rows), self._num_smaller + 1
        if self._num_smaller == PATIENCE:
            self._size, self._largest, self._num_smaller = self._largest, 0, 0
        return size - num_rows


class StepLayout:
    """Places of the new tokens of some sequences; see `draftwire.models.openvino.graph` for the arrays."""

    def __init__(self, segments: Sequence[Segment], num_padded: int = 0, padding_block: int = NULL_BLOCK) -> None:
        """Takes segments whose sequences' lengths include the new tokens, and how many rows come after them, of a text
        that nobody reads, in a block of its own.
        """
        self._segments, self._padding_block = segments, padding_block
        padding = [num_padded] if num_padded else []
        self._counts = np.array([*(each.num_tokens for each in segments), *padding], np.int32)
        self._lengths = np.array([*(each.sequence.length for each in segments), *padding], np.int32)
        self._begins = _begins(self._counts)

    def inputs(self) -> dict[str, NDArray[Any]]:
        """Returns the arrays by the names of their inputs."""
        past = self._lengths - self._counts
        tables = [each.sequence.blocks[: blocks_for(each.sequence.length)] for each in self._segments]
        tables += [[self._padding_block]] * (len(self._counts) - len(self._segments))
        shifts = np.repeat(past - self._begins[:-1], self._counts)
        positions = np.arange(self._begins[-1], dtype=np.int64) + shifts
        return {
            "position_ids": self._in_trees(positions),
            "past_lens": past,
            "subsequence_begins": self._begins,
            "block_indices": np.array([block for table in tables for block in table], np.int32),
            "block_indices_begins": _begins(np.array([len(table) for table in tables], np.int32)),
            "max_context_len": np.array(self._lengths.max()),
            **self._masks(),
        }

    def _in_trees(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        for segment, begin, end in zip(self._segments, self._begins, self._begins[1:], strict=False):
            if segment.num_nodes:
                positions[begin:end] = positions_of(segment)
        return positions

    def _masks(self) -> dict[str, NDArray[Any]]:
        if not any(each.num_nodes for each in self._segments):
            return {"qq_bias": np.zeros(0, np.uint8), "qq_bias_begins": np.zeros(0, np.int32)}
        masks = [_seen(each).ravel() if each.num_nodes else np.zeros(0, np.uint8) for each in self._segments]
        masks += [np.zeros(0, np.uint8)] * (len(self._counts) - len(self._segments))
        ends = np.array([len(mask) for mask in masks], np.int32)
        return {"qq_bias": np.concatenate(masks), "qq_bias_begins": _begins(ends)}


def _begins(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns where each of some ranges begins, and where the last one ends."""
    begins = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    return begins


def _seen(segment: Segment) -> NDArray[np.uint8]:
    """Returns `[new, new]`: whether a new token sees another one. Those of a text see the ones before them, nodes of a
    tree the text and the path to them.
    """
    num_text = segment.num_tokens - segment.num_nodes
    assert num_text >= 0, "a tree is read in one pass: later ones cannot hide its nodes from each other"
    mask = np.tri(segment.num_tokens, dtype=np.uint8)
    mask[num_text:, num_text:] = distances_in(segment.sequence.parents) >= 0
    return mask
