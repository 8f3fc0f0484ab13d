"""Exact integrals of decisions over the uniform numbers that they use.

A decision is a piecewise constant function of the unit cube: numbers are compared with thresholds, in plain tests or
inside an inverse distribution function. The cube is cut into boxes along such thresholds, found to float64 precision by
bisection, until all corners of each box and random points within agree. A function that only compares each number with
thresholds, which may depend on the results of other comparisons, and whose value identifies these results, is then
constant in the box: its integral is the sum of volumes, exact up to rounding. If it takes the same value in
disconnected regions, only the random points can show that. For other functions, say of a product of two numbers, the
cutting does not end. They are sampled with quasi-random points, and the error is estimated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

Decision = Callable[[Tensor, Tensor], Tensor]
"""Takes cases, `[points] int64`, and numbers in [0, 1), `[points, dimensions] float64`; returns the code of each
decision, `[points] int64`."""

LAST = 1.0 - 2.0**-53
"""The largest number that is drawn."""

INSET = 2.0**-40
"""Distance from a box's faces at which its corners are evaluated, because faces are only found up to rounding."""

BISECTIONS = 44
MOST_CORNERS = 64
RANDOM_POINTS = 6
CHECK_POINTS = 8
POINTS_AT_ONCE = 2**16
MOST_BOXES_PER_CASE = 1000
"""Limit on the mean number of boxes. One round of a rule has tens."""
PROBED_CASES = 4
"""Cases that are tried first, to see whether the function is made of boxes."""
REPLICATES = 16
SOBOL_POINTS = 256


@dataclass(frozen=True, slots=True)
class Measure:
    """The probability of each decision."""

    replicates: Tensor
    """`[1, cases, codes] float64`; if sampled, `[REPLICATES, cases, codes]` independent estimates."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing was sampled."""
        return len(self.replicates) == 1

    @property
    def probs(self) -> Tensor:
        """`[cases, codes] float64`."""
        return self.replicates.mean(dim=0)


def integrate(decision: Decision, num_cases: int, dimensions: int, num_codes: int) -> Measure:
    """Returns the probability of each code in each case for independent uniform numbers: exact if the decision is made
    of boxes, else by `sample`.
    """
    if num_cases > PROBED_CASES:
        probed = torch.linspace(0, num_cases - 1, PROBED_CASES).round().to(torch.int64)
        if _boxes(decision, probed, dimensions) is None:
            return sample(decision, num_cases, dimensions, num_codes)
    boxes = _boxes(decision, torch.arange(num_cases), dimensions)
    if boxes is None:
        return sample(decision, num_cases, dimensions, num_codes)
    probs = torch.zeros(num_cases * num_codes, dtype=torch.float64)
    probs.index_add_(0, boxes.cases * num_codes + boxes.codes, (boxes.high - boxes.low).prod(dim=1))
    return Measure(probs.reshape(1, num_cases, num_codes))


def sample(decision: Decision, num_cases: int, dimensions: int, num_codes: int) -> Measure:
    """Estimates the probabilities of `integrate` from quasi-random points."""
    result = torch.zeros(REPLICATES, num_cases * num_codes, dtype=torch.float64)
    cases = torch.arange(num_cases).repeat_interleave(SOBOL_POINTS)
    for replicate in range(REPLICATES):
        engine = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=replicate)
        points = engine.draw(SOBOL_POINTS, dtype=torch.float64).clamp(max=LAST)
        codes = _decided(decision, cases, points.repeat(num_cases, 1))
        result[replicate] = torch.bincount(cases * num_codes + codes, minlength=num_cases * num_codes) / SOBOL_POINTS
    return Measure(result.reshape(REPLICATES, num_cases, num_codes))


def edge_points(dimensions: int, values: tuple[float, ...] = (0.0, 0.5, LAST), most: int = 243) -> Tensor:
    """Returns points with all coordinates among `values`: all such points, or `most` of them if there are more.

    Returns:
        `[points, dimensions] float64`.
    """
    if len(values) ** dimensions <= most:
        return torch.tensor(list(product(values, repeat=dimensions)), dtype=torch.float64).reshape(-1, dimensions)
    generator = torch.Generator().manual_seed(dimensions)
    index = torch.randint(0, len(values), (most, dimensions), generator=generator)
    index[: len(values)] = torch.arange(len(values)).unsqueeze(1)  # all coordinates equal
    return torch.tensor(values, dtype=torch.float64)[index]


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Boxes of the cubes of several cases."""

    cases: Tensor
    """`[boxes] int64`."""
    low: Tensor
    """`[boxes, dimensions] float64`."""
    high: Tensor
    codes: Tensor
    """`[boxes] int64`: the decision at the centre."""

    def select(self, index: Tensor) -> "_Boxes":
        return _Boxes(self.cases[index], self.low[index], self.high[index], self.codes[index])


def _boxes(decision: Decision, cases: Tensor, dimensions: int) -> _Boxes | None:
    """Returns boxes in which the decision is constant; None if there are too many."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(cases), dimensions)
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    active = _Boxes(cases, low, high, cases)
    done = active.select(cases[:0])
    while len(active.cases):
        parts = [done]
        while len(active.cases):
            if sum(len(part.cases) for part in [*parts, active]) > MOST_BOXES_PER_CASE * len(cases):
                return None
            active, others = _with_witnesses(decision, active, generator)
            is_split = ~others.isnan().any(dim=1)
            parts.append(active.select(~is_split))
            active = _split(decision, active.select(is_split), others[is_split])
        done = _joined(parts)
        others = _contradictions(decision, done, generator)
        is_split = ~others.isnan().any(dim=1)
        active = _split(decision, done.select(is_split), others[is_split])
        done = done.select(~is_split)
    return done


