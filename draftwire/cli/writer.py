"""Writes texts to standard output: in colours on a terminal, and elsewhere exactly as they are."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, TextIO

import typer

from draftwire.cli.colors import ColorWhen, legend, paint, visible, wants_color
from draftwire.token_source import TokenSource


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
        """When the text is coloured."""
        return ColorWhen.NEVER if self.no_color else self.color


class TextWriter:
    """Writes to standard output."""

    def __init__(self, display: Display, out: TextIO | None = None) -> None:
        """Writes nothing yet."""
        self._out = sys.stdout if out is None else out
        self._is_quiet = display.quiet
        self._when = display.when
        self.is_colored = wants_color(display.when, self._out)
        """Whether `tokens` needs to know of each token what text it has."""
        self._is_exact = not self.is_colored and not self._out.isatty()

    def legend(self) -> None:
        """Says on standard error which colour is what, if there are any."""
        if self.is_colored and not self._is_quiet and wants_color(self._when, sys.stderr):
            sys.stderr.write(legend() + "\n")
            sys.stderr.flush()

    def text(self, text: str) -> None:
        """Writes a text without colour."""
        self._out.write(text if self._is_exact else visible(text))
        self._out.flush()

    def tokens(self, text: str, token_texts: Sequence[str] | None, sources: Sequence[TokenSource]) -> None:
        """Writes a text of tokens, in colours if there are any.

        Args:
            text: all of it.
            token_texts: the parts that belong to each token, which together are the text; None without colours.
            sources: where each token came from.
        """
        if not self.is_colored or token_texts is None:
            self.text(text)
            return
        runs = groupby(zip(sources, token_texts, strict=True), lambda token: token[0])
        self._out.write("".join(paint(visible("".join(text for _, text in run)), source) for source, run in runs))
        self._out.flush()
