"""What a chat model's head is trained on has nothing of the benchmark's questions."""

import json
from itertools import islice
from pathlib import Path

from tools.chat_head.questions import (
    BENCHMARK,
    LONGEST_COMMON,
    benchmark_runs,
    conversations,
    described_passages,
    documented_functions,
    runs_of,
)

WORDS = 40
"""Of a passage."""


def test_benchmark_asks_fifty_different_questions_of_several_kinds() -> None:
    lines = [json.loads(line) for line in BENCHMARK.read_text(encoding="utf-8").splitlines()]
    assert len({line["question"] for line in lines}) == 50
    kinds = [line["kind"] for line in lines]
    assert min(kinds.count(kind) for kind in ("question", "code", "list", "text")) >= 8


def test_no_question_to_train_on_has_eight_words_of_the_benchmark_in_a_row(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    asked = json.loads(BENCHMARK.read_text(encoding="utf-8").splitlines()[2])["question"]
    (package / "module.py").write_text(f'def f():\n    """{asked} {asked}"""\n\n\ndef g():\n    """{"word " * 9}"""\n')
    info = tmp_path / "package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: package\n\nThis" + " word" * WORDS + ".\n")
    assert documented_functions(tmp_path) == [("f", f"{asked} {asked}"), ("g", ("word " * 9).strip())]
    assert len(described_passages(tmp_path)) == 1
    known, found = benchmark_runs(), list(islice(conversations(tmp_path, 0), 400))
    assert not any(runs_of(question) & known for one in found for question in one.questions)
    assert len({one.questions for one in found}) > 300
    assert found == list(islice(conversations(tmp_path, 0), 400))
    assert found != list(islice(conversations(tmp_path, 1), 400))


def test_runs_of_words_are_compared_without_regard_to_signs_and_case() -> None:
    eight = "One two, three four: five six seven eight"
    assert runs_of(eight.upper()) == runs_of("one two three four five six seven - eight!")
    assert len(runs_of(f"{eight} nine")) == 2
    assert runs_of("short") == {("short",)}
    assert LONGEST_COMMON == 8