def _contradictions(decision: Decision, boxes: _Boxes, generator: torch.Generator) -> Tensor:
    """Returns a random point of each box whose decision differs from the centre's, NaN where none is found."""
    others = torch.full_like(boxes.low, torch.nan)
    is_wide = ((boxes.high - boxes.low) > 4 * INSET).all(dim=1)
    for _ in range(CHECK_POINTS if boxes.low.shape[1] else 0):
        points = _within(boxes, torch.rand(boxes.low.shape, generator=generator, dtype=torch.float64))
        differs = (_decided(decision, boxes.cases, points) != boxes.codes) & is_wide
        others = torch.where(differs.unsqueeze(1), points, others)
    return others


def _joined(parts: list[_Boxes]) -> _Boxes:
    return _Boxes(
        torch.cat([part.cases for part in parts]),
        torch.cat([part.low for part in parts]),
        torch.cat([part.high for part in parts]),
        torch.cat([part.codes for part in parts]),
    )


def _with_witnesses(decision: Decision, boxes: _Boxes, generator: torch.Generator) -> tuple[_Boxes, Tensor]:
    """Decides at the centres of boxes, and returns a point of each whose decision differs, NaN where none is found."""
    count, dimensions = boxes.low.shape
    relative = torch.cat(
        [
            torch.full((1, dimensions), 0.5, dtype=torch.float64),
            edge_points(dimensions, (0.0, 1.0), MOST_CORNERS),
            torch.rand(RANDOM_POINTS if dimensions else 0, dimensions, generator=generator, dtype=torch.float64),
        ]
    )
    points = _within(boxes, relative.unsqueeze(1))  # [points, boxes, dimensions]
    codes = _decided(decision, boxes.cases.repeat(len(relative)), points.flatten(0, 1)).reshape(-1, count)
    differs = (codes != codes[0]) & ((boxes.high - boxes.low) > 4 * INSET).all(dim=1)
    first = differs.to(torch.int8).argmax(dim=0)
    witness = points[first, torch.arange(count)]
    found = torch.where(differs.any(dim=0).unsqueeze(1), witness, torch.nan)
    return _Boxes(boxes.cases, boxes.low, boxes.high, codes[0]), found


def _split(decision: Decision, boxes: _Boxes, others: Tensor) -> _Boxes:
    """Cuts each box where the decision changes on the way from its centre to another point, axis by axis."""
    count, dimensions = boxes.low.shape
    if count == 0:
        return boxes
    start = _within(boxes, torch.full((1, dimensions), 0.5, dtype=torch.float64))
    is_moved = torch.ones(dimensions + 1, dimensions, dtype=torch.bool).tril(-1).unsqueeze(1)
    way = torch.where(is_moved, others, start)  # [dimensions + 1, boxes, dimensions]
    codes = _decided(decision, boxes.cases.repeat(dimensions + 1), way.flatten(0, 1)).reshape(-1, count)
    axis = (codes[1:] != codes[:-1]).to(torch.int8).argmax(dim=0)
    rows = torch.arange(count)
    point, near_code = way[axis, rows], codes[axis, rows]
    near, far = way[axis, rows, axis], way[axis + 1, rows, axis]
    for _ in range(BISECTIONS):
        middle = 0.5 * (near + far)
        point[rows, axis] = middle
        is_near = _decided(decision, boxes.cases, point) == near_code
        near, far = torch.where(is_near, middle, near), torch.where(is_near, far, middle)
    high, low = boxes.high.clone(), boxes.low.clone()
    high[rows, axis] = low[rows, axis] = 0.5 * (near + far)
    return _Boxes(
        boxes.cases.repeat(2), torch.cat([boxes.low, low]), torch.cat([high, boxes.high]), boxes.codes.repeat(2)
    )


def _within(boxes: _Boxes, relative: Tensor) -> Tensor:
    """Returns points of boxes at relative coordinates in [0, 1], `[..., boxes or 1, dimensions]`."""
    inset = (0.25 * (boxes.high - boxes.low)).clamp(max=INSET)
    return boxes.low + inset + relative * (boxes.high - boxes.low - 2 * inset)


def _decided(decision: Decision, cases: Tensor, points: Tensor) -> Tensor:
    parts = zip(cases.split(POINTS_AT_ONCE), points.split(POINTS_AT_ONCE), strict=True)
    return torch.cat([decision(*part) for part in parts])
