"""Colours of tokens: readable everywhere, never the only sign, and never in what another program reads."""

import io
import re

from hypothesis import given
from hypothesis import strategies as st

from draftwire.cli.colors import LEGEND, PALETTE, ColorWhen, legend, paint, visible, wants_color
from draftwire.method.token_source import TokenSource

SGR = re.compile(r"\x1b\[[0-9;]*m")


def luminance(number: int) -> float:
    """Relative luminance of one of the 256 colours of xterm, as WCAG 2 defines it."""
    if number >= 232:
        levels = (8 + 10 * (number - 232),) * 3
    else:
        steps = (0, 95, 135, 175, 215, 255)
        cube = number - 16
        levels = (steps[cube // 36], steps[cube // 6 % 6], steps[cube % 6])
    linear = [level / 255 / 12.92 if level <= 10 else ((level / 255 + 0.055) / 1.055) ** 2.4 for level in levels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_sources_differ_beyond_color_and_colors_fit_black_and_white() -> None:
    assert set(PALETTE) == set(LEGEND) == set(TokenSource)
    for kinds in zip(*PALETTE.values(), strict=True):
        assert len(set(kinds)) == 4
    for number, _ in PALETTE.values():
        assert min(luminance(number) + 0.05, 0.05 * 1.05 / (luminance(number) + 0.05)) / 0.05 >= 4.5
    assert paint("x", TokenSource.RECOVERED).startswith("\x1b[4;")
    assert paint("x", TokenSource.BONUS).startswith("\x1b[1;")


@given(st.text(), st.sampled_from(list(TokenSource)))
def test_paint_adds_colors_and_nothing_else_and_ends_them_with_each_line(text: str, source: TokenSource) -> None:
    shown = visible(text)
    painted = paint(shown, source)
    assert SGR.sub("", painted) == shown
    for line, plain in zip(painted.split("\n"), shown.split("\n"), strict=True):
        assert line.startswith("\x1b[") == line.endswith("\x1b[0m") == bool(plain)


def test_nothing_that_a_terminal_would_obey_is_shown() -> None:
    assert visible("a\x1b[2J\x07\r\n\tb\x7f\x9b1m é") == "a␛[2J␇␍\n\tb␡�1m é"


WANTED: list[tuple[ColorWhen, bool, dict[str, str], bool]] = [
    (ColorWhen.AUTO, True, {}, True),
    (ColorWhen.AUTO, False, {}, False),
    (ColorWhen.AUTO, True, {"NO_COLOR": "1"}, False),
    (ColorWhen.AUTO, True, {"NO_COLOR": ""}, True),
    (ColorWhen.AUTO, True, {"TERM": "dumb"}, False),
    (ColorWhen.AUTO, False, {"FORCE_COLOR": "1"}, True),
    (ColorWhen.AUTO, False, {"FORCE_COLOR": "0"}, False),
    (ColorWhen.AUTO, False, {"FORCE_COLOR": ""}, False),
    (ColorWhen.AUTO, True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    (ColorWhen.ALWAYS, False, {"NO_COLOR": "1"}, True),
    (ColorWhen.NEVER, True, {"FORCE_COLOR": "1"}, False),
]


def test_color_is_for_terminals_unless_something_stronger_says_so() -> None:
    stream = io.StringIO()
    for when, is_terminal, environment, expected in WANTED:
        stream.isatty = lambda is_terminal=is_terminal: is_terminal  # type: ignore[method-assign]
        assert wants_color(when, stream, environment) is expected, (when, is_terminal, environment)


def test_legend_names_every_source_in_its_own_look_on_one_line() -> None:
    assert "\n" not in legend()
    assert all(paint(LEGEND[source], source) in legend() for source in TokenSource)
