"""Which trace and which span something belongs to, as the header `traceparent` says it.

Source: W3C Trace Context, level 1, section 3.2.
"""

import re
from dataclasses import dataclass, field

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

MAX_HEADER_LENGTH = 256
"""Characters of a header that is looked at, at most. Those of version 00 have 55; later ones may be longer."""

_VERSION = "00"
"""The one that is written, and that the services take from each other."""
_INVALID_VERSION = "ff"
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span, by its ids."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""
    is_sampled: bool = True
    """Whether the spans below it are to be recorded."""
    is_local: bool = field(default=False, compare=False)
    """Whether it is a span of this process. No header says so."""

    def __str__(self) -> str:
        """Returns the header, version 00."""
        return f"{_VERSION}-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    @classmethod
    def parse(cls, header: str) -> "TraceContext | None":
        """Returns what a header says; None if it says nothing that can be understood.

        Of versions after 00 the parts that 00 has are read, as the standard wants it.
        """
        match = _HEADER.fullmatch(header) if len(header) <= MAX_HEADER_LENGTH else None
        if match is None:
            return None
        version, trace_id, span_id, flags, rest = match.groups()
        is_known = version != _INVALID_VERSION and not (version == _VERSION and rest)
        if not is_known or not int(trace_id, 16) or not int(span_id, 16):
            return None
        return cls(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))

    @classmethod
    def parse_exactly(cls, header: str) -> "TraceContext | None":
        """Returns what a header of version 00 says; None of every other one."""
        return cls.parse(header) if header.startswith(f"{_VERSION}-") else None
