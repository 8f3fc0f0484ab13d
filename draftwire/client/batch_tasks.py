"""Runs a batch as asyncio tasks, each of which reads one stream. They end with the batch."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable

from draftwire.client.async_stream import AsyncCompletionStream
from draftwire.client.batch import Batch, Job
from draftwire.client.completion import Completion
from draftwire.client.prompts import Prompt
from draftwire.errors import DraftwireError


class BatchTasks:
    """Tasks that run the requests of a batch. The caller's task reads the prompts."""

    def __init__(self, batch: Batch, open_stream: Callable[[Job], AsyncCompletionStream]) -> None:
        self._batch = batch
        self._open_stream = open_stream

    async def run(self, prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> None:
        """Returns when all prompts are finished; errors are those of `BatchThreads.run`."""
        try:
            async with asyncio.TaskGroup() as group:  # when a task fails, also cancels the wait for the next prompt
                await self._begin_all(prompts, group)
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__

    async def _begin_all(self, prompts: Iterable[Prompt] | AsyncIterable[Prompt], group: asyncio.TaskGroup) -> None:
        running: set[asyncio.Task[None]] = set()
        async for prompt in _one_by_one(prompts):
            task = group.create_task(self._work(self._batch.job(prompt)))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(0)  # lets tasks run even if the prompts arrive without waiting
            while len(running) >= self._batch.concurrency:  # the next prompt is read when a task is free
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    async def _work(self, job: Job) -> None:
        while True:
            try:
                outcome: Completion | DraftwireError = await self._complete(job)
            except DraftwireError as error:
                pause_s = job.pause_after(error)
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
                    continue
                outcome = error
            self._batch.finish(job, outcome)
            return

    async def _complete(self, job: Job) -> Completion:
        job.check()
        async with self._open_stream(job) as stream:
            async for _ in stream:
                pass
        assert stream.completion is not None, "it was read to its end"
        return stream.completion


async def _one_by_one(prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> AsyncIterator[Prompt]:
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            yield prompt
    else:
        for prompt in prompts:
            yield prompt
