"""Gateways for tests of the Python clients, which say what a script tells them."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import grpc

from draftwire.errors import RETRY_KEY
from draftwire.v1 import gateway_pb2

Code = grpc.StatusCode


class Failure(grpc.RpcError):
    """As much of an error of gRPC as a client looks at."""

    def __init__(self, code: grpc.StatusCode, retry_ms: int | None = None) -> None:
        self._code = code
        self._retry_ms = retry_ms

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._code.name

    def trailing_metadata(self) -> list[Any]:
        return [] if self._retry_ms is None else [Item(RETRY_KEY, str(self._retry_ms))]


class Item(NamedTuple):
    key: str
    value: str


def delta(*token_ids: int, choice: int = 0) -> gateway_pb2.GenerateResponse:
    text = "".join(chr(ord("a") + token) for token in token_ids)
    sources = [gateway_pb2.TOKEN_SOURCE_PLAIN] * len(token_ids)
    message = gateway_pb2.GenerateDelta(choice=choice, token_ids=token_ids, text=text, token_sources=sources)
    return gateway_pb2.GenerateResponse(delta=message)


def finish_of(choice: int, num_prompt_tokens: int = 0) -> gateway_pb2.GenerateResponse:
    message = gateway_pb2.GenerateFinish(choice=choice, reason=gateway_pb2.FINISH_REASON_LENGTH)
    message.statistics.num_prompt_tokens = num_prompt_tokens
    return gateway_pb2.GenerateResponse(finish=message)


def echo(choice: int, *token_ids: int) -> gateway_pb2.GenerateResponse:
    message = gateway_pb2.PromptEcho(choice=choice, token_ids=token_ids, text=f"prompt {choice}: ")
    return gateway_pb2.GenerateResponse(prompt_echo=message)


FINISH = finish_of(0)
LOST = Failure(Code.UNAVAILABLE)

Step = gateway_pb2.GenerateResponse | Failure


class Gateways:
    """Each call carries out the next script; the last one over and over.

    Attributes:
        kind: of the calls.
    """

    def __init__(self, *scripts: list[Step]) -> None:
        self._scripts = list(scripts)
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.timeouts: list[float | None] = []
        self.cancelled = 0
        self.kind: type[Call] = Call

    def start(self, request: gateway_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        self.timeouts.append(timeout_s)
        self.requests.append(gateway_pb2.GenerateRequest.FromString(request.SerializeToString()))
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        return self.kind(self, script)


class Call:
    def __init__(self, gateways: Gateways, script: list[Step]) -> None:
        self._gateways, self._script = gateways, script

    def __iter__(self) -> Iterator[gateway_pb2.GenerateResponse]:
        for step in self._script:
            if isinstance(step, Failure):
                raise step
            yield step

    async def __aiter__(self) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        for step in self:
            yield step

    def cancel(self) -> None:
        self._gateways.cancelled += 1


async def nothing() -> None: ...
