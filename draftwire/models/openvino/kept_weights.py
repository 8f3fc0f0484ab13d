"""Weights of eight bits that are kept on the disk: to make them anew at each start takes longer than to read them."""

import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import structlog
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from draftwire.models.folder import weights_files
from draftwire.models.gguf.cache import cache_home
from draftwire.models.openvino.quantized_weights import QuantizedMatrix

FORMAT = 1
"""Version of how weights are rounded and written; another one is another file."""
PARTS = ("levels", "zeros", "scales")
LEAST_BYTES = 2**25
"""Smaller weights are made as fast as they are read."""
ROOM = 2.0
"""Times the size of a file that have to be free on the disk: it fills no disk."""

log = structlog.get_logger()


class KeptWeights:
    """The matrices of one model, by the names of their weights."""

    def __init__(self, file: Path | None = None) -> None:
        """Reads what a file has of them, nothing if there is none that can be read; None makes all, and keeps none."""
        self._file = file
        self._found: dict[str, NDArray[Any]] = {}
        self._made: dict[str, QuantizedMatrix] = {}
        if file is None or not file.is_file():
            return
        try:
            with safe_open(file, framework="np") as kept:
                self._found = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118  # is no mapping
        except (OSError, SafetensorError) as error:
            log.warning("models.kept_weights_unreadable", file=str(file), reason=str(error))

    @classmethod
    def of_model(cls, folder: Path, fingerprint: bytes) -> "KeptWeights":
        """Returns those of the model in a folder, for the state that its files are in.

        Args:
            folder: of the model.
            fingerprint: of its weights.
        """
        digest = sha256(f"{FORMAT} {folder.absolute()}".encode() + fingerprint)
        for path in weights_files(folder):
            facts = path.stat()
            digest.update(f" {path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
        return cls(cache_home().parent / "u8" / f"{digest.hexdigest()[:16]}.safetensors")

    def matrix(self, name: str, weight: Tensor) -> QuantizedMatrix:
        """Returns the `[out, in]` weights of a linear layer in eight bits."""
        found = [self._found.get(f"{name}.{part}") for part in PARTS]
        levels, zeros, scales = found
        if levels is not None and zeros is not None and scales is not None and levels.shape == weight.shape:
            return QuantizedMatrix(levels, zeros, scales)
        self._made[name] = QuantizedMatrix.of(weight)
        return self._made[name]

    def keep(self) -> None:
        """Writes what had to be made, if the disk has room; that it cannot be written is logged, and no failure."""
        if self._file is None or not self._made:
            return
        arrays = self._found | {
            f"{name}.{part}": getattr(matrix, part) for name, matrix in self._made.items() for part in PARTS
        }
        size = sum(array.nbytes for array in arrays.values())
        if size < LEAST_BYTES:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._file.parent).free
            if free < ROOM * size:
                log.info("models.weights_not_kept", reason=f"{free / 2**30:.1f} GiB are free", file=str(self._file))
                return
            with tempfile.TemporaryDirectory(prefix="unfinished-", dir=self._file.parent) as beside:
                written = Path(beside) / self._file.name
                save_file(arrays, written)
                os.replace(written, self._file)
        except OSError as error:
            log.info("models.weights_not_kept", reason=str(error), file=str(self._file))
