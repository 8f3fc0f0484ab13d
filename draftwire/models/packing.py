"""Layout of a step: which sequences are attended to together, and which where their keys and values are.

Rows of similar shape are gathered, padded and computed together, so that neither a long text among short ones nor a
prefill among single tokens makes the others wait for padding. On a CPU, where to copy keys takes several times as long
as to attend to them, those of longer texts are read where they are, text by text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.method.devices import upload
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence, blocks_for, slots_of
from draftwire.models.kv_storage import KvStorage
from draftwire.models.paged_attention import LoneSegment, Masks, PackedStep, SegmentGroup

LEAST_BYTES = 2**19
"""On a CPU, a segment whose keys and values take less in a layer is gathered with others: to copy them takes no longer
than operations of its own."""
MOST_RUNS = 8
"""Runs of slots that are read in place: two matrix products are computed for each."""
LEAST_RUN = 64
"""Tokens that runs need to have on average."""
MOST_QUERIES = 32
"""Queries of a segment with more than one run: all their scores are in memory."""


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one sequence in a step."""

    sequence: CachedSequence
    """Its length already includes the new tokens."""
    num_tokens: int


def pack(segments: list[Segment], storage: KvStorage, device: torch.device) -> PackedStep:
    """Returns the layout of a step whose segments are packed in this order."""
    counts = np.array([segment.num_tokens for segment in segments])
    lengths = np.array([segment.sequence.length for segment in segments])
    starts = np.cumsum(counts) - counts
    slots = np.empty(counts.sum(), dtype=np.int64)
    positions = np.empty_like(slots)
    lone: list[LoneSegment] = []
    groups = []
    for similar in _by_shape(segments):
        members = []
        for index in similar:
            segment = segments[index]
            runs = _runs_to_read(segment, storage, device, LEAST_BYTES if len(similar) > 1 else 0)
            if not runs:
                members.append(index)
                continue
            own = slice(int(starts[index]), int(starts[index] + counts[index]))
            positions[own] = np.arange(lengths[index] - counts[index], lengths[index])
            slots[own] = _slots_at(segment.sequence, positions[own])
            masks = Masks(_tensor(positions[None, own], device), int(lengths[index]), segment.num_tokens == 1)
            lone.append(LoneSegment(own, runs, masks))
        if not members:
            continue
        count, length, start = counts[members, None], lengths[members, None], starts[members, None]
        query = np.arange(count.max())
        real = query < count
        tokens = start + np.minimum(query, count - 1)
        position = length - count + np.minimum(query, count - 1)
        places = slots_of([segments[index].sequence for index in members], int(length.max()))
        positions[tokens] = position
        slots[tokens] = np.take_along_axis(places, position, axis=1)
        mask = None if real.all() else _tensor(real, device)
        sees_all = tokens.shape[1] == 1 and bool((length == places.shape[1]).all())
        masks = Masks(_tensor(position, device), places.shape[1], sees_all)
        groups.append(SegmentGroup(_tensor(tokens, device), mask, _tensor(places, device), masks))
    lone.sort(key=lambda each: each.tokens.start)
    are_single = not groups and all(len(each.runs) == 1 and each.masks.sees_all for each in lone)
    spans = [(each.runs[0].start, each.masks.num_keys) for each in lone] if are_single else []
    return PackedStep(storage, _tensor(slots, device), _tensor(positions, device), groups, lone, spans)


def _by_shape(segments: Sequence[Segment]) -> Iterable[list[int]]:
    """Returns the indices of segments that are padded together: that at most doubles anyone's queries and keys."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        shape = (segment.num_tokens.bit_length(), segment.sequence.length.bit_length())
        shapes.setdefault(shape, []).append(index)
    return shapes.values()


def _runs_to_read(segment: Segment, storage: KvStorage, device: torch.device, least_bytes: int) -> list[slice]:
    """Returns the runs of slots that a segment's keys are in; none if it is faster to gather them.

    Args:
        segment: of the step.
        storage: of its keys.
        device: of the model.
        least_bytes: keys and values of a layer that take less are gathered; 0 for a segment without any like it, which
            on other devices than a CPU is the only one to be read in place.
    """
    sequence = segment.sequence
    is_on_cpu = device.type == "cpu"
    if sequence.length * storage.token_bytes < least_bytes or (least_bytes and not is_on_cpu):
        return []
    most = min(sequence.length // LEAST_RUN, MOST_RUNS if is_on_cpu and segment.num_tokens <= MOST_QUERIES else 1)
    blocks = np.array(sequence.blocks[: blocks_for(sequence.length)])
    ends = np.append(np.flatnonzero(np.diff(blocks) != 1) + 1, len(blocks))
    if len(ends) > max(most, 1):
        return []
    runs, first = [], 0
    for end in ends.tolist():
        start = int(blocks[first]) * BLOCK_SIZE
        runs.append(slice(start, start + min(end * BLOCK_SIZE, sequence.length) - first * BLOCK_SIZE))
        first = end
    return runs


def _slots_at(sequence: CachedSequence, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the slots of some positions of a sequence."""
    blocks = np.array(sequence.blocks[int(positions[0]) // BLOCK_SIZE : int(positions[-1]) // BLOCK_SIZE + 1])
    return np.asarray(
        blocks[positions // BLOCK_SIZE - positions[0] // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    )


def _tensor(array: NDArray[np.int64] | NDArray[np.bool_], device: torch.device) -> Tensor:
    return upload(array, device)
