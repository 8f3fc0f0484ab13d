"""Configuration of a verifier."""

from dataclasses import dataclass, field

from draftwire.services.settings import ModelSettings, ServerSettings, require


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """Everything that can be set. Bad values raise at start."""

    loading: ModelSettings
    server: ServerSettings = field(default_factory=lambda: ServerSettings(port=50052, metrics_port=9052))
    max_sessions: int = 64
    """Sessions that may be open at once; more are refused with RESOURCE_EXHAUSTED."""
    max_draft_tokens: int = 16
    """Draft tokens in a block, at most."""

    def __post_init__(self) -> None:
        require(self.max_sessions >= 1, "max_sessions must be at least 1")
        require(self.max_draft_tokens >= 1, "max_draft_tokens must be at least 1")
