"""Configuration of a rank, as rank 0 passes it to the others on the command line."""

import json
from dataclasses import asdict, dataclass
from typing import Protocol

from draftwire.engine.ranks.place import Place, WantedGroup
from draftwire.runtime.settings import EngineSettings, LayerParallelSettings, ModelSettings, ServerSettings


class ServiceConfig(Protocol):
    """Configuration of a service that may run as several processes."""

    @property
    def loading(self) -> ModelSettings:
        """The model and how to load it."""

    @property
    def engine(self) -> EngineSettings:
        """Limits of sessions and of the KV cache."""

    @property
    def server(self) -> ServerSettings:
        """Listening, draining and logging."""

    @property
    def wanted_group(self) -> WantedGroup:
        """Size of the group of processes."""


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Configuration of one rank."""

    group: WantedGroup
    place: Place
    loading: ModelSettings
    engine: EngineSettings
    """Settings of which a rank needs the size of the KV cache and, to find it, that of the largest step."""
    log_format: str

    @classmethod
    def of(cls, config: ServiceConfig, place: Place) -> "RankConfig":
        """Returns the configuration of the rank at a place, from that of its service."""
        return cls(config.wanted_group, place, config.loading, config.engine, config.server.log_format)

    @classmethod
    def parse(cls, text: str) -> "RankConfig":
        """Parses the format of `text`."""
        values = json.loads(text)
        layers = LayerParallelSettings(**values["group"].pop("layers"))
        return cls(
            WantedGroup(**values["group"], layers=layers),
            Place(**values["place"]),
            ModelSettings(**values["loading"]),
            EngineSettings(**values["engine"]),
            values["log_format"],
        )

    @property
    def text(self) -> str:
        """JSON, for a command-line argument."""
        return json.dumps(asdict(self))
