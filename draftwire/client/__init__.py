"""Python clients of a gateway. They need neither torch nor transformers."""

from draftwire.client.aio import AsyncClient
from draftwire.client.async_stream import AsyncCompletionStream
from draftwire.client.completion import Completion, Piece
from draftwire.client.request_maker import Options
from draftwire.client.stream import CompletionStream
from draftwire.client.sync import Client
from draftwire.method.token_source import TokenSource
from draftwire.requests.logprobs import TokenLogprob
from draftwire.requests.structured_output import StructuredOutput

__all__ = [
    "AsyncClient",
    "AsyncCompletionStream",
    "Client",
    "Completion",
    "CompletionStream",
    "Options",
    "Piece",
    "StructuredOutput",
    "TokenLogprob",
    "TokenSource",
]
