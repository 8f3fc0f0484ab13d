"""Files that are read again when they change, while whatever was read last stays in force."""

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
    """What some files say together. All methods may be called on any thread.

    There is no thread that watches: whoever asks looks whether the files are still those that were read, by inode,
    size and times, behind any links. That takes microseconds, and finds what Kubernetes does to a mounted secret, which
    is to swap a link.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], Content]) -> None:
        """Reads for the first time.

        Args:
            what: names the files in the log.
            paths: the files.
            read: reads and checks them, and raises InvalidRequestError where they are no good.

        Raises:
            InvalidRequestError: the files are no good.
        """
        self._what = what
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._content = read()

    def current(self) -> Content:
        """Returns what the files say: the same object as before unless they changed.

        Files that changed and are no good (half written, gone, a key that is another certificate's) change nothing;
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
                    if self._signature() != signature:  # perhaps of two versions: the next call reads them again
                        return self._content
                    self._content = content
                    log.info("files.reloaded", what=self._what)
                self._seen = signature
            return self._content

    def _signature(self) -> Signature:
        return tuple(_signature(path) for path in self._paths)


def read_bytes(path: Path, option: str) -> bytes:
    """Reads a file that an option names.

    Raises:
        InvalidRequestError: it cannot be read; the message names file and option.
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
