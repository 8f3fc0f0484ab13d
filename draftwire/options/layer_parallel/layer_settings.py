"""Settings of layer-parallel drafting. Needs no torch."""

import json
from dataclasses import asdict, dataclass

from draftwire.engine.ranks.place import WantedGroup
from draftwire.options.layer_parallel.layer_groups import LayerParallelism
from draftwire.runtime.settings import require

LOADER = "draftwire.options.layer_parallel.layer_parallel_loading:load_draft_rank"
"""Import path of what loads a rank's share of a drafter."""


@dataclass(frozen=True, slots=True)
class LayerParallelSettings:
    """Layers of the draft model that run at the same time, and the number of devices."""

    layer_parallel_size: int = 1
    """Consecutive layers whose attention runs at the same time, on the same input, while tokens are drafted (EasySpec);
    1 drafts as usual."""
    layer_groups: str | None = None
    """The same by list, such as "0 1-3 4-7 8": which layers run together, all of them in order; in the place of
    layer_parallel_size."""
    bonus_calibration: bool = True
    """Whether what was drafted approximately is computed again exactly after each verdict; off is for comparison."""
    layer_parallel_ranks: int = 1
    """Processes that share the attention of layers that run together, each on a device of its own; with device cuda
    each takes a GPU. They are started on this machine, or by torchrun."""
    layer_parallel_timeout_s: float = 30.0
    """Seconds that these processes wait for each other, at most: when one is silent for longer in the middle of a step,
    the drafter ends, to be started again as a whole."""

    def __post_init__(self) -> None:
        require(self.layer_parallel_size >= 1, "layer_parallel_size must be at least 1")
        says_once = self.layer_groups is None or self.layer_parallel_size == 1
        require(says_once, "layer_parallel_size and layer_groups say the same: set one of them")
        has_use = self.bonus_calibration or self.is_parallel
        require(has_use, "bonus_calibration has nothing to leave out: set layer_parallel_size or layer_groups")
        _ = self.parallelism  # validates
        require(self.layer_parallel_ranks >= 1, "layer_parallel_ranks must be at least 1")
        can_share = self.layer_parallel_ranks == 1 or self.is_parallel
        require(can_share, "layer_parallel_ranks share what runs together: set layer_parallel_size or layer_groups")
        require(0.0 < self.layer_parallel_timeout_s < float("inf"), "layer_parallel_timeout_s must be positive")

    @property
    def parallelism(self) -> LayerParallelism:
        """Layer groups in the form that the model loader takes."""
        return LayerParallelism(self.layer_parallel_size, self.layer_groups)

    @property
    def is_parallel(self) -> bool:
        """Whether layers are to run together."""
        return self.layer_parallel_size > 1 or self.layer_groups is not None

    @property
    def wanted_group(self) -> WantedGroup:
        """Size and limits of the group of processes."""
        size, timeout_s = self.layer_parallel_ranks, self.layer_parallel_timeout_s
        return WantedGroup("drafter", "layer_parallel_ranks", size, timeout_s, LOADER, self.text)

    @property
    def text(self) -> str:
        """JSON, for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "LayerParallelSettings":
        """Parses the format of `text`."""
        return cls(**json.loads(text))
