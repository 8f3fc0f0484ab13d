"""Folders that no model can be loaded from: each is refused with a line that names the file and what to do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from draftwire.errors import InvalidRequestError
from draftwire.models.folder import check_folder, check_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"
HEADER = json.dumps({"__metadata__": {}, "a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    return tmp_path


def test_whole_folder_is_taken_and_so_is_a_name_on_the_hub(model: Path) -> None:
    check_model(str(model))
    check_model("Qwen/Qwen2.5-0.5B")
    (model / "model.safetensors").unlink()
    check_folder(model, needs_weights=False)
    (model / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    check_folder(model)


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def removed(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def with_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_odd_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


def with_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (replaced("model.safetensors", POINTER), "model.safetensors is a git-lfs pointer: run git lfs pull"),
        (replaced("tokenizer.json", POINTER), "tokenizer.json is a git-lfs pointer: run git lfs pull"),
        (replaced("config.json", POINTER), "config.json is a git-lfs pointer: run git lfs pull"),
        (
            replaced("model.safetensors", WEIGHTS[:-1]),
            f"model.safetensors is cut short: it has {len(WEIGHTS) - 1} of at least {len(WEIGHTS)} bytes",
        ),
        (replaced("model.safetensors", WEIGHTS[:20]), "model.safetensors is cut short: it has 20 of at least"),
        (replaced("model.safetensors", b""), "model.safetensors is no safetensors file"),
        (replaced("model.safetensors", b"PK" * 20), "model.safetensors is no safetensors file"),
        (replaced("model.safetensors", (2).to_bytes(8, "little") + b"[]"), "its header cannot be read"),
        (removed("config.json"), "has no config.json, the configuration of a Hugging Face model"),
        (replaced("config.json", b"{"), "config.json cannot be read"),
        (replaced("config.json", b"[]"), "config.json is no JSON object"),
        (removed("tokenizer.json"), "has no tokenizer: tokenizer.json is missing"),
        (removed("model.safetensors"), "has no weights: model.safetensors is missing"),
        (with_pickle, "has no weights: model.safetensors is missing (pytorch_model.bin cannot be read: convert it"),
        (with_odd_index, "model.safetensors.index.json has no weight_map from tensors to files"),
        (with_index, "lacks model-2.safetensors, which model.safetensors.index.json lists"),
    ],
)
def test_fault_is_named_with_its_file(model: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(model)
    with pytest.raises(InvalidRequestError) as refused:
        check_model(str(model))
    assert said in str(refused.value)
    assert str(model) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_folder_that_is_empty_or_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="is empty"):
        check_model(str(tmp_path))
    for name in (str(tmp_path / "nothing"), "./nothing", "~/no such folder"):
        with pytest.raises(InvalidRequestError, match="no model folder at"):
            check_model(name)


def test_misspelt_folder_beside_others_is_none_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("target", "drafter"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match="no model folder at models/targt; did you mean models/target"):
        check_model("models/targt")
    with pytest.raises(InvalidRequestError, match=r"no model folder at models/else$"):
        check_model("models/else")
    for name in ("Qwen/Qwen2.5-0.5B", "gpt2", "target"):
        check_model(name)
