"""The places in the sources that mutants name: a definition, and an expression or some statements within it.

What is looked for is compared as a syntax tree, so that line breaks, brackets, quotes and comments do not matter, and
the file is found by the definition, so that it may be moved and renamed.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGES = ("draftwire", "services")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a source."""

    path: Path
    start: int
    """The first byte."""
    stop: int
    """The byte after the last one."""
    is_expression: bool
    """Whether an expression stands there; otherwise statements do."""

    def replaced(self, code: str) -> str:
        """Returns the source with other code at this place.

        Args:
            code: an expression, or statements as they stand at the beginning of a line.
        """
        source = self.path.read_bytes()
        column = self.start - (source.rfind(b"\n", 0, self.start) + 1)
        code = textwrap.dedent(code).strip()
        # Brackets: what stands beside the expression may bind more tightly.
        code = f"({code})" if self.is_expression else code.replace("\n", "\n" + " " * column)
        return (source[: self.start] + code.encode() + source[self.stop :]).decode()


class Source:
    """A file, which is parsed when it is needed."""

    def __init__(self, path: Path, module: str) -> None:
        """Reads a file."""
        self.path, self.module = path, module
        self._text = path.read_text()
        # Only files that have a name are parsed: all would take many seconds.
        self._names = set(re.findall(r"(?:def|class) (\w+)", self._text))

    def definitions(self, name: str) -> Iterator[Definition]:
        """Yields the functions and classes of a name: `function`, `Class.method`, or one with modules before it."""
        if name.rpartition(".")[2] in self._names:
            for qualified, definition in self._definitions:
                is_here = f".{self.module}.{qualified}".endswith(f".{name}")
                if is_here and (name == qualified or name.endswith(f".{qualified}")):
                    yield definition

    def places(self, within: ast.AST, wanted: ast.expr | Sequence[ast.stmt] | None) -> Iterator[Place]:
        """Yields where an expression, or some statements in a row, stand within a definition."""
        if isinstance(wanted, ast.expr):
            form = _form(wanted)
            for node in ast.walk(within):
                if type(node) is type(wanted) and _form(node) == form:
                    yield self._place(node, node, is_expression=True)
            return
        assert wanted is not None
        forms = [_form(statement) for statement in wanted]
        for node in ast.walk(within):
            for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                for first in range(len(body) - len(forms) + 1 if isinstance(body, list) else 0):
                    found = body[first : first + len(forms)]
                    if type(found[0]) is type(wanted[0]) and [_form(statement) for statement in found] == forms:
                        yield self._place(found[0], found[-1], is_expression=False)

    def _place(self, first: ast.expr | ast.stmt, last: ast.expr | ast.stmt, *, is_expression: bool) -> Place:
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        start = self._line_starts[first.lineno - 1] + first.col_offset
        stop = self._line_starts[last.end_lineno - 1] + last.end_col_offset
        return Place(self.path, start, stop, is_expression)

    @cached_property
    def _definitions(self) -> list[tuple[str, Definition]]:
        return list(_definitions_in(ast.parse(self._text), ""))

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self._text.encode().split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        return starts


class Sources:
    """All files of the packages below a folder."""

    def __init__(self, root: Path) -> None:
        """Reads them."""
        paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
        self._sources = [Source(path, module_of(root, path)) for path in paths]

    def place(self, where: str, code: str, *, is_expression: bool) -> Place:
        """Returns the one place where some code stands.

        Args:
            where: the function or class, as `Source.definitions` takes it.
            code: an expression, or statements.
            is_expression: which of both.

        Raises:
            ValueError: there is no such place, or several.
        """
        code = textwrap.dedent(code).strip()
        wanted = expression(code) if is_expression else ast.parse(code).body
        definitions = [(source, found) for source in self._sources for found in source.definitions(where)]
        places = [place for source, found in definitions for place in source.places(found, wanted)]
        if len(places) != 1:
            text = " ".join(code.split())
            raise ValueError(f"`{text}` is in {where} {len(places)} times, of {len(definitions)} definitions")
        return places[0]


def module_of(root: Path, path: Path) -> str:
    """Returns the name under which a file is imported."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts[2:] if parts[0] == "services" else parts  # each service is a package inside its folder
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def expression(code: str) -> ast.expr | None:
    """Returns an expression; None if it is none, but statements."""
    try:
        return ast.parse(f"({code}\n)", mode="eval").body
    except SyntaxError:
        return None


def _definitions_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield f"{prefix}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from _definitions_in(child, f"{prefix}{child.name}.")


def _form(node: ast.AST) -> str:
    """Returns the tree below a node as text. Whether a name is read or written does not count."""
    return re.sub(r", ctx=\w+\(\)|ctx=\w+\(\)", "", ast.dump(node))
