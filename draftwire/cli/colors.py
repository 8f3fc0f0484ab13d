"""Colours of tokens by where they came from, and when there are any.

Colour is never the only sign: recovered tokens are underlined, bonus tokens bold, plain ones in italics.
"""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import TextIO

from draftwire.method.token_source import TokenSource


class ColorWhen(StrEnum):
    """When a text is coloured."""

    AUTO = "auto"
    """On a terminal, unless NO_COLOR is set; elsewhere if FORCE_COLOR is set."""
    ALWAYS = "always"
    NEVER = "never"


PALETTE = {
    TokenSource.ACCEPTED: (29, ""),
    TokenSource.RECOVERED: (163, "4;"),
    TokenSource.BONUS: (63, "1;"),
    TokenSource.PLAIN: (243, "3;"),
}
"""Number of the colour among a terminal's 256, and what else marks it. Each has a contrast of at least 4.5 to black as
well as to white, which is what WCAG 2 asks of text."""

LEGEND = {
    TokenSource.ACCEPTED: "accepted",
    TokenSource.RECOVERED: "recovered (in place of a draft token)",
    TokenSource.BONUS: "bonus (after a whole block)",
    TokenSource.PLAIN: "plain",
}

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Characters that a terminal would obey, and those that stand for them."""


def wants_color(when: ColorWhen, stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a text on a stream is coloured. NO_COLOR is stronger than FORCE_COLOR, an option than both."""
    if when is not ColorWhen.AUTO:
        return when is ColorWhen.ALWAYS
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and environment.get("TERM") != "dumb"


def paint(text: str, source: TokenSource) -> str:
    """Returns a text in the colour of its source. No line break is coloured, so that a pager can begin at any line."""
    number, mark = PALETTE[source]
    return re.sub(r"[^\n]+", lambda line: f"\x1b[{mark}38;5;{number}m{line[0]}\x1b[0m", text)


def visible(text: str) -> str:
    """Returns a text without characters that a terminal would obey, such as the start of an escape sequence."""
    return text.translate(_CONTROLS)


def legend() -> str:
    """Returns one line that says which colour is what."""
    return " · ".join(paint(text, source) for source, text in LEGEND.items())
