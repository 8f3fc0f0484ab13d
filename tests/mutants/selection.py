"""Which tests can notice a change of a file: those that import it, directly or through others."""

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("draftwire", "services", "examples", "tests", "benchmarks")
FAST = ("tests/unit/", "tests/contract/")
OWN_TEST = "test_mutants.py"
"""Looks up what is to be replaced, which is not there once it was: it would notice everything."""

NEAREST = 8
"""Test files of the first wave, at most."""

_IMPORT = re.compile(r"[ \t]*(?:import|from)[ \t]")
_TYPES_ONLY = re.compile(r"^([ \t]*)if TYPE_CHECKING:\n(?:(?:\1[ \t]+.*)?\n)+", re.MULTILINE)
_NAMED = re.compile(r"\"((?:draftwire|draftwire_\w+|benchmarks|tests)(?:\.\w+)*)\"")
"""A module that is imported, or run as a program, by its name."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Test files that are run by one process, in this order."""

    name: str
    files: tuple[str, ...]


class ImportGraph:
    """Who imports whom, read off the sources. Imports for types alone do not count."""

    def __init__(self, root: Path) -> None:
        """Reads all sources of a tree."""
        self._root = root
        paths = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
        self._files = sorted(str(path.relative_to(root)) for path in paths)
        self._modules = {_module_of(file): file for file in self._files}
        self._importers: dict[str, set[str]] = defaultdict(set)
        sources = {file: (root / file).read_text() for file in self._files}
        for file, source in sources.items():
            for imported in self._imports(file, source):
                self._importers[imported].add(file)
        self._sources = sources

    def waves(self, file: str) -> list[Wave]:
        """Returns the tests that can notice a change of a file: the nearest unit and contract tests, the other ones,
        and then those that start services or take longer for another reason.
        """
        distances = self._distances(file)
        tests = [one for one in distances if one.startswith("tests/") and Path(one).name.startswith("test_")]
        tests = [one for one in tests if Path(one).name != OWN_TEST]
        name = Path(file).stem
        tests.sort(key=lambda one: (distances[one], name not in one, len(self._sources[one]), one))
        fast = [one for one in tests if one.startswith(FAST)]
        least = distances[fast[0]] if fast else 0
        nearest = [one for one in fast if distances[one] == least][:NEAREST]
        waves = [
            Wave("nearest", tuple(nearest)),
            Wave("unit", tuple(one for one in fast if one not in nearest)),
            Wave("served", tuple(one for one in tests if not one.startswith(FAST))),
        ]
        return [wave for wave in waves if wave.files]

    def _distances(self, file: str) -> dict[str, int]:
        """Returns how many imports lead from each file to this one, of all from which any do."""
        starts = [file] if file in self._sources else self._readers_of(Path(file).parent.name)
        distances = dict.fromkeys(starts, 0)
        waiting = deque(starts)
        while waiting:
            reached = waiting.popleft()
            for importer in sorted(self._importers[reached]):
                if importer not in distances:
                    distances[importer] = distances[reached] + 1
                    waiting.append(importer)
        return distances

    def _readers_of(self, folder: str) -> list[str]:
        """Returns the modules that name a folder of files that are not Python's."""
        return [file for file, source in self._sources.items() if f'"{folder}"' in source]

    def _imports(self, file: str, source: str) -> Iterator[str]:
        for statement in _import_statements(source):
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    yield from self._found(alias.name, file)
            else:
                package = _module_of(file).split(".")[: -statement.level] if statement.level else []
                base = ".".join([*package, *([statement.module] if statement.module else [])])
                for alias in statement.names:
                    yield from self._found(f"{base}.{alias.name}", file) or self._found(base, file)
        for name in _NAMED.findall(source):
            yield from self._found(name, file) + self._found(f"{name}.__main__", file)
        for folder in Path(file).parents:
            if file.startswith("tests/") and f"{folder}/conftest.py" in self._modules.values():
                yield f"{folder}/conftest.py"

    def _found(self, name: str, file: str) -> list[str]:
        """Returns the file of a module, as a file names it: those of its own folder and of `tests` need no prefix."""
        names = [name]
        if file.startswith("tests/"):
            names += [f"{'.'.join(Path(file).parent.parts)}.{name}", f"tests.{name}"]
        return next(([self._modules[known]] for known in names if known in self._modules), [])


def _module_of(file: str) -> str:
    """Returns the name under which a file is imported."""
    parts = Path(file).with_suffix("").parts
    parts = parts[2:] if parts[0] == "services" else parts  # each service is a package inside its folder
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _import_statements(source: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the import statements of a source. Whole sources are not parsed, which would take seconds."""
    lines = iter(_TYPES_ONLY.sub("", source).splitlines() if "TYPE_CHECKING" in source else source.splitlines())
    for line in lines:
        if not _IMPORT.match(line):
            continue
        statement = line.strip()
        while statement.count("(") > statement.count(")") and (more := next(lines, None)) is not None:
            statement += "\n" + more
        try:
            (parsed,) = ast.parse(statement).body
        except (SyntaxError, ValueError):  # prose that begins like one
            continue
        if isinstance(parsed, ast.Import | ast.ImportFrom):
            yield parsed
