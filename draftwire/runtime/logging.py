"""Structured logs on standard error, never with a prompt or a token in them.

The message of an error of unknown origin may quote a prompt, so tracebacks are logged without messages and without the
values of variables. What cannot be written is dropped and counted: see `log_stream`.
"""

import logging
import sys
import traceback

import structlog
from typing_extensions import override

from draftwire.errors import DraftwireError
from draftwire.runtime.log_stream import guard_stderr

log = structlog.get_logger()


def configure_logging(log_format: str, service: str) -> None:
    """Sets up structlog for the process, and forwards what libraries log to it. Standard error is guarded from now on.

    The format is "console" for people, "json" for machines; `service` is bound to every line.
    """
    guard_stderr()
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            _format_exception,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line is one write
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(handlers=[_Forwarder()], force=True)


def traceback_text(error: BaseException) -> str:
    """Returns the stack frames and types of an error and its causes.

    Messages are left out, except for errors that never quote a prompt: ours, and those of torch's own classes, such as
    out of memory.
    """
    return "\n".join(_parts(error, set()))


def _parts(error: BaseException, seen: set[int]) -> list[str]:
    if id(error) in seen:
        return []
    seen.add(id(error))
    cause = error.__cause__ if error.__suppress_context__ else error.__context__
    parts = [*_parts(cause, seen), "which led to:"] if cause is not None else []
    quotes_nothing = isinstance(error, DraftwireError) or type(error).__module__.partition(".")[0] == "torch"
    message = f": {error}" if quotes_nothing else ""
    frames = "".join(traceback.format_tb(error.__traceback__))
    parts.append(f"Traceback (most recent call last):\n{frames}{type(error).__qualname__}{message}")
    if isinstance(error, BaseExceptionGroup):
        for index, member in enumerate(error.exceptions):
            parts += [f"member {index} of the group:", *_parts(member, seen)]
    return parts


_format_exception = structlog.processors.ExceptionRenderer(lambda info: traceback_text(info[1]))


class _Forwarder(logging.Handler):
    """Forwards the log records of libraries to structlog."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        details = {} if error is None else {"exc_info": error}
        log.log(record.levelno, "library.message_logged", logger=record.name, text=record.getMessage(), **details)
