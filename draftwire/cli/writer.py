"""Writes texts to standard output: in colours on a terminal, and elsewhere exactly as they are."""

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, TextIO

import typer

from draftwire.cli.colors import ColorWhen, legend, paint, visible, wants_color
from draftwire.method.token_source import TokenSource


@dataclass(frozen=True, slots=True)
class Display:
    """How texts and what they took are shown."""

    color: Annotated[ColorWhen, typer.Option(help="Colour tokens by where they came from; auto: on a terminal.")] = (
        ColorWhen.AUTO
    )
    no_color: Annotated[bool, typer.Option("--no-color", help="The same as --color never.")] = False
    stats: Annotated[bool, typer.Option("--stats", help="End with a table of what it took, not with one line.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but the text, and errors.")] = False

    @property
    def when(self) -> ColorWhen:
        """Choice of when the text is coloured."""
        return ColorWhen.NEVER if self.no_color else self.color


def encode_as_utf8() -> None:
    """Uses UTF-8 for pipes and files, whatever the locale; a terminal shows ? for characters that it lacks."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            if stream.isatty():
                stream.reconfigure(errors="replace")
            else:
                stream.reconfigure(encoding="utf-8", errors="strict")


class TextWriter:
    """Writes texts of completions: in colours, printable on a terminal, or byte for byte."""

    def __init__(self, display: Display, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._is_quiet = display.quiet
        self._when = display.when
        self.is_colored = wants_color(display.when, self._out)
        """Whether `tokens` needs the text of each token."""
        self._is_exact = not self.is_colored and not self._out.isatty()
        self._is_in_line = False

    def legend(self) -> None:
        """Prints the legend of colours on standard error, if there are colours."""
        if self.is_colored and not self._is_quiet and wants_color(self._when, sys.stderr):
            sys.stderr.write(legend() + "\n")
            sys.stderr.flush()

    def text(self, text: str) -> None:
        """Writes a text without colour."""
        self._write(text if self._is_exact else visible(text), text)

    def tokens(self, text: str, token_texts: Sequence[str] | None, sources: Sequence[TokenSource]) -> None:
        """Writes a text of tokens, in colours if there are any. `token_texts` are its parts, one for each token."""
        if not self.is_colored or token_texts is None:
            self.text(text)
            return
        runs = groupby(zip(sources, token_texts, strict=True), lambda token: token[0])
        painted = "".join(paint(visible("".join(text for _, text in run)), source) for source, run in runs)
        self._write(painted, text)

    def break_line(self) -> None:
        """Ends an unfinished line on a terminal before a message follows; does nothing on a pipe."""
        if self._is_in_line and self._out.isatty():
            self.text("\n")

    def _write(self, shown: str, text: str) -> None:
        self._out.write(shown)
        self._out.flush()
        if text:
            self._is_in_line = not text.endswith("\n")
