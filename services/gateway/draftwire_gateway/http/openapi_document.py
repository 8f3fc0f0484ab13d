"""`/openapi.json`: the routes, with the models of their requests and responses.

The generating routes parse and send by themselves (`streaming`), with limits that a framework has not. So FastAPI makes
its description of routes that are declared here by their signatures alone, and are never called.
"""

from functools import partial
from typing import Any

from fastapi import APIRouter, Security
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import draftwire
from draftwire_gateway.http import response_models as answers
from draftwire_gateway.http.body import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from draftwire_gateway.http.responses_body import ResponsesBody

ByStatus = dict[int | str, dict[str, Any]]
"""Responses by status."""

_SCHEMAS = "#/components/schemas/"

_ERRORS: ByStatus = {
    "4XX": {"model": answers.ErrorBody, "description": "The request is refused; see docs/http.md"},
    "5XX": {"model": answers.ErrorBody, "description": "The gateway or a service behind it cannot answer"},
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
    events = (answers.CompletionChunk, answers.ChatCompletionChunk)
    _, chunks = models_json_schema([(kind, "serialization") for kind in events], ref_template=_SCHEMAS + "{model}")
    document["components"]["schemas"] |= chunks["$defs"]
    return document


def _declared() -> APIRouter:
    router = APIRouter(responses=_ERRORS)
    get, post = (partial(method, dependencies=[_TOKEN]) for method in (router.get, router.post))

    @post("/v1/completions", responses=_whole_or(answers.TextCompletion, answers.CompletionChunk))
    def complete(body: CompletionBody) -> None:
        """Completes texts or token ids."""

    @post("/v1/chat/completions", responses=_whole_or(answers.ChatCompletion, answers.ChatCompletionChunk))
    def answer(body: ChatBody) -> None:
        """Answers a conversation."""

    @post("/v1/responses", response_model=answers.ResponseBody)
    def respond(body: ResponsesBody) -> None:
        """Answers a conversation; with `stream`, in events named `response.*`. Nothing is stored."""

    @post("/tokenize", response_model=answers.TokenizedBody)
    def tokenize(body: TokenizeBody) -> None:
        """Returns the token ids of a text or a conversation."""

    @post("/detokenize", response_model=answers.DetokenizedBody)
    def detokenize(body: DetokenizeBody) -> None:
        """Returns the text of token ids."""

    @get("/v1/models", response_model=answers.ListedModels)
    def list_models() -> None:
        """Lists the target, under each of its names."""

    @get("/v1/models/{name}", response_model=answers.ListedModel)
    def retrieve_model(name: str) -> None:
        """Returns one of the models."""

    unready = _not_ready("It loads or drains")

    @router.get("/ping", responses=unready, response_model=answers.HealthBody)
    @router.get("/health", responses=unready, response_model=answers.HealthBody)
    def health() -> None:
        """Says whether requests are taken."""

    absent = _not_ready("It loads or drains, no verifier takes requests, or it is full")

    @router.get("/ready", responses=absent, response_model=answers.HealthBody)
    def ready() -> None:
        """Says whether a request would be served."""

    @router.get("/version", response_model=answers.VersionBody)
    def version() -> None:
        """Returns the gateway's version."""

    return router


def _whole_or(whole: type[BaseModel], chunk: type[BaseModel]) -> ByStatus:
    """Returns the response of a generating route: an object, or a stream of server-sent events."""
    events = {"schema": {"$ref": _SCHEMAS + chunk.__name__}}
    description = "The whole response; with `stream`, events `data: {...}`, and `data: [DONE]` at the end"
    return {200: {"model": whole, "description": description, "content": {"text/event-stream": events}}}


def _not_ready(description: str) -> ByStatus:
    return {503: {"model": answers.HealthBody, "description": description}}
