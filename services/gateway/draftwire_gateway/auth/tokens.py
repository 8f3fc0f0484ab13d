"""Format of the bearer tokens file, and creation of its entries. Needs only Python's standard library."""

import hashlib
import re
import secrets
import tomllib
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from draftwire.errors import InvalidRequestError

TOKEN_BYTES = 32
"""Random bytes of a new token: enough that an unsalted digest cannot be inverted by guessing."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token and the limits of its holder."""

    name: str
    """Name of the holder in logs: letters, digits, dots, underscores and dashes."""
    sha256: str
    """Digest of the token, hexadecimal. The token itself is not stored."""
    max_sessions: int | None = None
    """Requests that may run at once, each choice counted."""
    max_tokens_per_minute: int | None = None
    """Generated tokens, on average over a minute."""
    expires_at: datetime | None = None
    """Time from which the token is refused, with an offset from UTC; None is never."""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and _NAME.fullmatch(self.name)):
            raise InvalidRequestError("name must be 1 to 64 letters, digits, dots, underscores and dashes")
        if not (isinstance(self.sha256, str) and _SHA256.fullmatch(self.sha256)):
            raise InvalidRequestError(f"sha256 of {self.name} must be 64 hexadecimal digits, in lower case")
        for limit in ("max_sessions", "max_tokens_per_minute"):
            value = getattr(self, limit)
            if value is not None and not (type(value) is int and value >= 1):
                raise InvalidRequestError(f"{limit} of {self.name} must be at least 1")
        expires_at = self.expires_at
        if expires_at is not None and (not isinstance(expires_at, datetime) or expires_at.utcoffset() is None):
            raise InvalidRequestError(
                f"expires_at of {self.name} must be a date and time with an offset, such as 2027-01-31T12:00:00Z"
            )

    def has_expired(self, now: float) -> bool:
        """Returns whether the token is refused at a time, seconds since 1970."""
        return self.expires_at is not None and now >= self.expires_at.timestamp()

    def to_toml(self) -> str:
        """Returns the entry in the format of the file."""
        limits = {"max_sessions": self.max_sessions, "max_tokens_per_minute": self.max_tokens_per_minute}
        set_limits = [f"{name} = {limit}" for name, limit in limits.items() if limit is not None]
        expiry = [f"expires_at = {self.expires_at.isoformat()}"] if self.expires_at is not None else []
        lines = ["[[token]]", f'name = "{self.name}"', f'sha256 = "{self.sha256}"', *set_limits, *expiry]
        return "\n".join(lines) + "\n"


def new_token() -> str:
    """Returns a random token."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def digest_of(token: str) -> str:
    """Returns the digest that the file stores of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def parse_tokens(text: str) -> tuple[TokenEntry, ...]:
    """Parses the content of a tokens file. A file without entries is valid, and refuses every caller.

    Raises:
        InvalidRequestError: the content is not TOML, an entry has a value out of range or an unknown key, or two
            entries share a name or a token.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"not TOML: {error}") from error
    tables = content.pop("token", [])
    if content or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidRequestError("only [[token]] entries can be set")
    entries = tuple(_entry(table) for table in tables)
    for key in ("name", "sha256"):
        if len({getattr(entry, key) for entry in entries}) < len(entries):
            raise InvalidRequestError(f"two entries have the same {key}")
    return entries


def _entry(table: dict[str, Any]) -> TokenEntry:
    known = {field.name for field in fields(TokenEntry)}
    unknown, missing = sorted(table.keys() - known), sorted({"name", "sha256"} - table.keys())
    if unknown or missing:
        fault = f"unknown key {unknown[0]}" if unknown else f"no {missing[0]}"
        raise InvalidRequestError(f"a [[token]] entry has {fault}; known: {', '.join(sorted(known))}")
    return TokenEntry(**table | {"expires_at": read_time(table.get("expires_at"))})


def read_time(value: Any) -> Any:
    """Returns the date and time that a text has in the form of RFC 3339. What is none stays as it is."""
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        return value
