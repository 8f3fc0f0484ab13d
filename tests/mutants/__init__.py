"""Mistakes that are planted into the sources, one at a time, to see which test notices.

The lists are the TOML files of this folder, one for each area. `python -m tests.mutants` plants them.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake."""

    name: str
    """States the mistake; no other mutant has it."""
    file: str
    """The source that it is planted into, relative to the repository's root."""
    find: str
    """What stands there, exactly once."""
    replace: str
    """What stands there then."""
    origin: str
    """Where the mistake comes from."""
    new: bool = False
    """Whether it is of a kind that no other test plants."""
    noticed_by: str = ""
    """The test file to run first, where imports do not soon lead to one that notices it."""

    def planted(self, source: str) -> str:
        """Returns a source with the mistake.

        Raises:
            ValueError: what is to be replaced is not there exactly once, or replaced by itself.
        """
        count = source.count(self.find)
        if count != 1:
            raise ValueError(f"{self.name}: what it replaces is in {self.file} {count} times")
        if self.find == self.replace:
            raise ValueError(f"{self.name} changes nothing")
        return source.replace(self.find, self.replace)


def load_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """Reads all lists.

    Raises:
        TypeError: an entry lacks a key, or has one that means nothing.
    """
    tables = [table for path in sorted(folder.glob("*.toml")) for table in tomllib.loads(path.read_text())["mutant"]]
    return [Mutant(**table) for table in tables]
