"""draftwire: distributed speculative decoding that does not change a single probability.

What users of a server need can be imported from here. It is loaded when it is asked for, because the library itself
needs no gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftwire.client import (
        AsyncClient,
        AsyncCompletionStream,
        Client,
        Completion,
        CompletionStream,
        Options,
        Piece,
        StructuredOutput,
        TokenLogprob,
        TokenSource,
    )
    from draftwire.errors import (
        DraftwireError,
        InvalidRequestError,
        ModelMismatchError,
        NoRoomError,
        ProtocolViolationError,
        UnauthenticatedError,
        UnavailableError,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncCompletionStream",
    "Client",
    "Completion",
    "CompletionStream",
    "DraftwireError",
    "InvalidRequestError",
    "ModelMismatchError",
    "NoRoomError",
    "Options",
    "Piece",
    "ProtocolViolationError",
    "StructuredOutput",
    "TokenLogprob",
    "TokenSource",
    "UnauthenticatedError",
    "UnavailableError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module("draftwire.errors" if name.endswith("Error") else "draftwire.client")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
