"""Configuration of a drafter."""

from dataclasses import dataclass, field

from draftwire.engine.ranks.place import WantedGroup
from draftwire.method.quantization import Encoding, Quantization, position_bytes
from draftwire.models.parallel.layer_groups import LayerParallelism
from draftwire.runtime.settings import (
    ConnectionSettings,
    EngineSettings,
    ModelSettings,
    ServerSettings,
    TlsSettings,
    TracingSettings,
    require,
)


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """What is made of the draft model's distributions before tokens are drawn from them and both are sent."""

    draft_encoding: Encoding = Encoding.SPARSE_UINT16
    """How distributions travel: sparse_uint16 takes a few dozen bytes a token, dense_float32 and dense_float16 take 4
    and 2 bytes x vocabulary."""
    draft_mass: float = 0.98
    """Share of a distribution's mass that a sparse one keeps, in (0, 1]; more is accepted more often and takes more
    bytes."""
    draft_max_support: int = 64
    """Tokens that a sparse distribution keeps, at most, 1 to 1,024."""

    def __post_init__(self) -> None:
        _ = self.quantization  # checks itself

    @property
    def quantization(self) -> Quantization:
        """The same for a drafting strategy."""
        return Quantization(self.draft_encoding, self.draft_mass, self.draft_max_support)

    def block_bytes(self, vocab_size: int, max_draft_tokens: int) -> int:
        """Returns the most bytes that the distributions of one block take."""
        return max_draft_tokens * position_bytes(self.draft_encoding, vocab_size, self.draft_max_support)


@dataclass(frozen=True, slots=True)
class LayerParallelSettings:
    """Which layers of the draft model run at the same time, and on how many devices."""

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
        _ = self.parallelism  # checks itself
        require(self.layer_parallel_ranks >= 1, "layer_parallel_ranks must be at least 1")
        can_share = self.layer_parallel_ranks == 1 or self.is_parallel
        require(can_share, "layer_parallel_ranks share what runs together: set layer_parallel_size or layer_groups")
        require(0.0 < self.layer_parallel_timeout_s < float("inf"), "layer_parallel_timeout_s must be positive")

    @property
    def parallelism(self) -> LayerParallelism:
        """The same for a model."""
        return LayerParallelism(self.layer_parallel_size, self.layer_groups)

    @property
    def is_parallel(self) -> bool:
        """Whether layers are to run together."""
        return self.layer_parallel_size > 1 or self.layer_groups is not None


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Everything that can be set. Bad values raise at start."""

    loading: ModelSettings
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50053, metrics_port=9053))
    engine: EngineSettings = field(default_factory=EngineSettings)
    drafts: DraftSettings = field(default_factory=DraftSettings)
    layers: LayerParallelSettings = field(default_factory=LayerParallelSettings)
    connect_timeout_s: float = 10.0
    """How long a session's opening may wait for the verifier to answer."""
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)

    def __post_init__(self) -> None:
        self.tls.check_listening(self.server.host)
        self.tls.check_dialling(self.server.host)  # verifiers are where their gateways say: elsewhere, if callers are
        require(self.connect_timeout_s > 0.0, "connect_timeout_s must be positive")
        is_lean = self.loading.decoder != "transformers" or not self.layers.is_parallel
        require(is_lean, "layer_parallel_size and layer_groups need decoder lean, or auto, not transformers")

    @property
    def wanted_group(self) -> WantedGroup:
        """How many processes this is to be."""
        layers = self.layers
        size, timeout_s = layers.layer_parallel_ranks, layers.layer_parallel_timeout_s
        return WantedGroup("drafter", "layer_parallel_ranks", size, timeout_s)
