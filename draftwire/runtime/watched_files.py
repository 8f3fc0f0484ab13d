"""Files that are reloaded when they change; if a reload fails, the previous content stays in force."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from draftwire.errors import InvalidRequestError

Content = TypeVar("Content")
Signature = tuple[tuple[int, int, int, int] | None, ...]

log = structlog.get_logger()


class WatchedFiles(Generic[Content]):
    """Parsed content of one or more files, reloaded when they change. Thread-safe.

    There is no watcher thread: `current` compares inode, size and times, links followed. That takes microseconds, and
    detects how Kubernetes updates a mounted secret, by swapping a link.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], Content]) -> None:
        """Loads the files by `read`, which also validates them. `what` is their name in the log.

        Raises:
            InvalidRequestError: the files are not valid.
        """
        self._what = what
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._content = read()

    def current(self) -> Content:
        """Returns the content of the files: the same object as before unless they changed.

        Changed files that are not valid (half written, missing, a key that does not match) leave the content as it is;
        that is logged once, and they are read when they change again.
        """
        with self._lock:
            signature = self._signature()
            if signature != self._seen:
                try:
                    content = self._read()
                except InvalidRequestError as error:
                    log.warning("files.reload_failed", what=self._what, reason=str(error))
                else:
                    if self._signature() != signature:  # perhaps a mix of two versions: the next call reads again
                        return self._content
                    self._content = content
                    log.info("files.reloaded", what=self._what)
                self._seen = signature
            return self._content

    def _signature(self) -> Signature:
        return tuple(_signature(path) for path in self._paths)


def read_bytes(path: Path, option: str) -> bytes:
    """Reads the file that an option names.

    Raises:
        InvalidRequestError: the file cannot be read; the message names file and option.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{option}: {path} cannot be read: {error.strerror}") from error


def _signature(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
