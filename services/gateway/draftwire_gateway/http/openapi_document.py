"""`/openapi.json`: the routes, with the models of their requests and responses.

The generating routes parse and send by themselves (`streaming`), with limits that a framework has not. So FastAPI makes
its description of routes that are declared here by their signatures alone, and are never called: their bodies raise.
"""

from typing import Any

from fastapi import APIRouter, Security
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import draftwire
from draftwire_gateway.http.body import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from draftwire_gateway.http.response_models import (
    ChatCompletion,
    ChatCompletionChunk,
    CompletionChunk,
    DetokenizedBody,
    ErrorBody,
    HealthBody,
    ListedModel,
    ListedModels,
    ResponseBody,
    TextCompletion,
    TokenizedBody,
    VersionBody,
)
from draftwire_gateway.http.responses_body import ResponsesBody

_SCHEMAS = "#/components/schemas/"
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused; see docs/http.md"},
    "5XX": {"model": ErrorBody, "description": "The gateway or a service behind it cannot answer"},
}
_TOKEN = Security(HTTPBearer(auto_error=False, description="Where the gateway has a tokens file"))


def openapi_document() -> dict[str, Any]:
    """Returns the description of the HTTP API, in OpenAPI 3.1."""
    document = get_openapi(
        title="draftwire",
        version=draftwire.__version__,
        description="A parameter that is null counts as left out; an unknown one is refused by its name.",
        routes=_declared().routes,
    )
    _, chunks = models_json_schema(
        [(kind, "serialization") for kind in (CompletionChunk, ChatCompletionChunk)], ref_template=_SCHEMAS + "{model}"
    )
    document["components"]["schemas"] |= chunks["$defs"]
    return document


def _declared() -> APIRouter:
    router = APIRouter(responses=_ERRORS)

    @router.post("/v1/completions", responses=_whole_or(TextCompletion, CompletionChunk), dependencies=[_TOKEN])
    def complete(body: CompletionBody) -> TextCompletion:
        """Completes texts or token ids."""
        raise NotImplementedError

    @router.post(
        "/v1/chat/completions", responses=_whole_or(ChatCompletion, ChatCompletionChunk), dependencies=[_TOKEN]
    )
    def answer(body: ChatBody) -> ChatCompletion:
        """Answers a conversation."""
        raise NotImplementedError

    @router.post("/v1/responses", dependencies=[_TOKEN])
    def respond(body: ResponsesBody) -> ResponseBody:
        """Answers a conversation; with `stream`, in events named `response.*`. Nothing is stored."""
        raise NotImplementedError

    @router.post("/tokenize", dependencies=[_TOKEN])
    def tokenize(body: TokenizeBody) -> TokenizedBody:
        """Returns the token ids of a text or a conversation."""
        raise NotImplementedError

    @router.post("/detokenize", dependencies=[_TOKEN])
    def detokenize(body: DetokenizeBody) -> DetokenizedBody:
        """Returns the text of token ids."""
        raise NotImplementedError

    @router.get("/v1/models", dependencies=[_TOKEN])
    def list_models() -> ListedModels:
        """Lists the target, under each of its names."""
        raise NotImplementedError

    @router.get("/v1/models/{name}", dependencies=[_TOKEN])
    def retrieve_model(name: str) -> ListedModel:
        """Returns one of the models."""
        raise NotImplementedError

    unready: dict[int | str, dict[str, Any]] = {503: {"model": HealthBody, "description": "It loads or drains"}}

    @router.get("/ping", responses=unready)
    @router.get("/health", responses=unready)
    def health() -> HealthBody:
        """Says whether requests are taken."""
        raise NotImplementedError

    absent: dict[int | str, dict[str, Any]] = {
        503: {"model": HealthBody, "description": "It loads or drains, no verifier takes requests, or it is full"}
    }

    @router.get("/ready", responses=absent)
    def ready() -> HealthBody:
        """Says whether a request would be served."""
        raise NotImplementedError

    @router.get("/version")
    def version() -> VersionBody:
        """Returns the gateway's version."""
        raise NotImplementedError

    return router


def _whole_or(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Returns the response of a generating route: an object, or a stream of server-sent events."""
    events = {"schema": {"$ref": _SCHEMAS + chunk.__name__}}
    description = "The whole response; with `stream`, events `data: {...}`, and `data: [DONE]` at the end"
    return {200: {"model": whole, "description": description, "content": {"text/event-stream": events}}}
