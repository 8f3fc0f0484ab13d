"""The table of `draftwire up`: what services export, as rates of the last seconds."""

import io
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from rich.console import Console
from rich.text import Text

from draftwire.cli.live_table import NUM_LOG_LINES, NUM_OTHER_LINES, LiveTable, Row
from draftwire.cli.process_end import ProcessEnd
from draftwire.cli.service_metrics import WINDOW_SECONDS, History, fetch, parse
from draftwire.cli.up_command import COLORS

EXPORTED = """\
# HELP draftwire:requests_total Choices of requests ended, by result.
# TYPE draftwire:requests_total counter
draftwire:requests_total{result="stop"} 2.0
draftwire:requests_total{result="failed"} 1.0
draftwire:num_sessions 3.0
draftwire:kv_cache_usage_perc 0.25
draftwire:draft_pass_seconds_bucket{le="0.001"} 7.0
python_gc_objects_collected_total 5.0
"""


def test_numbers_are_read_by_name_and_summed_over_labels() -> None:
    read = parse(EXPORTED)
    assert (read["requests"], read["num_sessions"], read["kv_cache_usage_perc"]) == (3.0, 3.0, 0.25)
    assert not any("python" in name or "HELP" in name for name in read)


def history(*samples: tuple[float, dict[str, float]]) -> History:
    now = 100.0
    made = History(lambda: now)
    for at, values in samples:
        now = 100.0 + at
        made.add(values)
    return made


def test_rates_are_those_of_the_last_seconds() -> None:
    told = history((0.0, {"a": 0.0}), (1.0, {"a": 1000.0}), (4.0, {"a": 1030.0}), (1.0 + WINDOW_SECONDS, {"a": 1050.0}))
    assert told.rate("a") == pytest.approx(50.0 / WINDOW_SECONDS)
    assert told.value("a") == 1050.0
    assert told.value("missing", "a") == 1050.0


def test_what_is_not_known_is_not_made_up() -> None:
    empty, one, more = history(), history((0.0, {"a": 5.0})), history((0.0, {"a": 5.0}), (1.0, {"a": 6.0}))
    assert (empty.value("a"), empty.rate("a"), empty.ratio("a", "b")) == (None, None, None)
    assert one.rate("a") is None
    assert (more.value("b"), more.rate("b"), more.ratio("a", "b")) == (None, None, None)


def test_counter_that_appears_later_began_at_zero() -> None:
    assert history((0.0, {}), (2.0, {"a": 6.0})).rate("a") == 3.0


def test_ratios_are_of_lately_and_when_nothing_happened_of_all_time() -> None:
    before, nothing = (0.0, {"a": 10.0, "b": 100.0}), {"a": 0.0, "b": 0.0}
    assert history(before, (1.0, {"a": 15.0, "b": 110.0})).ratio("a", "b") == 0.5
    assert history(before, (1.0, before[1])).ratio("a", "b") == 0.1
    assert history((0.0, nothing), (1.0, nothing)).ratio("a", "b") is None


def test_service_is_read_over_http_and_a_silent_one_has_no_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(EXPORTED.encode())

        def log_message(self, *arguments: object) -> None: ...

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody there: it is of no use for this machine
    monkeypatch.delenv("no_proxy", raising=False)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        read = fetch(server.server_port)
        server.shutdown()
    assert read is not None
    assert read["requests"] == 3.0
    assert fetch(server.server_port, 0.2) is None


def line(event: str, **values: object) -> dict[str, object]:
    return {"event": event, **values}


def test_state_follows_the_log() -> None:
    row = Row("verifier")
    assert row.cells()[1].startswith("starting 0 s")
    for event, values, state, is_serving in (
        ("verifier.weights_read", {"share": 0.428}, "reading 43%", False),
        ("drafter.server_started", {}, "reading 43%", False),
        ("verifier.server_started", {}, "serving", True),
        ("verifier.server_stopped", {}, "stopped", False),
        ("verifier.server_failed", {}, "failed", False),
    ):
        row.take(line(event, **values))
        assert (row.cells()[1], row.is_serving) == (state, is_serving), event


def test_state_is_that_of_the_process_where_the_log_does_not_say_it() -> None:
    row = Row("drafter", "serving", is_serving=True)
    row.add({"num_sessions": 2.0})
    for ending, state in (
        (None, "serving"),
        (ProcessEnd(-9), "killed"),
        (None, "starting 0 s"),
        (ProcessEnd(1), "ended"),
    ):
        row.look(ending)
        assert (row.cells()[1], row.is_serving) == (state, state == "serving")
    assert row.cells()[2:] == [""] * 7, "what it had is gone"
    row.take(line("drafter.server_started"))
    row.look(None)
    assert row.cells()[1] == "serving", "it was faster than the look"
    row.take(line("drafter.server_failed"))
    row.look(None)
    row.look(ProcessEnd(2))
    assert row.cells()[1] == "failed"


def test_service_that_serves_and_does_not_answer_is_shown_as_such() -> None:
    row = Row("drafter", "serving", is_serving=True)
    for samples, state in (({}, "serving"), (None, "serving"), (None, "no answer"), ({}, "serving")):
        row.add(samples)
        assert (row.cells()[1], row.is_silent) == (state, state != "serving")


def test_row_shows_what_a_service_has_and_leaves_the_rest_empty() -> None:
    row = Row("verifier", "serving")
    first = {"num_sessions": 2.0, "generation_tokens": 0.0, "target_passes": 0.0, "kv_cache_usage_perc": 0.125}
    first |= {"spec_decode_num_draft_tokens_per_pos": 0.0, "spec_decode_num_accepted_tokens": 0.0}
    accepted = {"spec_decode_num_draft_tokens_per_pos": 40.0, "spec_decode_num_accepted_tokens": 30.0}
    row.history = history((0.0, first), (2.0, first | {"generation_tokens": 50.0, "target_passes": 20.0} | accepted))
    assert row.cells() == ["verifier", "serving", "2", "", "25.0", "0.750", "2.50", "", "12.5%"]


def test_narrow_terminal_shows_what_matters_most_and_cuts_nothing() -> None:
    for width, shown, missing in (
        (120, ["draft", "use"], []),
        (80, ["tokens/s"], []),
        (60, ["tokens/s"], ["blocks/s"]),
        (24, [], ["/s"]),
    ):
        screen = io.StringIO()
        console = Console(file=screen, width=width, height=40, force_terminal=False)
        console.print(LiveTable(console, COLORS).render())
        text = screen.getvalue()
        assert all(name in text for name in ("verifier", "starting", *shown)), width
        assert not any(name in text for name in missing), width
        assert "…" not in text
        assert all(len(line) <= width for line in text.splitlines())


def test_newest_lines_are_lowest_and_never_more_than_the_terminal_holds() -> None:
    for height in (40, NUM_OTHER_LINES + 2, 5):
        screen = io.StringIO()
        console = Console(file=screen, width=100, height=height, force_terminal=False)
        table = LiveTable(console, COLORS)
        for number in range(30):
            table.take_log("drafter", line("drafter.x"), Text(f"line {number} " + "x" * 200))
        table.notice("[bold]ready[/bold] on a:1")
        console.print(table.render())
        lines = screen.getvalue().splitlines()
        room = max(0, min(NUM_LOG_LINES, height - NUM_OTHER_LINES))
        logged = [text.split()[1] for text in lines if text.startswith("line ")]
        assert logged == [str(number) for number in range(30 - room, 30)], height
        assert "ready on a:1" in lines
        assert all(len(text) <= 100 for text in lines)
        assert len(lines) <= max(height, NUM_OTHER_LINES)
