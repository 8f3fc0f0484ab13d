"""How far the loading of a model has come: lines for logs, a bar for people."""

import sys

import pytest
import structlog

from benchmarks.report import progress as benchmark_progress
from draftwire_verifier.progress import LoadProgress


def test_progress_is_a_line_every_few_seconds_and_one_at_the_end() -> None:
    now = 0.0
    with structlog.testing.capture_logs() as lines:
        progress = LoadProgress("json", clock=lambda: now)
        for second in range(11):
            now = float(second)
            progress(second * 10, 100)
    assert [line["share"] for line in lines] == [0.3, 0.6, 0.9, 1.0]
    assert lines[-1]["read_bytes"] == lines[-1]["total_bytes"] == 100


def test_terminal_gets_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with structlog.testing.capture_logs() as lines:
        progress = LoadProgress("console")
        progress(50, 100)
        progress(100, 100)
    assert lines == []
    assert "weights" in capsys.readouterr().err


def test_benchmarks_draw_a_bar_on_standard_error_and_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        assert list(benchmark_progress(iter("abc"), "letters", 3)) == ["a", "b", "c"]
        out, err = capsys.readouterr()
        assert (out, "letters" in err) == ("", is_terminal)
