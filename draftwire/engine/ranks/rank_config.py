"""Configuration of a rank, as rank 0 passes it to the others on the command line."""

import json
from dataclasses import asdict, dataclass
from typing import Protocol

from draftwire.engine.ranks.place import Place, WantedGroup
from draftwire.runtime.settings import EngineSettings, ModelSettings, ServerSettings


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

    service: str
    """"verifier" or "drafter"."""
    place: Place
    loading: ModelSettings
    engine: EngineSettings
    """Settings of which a rank needs the size of the KV cache and, to find it, that of the largest step."""
    timeout_s: float
    """How long ranks wait for each other, seconds."""
    log_format: str
    loader: str
    """Import path of what loads this rank's share, called with this."""
    loader_settings: str
    """Settings of the loader, in a format of its own."""

    @classmethod
    def of(cls, config: ServiceConfig, place: Place) -> "RankConfig":
        """Returns the configuration of the rank at a place, from that of its service."""
        wanted = config.wanted_group
        return cls(
            wanted.service,
            place,
            config.loading,
            config.engine,
            wanted.timeout_s,
            config.server.log_format,
            wanted.loader,
            wanted.loader_settings,
        )

    @classmethod
    def parse(cls, text: str) -> "RankConfig":
        """Parses the format of `text`."""
        values = json.loads(text)
        place, loading = Place(**values.pop("place")), ModelSettings(**values.pop("loading"))
        return cls(place=place, loading=loading, engine=EngineSettings(**values.pop("engine")), **values)

    @property
    def text(self) -> str:
        """JSON, for a command-line argument."""
        return json.dumps(asdict(self))
