"""What is installed from a wheel, away from the sources, serves; and a wheel made of the source archive is the same."""

import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SERVE = """
import json, sys
from draftwire import Client
from draftwire.cli.local_stack import LocalStack
model = {"model": "scripted:"}
with LocalStack({"verifier": model, "drafter": model, "gateway": {}}) as stack, Client(stack.address) as client:
    done = client.generate("abc", max_tokens=64, num_speculative_tokens=4)
    print(json.dumps([len(done.token_ids), done.statistics.num_accepted_tokens > 0, sys.modules["draftwire"].__file__]))
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    """Builds a "wheel" or an "sdist" and returns its path."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", code, str(folder), cwd=source)
    return next(folder.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the repository, so that nothing is built beside the sources."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("models/", "docs/", "tests/", "benchmarks/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_wheel_installed_elsewhere_starts_all_services(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has the dependencies, and of ours only the wheel."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))  # no .pth of those is read
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, wheel, cwd=tmp_path)
    said = json.loads(run(tmp_path / "env" / "bin" / "python", "-c", SERVE, cwd=tmp_path))
    assert said == [64, True, str(packages / "draftwire" / "__init__.py")]


def test_package_of_the_remote_drafter_builds_alone(source: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", source / "contrib" / "vllm_remote_drafter", tmp_path)) as archive:
        names = {name for name in archive.namelist() if ".dist-info" not in name}
    assert "vllm_remote_drafter/remote_drafter.py" in names
    assert {name.partition("/")[0] for name in names} == {"vllm_remote_drafter"}


def test_source_archive_gives_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", next(path for path in tmp_path.iterdir() if path.is_dir()), tmp_path)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        tops = {name.partition("/")[0] for name in one.namelist() if ".dist-info" not in name}
    assert tops == {"draftwire", "draftwire_drafter", "draftwire_verifier", "draftwire_gateway"}


def test_wheel_says_what_an_index_wants_to_know(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        said = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    lines = said.partition("\n\n")[0].splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert {"Classifier: Typing :: Typed", "Provides-Extra: openvino", "Provides-Extra: vllm"} <= set(lines)
    classifiers = {line.removeprefix("Classifier: ") for line in lines if line.startswith("Classifier: ")}
    assert not [name for name in classifiers if name.startswith("License ::")]  # refused beside an expression
