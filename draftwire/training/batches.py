"""Training batches: windows of several texts, some of them with a passage that comes a second time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwire.training.plan import TrainingPlan

Ids = NDArray[np.unsignedinteger[Any]]

TrainingBatch = tuple[Tensor, ...]
"""Token ids `[batch, sequence_length + 1] int64`, and what else a loss takes, by row."""

LONGEST_EDIT = 4
"""Tokens that an edit takes out or puts in, at most, less one."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """How windows repeat their first passage, so that a model learns to copy."""

    separator: int
    """Token that stands between a passage and each copy of it."""
    edits_per_token: tuple[float, ...]
    """Edits in each token of a copy; one of these is drawn for each window."""
    shortest: float = 0.25
    """Length of the shortest passage, as a share of the window; the longest take half of it."""
    copies: int = 1
    """Most copies of a passage in one window; fewer where no more fit."""
    alphabet: tuple[int, int] | None = None
    """Range of alphabet sizes. If set, passages are random tokens, not text, drawn from so few that the same two or
    three in a row occur at many places, and only longer matches show which place is copied."""


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """Texts to train on."""

    ids: Ids
    """All of them, joined."""
    share: float
    """Share of the windows of a batch, as nearly as whole numbers allow."""
    repetition: Repetition | None = None
    """Repetitions: if set, every window begins with a passage and copies of it."""


def batches(sources: Sequence[TrainingTexts], plan: TrainingPlan, first_step: int = 0) -> Iterator[TrainingBatch]:
    """Yields the batches from `first_step` on, of token ids alone.

    In each phase, every epoch reads every window of a source once, in an order of its own.

    Raises:
        ValueError: a source does not fill its part of a batch.
    """
    begun = 0
    for number, (phase, ended) in enumerate(zip(plan.phases, plan.phase_ends, strict=True)):
        length = phase.sequence_length
        rows = row_counts([source.share for source in sources], plan.batch_tokens // length)
        orders = [
            Order((len(source.ids) - 1) // length, count, (plan.seed, number, place))
            for place, (source, count) in enumerate(zip(sources, rows, strict=True))
        ]
        for step in range(max(begun, first_step), ended):
            picked = []
            for place, (source, count, order) in enumerate(zip(sources, rows, orders, strict=True)):
                for position in range((step - begun) * count, (step - begun + 1) * count):
                    start = order.window(position) * length
                    if source.repetition is None:
                        picked.append(source.ids[start : start + length + 1])
                    else:
                        generator = np.random.default_rng((plan.seed, number, place, position))
                        picked.append(repeated(source.ids, start, length, source.repetition, generator))
            yield (torch.from_numpy(np.stack(picked).astype(np.int64)),)
        begun = ended


def row_counts(shares: Sequence[float], rows: int) -> list[int]:
    """Returns how many of `rows` each share gets, by the method of the largest remainder."""
    exact = [share / sum(shares) * rows for share in shares]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda place: counts[place] - exact[place])
    for place in by_remainder[: rows - sum(counts)]:
        counts[place] += 1
    return counts


def repeated(ids: Ids, start: int, length: int, how: Repetition, generator: np.random.Generator) -> Ids:
    """Returns `length + 1` tokens: a passage of `ids` at `start`, copies of it, what follows it in `ids`."""
    size = int(generator.integers(int(how.shortest * length), length // 2))
    passage = ids[start : start + size]
    if how.alphabet is not None:
        few = np.exp(generator.uniform(*np.log(how.alphabet)))
        passage = generator.choice(generator.choice(passage, round(few)), size)
    edits_per_token = generator.choice(how.edits_per_token)
    parts = [passage]
    for _ in range(min(how.copies, length // size - 1)):
        parts += [np.array([how.separator], ids.dtype), *_edited(passage, edits_per_token, ids, generator)]
    window = np.concatenate([*parts, ids[start + size : start + length + 1]])[: length + 1]
    missing = length + 1 - len(window)  # where edits took out more than they put in, or the texts end
    return np.concatenate([window, ids[:missing]]) if missing else window


def _edited(passage: Ids, edits_per_token: float, ids: Ids, generator: np.random.Generator) -> list[Ids]:
    """The parts of a copy. An edit replaces up to three tokens by up to three that stand elsewhere in `ids`."""
    count = generator.binomial(len(passage), edits_per_token)
    parts, copied = [], 0
    for position in np.sort(generator.integers(0, len(passage), count)).tolist():
        if position < copied:
            continue
        removed, added = generator.integers(0, LONGEST_EDIT, 2).tolist()
        elsewhere = int(generator.integers(0, len(ids) - LONGEST_EDIT))
        parts += [passage[copied:position], ids[elsewhere : elsewhere + added]]
        copied = position + removed
    return [*parts, passage[copied:]]


class Order:
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
