"""Clients in threads of their own, which ask until they are stopped."""

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class ClientThreads(ABC):
    """Some clients, each in a thread. A context manager, at whose end all have stopped."""

    def __init__(self, num_clients: int) -> None:
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(num_clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    @abstractmethod
    def _ask(self, index: int) -> None:
        """Asks until `_ended` is set; the client's index counts from 0."""
