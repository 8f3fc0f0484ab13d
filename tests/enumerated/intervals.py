"""Random numbers as intervals: every run of some code is enumerated, with its probability.

Code that draws compares a number with borders, and goes on in the same way wherever the number lies between two of
them.
A number begins as the interval from 0 to 1. Each use cuts it down to the part in which the use has the same result, and
what was cut off becomes another run to do. So a number that is used twice is cut twice: nothing is assumed to be
independent, but numbers of different names.

A name is what the product knows a number by: key, choice, round and index. Two uses of a name are uses of one number,
wherever they are, in whichever request, however much later.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from draftwire.drafting import drawing
from draftwire.method import distributions, randomness
from draftwire.method.keys import DrawKey
from draftwire.options.trees import tree_kinds, tree_rule, walk
from draftwire.verification import coupled, rule

Name = tuple[object, ...]
Interval = tuple[float, float]
Result = TypeVar("Result")

MOST_RUNS = 20_000
"""A case with more does not end, for all that matters."""
ROUNDING = 1e-12
"""What is left of an interval beside a border that is no wider is of rounding alone, and no run of its own."""


@dataclass(slots=True)
class Numbers:
    """The numbers of one run."""

    intervals: dict[Name, Interval]
    """Of the numbers that were cut, before this run and in it."""
    left: list[dict[Name, Interval]] = field(default_factory=list)
    """Of runs to do: what this one cut off."""
    _values: dict[Name, float] = field(default_factory=dict)
    _names: dict[float, Name] = field(default_factory=dict)

    @property
    def probability(self) -> float:
        """Of this run."""
        return math.prod(high - low for low, high in self.intervals.values())

    def value(self, name: Name) -> float:
        """Returns a number within the interval of a name, which no other name has."""
        if name not in self._values:
            low, high = self.intervals.get(name, (0.0, 1.0))
            value = 0.5 * (low + high)
            while value in self._names:  # that of another name
                value = math.nextafter(value, high)
            self._values[name], self._names[value] = value, name
        return self._values[name]

    def cut(self, value: float, low: float, high: float) -> None:
        """Records a use of a number, which has the same result between two borders."""
        name = self._names[value]
        known_low, known_high = self.intervals.get(name, (0.0, 1.0))
        low = known_low if low < known_low + ROUNDING else low
        high = known_high if high > known_high - ROUNDING else high
        assert low <= value < high, "the use has this result for the number itself"
        for part in ((known_low, low), (high, known_high)):
            if part[0] < part[1]:
                self.left.append({**self.intervals, name: part})
        self.intervals[name] = (low, high)

    # What the product draws with

    def uniforms(self, keys: Sequence[DrawKey], count: int) -> Tensor:
        """Stands for `randomness.uniforms`."""
        rows = [[self.value((key.key, key.choice, key.round, index)) for index in range(count)] for key in keys]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(keys), count)

    def exponentials(self, words: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        """Stands for `randomness.exponentials`. Of two tokens, which one wins a race depends on one uniform number: the
        share that the first one's time has of both.
        """
        assert vocab_size == 2, "races of more tokens have no borders"
        shares = [
            self.value((tuple(text), position))
            for text, position in zip(words.tolist(), positions.tolist(), strict=True)
        ]
        return torch.tensor([[share, 1.0 - share] for share in shares], dtype=torch.float64)

    def draw(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Stands for `distributions.draw`."""
        found = DRAW(weights, uniforms)
        ends = weights.cumsum(dim=1, dtype=torch.float64) / weights.sum(dim=1, keepdim=True, dtype=torch.float64)
        for place, row, value in zip(found.tolist(), ends.tolist(), uniforms.tolist(), strict=True):
            self._cut_to(place, row, value)
        return found

    def drawn_places(self, weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Stands for `distributions._drawn_places`, of integer weights."""
        places, totals = DRAWN_PLACES(weights, uniforms)
        ends = (weights.cumsum(dim=1) / totals.unsqueeze(1).clamp(min=1)).tolist()
        for (place,), total, row, value in zip(places.tolist(), totals.tolist(), ends, uniforms.tolist(), strict=True):
            if total and value in self._names:  # else no token is left, or none was to be drawn
                self._cut_to(place, row, value)
        return places, totals

    def race(self, weights: Tensor, times: Tensor) -> distributions.RaceOutcome:
        """Stands for `distributions.race`, of two tokens: the first wins while its share is below its weight's."""
        found = RACE(weights, times)
        for winner, row, share in zip(found.winners.tolist(), weights.tolist(), times[:, 0].tolist(), strict=True):
            border = row[0] / (row[0] + row[1])
            self.cut(share, *((0.0, border) if winner == 0 else (border, 1.0)))
        return found

    def _cut_to(self, place: int, ends: list[float], value: float) -> None:
        low = ends[place - 1] if place else 0.0
        self.cut(value, low, 1.0 if place == len(ends) - 1 else ends[place])


DRAW, DRAWN_PLACES, RACE = distributions.draw, distributions._drawn_places, distributions.race
"""The product's own."""


@contextmanager
def drawn_from(numbers: Numbers) -> Iterator[None]:
    """Has the product draw with the numbers of a run."""
    patches: list[tuple[Any, str, Any]] = [
        *((module, "uniforms", numbers.uniforms) for module in (randomness, drawing, tree_kinds)),
        *((module, "exponentials", numbers.exponentials) for module in (randomness, drawing, tree_kinds)),
        *((module, "draw", numbers.draw) for module in (drawing, rule, tree_rule, walk)),
        *((module, "race", numbers.race) for module in (drawing, coupled)),
        (distributions, "_drawn_places", numbers.drawn_places),
    ]
    with ExitStack() as stack:
        for module, name, own in patches:
            stack.enter_context(mock.patch.object(module, name, own))
        yield


def all_runs(run: Callable[[], Result]) -> Iterator[tuple[float, Result]]:
    """Yields what each run comes to, with its probability; they sum to 1.

    Args:
        run: does the same with the same numbers, and draws with nothing else.
    """
    to_do: list[dict[Name, Interval]] = [{}]
    for _ in range(MOST_RUNS):
        if not to_do:
            return
        numbers = Numbers(to_do.pop())
        with drawn_from(numbers):
            result = run()
        to_do += numbers.left
        yield numbers.probability, result
    raise AssertionError(f"more than {MOST_RUNS} runs")
