"""When certificates expire. Python's `ssl` says that only of certificates that it has verified.

Source: RFC 5280, section 4.1 (the fields of a certificate), and X.690 (their encoding, DER).
"""

import calendar
import re
import ssl
import time
from collections.abc import Iterator

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18
_VALIDITY = 3
"""Place of the validity among the fields of a certificate behind its version."""


def expiries(pem: bytes) -> list[float]:
    """Returns when each certificate of a PEM file expires, seconds since 1970.

    Certificates that cannot be read are left out: whether a file is good is for OpenSSL to say.
    """
    found: list[float] = []
    for block in _BLOCK.findall(pem):
        try:
            found.append(_expiry(ssl.PEM_cert_to_DER_cert(block.decode("ascii"))))
        except (ValueError, IndexError):
            continue
    return found


def _expiry(certificate: bytes) -> float:
    (_, whole), *_ = _elements(certificate)
    (_, signed), *_ = _elements(whole)
    fields = list(_elements(signed))
    if fields[0][0] == _VERSION:
        del fields[0]
    _, (kind, end) = _elements(fields[_VALIDITY][1])
    text = end.decode("ascii")
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
