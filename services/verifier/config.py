"""Configuration of a verifier."""

from dataclasses import dataclass, field

from draftwire.services.settings import ConnectionSettings, EngineSettings, ModelSettings, ServerSettings


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """Everything that can be set. Bad values raise at start."""

    loading: ModelSettings
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50052, metrics_port=9052))
    engine: EngineSettings = field(default_factory=EngineSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
