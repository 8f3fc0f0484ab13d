"""Docstrings are sentences about the thing, and names of tests are short: both are read off the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FRAGMENTS = frozenset(
    {
        "as",
        "at",
        "by",
        "for",
        "from",
        "in",
        "of",
        "on",
        "since",
        "that",
        "to",
        "until",
        "what",
        "when",
        "where",
        "which",
        "who",
        "whom",
        "whose",
        "why",
        "with",
        "without",
    }
)
"""First words of docstrings that are no sentence about the thing, in lower case."""

LONGEST_NAME = 70
"""Characters of the name of a test, `test_` included."""

LEFT_FOR_LATER = "services/gateway/draftwire_gateway/speculation/"


def product_files() -> Iterator[Path]:
    """Yields our sources, without those that are generated."""
    for top in ("draftwire", "services"):
        for path in sorted((ROOT / top).rglob("*.py")):
            is_generated = "_pb2" in path.name
            if not is_generated and not path.relative_to(ROOT).as_posix().startswith(LEFT_FOR_LATER):
                yield path


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each string that stands alone: docstrings of modules, classes, functions, attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def fragments(source: str) -> list[int]:
    """Returns the lines of docstrings that begin with one of `FRAGMENTS`."""
    return sorted(
        line for line, text in strings(source) if text.split() and text.split()[0].strip(",.:;").lower() in FRAGMENTS
    )


def long_names(source: str) -> list[tuple[int, str]]:
    """Returns lines and names of tests with more than `LONGEST_NAME` characters."""
    functions = [
        each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        (each.lineno, each.name)
        for each in functions
        if each.name.startswith("test_") and len(each.name) > LONGEST_NAME
    ]


def test_docstrings_begin_with_the_thing_or_its_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {path.read_text().splitlines()[line - 1].strip()}"
        for path in product_files()
        for line in fragments(path.read_text())
    ]
    assert not found, "these docstrings begin with a fragment; begin with the thing or its verb:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What is here."""',
        'class Some:\n    """Who asks."""',
        'def some():\n    """\n    As `other`."""',
        'class Some:\n    size: int = 0\n    """Of it."""',
        'class Some:\n    def __init__(self):\n        self.size = 0\n        """By name, the size."""',
    ],
    ids=["module", "class", "function", "field", "attribute"],
)
def test_docstring_that_begins_with_a_fragment_is_seen(source: str) -> None:
    assert fragments(source) == [source.count("\n", 0, source.index('"""')) + 1]


def test_sentence_is_no_fragment() -> None:
    assert not fragments(
        '"""Forms of it."""\nsize = 0\n"""Whether it asks for some."""\n"by itself: no docstring" + ""'
    )


def test_names_of_tests_are_short() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {len(name)} characters: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in long_names(path.read_text())
    ]
    assert not found, f"names of tests with more than {LONGEST_NAME} characters:\n" + "\n".join(found)


def test_long_name_of_a_test_is_seen() -> None:
    fits, long = (f"test_{'x' * length}" for length in (65, 66))
    source = f"def {fits}(): ...\nclass TestSome:\n    async def {long}(self): ...\ndef {'x' * 80}(): ..."
    assert long_names(source) == [(3, long)]
