"""Settings of a `RemoteDrafter`, from the JSON of vLLM's `--additional-config`. No vLLM here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from draftwire.errors import InvalidRequestError
from draftwire.runtime.addresses import host_of
from draftwire.runtime.settings import TlsSettings, require

KEY = "draftwire"
"""Entry of `additional_config`."""
ANY_HOST = ("0.0.0.0", "::", "[::]", "")
"""Hosts to listen at that nobody can call."""


@dataclass(frozen=True, slots=True)
class RemoteDrafterSettings:
    """Drafters to ask, how they reach this process, and how long vLLM waits for them.

    Raises:
        InvalidRequestError: a value is missing or out of range.
    """

    drafters: tuple[str, ...]
    """host:port of each drafter service."""
    host: str = "127.0.0.1"
    """Host to listen at for blocks."""
    port: int = 0
    """Port to listen on; 0 is any free one."""
    address: str = ""
    """host:port at which drafters reach this process. Empty: host and port that it listens at."""
    deadline_ms: float = 200.0
    """How long a step of vLLM waits for blocks at most, milliseconds. Whoever has none by then goes on without."""
    tls: TlsSettings = field(default_factory=TlsSettings)
    """TLS as of a gateway, towards drafters, and as of a verifier, for the blocks."""

    def __post_init__(self) -> None:
        require(bool(self.drafters), "drafters must name the host:port of at least one drafter")
        require(0 <= self.port <= 65535, f"port must be in 0..65535, not {self.port}")
        require(0.0 < self.deadline_ms <= 60_000.0, f"deadline_ms must be in 0..60000, not {self.deadline_ms:g}")
        can_be_called = bool(self.address) or self.host not in ANY_HOST
        require(can_be_called, f"address must say where drafters reach this process, which listens at {self.host}")
        self.tls.check_listening(self.host)
        for drafter in self.drafters:
            self.tls.check_dialling(host_of(drafter))


def parse_settings(additional_config: Mapping[str, Any]) -> RemoteDrafterSettings:
    """Returns the settings that vLLM was started with.

    Raises:
        InvalidRequestError: there are none, one is unknown, or a value is of the wrong type or out of range.
    """
    given = additional_config.get(KEY)
    require(isinstance(given, Mapping), f'--additional-config must be {{"{KEY}": {{"drafters": ["host:port"]}}}}')
    assert isinstance(given, Mapping)
    of_tls = {one.name for one in fields(TlsSettings)}
    own = {one.name for one in fields(RemoteDrafterSettings)} - {"tls"}
    values: dict[str, Any] = {}
    tls: dict[str, Any] = {}
    for name, value in given.items():
        if name not in own | of_tls:
            alike = get_close_matches(name, own | of_tls, n=1)
            meant = f"; did you mean {alike[0]}?" if alike else ""
            raise InvalidRequestError(f"{KEY} has no setting {name!r}{meant}")
        require(_has_type(name, value), f"{name}: {value!r} is of the wrong type")
        if name in of_tls:
            tls[name] = Path(value) if name in ("tls_cert", "tls_key", "tls_ca") else value
        else:
            values[name] = tuple(value) if name == "drafters" else value
    require("drafters" in values, "drafters must name the host:port of at least one drafter")
    return RemoteDrafterSettings(**values, tls=TlsSettings(**tls))


def _has_type(name: str, value: Any) -> bool:
    if name == "drafters":
        return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)
    if name in ("tls_require_client_cert", "allow_plaintext"):
        return isinstance(value, bool)
    if name == "port":
        return isinstance(value, int) and not isinstance(value, bool)
    if name == "deadline_ms":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str)
