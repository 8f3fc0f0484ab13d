"""Step plans that rank 0 broadcasts to the other ranks: a message of fixed size, and a second one for larger plans.

Only rank 0 has the block tables of the sequences. The other ranks rebuild a step from its plan and run it on their own
shards of the weights and of the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.errors import UnavailableError
from draftwire.models.kv_cache import CachedSequence, blocks_for
from draftwire.models.parallel.process_group import ProcessGroup
from draftwire.models.sequence_model import Segment

PLAN_SIZE = 1024
"""Numbers in the first message."""
MARK = 0x64726166
"""First number of every plan: detects ranks that are out of step and would misread a message."""

Numbers: TypeAlias = NDArray[np.int64]


READ, READ_FUZZILY, COPY = 1, 2, 3
"""Kinds of plans that have contents; the others are signals."""


class Signal(IntEnum):
    """A plan without contents."""

    HEARTBEAT = 4
    """Checks that all ranks are there."""
    STOP = 5
    """Ends the sequence of plans."""
    FIT = 6
    """Gives the KV cache the size that fits on all ranks."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Reads the tokens of some sequences."""

    segments: list[Segment]
    token_ids: Numbers | None
    """`[num_tokens]`; None if they are on rank 0's device only, which then broadcasts them."""
    kept: Sequence[int]
    """The tokens whose logits are returned."""
    fuzzily: bool = False
    """Whether to read approximately, like `DraftModel.extend`."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all segments."""
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies keys and values between slots of the cache."""

    sources: Numbers
    targets: Numbers


StepPlan = ReadPlan | CopyPlan | Signal


class PlanChannel:
    """Broadcasts plans from rank 0 to the others."""

    def __init__(self, group: ProcessGroup) -> None:
        """Allocates the buffer of the first message."""
        self._group = group
        self._first = torch.zeros(PLAN_SIZE, dtype=torch.int64)

    def announce(self, plan: StepPlan) -> None:
        """Broadcasts a plan; on rank 0.

        Raises:
            UnavailableError: as for every collective.
        """
        numbers = encode(plan)
        first = numbers[:PLAN_SIZE]
        self._first.numpy()[: len(first)] = first
        self._group.broadcast(self._first)
        if len(numbers) > PLAN_SIZE:
            self._group.broadcast(torch.from_numpy(numbers[PLAN_SIZE:]))

    def receive(self) -> StepPlan:
        """Waits for the next plan; on the other ranks.

        Raises:
            UnavailableError: rank 0 is lost, silent for longer than the group's timeout, or sent no plan.
        """
        self._group.broadcast(self._first)
        numbers: Numbers = self._first.numpy().copy()
        if numbers[0] != MARK:
            self._group.break_off("rank 0 sent something that is no plan")
            raise UnavailableError("rank 0 sent something that is no plan: the ranks have lost track of each other")
        size = int(numbers[1])
        if size > PLAN_SIZE:
            rest = torch.empty(size - PLAN_SIZE, dtype=torch.int64)
            self._group.broadcast(rest)
            numbers = np.concatenate([numbers, rest.numpy()])
        return decode(numbers[:size])


def encode(plan: StepPlan) -> Numbers:
    """Encodes a plan as numbers: the mark, the number of numbers, the kind, three counts, and the counted items."""
    match plan:
        case ReadPlan(segments, token_ids, kept, fuzzily):
            kind = READ_FUZZILY if fuzzily else READ
            blocks = [block for segment in segments for block in segment.sequence.blocks]
            parents = [parent for segment in segments for parent in segment.sequence.parents]
            shapes = [size for one in segments for size in (one.num_tokens, one.sequence.length, one.num_nodes)]
            ids = np.empty(0, dtype=np.int64) if token_ids is None else token_ids
            return _numbers(kind, (len(segments), len(ids), len(kept)), [*shapes, *blocks, *parents], ids, kept)
        case CopyPlan(sources, targets):
            return _numbers(COPY, (len(sources), 0, 0), sources, targets)
        case Signal():
            return _numbers(plan, (0, 0, 0))


def decode(numbers: Numbers) -> StepPlan:
    """Decodes a plan. Its sequences have only their blocks, lengths and trees."""
    (kind, count, num_ids, num_kept), body = numbers[2:6].tolist(), numbers[6:]
    if kind == COPY:
        return CopyPlan(body[:count], body[count:])
    if kind not in (READ, READ_FUZZILY):
        return Signal(kind)
    shapes, body = body[: 3 * count].reshape(count, 3).tolist(), body[3 * count :]
    blocks, body = _split(body, [blocks_for(length) for _, length, _ in shapes])
    trees, body = _split(body, [num_nodes for _, _, num_nodes in shapes])
    segments = [
        Segment(CachedSequence(b"", own, length, tuple(parents)), num_tokens)
        for (num_tokens, length, _), own, parents in zip(shapes, blocks, trees, strict=True)
    ]
    ids, kept = body[:num_ids], body[num_ids:]
    assert len(kept) == num_kept
    return ReadPlan(segments, ids if num_ids else None, kept.tolist(), kind == READ_FUZZILY)


def _numbers(kind: int, counts: tuple[int, int, int], *body: Sequence[int] | Numbers) -> Numbers:
    size = 6 + sum(map(len, body))
    return np.concatenate([np.array(part, dtype=np.int64) for part in ((MARK, size, kind, *counts), *body)])


def _split(numbers: Numbers, sizes: Sequence[int]) -> tuple[list[list[int]], Numbers]:
    """Returns parts of these sizes, and the numbers after them."""
    *parts, rest = np.split(numbers, np.cumsum(sizes))
    return [part.tolist() for part in parts], rest


def host_ids(token_ids: Sequence[int] | Tensor) -> Numbers | None:
    """Returns token ids for a plan; None if they are on the device only."""
    if isinstance(token_ids, Tensor):
        return token_ids.numpy() if token_ids.device.type == "cpu" else None
    return np.array(token_ids, dtype=np.int64)
