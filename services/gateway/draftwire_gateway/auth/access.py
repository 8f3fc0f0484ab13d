"""Who may use a gateway, and how much: bearer tokens and their limits. Knows neither gRPC nor HTTP."""

import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from draftwire.errors import InvalidRequestError, NoRoomError, UnauthenticatedError
from draftwire.runtime.watched_files import WatchedFiles, read_bytes
from draftwire_gateway.auth.tokens import TokenEntry, digest_of, parse_tokens

log = structlog.get_logger()

MESSAGE = "a bearer token is needed that is good here: authorization: Bearer <token>"
"""What a caller without one is told, whatever is wrong."""

BUSY_RETRY_S = 1.0
"""When to try again while too many requests of a caller run: there is no telling when one ends."""

Clock = Callable[[], float]


class Caller:
    """One holder of a token, or everybody where there are no tokens. All methods run on the event loop."""

    def __init__(self, entry: TokenEntry | None, clock: Clock) -> None:
        """Starts with a full bucket. Without an entry nothing is limited."""
        self.entry = entry
        """Replaced when the file changes: what is used and what runs is kept."""
        self._clock = clock
        self._num_running = 0
        self._tokens_used = 0.0
        self._used_at = clock()

    @property
    def name(self) -> str:
        """Names the caller in logs; empty where there are no tokens."""
        return self.entry.name if self.entry is not None else ""

    @contextmanager
    def request(self, num_choices: int = 1) -> Iterator["Caller"]:
        """Counts one request for as long as it runs, each of its choices.

        Raises:
            InvalidRequestError: it has more choices than the caller may ever have at once.
            NoRoomError: the caller has used up a limit; says when to try again.
        """
        self._refuse_if_over(num_choices)
        self._num_running += num_choices
        try:
            yield self
        finally:
            self._num_running -= num_choices

    def charge(self, num_tokens: int) -> None:
        """Takes generated tokens out of the bucket, below empty if need be: a running request is never cut."""
        self._refill()
        self._tokens_used += num_tokens

    def _refuse_if_over(self, num_choices: int) -> None:
        if self.entry is None:
            return
        most_running, rate = self.entry.max_sessions, self.entry.max_tokens_per_minute
        if most_running is not None and num_choices > most_running:
            raise InvalidRequestError(
                f"num_choices: {num_choices} choices in all; {self.name} may have {most_running} at once"
            )
        if most_running is not None and self._num_running + num_choices > most_running:
            message = (
                f"{self._num_running} requests of {self.name} are running, of {most_running} at most; retry in a second"
            )
            raise NoRoomError(message, BUSY_RETRY_S)
        self._refill()
        if rate is not None and self._tokens_used > rate - 1:
            wait_s = (self._tokens_used - (rate - 1)) * 60.0 / rate
            message = f"{self.name} may generate {rate} tokens a minute, which are used up; retry in {wait_s:.1f} s"
            raise NoRoomError(message, wait_s)

    def _refill(self) -> None:
        """Forgets what was used long enough ago."""
        now = self._clock()
        rate = self.entry.max_tokens_per_minute if self.entry is not None else None
        if rate is None:
            self._tokens_used = 0.0
        else:
            self._tokens_used = max(0.0, self._tokens_used - (now - self._used_at) * rate / 60.0)
        self._used_at = now


class Access:
    """Tells callers apart by the tokens in a file, which is read again when it changes.

    All methods run on the event loop.
    """

    def __init__(self, tokens_file: Path | None, clock: Clock = time.monotonic) -> None:
        """Reads the file.

        Args:
            tokens_file: see `draftwire_gateway.auth.tokens`; None lets everybody in.
            clock: seconds.

        Raises:
            InvalidRequestError: the file is no good; the message names it and what is wrong.
        """
        self._clock = clock
        self._everybody = Caller(None, clock)
        self._callers: dict[str, Caller] = {}
        self._entries: tuple[TokenEntry, ...] = ()
        self._file: WatchedFiles[tuple[TokenEntry, ...]] | None = None
        if tokens_file is not None:
            self._file = WatchedFiles("tokens", [tokens_file], lambda: _read(tokens_file))
            self._take(self._file.current())

    def authenticate(self, authorization: str | None) -> Caller:
        """Returns who calls.

        Args:
            authorization: the header of that name; None where there is none, or more than one.

        Raises:
            UnauthenticatedError: it holds no token that is good.
        """
        if self._file is None:
            return self._everybody
        entries = self._file.current()
        if entries is not self._entries:
            self._take(entries)
        scheme, _, token = (authorization or "").partition(" ")
        digest = digest_of(token.strip()).encode()
        found: TokenEntry | None = None
        for entry in entries:  # all of them, whichever fits: the time it takes tells nothing
            if hmac.compare_digest(entry.sha256.encode(), digest):
                found = entry
        if found is None or scheme.lower() != "bearer":
            raise UnauthenticatedError(MESSAGE)
        return self._callers[found.name]

    def _take(self, entries: tuple[TokenEntry, ...]) -> None:
        """Takes what the file says now. A caller who was there before keeps what runs and what is used."""
        callers = {entry.name: self._callers.get(entry.name) or Caller(entry, self._clock) for entry in entries}
        for entry in entries:
            callers[entry.name].entry = entry
        self._callers, self._entries = callers, entries
        log.info("gateway.tokens_loaded", num_tokens=len(entries))


def _read(path: Path) -> tuple[TokenEntry, ...]:
    data = read_bytes(path, "tokens_file")
    try:
        return parse_tokens(data.decode())
    except (UnicodeDecodeError, InvalidRequestError) as error:
        fault = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidRequestError(f"tokens_file: {path}: {fault}") from error
