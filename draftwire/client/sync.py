"""The blocking client.

Example:
    with Client("localhost:50051") as client:
        for piece in client.stream("def merge_sorted(a, b):", temperature=0.0, max_tokens=64):
            print(piece.text, end="")
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, overload

import grpc
from google.protobuf.message import Message

from draftwire.client.batch import CONCURRENCY, ROOM_TIMEOUT_S, Batch
from draftwire.client.batch_threads import BatchThreads
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
from draftwire.client.stream import CompletionStream
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc

Answer = TypeVar("Answer")
Method = Callable[[gateway_pb2_grpc.GatewayServiceStub], Callable[..., Answer]]
"""Returns a method of a gateway."""


class Client:
    """A connection to a gateway. Thread-safe; close it, or use it as a context manager."""

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
        """Reads the certificate files; the first call connects.

        Args:
            address: host:port of the gateway, or of several, as a list or separated by commas. A completion goes to one
                of them, and to the next if it is interrupted.
            tls_ca: PEM file of the trusted issuers; without it, the connection is plaintext.
            tls_cert: PEM file of the client certificate, if the gateway requires one.
            tls_key: PEM file of the client certificate's key.
            tls_target_name: name that the gateway's certificate must carry instead of its address.
            token: bearer token, if the gateway requires one. Without TLS it is sent to this machine alone.
            allow_plaintext: sends the token without TLS to other machines too, where the network encrypts on its own.

        Raises:
            InvalidRequestError: a file cannot be read, another file that it requires is missing, or the token would
                travel in plaintext.
        """
        self._addresses = addresses_of(address)
        security = Security(tls_ca, tls_cert, tls_key, tls_target_name, token, allow_plaintext)
        openers = [security.channel_opener(one, CHANNEL_OPTIONS, grpc) for one in self._addresses]
        self._channels: list[grpc.Channel] = [open_channel() for open_channel in openers]
        self._metadata = security.metadata
        self._stubs = [gateway_pb2_grpc.GatewayServiceStub(channel) for channel in self._channels]
        self._turns = count(random.randrange(len(self._stubs)))
        self._is_closed = False

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections, which cancels the calls on them."""
        self._is_closed = True
        for channel in self._channels:
            channel.close()

    def stream(self, prompt: Prompt | Prompts, **options: Unpack[Options]) -> CompletionStream:
        """Starts the completion of a prompt, or of several, and returns its pieces as an iterator.

        Args:
            prompt: text, token ids or chat messages, or a list of such prompts.
            **options: see `Options`.

        Raises:
            InvalidRequestError: here or while iterating: a parameter is out of range.
            UnauthenticatedError: while iterating: the gateway does not accept the token.
            NoRoomError: while iterating: the server is full; the error holds when to retry.
            UnavailableError: here or while iterating: the server cannot be reached, or the deadline has passed.
        """
        request = make_request(prompt, options)
        self._wait_if_asked(options)
        return CompletionStream(self._start, RequestProgress(request, make_retry_policy(options, len(self._stubs))))

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Returns one whole completion. Arguments are those of `stream`.

        Raises:
            InvalidRequestError: also if several completions are requested.
        """
        check_is_one(prompt, options)
        ((completion,),) = self.generate_many(prompt, **options)
        return completion

    def generate_many(self, prompts: Prompt | Prompts, **options: Unpack[Options]) -> list[list[Completion]]:
        """Returns the completions of each prompt, all from one request. Arguments are those of `stream`.

        Returns:
            A list of `num_choices` completions for each prompt, even if there is only one prompt.
        """
        stream = self.stream(prompts, **options)
        for _ in stream:
            pass
        return by_prompt(stream.completions, options)

    @overload
    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = ...,
        return_exceptions: Literal[False] = ...,
        room_timeout_s: float = ...,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    @overload
    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = ...,
        return_exceptions: bool,
        room_timeout_s: float = ...,
        **options: Unpack[Options],
    ) -> list[Completion | DraftwireError]: ...

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = CONCURRENCY,
        return_exceptions: bool = False,
        room_timeout_s: float = ROOM_TIMEOUT_S,
        **options: Unpack[Options],
    ) -> list[Completion] | list[Completion | DraftwireError]:
        """Returns one completion for each of any number of prompts, in their order, each with a request of its own.

        If the server is full, the request is retried after the pause that the server asks for. With a seed, a prompt's
        is `seed_of(seed, index)`: see `draftwire.client.batch`. Without one the server draws them.

        Args:
            prompts: read one by one, on this thread, when a request can start for the next.
            concurrency: the most requests at a time, each on a thread that ends with the batch.
            return_exceptions: puts the `DraftwireError` of a prompt in the place of its completion. Otherwise the first
                error is raised, and running requests are cancelled.
            room_timeout_s: how long a prompt is retried while the server is full.
            **options: as for `generate`. `timeout_s` applies to each attempt at each prompt.

        Raises:
            InvalidRequestError: also if `prompts` is a single prompt.
            DraftwireError: as `generate`.
        """
        batch = Batch(prompts, options, concurrency, return_exceptions, room_timeout_s)
        self._wait_if_asked(options)
        BatchThreads(batch, lambda job: self.stream(job.prompt, **job.options)).run(prompts)
        return batch.outcomes()

    def server(self) -> gateway_pb2.GetServerResponse:
        """Returns the server's models, rules and defaults."""
        return self._ask(lambda stub: stub.GetServer, gateway_pb2.GetServerRequest())

    def explain_speculation(self) -> gateway_pb2.ExplainSpeculationResponse:
        """Returns what the server chooses the lengths of drafts by."""
        return self._ask(lambda stub: stub.ExplainSpeculation, gateway_pb2.ExplainSpeculationRequest())

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when a gateway serves requests.

        Raises:
            UnavailableError: no gateway serves requests within the time.
        """
        readiness, request = Readiness(self._addresses, timeout_s), gateway_pb2.GetServerRequest()
        while True:
            try:
                self._first_answer(lambda stub: stub.GetServer, request, readiness.left_s)
                return
            except grpc.RpcError as error:
                readiness.check(error)
                time.sleep(LOADING_PAUSE_S)

    def _wait_if_asked(self, options: Options) -> None:
        wait_s = options.get("wait_for_server_s")
        if wait_s is not None:
            self.wait_ready(wait_s)

    def _ask(self, method: Method[Answer], request: Message) -> Answer:
        try:
            return self._first_answer(method, request, ANSWER_SECONDS)
        except grpc.RpcError as error:
            raise error_of(error) from error

    def _first_answer(self, method: Method[Answer], request: Message, timeout_s: float) -> Answer:
        """Returns the first answer of the gateways, which are called in turn, all together within `timeout_s`.

        Raises:
            grpc.RpcError: the error of the last gateway, if none answers.
            UnavailableError: the client is closed.
        """
        failure: grpc.RpcError | None = None
        with self._open() as stubs:
            for stub, share_s in in_turn(stubs, timeout_s):
                try:
                    return method(stub)(request, timeout=share_s, metadata=self._metadata)
                except grpc.RpcError as error:
                    failure = error
        assert failure is not None, "there is a gateway"
        raise failure

    def _start(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        with self._open() as stubs:
            stub = stubs[next(self._turns) % len(stubs)]
            return stub.Generate(request, timeout=timeout_s, metadata=self._metadata)

    @contextmanager
    def _open(self) -> Iterator[list[gateway_pb2_grpc.GatewayServiceStub]]:
        """Yields the stubs of the gateways.

        Raises:
            UnavailableError: the client is closed, or another thread closed it within the block.
        """
        try:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            yield self._stubs
        except ValueError as error:  # gRPC raises it for a closed channel
            if self._is_closed:
                raise UnavailableError("the client is closed") from error
            raise
