"""The asyncio client.

Example:
    async with AsyncClient("localhost:50051") as client:
        async for piece in client.stream("def merge_sorted(a, b):", temperature=0.0, max_tokens=64):
            print(piece.text, end="")
"""

import asyncio
import random
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

import grpc
from google.protobuf.message import Message

from draftwire.client.async_stream import AsyncCompletionStream, is_task_cancelled
from draftwire.client.batch import CONCURRENCY, ROOM_TIMEOUT_S, Batch
from draftwire.client.batch_tasks import BatchTasks
from draftwire.client.call_errors import error_of
from draftwire.client.client_channels import (
    ANSWER_SECONDS,
    CHANNEL_OPTIONS,
    DEFAULT_ADDRESS,
    LOADING_PAUSE_S,
    Readiness,
    addresses_of,
    in_turn,
)
from draftwire.client.completion import Completion
from draftwire.client.prompts import Prompt, Prompts
from draftwire.client.request_maker import Options, by_prompt, check_is_one, make_request, make_retry_policy
from draftwire.client.request_progress import RequestProgress
from draftwire.client.security import Security
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc

Answer = TypeVar("Answer")

if TYPE_CHECKING:  # a class of the stubs alone; the module does not have it
    from draftwire.v1.gateway_pb2_grpc import GatewayServiceAsyncStub

    Method = Callable[[GatewayServiceAsyncStub], Callable[..., Awaitable[Answer]]]


class AsyncClient:
    """A connection to a gateway, for all tasks of one event loop: that of the first call. Arguments, results and
    errors are those of `Client`. Close it, or use it as an async context manager.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        tls_target_name: str | None = None,
        token: str | None = None,
        allow_plaintext: bool = False,
    ) -> None:
        """Reads the certificate files; the first call connects."""
        self._addresses = addresses_of(address)
        security = Security(tls_ca, tls_cert, tls_key, tls_target_name, token, allow_plaintext)
        self._openers = [security.channel_opener(one, CHANNEL_OPTIONS, grpc.aio) for one in self._addresses]
        self._metadata = security.metadata
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[GatewayServiceAsyncStub] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = count(random.randrange(len(self._addresses)))
        self._is_closed = False

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections, which cancels the calls on them."""
        self._is_closed = True
        for channel in self._channels:
            await channel.close()

    def stream(self, prompt: Prompt | Prompts, **options: Unpack[Options]) -> AsyncCompletionStream:
        """Returns the pieces of the completion of a prompt, or of several, as an async iterator.

        The request is sent when the first piece is asked for, so that a server that cannot be reached is noticed while
        iterating.
        """
        request = make_request(prompt, options)
        progress = RequestProgress(request, make_retry_policy(options, len(self._addresses)))
        return AsyncCompletionStream(self._start, progress, partial(self._wait_if_asked, options))

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Returns one whole completion."""
        check_is_one(prompt, options)
        ((completion,),) = await self.generate_many(prompt, **options)
        return completion

    async def generate_many(self, prompts: Prompt | Prompts, **options: Unpack[Options]) -> list[list[Completion]]:
        """Returns the completions of each prompt, all from one request."""
        async with self.stream(prompts, **options) as stream:
            async for _ in stream:
                pass
        return by_prompt(stream.completions, options)

    @overload
    async def generate_batch(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        concurrency: int = ...,
        return_exceptions: Literal[False] = ...,
        room_timeout_s: float = ...,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    @overload
    async def generate_batch(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        concurrency: int = ...,
        return_exceptions: bool,
        room_timeout_s: float = ...,
        **options: Unpack[Options],
    ) -> list[Completion | DraftwireError]: ...

    async def generate_batch(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        concurrency: int = CONCURRENCY,
        return_exceptions: bool = False,
        room_timeout_s: float = ROOM_TIMEOUT_S,
        **options: Unpack[Options],
    ) -> list[Completion] | list[Completion | DraftwireError]:
        """Returns one completion for each of any number of prompts, as `Client.generate_batch` does.

        An iterable of prompts may be an async one. Requests run as tasks.
        """
        batch = Batch(prompts, options, concurrency, return_exceptions, room_timeout_s)
        await self._wait_if_asked(options)
        await BatchTasks(batch, lambda job: self.stream(job.prompt, **job.options)).run(prompts)
        return batch.outcomes()

    async def server(self) -> gateway_pb2.GetServerResponse:
        """Returns the server's models, rules and defaults."""
        return await self._ask(lambda stub: stub.GetServer, gateway_pb2.GetServerRequest())

    async def explain_speculation(self) -> gateway_pb2.ExplainSpeculationResponse:
        """Returns what the server chooses the lengths of drafts by."""
        return await self._ask(lambda stub: stub.ExplainSpeculation, gateway_pb2.ExplainSpeculationRequest())

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when a gateway serves requests."""
        readiness, request = Readiness(self._addresses, timeout_s), gateway_pb2.GetServerRequest()
        while True:
            try:
                await self._first_answer(lambda stub: stub.GetServer, request, readiness.left_s)
                return
            except grpc.RpcError as error:
                readiness.check(error)
                await asyncio.sleep(LOADING_PAUSE_S)

    async def _wait_if_asked(self, options: Options) -> None:
        wait_s = options.get("wait_for_server_s")
        if wait_s is not None:
            await self.wait_ready(wait_s)

    async def _ask(self, method: "Method[Answer]", request: Message) -> Answer:
        try:
            return await self._first_answer(method, request, ANSWER_SECONDS)
        except grpc.RpcError as error:
            raise error_of(error) from error

    async def _first_answer(self, method: "Method[Answer]", request: Message, timeout_s: float) -> Answer:
        """Returns the first answer of the gateways, which are called in turn; see `Client._first_answer`."""
        failure: grpc.RpcError | None = None
        for stub, share_s in in_turn(self._open(), timeout_s):
            try:
                return await _answer(method(stub)(request, timeout=share_s, metadata=self._metadata))
            except grpc.RpcError as error:
                failure = error
            self._open()  # raises if the client was closed meanwhile
        assert failure is not None, "there is a gateway"
        raise failure

    def _start(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        stubs = self._open()
        stub = stubs[next(self._turns) % len(stubs)]
        return stub.Generate(request, timeout=timeout_s, metadata=self._metadata)

    def _open(self) -> "list[GatewayServiceAsyncStub]":
        """Returns the stubs of the gateways, on channels of this event loop.

        Raises:
            UnavailableError: the client is closed.
            RuntimeError: the client was used in another event loop before.
        """
        if self._is_closed:
            raise UnavailableError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._channels = [open_channel() for open_channel in self._openers]
            self._stubs = [gateway_pb2_grpc.GatewayServiceStub(channel) for channel in self._channels]
        if self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call: make one in each")
        return self._stubs


async def _answer(call: Awaitable[Answer]) -> Answer:
    """Returns the response of a call.

    Raises:
        grpc.RpcError: the call failed.
        UnavailableError: the client was closed during the call.
    """
    try:
        return await call
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise
        raise UnavailableError("the client is closed") from None
