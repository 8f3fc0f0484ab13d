"""Runs a batch on threads, each of which reads one stream at a time. The threads end with the batch."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from draftwire.client.batch import Batch, Job
from draftwire.client.completion import Completion
from draftwire.client.prompts import Prompt
from draftwire.client.stream import CompletionStream
from draftwire.errors import DraftwireError


class BatchThreads:
    """Threads that run the requests of a batch. The caller's thread reads the prompts."""

    def __init__(self, batch: Batch, open_stream: Callable[[Job], CompletionStream]) -> None:
        self._batch = batch
        self._open_stream = open_stream
        self._has_failed = threading.Event()
        self._failures: list[BaseException] = []
        self._lock = threading.Lock()
        self._streams: set[CompletionStream] = set()

    def run(self, prompts: Iterable[Prompt]) -> None:
        """Returns when all prompts are finished.

        Raises:
            DraftwireError: the error of the first prompt that failed, unless errors are returned; the other prompts are
                cancelled.
            Exception: an exception of the iterable of prompts; all prompts are cancelled.
        """
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(self._batch.concurrency, "draftwire-batch") as pool:
            try:
                for prompt in prompts:
                    self._raise_failure()
                    running.add(pool.submit(self._run, self._batch.job(prompt)))
                    while len(running) >= self._batch.concurrency:  # the next prompt is read when a thread is free
                        running = self._wait(running)
                while running:
                    running = self._wait(running)
            except BaseException:
                self._cancel()
                raise

    def _wait(self, running: set[Future[None]]) -> set[Future[None]]:
        """Waits until a job has ended, and returns those that still run."""
        rest = wait(running, return_when=FIRST_COMPLETED).not_done
        self._raise_failure()
        return rest

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures[0]

    def _run(self, job: Job) -> None:
        try:
            self._work(job)
        except BaseException as error:
            self._failures.append(error)
            self._cancel()  # at once: the caller's thread may wait for the next prompt

    def _work(self, job: Job) -> None:
        while not self._has_failed.is_set():
            try:
                outcome: Completion | DraftwireError = self._complete(job)
            except DraftwireError as error:
                pause_s = job.pause_after(error)
                if pause_s is not None:
                    self._has_failed.wait(pause_s)
                    continue
                outcome = error
            self._batch.finish(job, outcome)
            return

    def _complete(self, job: Job) -> Completion:
        job.check()
        stream = self._open_stream(job)
        with self._lock:
            self._streams.add(stream)
        try:
            with stream:
                if self._has_failed.is_set():  # `_cancel` may have run before this stream was added
                    stream.cancel()
                for _ in stream:
                    pass
        finally:
            with self._lock:
                self._streams.discard(stream)
        assert stream.completion is not None, "it was read to its end"
        return stream.completion

    def _cancel(self) -> None:
        self._has_failed.set()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()
