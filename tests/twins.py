"""The async client, driven by callers that block: what holds of both clients is tested once, of each."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any

from draftwire.client import AsyncClient, AsyncCompletionStream, Client, Piece

SECONDS = 60.0
Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end, in the event loop of a stream."""


class Driven(Iterator[Piece]):
    """An async stream that is read as a blocking one is."""

    def __init__(self, stream: AsyncCompletionStream, run: Run) -> None:
        self._stream, self._run = stream, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Piece]:
        pieces = aiter(self._stream)
        try:
            while (piece := self._run(_next(pieces))) is not None:
                yield piece
        finally:
            self._run(pieces.aclose())  # type: ignore[attr-defined]

    def __next__(self) -> Piece:
        piece = self._run(_next(self._stream))
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> "Driven":
        self._run(self._stream.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._stream.__aexit__(kind, error, trace))

    def close(self) -> None:
        self._run(self._stream.aclose())


async def _next(pieces: Any) -> Piece | None:
    return await anext(pieces, None)


class DrivenClient:
    """An async client whose calls block. Its event loop runs on a thread until the end of a `with` block."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._client = AsyncClient(*arguments, **options)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            made = method(*arguments, **options)
            return Driven(made, self._run) if isinstance(made, AsyncCompletionStream) else self._run(made)

        return call

    def __enter__(self) -> "DrivenClient":
        self._run(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._client.__aexit__(kind, error, trace))
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)


TWINS: dict[str, Any] = {"blocking": Client, "async": DrivenClient}
