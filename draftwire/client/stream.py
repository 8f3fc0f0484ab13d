"""The stream of one request, for blocking callers."""

import threading
from collections.abc import Iterator
from contextlib import suppress

import grpc

from draftwire.client.call_errors import interruption_of
from draftwire.client.completion import Piece
from draftwire.client.request_progress import RequestProgress, RequestStream, StartCall
from draftwire.errors import UnavailableError
from draftwire.v1 import gateway_pb2


class CompletionStream(RequestStream, Iterator[Piece]):
    """Iterates over the pieces of one completion, or of several in the order of arrival; `completions` is complete at
    the end.

    Leaving a `for` loop before the end, by a break or an error, cancels the generation. So do `cancel`, the end of a
    `with` block, and dropping the stream. `next(stream)` returns one piece and cancels nothing.

    An interrupted stream is resumed from the received tokens, by the next gateway, or by the same one if there is no
    other: the pieces go on without a gap.
    """

    def __init__(self, start: StartCall, progress: RequestProgress) -> None:
        """Use `Client.stream`."""
        super().__init__(start, progress)
        self._cancelled = threading.Event()
        progress.retry_policy.begin()
        self._call_now()

    def __iter__(self) -> Iterator[Piece]:
        """Yields the remaining pieces. Stopping before the end cancels the generation."""
        try:
            while (piece := next(self, None)) is not None:
                yield piece
        finally:
            self.close()

    def __next__(self) -> Piece:
        """Returns the next piece.

        Raises:
            StopIteration: all completions are finished.
            NoRoomError: the server is full.
            UnavailableError: the server cannot be reached, an interrupted completion could not be resumed, or the
                stream is cancelled.
            DraftwireError: see the table in `docs/client.md`.
        """
        while True:
            with suppress(IndexError):  # `cancel` on another thread may clear them
                return self._pieces.popleft()
            if self._is_over:
                raise StopIteration
            try:
                self._read()
            except BaseException:
                if not self._cancelled.is_set():  # after `cancel` every read raises, after a failure only one
                    self.close()
                    self._is_over = True
                raise

    def cancel(self) -> None:
        """Cancels the generation; the server frees its resources. Thread-safe. A reader gets `UnavailableError`."""
        self._cancelled.set()  # set first: a reader checks it after each step, and then drops its pieces
        self._pieces.clear()
        self._call.cancel()

    def close(self) -> None:
        """Cancels the generation if it still runs."""
        if self._progress.is_missing and not self._cancelled.is_set() and not self._is_over:
            self.cancel()

    def __enter__(self) -> "CompletionStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        """Adds the pieces of the next response, or makes the next call."""
        self._check_wanted()
        error: grpc.RpcError | None = None
        try:
            for response in self._messages:
                self._pieces.extend(self._progress.take(response))
                self._check_wanted()
                return
        except grpc.RpcError as raised:
            error = raised
        self._check_wanted()
        if self._progress.is_missing:
            self._resume(error)
        else:
            self._is_over = True

    def _resume(self, error: grpc.RpcError | None) -> None:
        """Resumes from the received tokens with a new call, after a pause. `error` is None if the stream just ended.

        Raises:
            DraftwireError: the error of the interruption, if it is permanent or was retried for too long.
        """
        interruption = interruption_of(error)
        pause_s = self._progress.resume(interruption)
        if pause_s is None:
            raise interruption.error from error
        self._pause(pause_s)
        self._check_wanted()
        self._call_now()
        if self._cancelled.is_set():  # `cancel` may have cancelled the previous call
            self._call.cancel()

    def _check_wanted(self) -> None:
        """Raises if the stream was cancelled.

        Raises:
            UnavailableError: the stream was cancelled. Pieces that were added since are dropped.
        """
        if self._cancelled.is_set():
            self._pieces.clear()
            raise UnavailableError("the completion was cancelled")

    def _call_now(self) -> None:
        self._messages: Iterator[gateway_pb2.GenerateResponse] = iter(self._next_call())

    def _pause(self, seconds: float) -> None:
        self._cancelled.wait(seconds)
