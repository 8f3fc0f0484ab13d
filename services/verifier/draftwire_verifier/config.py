"""Configuration of a verifier."""

from dataclasses import dataclass, field

from draftwire.engine.ranks.place import WantedGroup
from draftwire.runtime.settings import (
    ConnectionSettings,
    EngineSettings,
    ModelSettings,
    ServerSettings,
    TextDraftSettings,
    TlsSettings,
    TracingSettings,
    require,
)


@dataclass(frozen=True, slots=True)
class TensorParallelSettings:
    """How many processes share the model, each on a device of its own; see docs/tensor-parallel.md."""

    tensor_parallel_size: int = 1
    """Processes that compute the model together, each with a share of every layer's weights and of the KV cache; with
    device cuda each takes a GPU. They are started on this machine, or by torchrun on several."""
    tensor_parallel_timeout_s: float = 30.0
    """Seconds that these processes wait for each other, at most: when one is silent for longer in the middle of a step,
    the verifier ends, to be started again as a whole."""

    def __post_init__(self) -> None:
        require(self.tensor_parallel_size >= 1, "tensor_parallel_size must be at least 1")
        require(0.0 < self.tensor_parallel_timeout_s < float("inf"), "tensor_parallel_timeout_s must be positive")


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """Everything that can be set. Bad values raise at start."""

    loading: ModelSettings
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50052, metrics_port=9052))
    engine: EngineSettings = field(default_factory=EngineSettings)
    parallel: TensorParallelSettings = field(default_factory=TensorParallelSettings)
    texts: TextDraftSettings = field(default_factory=TextDraftSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    rules: str | None = None
    """Verification rules of your own that requests may ask for too, by where they can be imported from, separated by
    commas: package.module.Attribute. Prove them with draftwire check-rule first."""

    def __post_init__(self) -> None:
        self.engine.check_device(self.loading.device)
        self.tls.check_listening(self.server.host)
        require(all(self.own_rules), f"rules takes package.module.Attribute, by commas, not {self.rules!r}")
        require(self.tls.tls_target_name is None, "tls_target_name sets nothing here: a verifier calls nobody")

    @property
    def own_rules(self) -> tuple[str, ...]:
        """Import path of each of `rules`."""
        return () if self.rules is None else tuple(map(str.strip, self.rules.split(",")))

    @property
    def wanted_group(self) -> WantedGroup:
        """Size and limits of the group of processes."""
        parallel = self.parallel
        size, timeout_s = parallel.tensor_parallel_size, parallel.tensor_parallel_timeout_s
        return WantedGroup("verifier", "tensor_parallel_size", size, timeout_s)
