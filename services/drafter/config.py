"""Configuration of a drafter."""

from dataclasses import dataclass, field

from draftwire.services.settings import EngineSettings, ModelSettings, ServerSettings, require


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Everything that can be set. Bad values raise at start."""

    loading: ModelSettings
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50053, metrics_port=9053))
    engine: EngineSettings = field(default_factory=EngineSettings)
    connect_timeout_s: float = 10.0
    """How long a session's opening may wait for the verifier to answer."""

    def __post_init__(self) -> None:
        require(self.connect_timeout_s > 0.0, "connect_timeout_s must be positive")
