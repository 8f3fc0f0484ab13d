"""Reads when certificates expire, and logs it. `ssl` reports it only of certificates that it has verified.

Source: RFC 5280, section 4.1 (the fields of a certificate), and X.690 (their encoding, DER).
"""

import calendar
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

log = structlog.get_logger()

WARNING_SECONDS = 30 * 86_400.0
"""How long before its end a certificate is warned of; at most a third of its life: short ones are renewed late."""
AGAIN_SECONDS = 86_400.0
"""Seconds after which the same is logged again."""

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18
_VALIDITY = 3
"""Place of the validity among the fields of a certificate behind its version."""


@dataclass(frozen=True, slots=True)
class Validity:
    """Validity period of a certificate, seconds since 1970."""

    start: float
    end: float

    @property
    def warned_from(self) -> float:
        """Time from which its end is near enough for a warning."""
        return self.end - min(WARNING_SECONDS, (self.end - self.start) / 3.0)


class ExpiryLog:
    """Logs certificates that end soon or have ended: when that is so at first, and each day after that."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._logged: dict[str, tuple[Validity, bool, float]] = {}
        """Validity of each option's certificates that was logged last, whether it had ended, and the time of that."""

    def check(self, validities: Mapping[str, Validity]) -> None:
        """Looks at the certificates of each option, as they are now. Takes a microsecond; for any thread."""
        now = self._clock()
        for option, validity in validities.items():
            has_ended = now >= validity.end
            if now < validity.warned_from:
                self._logged.pop(option, None)
                continue
            before, had_ended, logged_at = self._logged.get(option, (None, False, 0.0))
            if (before, had_ended) == (validity, has_ended) and now - logged_at < AGAIN_SECONDS:
                continue
            self._logged[option] = (validity, has_ended, now)
            ends_at = datetime.fromtimestamp(validity.end, UTC).isoformat()
            if has_ended:
                log.error("tls.certificate_expired", option=option, ended_at=ends_at)
            else:
                days = round((validity.end - now) / 86_400.0, 1)
                log.warning("tls.certificate_expires", option=option, ends_at=ends_at, left_days=days)


def validities(pem: bytes) -> list[Validity]:
    """Returns when each certificate of a PEM file is valid.

    Certificates that cannot be read are left out: whether a file is good is for OpenSSL to say.
    """
    found: list[Validity] = []
    for block in _BLOCK.findall(pem):
        try:
            found.append(_validity(ssl.PEM_cert_to_DER_cert(block.decode("ascii"))))
        except (ValueError, IndexError):
            continue
    return found


def _validity(certificate: bytes) -> Validity:
    (_, whole), *_ = _elements(certificate)
    (_, signed), *_ = _elements(whole)
    fields = list(_elements(signed))
    if fields[0][0] == _VERSION:
        del fields[0]
    start, end = (_seconds(*time_of) for time_of in _elements(fields[_VALIDITY][1]))
    return Validity(start, end)


def _seconds(kind: int, content: bytes) -> float:
    text = content.decode("ascii")
    if kind == _UTC_TIME:
        text = ("20" if text < "50" else "19") + text
    elif kind != _GENERALIZED_TIME:
        raise ValueError("no time")
    return float(calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ")))


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields tag and content of each element."""
    place = 0
    while place < len(data):
        tag, size = data[place], data[place + 1]
        place += 2
        if size & 0x80:
            num_bytes = size & 0x7F
            size = int.from_bytes(data[place : place + num_bytes], "big")
            place += num_bytes
        if place + size > len(data):
            raise ValueError("cut short")
        yield tag, data[place : place + size]
        place += size
