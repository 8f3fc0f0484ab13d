"""Questions and instructions for a chat model: of everyday topics, code, and the documentation of Python packages."""

import ast
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.chat_head import topics
from tools.chat_head.topics import words_of

LONGEST_COMMON = 8
"""Words in a row that no text may have in common with a benchmark's question."""
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "questions.jsonl"
TEMPERATURES = (0.0, 0.2, 0.2, 0.7, 1.0)
"""One of which each question is answered at: as texts are served."""
SHORTEST_PASSAGE, LONGEST_PASSAGE = 30, 120
"""Words of a passage that is to be summed up."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a model is asked, one question after the other."""

    questions: tuple[str, ...]
    temperature: float


def conversations(packages: Path, seed: int) -> Iterator[Conversation]:
    """Yields conversations without end, the same ones for the same packages and seed.

    Args:
        packages: folder of installed packages, whose docstrings and descriptions are asked about.
        seed: of the order, and of what is asked how.
    """
    generator = random.Random(seed)
    known = benchmark_runs()
    functions, passages = documented_functions(packages), described_passages(packages)
    for questions in (_asked(generator, functions, passages) for _ in iter(int, 1)):
        if not any(runs_of(question) & known for question in questions):
            yield Conversation(questions, generator.choice(TEMPERATURES))


def _asked(generator: random.Random, functions: list[tuple[str, str]], passages: list[str]) -> tuple[str, ...]:
    kind = generator.choices(
        ("thing", "place", "person", "how", "task", "story", "code", "docs", "sum"), (9, 2, 1, 3, 2, 2, 6, 4, 3)
    )[0]
    choose = generator.choice
    if kind == "thing":
        things = generator.sample(words_of(topics.THINGS), 2)
        question = choose(topics.ABOUT_THINGS).format(*things)
    elif kind == "place":
        question = choose(topics.ABOUT_PLACES).format(choose(words_of(topics.PLACES)))
    elif kind == "person":
        question = choose(topics.ABOUT_PEOPLE).format(choose(words_of(topics.PEOPLE)))
    elif kind == "how":
        question = choose(("How do I {}?", "Give me the steps to {}.", "What is the best way to {}?")).format(
            choose(words_of(topics.HOWS))
        )
    elif kind == "task":
        question = choose(("Write an email to {}.", "Write a short message to {}.")).format(
            choose(words_of(topics.TASKS))
        )
    elif kind == "story":
        characters = " and ".join(generator.sample(words_of(topics.CHARACTERS), 2))
        question = choose(("Write a story about {}.", "Write a poem about {}.", "Write a dialogue between {}.")).format(
            characters
        )
    elif kind == "code":
        language, does = choose(topics.LANGUAGES), choose(words_of(topics.FUNCTIONS))
        question = choose(("Write a function in {} that {}.", "Show me code in {} that {}, and explain it.")).format(
            language, does
        )
    elif kind == "docs":
        name, summary = choose(functions)
        question = choose(
            (
                'A Python function `{}` is documented as: "{}" Write it.',
                'Explain what `{}` does, whose documentation says: "{}"',
                'Write an example that calls `{}`: "{}"',
            )
        ).format(name, summary)
    else:
        question = choose(("Sum this up in two sentences: {}", "Explain this to a beginner: {}")).format(
            choose(passages)
        )
    if generator.random() < 0.25:
        return question, choose(topics.FOLLOW_UPS)
    return (question,)


def documented_functions(packages: Path) -> list[tuple[str, str]]:
    """Returns names and first sentences of functions, of modules in the order of their paths."""
    found = []
    for path in sorted(packages.glob("*/*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if 30 <= len(summary) <= 200 and summary.isascii():
                    found.append((node.name, summary))
    return found


def described_passages(packages: Path) -> list[str]:
    """Returns paragraphs of packages' descriptions."""
    found = []
    for path in sorted(packages.glob("*.dist-info/METADATA")):
        _, _, description = path.read_text(encoding="utf-8").partition("\n\n")
        for paragraph in re.split(r"\n\s*\n", description):
            words = paragraph.split()
            is_prose = re.fullmatch(r"[A-Z][\w\s,.;:'()/-]+\.", " ".join(words)) is not None
            if SHORTEST_PASSAGE <= len(words) <= LONGEST_PASSAGE and is_prose:
                found.append(" ".join(words))
    return found


def runs_of(text: str) -> set[tuple[str, ...]]:
    """Returns all runs of `LONGEST_COMMON` words of a text; a shorter text is one run by itself."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + LONGEST_COMMON]) for at in range(max(1, len(words) - LONGEST_COMMON + 1))}


def benchmark_runs() -> set[tuple[str, ...]]:
    """Returns the runs of words of the benchmark's questions."""
    lines = BENCHMARK.read_text(encoding="utf-8").splitlines()
    return {run for line in lines for run in runs_of(json.loads(line)["question"])}
