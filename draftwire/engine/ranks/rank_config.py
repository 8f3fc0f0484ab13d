"""What every rank of a service has to know, as rank 0 hands it to the others."""

import json
from dataclasses import asdict, dataclass, field
from typing import Protocol

from draftwire.engine.ranks.place import Place, WantedGroup
from draftwire.runtime.settings import EngineSettings, LayerParallelSettings, ModelSettings, ServerSettings


class ServiceConfig(Protocol):
    """The configuration of a service that may be several processes."""

    @property
    def loading(self) -> ModelSettings:
        """Its model."""

    @property
    def engine(self) -> EngineSettings:
        """How much it serves."""

    @property
    def server(self) -> ServerSettings:
        """How it logs."""

    @property
    def wanted_group(self) -> WantedGroup:
        """How many processes it is to be."""


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What every rank has to know."""

    service: str
    """"verifier" or "drafter"."""
    place: Place
    loading: ModelSettings
    cache_tokens: int
    """Room of the KV cache, tokens."""
    timeout_s: float
    """How long ranks wait for each other, seconds."""
    log_format: str
    layers: LayerParallelSettings = field(default_factory=LayerParallelSettings)
    """Of a drafter."""

    @classmethod
    def of(cls, config: ServiceConfig, place: Place) -> "RankConfig":
        """Takes what matters to the rank at a place from its service's configuration."""
        return cls(
            config.wanted_group.service,
            place,
            config.loading,
            config.engine.kv_cache_tokens,
            config.wanted_group.timeout_s,
            config.server.log_format,
            config.wanted_group.layers,
        )

    @classmethod
    def parse(cls, text: str) -> "RankConfig":
        """Reads what `text` wrote."""
        values = json.loads(text)
        place, loading = Place(**values.pop("place")), ModelSettings(**values.pop("loading"))
        return cls(place=place, loading=loading, layers=LayerParallelSettings(**values.pop("layers")), **values)

    @property
    def text(self) -> str:
        """As an argument of a command line."""
        return json.dumps(asdict(self))
