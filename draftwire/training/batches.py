"""Training batches: windows of several texts, some of them with a passage that comes a second time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.training.plan import TrainingPlan

Ids = NDArray[np.uint16]

EDITS_PER_TOKEN = (0.0, 0.0, 0.02)
"""Of a passage that is repeated; one of these is drawn for each window."""
LONGEST_EDIT = 4
"""Tokens that an edit takes out or puts in, at most, less one."""


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """Texts to train on."""

    ids: Ids
    """All of them, joined."""
    share: float
    """Of the windows of a batch, as nearly as whole numbers allow."""
    separator: int | None = None
    """If set, every window begins with a passage and its edited copy, this token between them."""


def batches(sources: Sequence[TrainingTexts], plan: TrainingPlan, first_step: int = 0) -> Iterator[Tensor]:
    """Yields the batches from `first_step` on, `[batch, sequence_length + 1] int64`.

    In each phase, every epoch reads every window of a source once, in an order of its own.

    Raises:
        ValueError: a source does not fill its part of a batch.
    """
    begun = 0
    for number, (phase, ended) in enumerate(zip(plan.phases, plan.phase_ends, strict=True)):
        length = phase.sequence_length
        rows = row_counts([source.share for source in sources], plan.batch_tokens // length)
        orders = [
            _Order((len(source.ids) - 1) // length, count, (plan.seed, number, place))
            for place, (source, count) in enumerate(zip(sources, rows, strict=True))
        ]
        for step in range(max(begun, first_step), ended):
            picked = []
            for place, (source, count, order) in enumerate(zip(sources, rows, orders, strict=True)):
                for position in range((step - begun) * count, (step - begun + 1) * count):
                    start = order.window(position) * length
                    if source.separator is None:
                        picked.append(source.ids[start : start + length + 1])
                    else:
                        generator = np.random.default_rng((plan.seed, number, place, position))
                        picked.append(repeated(source.ids, start, length, source.separator, generator))
            yield torch.from_numpy(np.stack(picked).astype(np.int64))
        begun = ended


def row_counts(shares: Sequence[float], rows: int) -> list[int]:
    """Returns how many of `rows` each share gets, by the method of the largest remainder."""
    exact = [share / sum(shares) * rows for share in shares]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda place: counts[place] - exact[place])
    for place in by_remainder[: rows - sum(counts)]:
        counts[place] += 1
    return counts


def repeated(ids: Ids, start: int, length: int, separator: int, generator: np.random.Generator) -> Ids:
    """Returns `length + 1` tokens: a passage of `ids` at `start`, the separator, the passage edited, what follows it.

    An edit replaces up to three tokens by up to three that stand elsewhere in `ids`.
    """
    size = int(generator.integers(length // 4, length // 2))
    passage = ids[start : start + size]
    count = generator.binomial(size, generator.choice(EDITS_PER_TOKEN))
    parts, copied = [passage, np.array([separator], ids.dtype)], 0
    for position in np.sort(generator.integers(0, size, count)).tolist():
        if position < copied:
            continue
        removed, added = generator.integers(0, LONGEST_EDIT, 2).tolist()
        elsewhere = int(generator.integers(0, len(ids) - LONGEST_EDIT))
        parts += [passage[copied:position], ids[elsewhere : elsewhere + added]]
        copied = position + removed
    parts += [passage[copied:], ids[start + size : start + length + 1]]
    window = np.concatenate(parts)[: length + 1]
    missing = length + 1 - len(window)  # where edits took out more than they put in, or the texts end
    return np.concatenate([window, ids[:missing]]) if missing else window


class _Order:
    """Order in which the windows of a source are read."""

    def __init__(self, count: int, rows: int, seed: tuple[int, ...]) -> None:
        if count < rows:
            raise ValueError(f"{count} windows of training tokens do not fill {rows} rows of a batch")
        self._count, self._seed = count, seed
        self._epoch, self._windows = -1, np.empty(0, dtype=np.int64)

    def window(self, position: int) -> int:
        """The window that is read at a position of the whole run."""
        if position // self._count != self._epoch:
            self._epoch = position // self._count
            self._windows = np.random.default_rng((*self._seed, self._epoch)).permutation(self._count)
        return int(self._windows[position % self._count])
