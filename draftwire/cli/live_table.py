"""A live table of the three services, and the last lines of their logs."""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from draftwire.cli.local_stack import LocalStack
from draftwire.cli.process_end import ProcessEnd
from draftwire.cli.service_metrics import History, Samples, fetch

REFRESHES_PER_SECOND = 2
NUM_LOG_LINES = 8
NUM_OTHER_LINES = 10
"""Lines of the table, a notice of two lines, the empty lines between them, and the cursor."""
MAX_UNANSWERED = 2
"""So many requests for metrics, a second each, that are not answered show a service as silent."""
STATE_WIDTH = 11
"""Width of the longest state, so that the table does not move when a state changes."""
HEADINGS = (
    "service",
    "state",
    "sessions",
    "requests",
    "tokens/s",
    "acceptance\nrate",
    "block\nefficiency",
    "draft\nblocks/s",
    "KV cache\nuse",
)
WIDEST = 1000
"""More than a table needs."""
DROPPED_FIRST = (
    "draft\nblocks/s",
    "KV cache\nuse",
    "block\nefficiency",
    "requests",
    "sessions",
    "acceptance\nrate",
    "tokens/s",
)
"""Columns that a narrow terminal does without, in this order."""


@dataclass(slots=True)
class Row:
    """State and metrics of one service."""

    name: str
    state: str = "starting"
    since: float = field(default_factory=time.monotonic)
    """Start of the service's start-up, by `time.monotonic`."""
    is_serving: bool = False
    num_unanswered: int = 0
    """Requests for metrics since the last one that was answered."""
    history: History = field(default_factory=History)
    _is_gone: bool = False
    """Whether the process had ended when it was last looked at."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Updates the state from a line of the service's log."""
        match str(line["event"]).removeprefix(f"{self.name}."):
            case "weights_read":
                self.state = f"reading {float(line.get('share', 0.0)):.0%}"
            case "server_started":
                self.state, self.is_serving = "serving", True
            case "server_failed":
                self.state, self.is_serving = "failed", False
            case "server_stopped":
                self.state, self.is_serving = "stopped", False

    def look(self, ending: ProcessEnd | None) -> None:
        """Updates the state from the process: one that was killed has logged nothing."""
        if ending is None:
            if self._is_gone and not self.is_serving:  # it was started again, and has not said more yet
                self.state, self.since = "starting", time.monotonic()
        else:
            if self.state not in ("stopped", "failed"):  # in its own words
                self.state = "killed" if ending.was_killed else "ended"
            self.is_serving, self.history, self.num_unanswered = False, History(), 0
        self._is_gone = ending is not None

    def add(self, samples: Samples | None) -> None:
        """Takes metrics that were read just now; None if the service did not answer."""
        self.num_unanswered = self.num_unanswered + 1 if samples is None else 0
        if samples is not None:
            self.history.add(samples)

    @property
    def is_silent(self) -> bool:
        """Whether the service says nothing although it serves, as a frozen one."""
        return self.is_serving and self.num_unanswered >= MAX_UNANSWERED

    def cells(self) -> list[str]:
        """Returns the cells of the service's row; empty where the service does not export the metric."""
        history = self.history
        state = "no answer" if self.is_silent else self.state
        if state == "starting":
            state += f" {time.monotonic() - self.since:.0f} s"
        return [
            self.name,
            state,
            _shown(history.value("num_sessions", "num_requests_running"), "{:.0f}"),
            _shown(history.value("requests"), "{:.0f}"),
            _shown(history.rate("generation_tokens"), "{:.1f}"),
            _shown(history.ratio("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens_per_pos"), "{:.3f}"),
            _shown(history.ratio("generation_tokens", "target_passes"), "{:.2f}"),
            _shown(history.rate("blocks_sent"), "{:.1f}"),
            _shown(history.value("kv_cache_usage_perc"), "{:.1%}"),
        ]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


class LiveTable:
    """Draws on its console while entered, and restores the terminal at the end."""

    def __init__(self, console: Console, colors: Mapping[str, str]) -> None:
        """Draws nothing yet. `colors` maps the names of the services, one for each row, to their colours."""
        self._console = console
        self._colors = colors
        self._rows = {name: Row(name) for name in colors}
        self._lines: deque[Text] = deque(maxlen=NUM_LOG_LINES)
        self._notice = Text()
        self._stack: LocalStack | None = None
        self._is_over = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=REFRESHES_PER_SECOND, screen=False
        )

    def __enter__(self) -> "LiveTable":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._look()
        self._live.stop()

    def take_log(self, service: str, line: Mapping[str, Any], shown: Text) -> None:
        """Adds a line of a service's log, as data and as the text to show. Called on any thread."""
        self._rows[service].take(line)
        shown.no_wrap, shown.overflow = True, "ellipsis"  # so that a line stays a line
        self._lines.append(shown)

    def watch(self, stack: LocalStack) -> None:
        """Starts to read the services' metrics."""
        self._stack = stack
        self._reader.start()

    def notice(self, markup: str) -> None:
        """Shows a line between table and log."""
        self._notice = Text.from_markup(markup)

    def render(self) -> Group:
        """Returns the table, the notice and as many log lines as the terminal has room for."""
        shown = list(HEADINGS)
        table, unbounded = self._table(shown), self._console.options.update(width=WIDEST)
        for heading in DROPPED_FIRST:
            if self._console.measure(table, options=unbounded).maximum <= self._console.width:
                break
            shown.remove(heading)
            table = self._table(shown)
        room = max(0, self._console.height - NUM_OTHER_LINES)
        newest = list(self._lines)[max(0, len(self._lines) - room) :]
        return Group(table, Text(), self._notice, Text(), *newest)

    def _table(self, shown: Sequence[str]) -> Table:
        """Returns the table with some of its columns."""
        table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
        for heading in shown:
            is_text = heading in ("service", "state")
            width = STATE_WIDTH if heading == "state" else None
            table.add_column(heading, justify="left" if is_text else "right", no_wrap=True, min_width=width)
        for row in self._rows.values():
            name, state, *numbers = row.cells()
            style = "green" if row.is_serving and not row.is_silent else "yellow"
            cells: list[Text | str] = [Text(name, self._colors[name]), Text(state, style), *numbers]
            table.add_row(*(cell for heading, cell in zip(HEADINGS, cells, strict=True) if heading in shown))
        return table

    def _read(self) -> None:
        assert self._stack is not None
        while not self._is_over.wait(1.0 / REFRESHES_PER_SECOND):
            self._look()
            for name, service in list(self._stack.services.items()):
                if service.metrics_port and service.is_serving and service.ending is None:
                    self._rows[name].add(fetch(service.metrics_port))

    def _look(self) -> None:
        for name, service in list(self._stack.services.items()) if self._stack is not None else []:
            self._rows[name].look(service.ending)
