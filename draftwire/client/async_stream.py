"""The stream of one request, for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import grpc

from draftwire.client.call_errors import Interruption, interruption_of
from draftwire.client.completion import Piece
from draftwire.client.request_progress import RequestProgress, RequestStream, StartCall
from draftwire.errors import UnavailableError
from draftwire.v1 import gateway_pb2


class AsyncCompletionStream(RequestStream, AsyncIterator[Piece]):
    """Iterates over the pieces of one completion, or of several in the order of arrival; `completions` is complete at
    the end.

    The request is sent when the first piece is asked for. Leaving an `async for` loop before the end cancels the
    generation, and so do `cancel`, the end of an `async with` block, dropping the stream, and cancelling the task that
    reads it. `await anext(stream)` returns one piece and cancels nothing. One task at a time reads a stream.

    An interrupted stream is resumed as a `CompletionStream` is.
    """

    def __init__(self, start: StartCall, progress: RequestProgress, prepare: Callable[[], Awaitable[None]]) -> None:
        """Use `AsyncClient.stream`."""
        super().__init__(start, progress)
        self._prepare = prepare
        self._cancelled = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._preparing: asyncio.Future[None] | None = None

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yields the remaining pieces. Stopping before the end cancels the generation."""
        try:
            while (piece := await anext(self, None)) is not None:
                yield piece
        finally:
            self._close()

    async def __anext__(self) -> Piece:
        """Returns the next piece; errors are those of a `CompletionStream`.

        Raises:
            StopAsyncIteration: all completions are finished.
        """
        while not self._pieces:
            if self._is_over:
                raise StopAsyncIteration
            try:
                await self._read()
            except BaseException:
                if not self._cancelled.is_set():  # after `cancel` every read raises, after a failure only one
                    self._close()
                    self._is_over = True
                raise
        return self._pieces.popleft()

    def cancel(self) -> None:
        """Cancels the generation; the server frees its resources. A task that reads gets `UnavailableError`."""
        self._pieces.clear()
        self._cancelled.set()
        for running in (self._preparing, self._call):
            if running is not None:
                running.cancel()

    async def aclose(self) -> None:
        """Cancels the generation if it still runs."""
        self._close()

    async def __aenter__(self) -> "AsyncCompletionStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def __del__(self) -> None:
        """Cancels the generation if it still runs: `grpc.aio` keeps calls alive that nobody reads."""
        if self._call is not None and self._runs:
            with suppress(RuntimeError):  # the event loop is closed, and the connection with it
                self._loop.call_soon_threadsafe(self._call.cancel)  # `__del__` may run on any thread

    def _close(self) -> None:
        if self._runs:
            self.cancel()

    @property
    def _runs(self) -> bool:
        return self._progress.is_missing and not self._cancelled.is_set() and not self._is_over

    async def _read(self) -> None:
        """Adds the pieces of the next response, or makes the next call."""
        self._check_wanted()
        if self._call is None:
            await self._begin()
        interruption, cause = None, None
        try:
            async for response in self._messages:
                self._pieces.extend(self._progress.take(response))
                return
        except grpc.RpcError as error:
            interruption, cause = interruption_of(error), error
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            interruption = Interruption(UnavailableError("the call was cancelled on this side"), may_pass=True)
        self._check_wanted()
        if self._progress.is_missing:
            await self._resume(interruption or interruption_of(None), cause)
        else:
            self._is_over = True

    async def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._preparing = asyncio.ensure_future(self._prepare())
        try:
            await self._preparing
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
        self._check_wanted()
        self._progress.retry_policy.begin()
        self._call_now()

    async def _resume(self, interruption: Interruption, cause: grpc.RpcError | None) -> None:
        """Resumes from the received tokens with a new call, after a pause.

        Raises:
            DraftwireError: the error of the interruption, if it is permanent or was retried for too long.
        """
        pause_s = self._progress.resume(interruption)
        if pause_s is None:
            raise interruption.error from cause
        await self._pause(pause_s)
        self._check_wanted()
        self._call_now()

    def _check_wanted(self) -> None:
        if self._cancelled.is_set():
            raise UnavailableError("the completion was cancelled")

    def _call_now(self) -> None:
        self._messages: AsyncIterator[gateway_pb2.GenerateResponse] = aiter(self._next_call())

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):  # `wait_for` may lose a cancellation before Python 3.12
            async with asyncio.timeout(seconds):
                await self._cancelled.wait()


def is_task_cancelled() -> bool:
    """Returns whether a `CancelledError` was raised because this task was cancelled. `grpc.aio` raises it also in tasks
    that read a call after another task cancelled the call or closed the channel.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
