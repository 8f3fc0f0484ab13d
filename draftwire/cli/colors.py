"""Colours of tokens by their source, and when texts are coloured.

Colour is never the only sign: recovered tokens are underlined, bonus tokens bold, plain ones in italics.
"""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import TextIO

from draftwire.method.token_source import TokenSource


class ColorWhen(StrEnum):
    """Choice of when a text is coloured."""

    AUTO = "auto"
    """Colours on a terminal, unless NO_COLOR is set; elsewhere if FORCE_COLOR is set."""
    ALWAYS = "always"
    NEVER = "never"


PALETTE = {
    TokenSource.ACCEPTED: (29, ""),
    TokenSource.RECOVERED: (163, "4;"),
    TokenSource.BONUS: (63, "1;"),
    TokenSource.PLAIN: (243, "3;"),
}
"""Number of the colour in a terminal's 256-colour palette, and the ANSI attribute that marks the source as well. Each
colour has a contrast of at least 4.5 to both black and white, as WCAG 2 requires of text."""

LEGEND = {
    TokenSource.ACCEPTED: "accepted",
    TokenSource.RECOVERED: "recovered (in place of a draft token)",
    TokenSource.BONUS: "bonus (after a whole block)",
    TokenSource.PLAIN: "plain",
}

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Printable replacements for control characters."""


def wants_color(when: ColorWhen, stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether text on a stream is coloured. NO_COLOR overrides FORCE_COLOR; the option overrides both."""
    if when is not ColorWhen.AUTO:
        return when is ColorWhen.ALWAYS
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and environment.get("TERM") != "dumb"


def paint(text: str, source: TokenSource) -> str:
    """Returns a text in the colour of its source. Each line is coloured by itself, so a pager can start at any line."""
    number, mark = PALETTE[source]
    return re.sub(r"[^\n]+", lambda line: f"\x1b[{mark}38;5;{number}m{line[0]}\x1b[0m", text)


def visible(text: str) -> str:
    """Returns a text with its control characters replaced, such as the start of an escape sequence."""
    return text.translate(_CONTROLS)


def legend() -> str:
    """Returns one line that names the token source of each colour."""
    return " · ".join(paint(text, source) for source, text in LEGEND.items())
