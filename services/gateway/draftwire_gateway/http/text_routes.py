"""POST /tokenize and /detokenize: prompts to token ids and back, in the form of vLLM's."""

import json
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send
from typing_extensions import override

from draftwire.errors import InvalidRequestError
from draftwire_gateway.auth.access import Access
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.body import DetokenizeBody, TokenizeBody
from draftwire_gateway.http.body_reading import BodyReader, header
from draftwire_gateway.http.error_bodies import HTTP_NAMES, renamed
from draftwire_gateway.http.model_list import ListDrafters
from draftwire_gateway.http.routes import check_model, conversation_of
from draftwire_gateway.http.streaming import send_whole

TextBody = TypeVar("TextBody", bound=TokenizeBody | DetokenizeBody)


class TextRoute(ABC, Generic[TextBody]):
    """A route that answers without generating."""

    body: type[TextBody]
    """Model of the request body."""

    @abstractmethod
    async def answer(self, body: TextBody, core: GatewayCore, caller: str) -> dict[str, Any]:
        """Returns the response.

        Raises:
            InvalidRequestError: a value is invalid.
            NoRoomError: too many texts are being tokenised.
        """


class Tokenize(TextRoute[TokenizeBody]):
    """POST /tokenize."""

    body = TokenizeBody

    @override
    async def answer(self, body: TokenizeBody, core: GatewayCore, caller: str) -> dict[str, Any]:
        if body.prompt is not None:
            ids = await core.tokenize(body.prompt, caller, with_special=body.add_special_tokens)
        else:
            ids = await core.render_chat(conversation_of(body, body.messages, body.tools), caller)
        texts = {"token_strs": [core.token_text(token) for token in ids]} if body.return_token_strs else {}
        return {"count": len(ids), "max_model_len": core.description.context_length, "tokens": ids, **texts}


class Detokenize(TextRoute[DetokenizeBody]):
    """POST /detokenize."""

    body = DetokenizeBody

    @override
    async def answer(self, body: DetokenizeBody, core: GatewayCore, caller: str) -> dict[str, Any]:
        return {"prompt": await core.detokenize(body.tokens)}


class BodyRoute(Generic[TextBody]):
    """An ASGI application for one such route. `Guard` around it converts its exceptions into responses."""

    def __init__(
        self,
        route: TextRoute[TextBody],
        core: GatewayCore,
        drafters: ListDrafters,
        access: Access,
        bodies: BodyReader,
    ) -> None:
        self._route = route
        self._core = core
        self._drafters = drafters
        self._access = access
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        caller = self._access.authenticate(header(scope, "authorization"))
        with self._bodies.budget.share(caller.name) as share:
            body = await self._bodies.read(self._route.body, scope, receive, share)
            if body.model is not None:
                check_model(body.model, self._core.model_names, self._drafters())
            try:
                answer = await self._route.answer(body, self._core, caller.name)
            except InvalidRequestError as error:
                raise renamed(error, HTTP_NAMES) from error
        await send_whole(send, iter([json.dumps(answer, ensure_ascii=False)]))
