"""Layout of a step: which sequences are attended to together, and which where their keys and values are.

A token's *place* is where its keys and values are in its sequence; its *position* is how many tokens of its text come
before it. They differ in token trees, whose nodes lie one after the other, but follow their parents.

Rows of similar shape are gathered, padded and computed together, so that neither a long text among short ones nor a
prefill among single tokens makes the others wait for padding. On a CPU, where to copy keys takes several times as long
as to attend to them, those of longer texts are read where they are, text by text.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from draftwire.method.devices import upload
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for, slots_between, slots_of
from draftwire.models.kv_storage import KvStorage
from draftwire.models.paged_attention import LoneSegment, Masks, PackedStep, SegmentGroup, Trees
from draftwire.models.sequence_model import Segment

LEAST_BYTES = 2**19
"""Segments whose keys and values take less in a layer on a CPU are gathered with others: to copy them takes no longer
than operations of their own."""
MOST_RUNS = 8
"""Runs of slots that are read in place: two matrix products are computed for each."""
LEAST_RUN = 64
"""Tokens that runs need to have on average."""
MOST_QUERIES = 32
"""Queries of a segment with more than one run: all their scores are in memory."""


def pack(segments: list[Segment], storage: KvStorage, device: torch.device) -> PackedStep:
    """Returns the layout of a step whose segments are packed in this order."""
    if len(segments) == 1 and (step := _of_one_token(segments[0], storage, device)) is not None:
        return step
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
            stop = segment.sequence.length
            first = stop - segment.num_tokens
            slots[own] = slots_between(segment.sequence, first, stop)
            positions[own], trees = _in_trees([segment], np.arange(first, stop)[None], device)
            sees_all = segment.num_tokens == 1 and trees is None
            masks = Masks(upload(positions[None, own], device), int(lengths[index]), sees_all, trees)
            lone.append(LoneSegment(own, runs, masks))
        if not members:
            continue
        count, length, start = counts[members, None], lengths[members, None], starts[members, None]
        query = np.arange(count.max())
        real = query < count
        tokens = start + np.minimum(query, count - 1)
        places = length - count + np.minimum(query, count - 1)
        table = slots_of([segments[index].sequence for index in members], int(length.max()))
        position, trees = _in_trees([segments[index] for index in members], places, device)
        positions[tokens] = position
        slots[tokens] = np.take_along_axis(table, places, axis=1)
        mask = None if real.all() else upload(real, device)
        sees_all = tokens.shape[1] == 1 and trees is None and bool((length == table.shape[1]).all())
        masks = Masks(upload(position, device), table.shape[1], sees_all, trees)
        groups.append(SegmentGroup(upload(tokens, device), mask, upload(table, device), masks))
    lone.sort(key=lambda each: each.tokens.start)
    are_single = not groups and all(len(each.runs) == 1 and each.masks.sees_all for each in lone)
    spans = [(each.runs[0].start, each.masks.num_keys) for each in lone] if are_single else []
    return PackedStep(storage, upload(slots, device), upload(positions, device), groups, lone, spans)


def _of_one_token(segment: Segment, storage: KvStorage, device: torch.device) -> PackedStep | None:
    """Returns the layout of a step of one token of a text that is read in place; None of any other step.

    It is the step of one session that decodes or drafts: a small model takes less time for a layer than for a layout.
    """
    sequence = segment.sequence
    if segment.num_tokens > 1 or segment.num_nodes:
        return None
    runs = _runs_to_read(segment, storage, device, 0)
    if not runs:
        return None
    last = sequence.length - 1
    numbers = upload([last, sequence.blocks[last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE], device, torch.int64)
    positions, slots = numbers[:1], numbers[1:]
    lone = LoneSegment(slice(0, 1), runs, Masks(positions.unsqueeze(0), sequence.length, sees_all=True))
    spans = [(runs[0].start, sequence.length)] if len(runs) == 1 else []
    return PackedStep(storage, slots, positions, [], [lone], spans)


def _in_trees(
    segments: Sequence[Segment], places: NDArray[np.int64], device: torch.device
) -> tuple[NDArray[np.int64], Trees | None]:
    """Returns the positions of the queries at some places, `[rows, queries]`, and what they see of their trees."""
    width = max(segment.num_nodes for segment in segments)
    if not width:
        return places, None
    bases, distances, positions = laid_out_trees(segments, places, width)
    return positions, Trees(upload(bases, device), upload(distances, device))


def positions_of(segment: Segment) -> list[int]:
    """Returns the positions of a segment's new tokens."""
    length = segment.sequence.length
    _, _, positions = laid_out_trees([segment], np.arange(length - segment.num_tokens, length)[None], segment.num_nodes)
    return [int(position) for position in positions[0]]


def laid_out_trees(
    segments: Sequence[Segment], places: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the layout of the trees of some segments, one per row.

    Args:
        segments: with trees or without.
        places: `[rows, queries]`, of the queries.
        width: at least as many as any tree has nodes.

    Returns:
        `Trees.bases` and `Trees.distances`, and the positions of the queries, `[rows, queries]`.
    """
    bases = np.array([segment.sequence.base for segment in segments])
    distances = np.full((*places.shape, width), -1, dtype=np.int64)
    for own, segment, base, row in zip(distances, segments, bases, places, strict=True):
        if segment.num_nodes:
            is_node = row >= base
            own[is_node, : segment.num_nodes] = distances_in(segment.sequence.parents)[row[is_node] - base]
    # The nodes that a query sees are those on the path to it, itself included.
    depths = np.count_nonzero(distances >= 0, axis=-1)
    return bases, distances, np.where(depths > 0, bases[:, None] + depths - 1, places)


@lru_cache(maxsize=128)
def distances_in(parents: tuple[int, ...]) -> NDArray[np.int64]:
    """Returns `[nodes, nodes]`: how far above the first node the second one is; -1 if it is not on the path to it."""
    table = np.full((len(parents), len(parents)), -1, dtype=np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            table[node] = np.where(table[parent] >= 0, table[parent] + 1, -1)
        table[node, node] = 0
    return table


def _by_shape(segments: Sequence[Segment]) -> Iterable[list[int]]:
    """Returns the indices of segments that are padded together: that at most doubles anyone's queries and keys."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        shape = (segment.num_tokens.bit_length(), segment.sequence.length.bit_length())
        shapes.setdefault(shape, []).append(index)
    return shapes.values()


def _runs_to_read(segment: Segment, storage: KvStorage, device: torch.device, least_bytes: int) -> list[slice]:
    """Returns the runs of slots that a segment's keys are in; none if it is faster to gather them.

    Keys and values of a layer that take less than `least_bytes` are gathered. It is 0 for a segment without any like
    it, which on other devices than a CPU is the only one to be read in place.
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
