"""Bearer tokens and rate limits of callers, independent of gRPC and HTTP."""

import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from draftwire.errors import InvalidRequestError, NoRoomError, UnauthenticatedError
from draftwire.runtime.addresses import network_of
from draftwire.runtime.served_request import note_caller
from draftwire.runtime.watched_files import WatchedFiles, read_bytes
from draftwire_gateway.auth.tokens import TokenEntry, digest_of, parse_tokens

log = structlog.get_logger()

MESSAGE = "a bearer token is needed that is good here: authorization: Bearer <token>"
"""Message of every authentication failure but one, so that it does not reveal the reason."""

EXPIRED = "the bearer token has expired: a new one is needed"
"""Message for who shows a token that was good here, and so may learn it."""

API_KEY_NAME = "api-key"
"""Name of the holder of the only token."""

BUSY_RETRY_S = 1.0
"""Retry hint while too many requests of a caller run: it is unknown when one ends."""

Clock = Callable[[], float]


class Caller:
    """The holder of a token, or every caller if there are no tokens. All methods run on the event loop."""

    def __init__(self, entry: TokenEntry | None, clock: Clock) -> None:
        """Starts with a full token bucket. Without an entry nothing is limited."""
        self.entry = entry
        """Replaced when the file changes; usage and running requests are kept."""
        self._clock = clock
        self._num_running = 0
        self._tokens_used = 0.0
        self._used_at = clock()

    @property
    def name(self) -> str:
        """Name of the caller in logs; empty if there are no tokens."""
        return self.entry.name if self.entry is not None else ""

    @contextmanager
    def request(self, num_choices: int = 1) -> Iterator["Caller"]:
        """Counts the choices of a request for as long as it runs.

        Raises:
            InvalidRequestError: the request has more choices than the caller may ever run at once.
            NoRoomError: the caller has reached a limit; the error holds when to retry.
        """
        self.refuse_if_over(num_choices)
        self._num_running += num_choices
        try:
            yield self
        finally:
            self._num_running -= num_choices

    def charge(self, num_tokens: int) -> None:
        """Takes generated tokens out of the bucket, below zero if needed: a running request is never cut."""
        self._refill()
        self._tokens_used += num_tokens

    def refuse_if_over(self, num_choices: int = 1) -> None:
        """Raises what `request` would raise now; of a request that is not read yet, at least one choice is known."""
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
        now = self._clock()
        rate = self.entry.max_tokens_per_minute if self.entry is not None else None
        if rate is None:
            self._tokens_used = 0.0
        else:
            self._tokens_used = max(0.0, self._tokens_used - (now - self._used_at) * rate / 60.0)
        self._used_at = now


def payer(caller: Caller, host: str) -> str:
    """Returns whose budget pays for what a request costs before it generates: of the token, or without tokens the host,
    an address without the port. Of IPv6 the network counts (64 bits), since who has one address there has all of it.
    """
    return f"token {caller.name}" if caller.name else f"host {network_of(host)}"


class Access:
    """Authenticates callers by the tokens in a file, which is read again when it changes.

    All methods run on the event loop.
    """

    def __init__(
        self,
        tokens_file: Path | None,
        clock: Clock = time.monotonic,
        *,
        api_key: str | None = None,
        calendar: Clock = time.time,
    ) -> None:
        """Reads the file, or takes `api_key` as the only token, without limits; without either every caller is
        accepted. `clock` returns seconds, `calendar` those since 1970, by which tokens expire.

        Raises:
            InvalidRequestError: the file is invalid; the message names the file and the fault.
        """
        self._clock = clock
        self._calendar = calendar
        self._everybody = Caller(None, clock)
        self._callers: dict[str, Caller] = {}
        self._entries: tuple[TokenEntry, ...] = ()
        self._file: WatchedFiles[tuple[TokenEntry, ...]] | None = None
        if tokens_file is not None:
            self._file = WatchedFiles("tokens", [tokens_file], lambda: _read(tokens_file))
            self._load(self._file.current())
        elif api_key is not None:
            self._load((TokenEntry(API_KEY_NAME, digest_of(api_key)),))

    def authenticate(self, authorization: str | None) -> Caller:
        """Returns the caller, whose name the served request then has, by its authorization header; None if that is
        missing or repeated.

        Raises:
            UnauthenticatedError: the header holds no valid token, or one that has expired.
        """
        if self._file is not None:
            entries = self._file.current()
            if entries is not self._entries:
                self._load(entries)
        elif not self._entries:
            return self._everybody
        scheme, _, token = (authorization or "").partition(" ")
        digest = digest_of(token.strip()).encode()
        found: TokenEntry | None = None
        for entry in self._entries:  # always all entries, so that the time does not reveal which one matched
            if hmac.compare_digest(entry.sha256.encode(), digest):
                found = entry
        if found is None or scheme.lower() != "bearer":
            raise UnauthenticatedError(MESSAGE)
        if found.has_expired(self._calendar()):
            raise UnauthenticatedError(EXPIRED)
        note_caller(found.name)
        return self._callers[found.name]

    def _load(self, entries: tuple[TokenEntry, ...]) -> None:
        """Replaces the entries. Callers that remain keep their usage and running requests."""
        callers = {entry.name: self._callers.get(entry.name) or Caller(entry, self._clock) for entry in entries}
        for entry in entries:
            callers[entry.name].entry = entry
        self._callers, self._entries = callers, entries
        num_expired = sum(entry.has_expired(self._calendar()) for entry in entries)
        log.info("gateway.tokens_loaded", num_tokens=len(entries), num_expired=num_expired)


def _read(path: Path) -> tuple[TokenEntry, ...]:
    data = read_bytes(path, "tokens_file")
    try:
        return parse_tokens(data.decode())
    except (UnicodeDecodeError, InvalidRequestError) as error:
        fault = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidRequestError(f"tokens_file: {path}: {fault}") from error
