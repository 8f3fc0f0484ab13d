"""`draftwire index build`: a store of some files, and what is no ground for one."""

import errno
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_line import run
from rich.console import Console
from tiny_models import save_tiny_model

from draftwire.cli import console, named_models
from draftwire.cli.exits import FAILED, MISUSED
from draftwire.cli.named_models import embedded_model
from draftwire.models import card
from draftwire.models.card import load_card
from draftwire.options.model_free import store_building
from draftwire.options.model_free.retrieval import RetrievalText
from draftwire.options.model_free.retrieval_store import RetrievalStore
from draftwire.options.model_free.text_drafter import Guess

WORDS = ["the", "cat", "sat", "on", "mat"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), 8, tokens=WORDS)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("the cat sat on the mat\n")
    return path


def opened(folder: Path, model: Path) -> RetrievalStore:
    return RetrievalStore.open(folder, load_card(str(model)).description.vocabulary_fingerprint)


def test_command_builds_a_store_of_the_targets_tokens(tmp_path: Path, model: Path, text: Path) -> None:
    other = tmp_path / "other"
    other.write_text("on the cat\n")
    out = tmp_path / "above" / "store"
    ended = run("index", "build", "--out", str(out), "--tokenizer", str(model), str(text), str(other))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert ended.stdout.startswith("12 tokens, 0.0 MB on disk, ")
    assert ended.stdout.endswith(f" s: {out}\n")
    store = opened(out, model)
    assert store.index.vocab_size == 8, "rows of the model, of which the tokenizer has fewer"
    drafter = partial(RetrievalText, store)
    assert drafter([3, 0]).guess(3) == Guess([1], 2), "of equally frequent ones the lower"
    assert drafter([1, 2]).guess(3) == Guess([3, 0, 4], 2)


def test_target_of_up_is_the_default(tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(card, "load_card", lambda name: asked.append(name) or load_card(str(model)))
    ended = run("index", "build", "--out", str(tmp_path / "store"), str(text))
    assert (ended.returncode, asked) == (0, [embedded_model("target")])


def test_store_is_replaced_only_by_force(tmp_path: Path, model: Path, text: Path) -> None:
    arguments = ("index", "build", "--out", str(tmp_path / "store"), "--tokenizer", str(model), str(text))
    assert run(*arguments).returncode == 0
    text.write_text("cat sat cat\n")
    ended = run(*arguments)
    assert (ended.returncode, ended.stdout) == (MISUSED, "")
    assert "holds a retrieval store already; pass --force to replace it" in ended.stderr
    assert opened(tmp_path / "store", model).find([3, 0]).match_len == 2
    assert run(*arguments, "--force").returncode == 0
    assert opened(tmp_path / "store", model).find([3, 0]).match_len == 0


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda _: [], "Missing argument"),
        (lambda folder: [str(folder / "nothing")], "does not exist"),
        (lambda folder: [str(folder)], "is a directory"),
        (lambda folder: [write(folder / "latin", b"the cat\xff")], "latin is not UTF-8 text"),
        (lambda folder: [write(folder / "empty", b"")], "a retrieval store needs tokens"),
        (lambda folder: ["--out", str(folder), "--force"], "is not empty, and is not a retrieval store"),
        (lambda folder: ["--out", write(folder / "file", b"")], "cannot be written to: Not a directory"),
        (lambda folder: ["--out", write(folder / "file", b"") + "/store"], "cannot be written to: File exists"),
        (lambda folder: ["--tokenizer", str(folder / "nothing")], "no model folder at"),
        (lambda folder: ["--tokenizer", str(folder)], "has no config.json"),
    ],
)
def test_wrong_input_is_refused_with_one_line_and_leaves_nothing(
    tmp_path: Path, model: Path, text: Path, arguments: Callable[[Path], list[str]], message: str
) -> None:
    given = arguments(tmp_path)
    defaults = ["--out", str(tmp_path / "store"), "--tokenizer", str(model)]
    files = [] if not given or not given[0].startswith("--") else [str(text)]
    before = sorted(tmp_path.iterdir())
    ended = run("index", "build", *defaults, *given, *files)
    assert (ended.returncode, ended.stdout) == (MISUSED, "")
    assert message in " ".join(ended.stderr.replace("│", " ").split())
    assert sorted(tmp_path.iterdir()) == before


def test_tokenizer_has_to_be_named_where_the_embedded_pair_is_missing(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_models, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    ended = run("index", "build", "--out", str(tmp_path / "store"), str(text))
    assert ended.returncode == MISUSED
    assert "the embedded pair is not installed; pass --tokenizer" in ended.stderr


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
def test_disk_or_memory_that_is_full_is_a_failure(
    tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(store_building, "sort_suffixes", fail)
    ended = run("index", "build", "--out", str(tmp_path / "store"), "--tokenizer", str(model), str(text))
    assert ended.returncode == FAILED
    assert "No space left on device" in ended.stderr or "no memory" in ended.stderr
    assert sorted(tmp_path.iterdir()) == [text]


def test_terminal_gets_a_bar_for_reading_and_one_for_sorting(
    tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(console, "make_console", lambda **_: Console(file=drawn, force_terminal=True, width=80))
    assert run("index", "build", "--out", str(tmp_path / "store"), "--tokenizer", str(model), str(text)).returncode == 0
    assert "tokenizing" in drawn.getvalue()
    assert "sorting" in drawn.getvalue()
    assert drawn.getvalue().count("100%") >= 2
