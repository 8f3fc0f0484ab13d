"""Nothing that was asked or answered is logged, whatever an error says."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator

import pytest
import structlog
import torch

from draftwire.errors import UnavailableError
from draftwire.runtime.logging import configure_logging, traceback_text
from tests.unwritable_logs import Unwritable, unwritable

SECRET = "launch-at-dawn"


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Returns what the process has written. Everything is put back afterwards."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield lambda: capsys.readouterr().err
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers


def fail_with_a_secret() -> None:
    prompt = [SECRET]
    try:
        raise KeyError(prompt[0])
    except KeyError:
        try:
            raise ValueError(f"cannot read {prompt}")
        except ValueError as second:
            raise ExceptionGroup(SECRET, [second, UnavailableError("lost 10.0.0.1")]) from None


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_traceback_has_places_and_types_but_no_messages_or_variables(
    written: Callable[[], str], log_format: str
) -> None:
    """Those of libraries neither."""
    configure_logging(log_format, "verifier")
    for log in (structlog.get_logger(), logging.getLogger("some.library")):
        try:
            fail_with_a_secret()
        except ExceptionGroup:
            log.exception("verifier.step_failed")
        text = written()
        assert SECRET not in text
        for expected in ("verifier.step_failed", "KeyError", "ValueError", "ExceptionGroup", "fail_with_a_secret"):
            assert expected in text
        assert "UnavailableError: lost 10.0.0.1" in text, "our own messages quote nothing, so they are shown"


def test_each_line_is_json_and_names_the_service(written: Callable[[], str]) -> None:
    configure_logging("json", "gateway")
    structlog.get_logger().info("gateway.server_started", port=1)
    logging.getLogger("some.library").warning("%s is odd", "this")
    logging.getLogger("some.library").info("not worth a line")
    first, second = map(json.loads, written().splitlines())
    assert (first["event"], first["service"], first["port"]) == ("gateway.server_started", "gateway", 1)
    assert (second["logger"], second["text"], second["level"]) == ("some.library", "this is odd", "warning")


def test_line_that_cannot_be_written_is_nobodys_error(
    written: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with unwritable(Unwritable.FULL) as end, os.fdopen(os.dup(end), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        configure_logging("json", "gateway")
        structlog.get_logger().info("gateway.server_started")
        logging.getLogger("uvicorn.error").error("lost")
        sys.stderr.flush()
    assert written() == ""


def test_what_a_device_says_is_shown() -> None:
    assert traceback_text(torch.OutOfMemoryError("CUDA out of memory")).endswith("OutOfMemoryError: CUDA out of memory")
    assert traceback_text(RuntimeError(SECRET)).endswith("RuntimeError")


def test_errors_that_cause_each_other_come_to_an_end() -> None:
    first, second = KeyError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert traceback_text(first).count("KeyError") == 1
