"""What services export, as docs/metric-list.md lists it. `python -m tests.metric_families` writes its tables anew."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from draftwire.engine.admission import Room
from draftwire.options.ahead.held_blocks import HeldTally
from draftwire.runtime.metrics import ServiceMetrics
from draftwire_drafter.metrics import DrafterMetrics
from draftwire_gateway.metrics import GatewayMetrics
from draftwire_gateway.peers.discovery import SourceStatus
from draftwire_verifier.draft_waits import DraftWaits
from draftwire_verifier.metrics import VerifierMetrics

OF_PROCESS = "process_"
"""Prefix of what the library exports of any process; the page says it once."""
PROCESS_SERIES = {
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_start_time_seconds",
    "process_open_fds",
    "process_max_fds",
}
PAGE = Path(__file__).parents[1] / "docs" / "metric-list.md"
SERVICES = ("gateway", "verifier", "drafter")
OF_MODEL = ("model_name", "engine")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
"""Of the series that a metric of a type has."""
UNITS = {
    "_timestamp_seconds$": "s since 1970",
    "_seconds$": "s",
    "_bytes_per_": "bytes per token",
    "_bytes": "bytes",
    "tokens|near_ties|prefix_cache": "tokens",
    "http_requests$": "requests",
    "grpc_requests$": "calls",
    "requests": "choices of requests",
    "sessions|_lost$": "sessions",
    "usage_perc$": "share, 0 to 1",
    "model_info$": "1",
    "audit_evidence$": "powers of ten",
    "audit_(sum|variance)$": "tokens, nats",
    "drafter_(proven|quarantined)$": "0 or 1",
    "rounds|passes$|num_drafts$|trees$": "rounds",
    "steps$": "steps",
    "blocks": "blocks",
    "places$": "places of blocks",
    "branches$": "texts",
    "messages": "messages",
    "peers": "services",
    "failures$": "times",
    "log_write_errors$": "lines",
}
"""What names that a pattern is found in count. The first that is found says it."""
IDLE = SimpleNamespace(
    sessions={},
    dropped={},
    prefix_tokens={},
    room=Room(1, 16),
)
"""A scheduler without work."""


@dataclass(frozen=True)
class Family:
    """One metric of one service."""

    name: str
    """Without what Prometheus adds: `_total` and the like."""
    type: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def series(self) -> set[str]:
        return {self.name + suffix for suffix in SUFFIXES[self.type]}

    @property
    def unit(self) -> str:
        return next(unit for pattern, unit in UNITS.items() if re.search(pattern, self.name))

    @property
    def row(self) -> str:
        shown = self.name.removeprefix("draftwire:") + ("_total" if self.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in self.labels) or "-"
        return f"| `{shown}` | {self.type} | {labels} | {self.unit} | {self.meaning} |"


def metrics_of(service: str) -> ServiceMetrics:
    """Returns what a service counts, before it has done anything."""
    if service == "gateway":
        metrics = GatewayMetrics()
        metrics.watch_certificates(dict)
        metrics.watch([SimpleNamespace(role="verifier", status=SourceStatus(), num_by_state=dict)])
        return metrics
    engine = VerifierMetrics() if service == "verifier" else DrafterMetrics()
    engine.watch_certificates(dict)
    engine.watch(IDLE, "model", "float32")
    if isinstance(engine, VerifierMetrics):
        engine.watch_waits(DraftWaits(float), HeldTally())
    return engine


def families_of(service: str) -> list[Family]:
    """Returns all metrics of a service, by name."""
    metrics = metrics_of(service)
    of_model = {family.name for family in metrics.of_model.registry.collect()}
    found = []
    for family in metrics.registry.collect():
        if family.name.startswith(OF_PROCESS):
            continue
        own = metrics.labels.get(family.name) or tuple(getattr(family, "_labelnames", ()))
        labels = (*OF_MODEL, *own) if family.name in of_model else own
        found.append(Family(family.name, family.type, labels, family.documentation))
    assert len({family.name for family in found}) == len(found)
    return sorted(found, key=lambda family: family.name)


def table_of(service: str) -> str:
    """Returns a service's table."""
    head = ["| name | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(family.row for family in families_of(service))])


def tables_of(page: str) -> Iterator[tuple[str, str]]:
    """Yields the tables on the page, each with its service."""
    yield from re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- end -->", page, re.DOTALL)


def written_anew(page: str) -> str:
    """Returns the page with tables of what the services export now."""
    return re.sub(
        r"<!-- (\w+) -->\n.*?\n<!-- end -->",
        lambda found: f"<!-- {found[1]} -->\n{table_of(found[1])}\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text()))
