"""Mistakes that are planted into the sources, one at a time, to see which test notices.

They are those by which a law would become wrong: of rules, sampling, random numbers, caches and the like. The lists are
the TOML files of this folder, one for each subject. `python -m tests.mutants` plants them.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.places import Sources, expression

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@dataclass(frozen=True, slots=True)
class Planted:
    """A source with a mistake."""

    path: Path
    source: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake."""

    name: str
    """States the mistake; no other mutant has it."""
    where: str
    """The function or class that it is planted into: `function` or `Class.method`, and before it as many names of
    modules as make it the only one."""
    find: str
    """An expression or some statements that stand there once, in any formatting."""
    write: str
    """What stands there then."""
    test: str
    """The file, or `file::function`, of tests that notices it; it is run first."""
    why: str = ""
    """What the mistake leads to, or where it comes from; empty if the name says all."""

    def planted(self, sources: Sources) -> Planted:
        """Returns the source with the mistake.

        Raises:
            ValueError: what is to be replaced is not there exactly once.
            SyntaxError: it is no Python.
        """
        is_expression = expression(self.find) is not None and expression(self.write) is not None
        try:
            place = sources.place(self.where, self.find, is_expression=is_expression)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        return Planted(place.path, place.replaced(self.write))


def load_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """Reads all lists.

    Raises:
        TypeError: an entry lacks a key, or has one that means nothing.
    """
    lists = [tomllib.loads(path.read_text()) for path in sorted(folder.glob("*.toml"))]
    return [Mutant(name, **entry) for entries in lists for name, entry in entries.items()]
