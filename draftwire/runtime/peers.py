"""Client of `ModelService`: a peer's model, vocabulary and tokenizer."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from draftwire.errors import ProtocolViolationError
from draftwire.models.description import ModelDescription, vocabulary_mismatch
from draftwire.runtime import messages
from draftwire.runtime.status import error_of
from draftwire.v1 import model_pb2, model_pb2_grpc

Response = TypeVar("Response")


def received(response: Response | None) -> Response:
    """Returns what a peer has sent. In the place of bytes that are no message gRPC gives None.

    Raises:
        ProtocolViolationError: the bytes are no message.
    """
    if response is None:
        raise ProtocolViolationError("the peer sent bytes that are no message")
    return response


async def _answer(call: Awaitable[Response]) -> Response:
    """Returns the response of a call, whose failure is raised as an error of ours."""
    try:
        return received(await call)
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from error


@dataclass(frozen=True, slots=True)
class ModelPeer:
    """Queries the model of a peer. `describe` waits for the peer to come up; all calls have a deadline."""

    channel: grpc.aio.Channel
    timeout_s: float

    async def describe(self) -> ModelDescription:
        """Returns the description of the peer's model.

        Raises:
            ModelMismatchError: no protocol version is supported by both peers.
            UnavailableError: no response before the deadline.
            ProtocolViolationError: the response is no message.
        """
        stub, request = model_pb2_grpc.ModelServiceStub(self.channel), model_pb2.GetModelRequest()
        answer = await _answer(stub.GetModel(request, timeout=self.timeout_s, wait_for_ready=True))
        return messages.model_from_proto(answer.model)

    async def vocabulary(self) -> list[str]:
        """Returns the token strings of the peer's model."""
        stub = model_pb2_grpc.ModelServiceStub(self.channel)
        answer = await _answer(stub.GetVocabulary(model_pb2.GetVocabularyRequest(), timeout=self.timeout_s))
        return list(answer.tokens)

    async def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the files of the peer's tokenizer."""
        stub = model_pb2_grpc.ModelServiceStub(self.channel)
        answer = await _answer(stub.GetTokenizer(model_pb2.GetTokenizerRequest(), timeout=self.timeout_s))
        return {file.name: file.content for file in answer.files}


async def check_vocabularies(target: ModelPeer, drafter: ModelPeer) -> None:
    """Checks that two peers have the same vocabulary.

    Raises:
        ModelMismatchError: they differ; the message names the first differing token.
    """
    ours, theirs = await target.describe(), await drafter.describe()
    if ours.vocabulary_fingerprint != theirs.vocabulary_fingerprint:
        raise vocabulary_mismatch(ours, theirs, await target.vocabulary(), await drafter.vocabulary())
