"""Folders of safetensors that were made of GGUF files, one for each state of each file."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.models.gguf.family import configuration, stored_dtype, tensors_of
from draftwire.models.gguf.header import GgufHeader, read_header

SOURCE = "gguf.json"
"""File beside the weights: what they were made of."""
UNFINISHED = "unfinished-"
"""Beginning of the names of folders that are being written."""
FORMAT = 1
"""Version of what is written into a folder; another one is another folder."""
SPARE_BYTES = 256 * 2**20
"""Room on the disk beside the weights: for the tokenizer, and what else is written meanwhile."""
LEAST_SECONDS, LEAST_BYTES_PER_S = 300.0, 2**20
"""A conversion that takes longer than so long, and than so many bytes a second of the file do, is ended."""

SHOWN_SHARE = 0.25
"""Share of a file after which progress is reported."""


class ShareReport(Protocol):
    """Takes progress."""

    def __call__(self, *, share: float) -> object:
        """`share` of the file was read, in [0, 1]."""


def cache_home() -> Path:
    """Returns the folder of all converted models."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "draftwire" / "gguf"


def converted_folder(name: str, report: ShareReport | None = None) -> Path:
    """Returns the folder of a file's model, which is made first if there is none; others that want it wait meanwhile.

    Args:
        name: of the file.
        report: is called while it is made, at its start and by `SHOWN_SHARE`; not at all if it is there.

    Raises:
        InvalidRequestError: the file is missing or broken, its model is not known, or the disk has no room for it or
            cannot be written.
        UnavailableError: converting it failed.
    """
    file = Path(name).expanduser()
    header = checked_header(file)
    folder = cache_home() / _key(header) / file.stem
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _alone(folder.parent):
                if not folder.is_dir():  # another process made it meanwhile
                    _make(header, folder, report or _keep_quiet)
    except OSError as error:
        where = f"{error.filename or folder} cannot be written: {error.strerror}"
        raise InvalidRequestError(f"{where}; XDG_CACHE_HOME names another place") from error
    return folder


def _keep_quiet(*, share: float) -> None:
    """Reports nothing."""


def checked_header(file: Path) -> GgufHeader:
    """Returns the header of a file whose model can be converted.

    Raises:
        InvalidRequestError: the file is missing or broken, or its model is not known.
    """
    try:
        header = read_header(file)
    except FileNotFoundError as error:
        raise InvalidRequestError(f"no file at {file}") from error
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}") from error
    tensors_of(header, configuration(header))
    return header


def source_types(folder: Path) -> list[str]:
    """Returns the quantised types of the file that a model's folder was made of; none for other folders."""
    try:
        found: list[str] = json.loads((folder / SOURCE).read_text(encoding="utf-8"))["quantised"]
    except FileNotFoundError:
        return []
    return found


def _key(header: GgufHeader) -> str:
    """Returns what tells states of files apart, without reading their tensors."""
    facts = header.path.stat()
    return sha256(f"{FORMAT} {facts.st_size} {facts.st_mtime_ns} {header.digest}".encode()).hexdigest()[:16]


def _make(header: GgufHeader, folder: Path, report: ShareReport) -> None:
    """Writes a model's folder beside its place, and moves it there."""
    entry_bytes = 4 if stored_dtype(header) == "float32" else 2
    entries = sum(
        tensor.num_bytes // tensor.stored_type.block_bytes * tensor.stored_type.block_entries
        for tensor in header.tensors.values()
    )
    needed, free = entries * entry_bytes + SPARE_BYTES, shutil.disk_usage(folder.parent).free
    if free < needed:
        sizes = f"{needed / 2**30:.1f} GiB to be converted, and {folder.parent} has {free / 2**30:.1f} free"
        raise InvalidRequestError(f"{header.path} needs {sizes}: XDG_CACHE_HOME names another place")
    for stale in folder.parent.glob(f"{UNFINISHED}*"):  # of a process that was killed: no other one is here
        shutil.rmtree(stale, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    try:
        _convert(header.path, beside, report)
        source = {"file": str(header.path.absolute()), "quantised": header.quantised_types}
        (beside / SOURCE).write_text(json.dumps(source), encoding="utf-8")
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _convert(file: Path, folder: Path, report: ShareReport) -> None:
    """Runs the process that converts a file."""
    command = [sys.executable, "-m", "draftwire.models.gguf.conversion", str(file), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        words: list[str] = []
        reader = threading.Thread(target=lambda: words.extend(process.stderr or ()), daemon=True)
        reader.start()
        limit = threading.Timer(_seconds_for(file), process.kill)
        limit.start()
        shown = 0.0
        report(share=shown)
        try:
            for line in process.stdout:
                facts = json.loads(line)
                if "fault" in facts:
                    raise InvalidRequestError(facts["fault"])
                if facts["share"] >= shown + SHOWN_SHARE:
                    shown = facts["share"]
                    report(share=round(shown, 2))
            status = process.wait()
        finally:
            limit.cancel()
            process.kill()
    reader.join()
    if status:
        last = words[-1].strip() if words else f"its process ended with status {status}"
        raise UnavailableError(f"{file} could not be converted: {last}")


def _seconds_for(file: Path) -> float:
    """Returns how long a file's conversion may take."""
    return LEAST_SECONDS + file.stat().st_size / LEAST_BYTES_PER_S


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process converts into a folder."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
