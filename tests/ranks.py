"""Processes that form groups, and do in them what a test tells them."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from draftwire.models.parallel.process_group import GroupSettings, ProcessGroup

ANSWER_SECONDS = 100.0
START_SECONDS = 60.0
Work = Callable[..., Any]
"""A function of a module, called with the group and further arguments; what it returns is sent back."""


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


class Worker:
    """A process that belongs to one group after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._owes_answer = False

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def ask(self, settings: GroupSettings, work: Work, arguments: tuple[Any, ...]) -> None:
        if self._owes_answer:  # a test that failed has left it
            self._receive()
        self._pipe.send((settings, work, arguments))
        self._owes_answer = True

    def answer(self) -> Any:
        """Returns what the work returned; raises what it raised, or `EOFError` if the process has died."""
        value = self._receive()
        if isinstance(value, BaseException):
            raise value
        return value

    def _receive(self) -> Any:
        if not self._pipe.poll(ANSWER_SECONDS):
            raise TimeoutError("a rank does not answer")
        self._owes_answer = False
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Ranks:
    """Workers that are started when they are first needed, and form a new group for each task."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def begin(self, work: Work, each: list[tuple[Any, ...]], timeout_s: float = 30.0) -> list[Worker]:
        """Lets a group of as many ranks as there are argument tuples begin to work."""
        living = [worker for worker in self._workers if worker.is_alive]
        workers = self._workers = living + [Worker() for _ in range(len(each) - len(living))]
        workers = workers[: len(each)]
        address = free_address()
        for rank, (worker, arguments) in enumerate(zip(workers, each, strict=True)):
            worker.ask(GroupSettings(rank, len(each), address, "cpu", timeout_s), work, arguments)
        return workers

    def run(self, size: int, work: Work, *arguments: Any, timeout_s: float = 30.0) -> list[Any]:
        """Returns what the work returned on each rank of a group."""
        return [worker.answer() for worker in self.begin(work, [arguments] * size, timeout_s)]

    def close(self) -> None:
        for worker in self._workers:
            worker.end()


def _serve(pipe: Connection) -> None:
    """What a worker does: all that it is asked, one after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            settings, work, arguments = pipe.recv()
        except EOFError:
            return
        try:
            group = ProcessGroup.join(settings)
            try:
                answer = work(group, *arguments)
            finally:
                group.leave()
        except Exception as error:
            answer = error
        pipe.send(answer)
