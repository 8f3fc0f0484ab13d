"""Servicer of `ModelService`, for drafters and verifiers."""

import asyncio
from collections.abc import Callable

from typing_extensions import override

from draftwire.models.card import ModelCard
from draftwire.models.tokenizer import tokenizer_files
from draftwire.runtime import messages
from draftwire.v1 import model_pb2, model_pb2_grpc


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Describes the loaded model to peers."""

    def __init__(self, card: Callable[[], ModelCard]) -> None:
        """Takes a function that returns the loaded model; it is called only once the service is ready."""
        self._card = card
        self._files: dict[str, bytes] | None = None

    @override
    async def GetModel(self, request: model_pb2.GetModelRequest, context: object) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=messages.model_to_proto(self._card().description))

    @override
    async def GetVocabulary(
        self, request: model_pb2.GetVocabularyRequest, context: object
    ) -> model_pb2.GetVocabularyResponse:
        return model_pb2.GetVocabularyResponse(tokens=self._card().vocabulary)

    @override
    async def GetTokenizer(
        self, request: model_pb2.GetTokenizerRequest, context: object
    ) -> model_pb2.GetTokenizerResponse:
        if self._files is None:  # slow: written to a folder and read back
            self._files = await asyncio.to_thread(tokenizer_files, self._card().tokenizer)
        files = self._files
        return model_pb2.GetTokenizerResponse(
            files=[model_pb2.GetTokenizerResponse.File(name=name, content=data) for name, data in files.items()]
        )
