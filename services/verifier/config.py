"""Configuration of a verifier."""

from dataclasses import dataclass, field

from draftwire.services.settings import (
    ConnectionSettings,
    EngineSettings,
    ModelSettings,
    ServerSettings,
    TlsSettings,
    require,
)


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """Everything that can be set. Bad values raise at start."""

    loading: ModelSettings
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50052, metrics_port=9052))
    engine: EngineSettings = field(default_factory=EngineSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)

    def __post_init__(self) -> None:
        self.tls.check_listening(self.server.host)
        require(self.tls.tls_target_name is None, "tls_target_name sets nothing here: a verifier calls nobody")
