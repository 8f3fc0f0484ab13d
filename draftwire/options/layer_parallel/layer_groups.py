"""Groups of a drafter's layers that run in parallel; see `layer_parallel`. Needs no torch."""

import re
from dataclasses import dataclass
from itertools import pairwise

from draftwire.errors import InvalidRequestError

LayerGroups = tuple[tuple[int, ...], ...]
"""Indices of all layers of a model in order, by group. The layers of a group run in parallel."""


@dataclass(frozen=True, slots=True)
class LayerParallelism:
    """Setting of which layers of a drafter run in parallel."""

    size: int = 1
    """Layers per group. The first and the last layer stay alone, layers 1 to size - 1 are the first group, size to
    2 * size - 1 the next, and the remaining layers before the last form a smaller group."""
    groups: str | None = None
    """Explicit groups, such as "0 1-3 4-7 8", instead of `size`."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidRequestError(f"layers of a group must be at least 1, not {self.size}")
        if self.groups is not None:
            _parsed(self.groups)

    def of(self, num_layers: int) -> LayerGroups:
        """Returns the groups of a model.

        Raises:
            InvalidRequestError: the groups do not list all layers in order, or no group has several layers.
        """
        groups = groups_of_size(self.size, num_layers) if self.groups is None else self._of_list(num_layers)
        if not runs_in_parallel(groups):
            raise InvalidRequestError(
                f"of {num_layers} layers in the groups {written(groups)!r} none run at the same time"
            )
        return groups

    def _of_list(self, num_layers: int) -> LayerGroups:
        groups = _parsed(self.groups or "")
        if [index for group in groups for index in group] != list(range(num_layers)):
            raise InvalidRequestError(
                f"groups of layers must name all {num_layers} of the model, 0 to {num_layers - 1}, in order, "
                f"which {self.groups!r} does not"
            )
        return groups


def groups_of_size(size: int, num_layers: int) -> LayerGroups:
    """Returns EasySpec's groups of a model's layers; see `LayerParallelism.size`."""
    last = num_layers - 1
    starts = {start for start in (0, 1, *range(size, last, size), last) if start <= last}
    return tuple(tuple(range(start, stop)) for start, stop in pairwise([*sorted(starts), num_layers]))


def runs_in_parallel(groups: LayerGroups) -> bool:
    """Whether there is a group of more than one layer."""
    return any(len(group) > 1 for group in groups)


def written(groups: LayerGroups) -> str:
    """Formats groups in the notation of `LayerParallelism.groups`."""
    return " ".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else f"{group[0]}" for group in groups)


def _parsed(text: str) -> LayerGroups:
    """Parses groups such as `0 1-3 4-7 8`."""
    groups = []
    for word in re.split(r"[,\s]+", text.strip()):
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", word, re.ASCII)
        if found is None:
            raise InvalidRequestError(f"a group of layers is written as 4 or 4-7, not {word!r}")
        first = int(found[1])
        groups.append(tuple(range(first, int(found[2] or first) + 1)))
    if not all(groups):
        raise InvalidRequestError(f"a group of layers in {text!r} ends before it begins")
    return tuple(groups)


def holders_of(groups: LayerGroups, num_ranks: int) -> list[int | None]:
    """Returns the rank that holds each layer's attention; None is all ranks.

    All ranks compute the layers that are alone, which costs less than waiting for one rank. The layers of the other
    groups are distributed.
    """
    return [place % num_ranks if len(group) > 1 else None for group in groups for place in range(len(group))]
