"""POST /tokenize and /detokenize: prompts to token ids and back, in the form of vLLM's."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.types import Receive, Scope, Send

from draftwire_gateway.auth.access import Access
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.body import DetokenizeBody, TokenizeBody
from draftwire_gateway.http.body_reading import BodyReader, header
from draftwire_gateway.http.error_bodies import HTTP_NAMES
from draftwire_gateway.http.model_list import ListDrafters
from draftwire_gateway.http.routes import check_model, conversation_of, in_names
from draftwire_gateway.http.streaming import send_whole

TextBody = TypeVar("TextBody", bound=TokenizeBody | DetokenizeBody)


async def tokenize(body: TokenizeBody, core: GatewayCore, caller: str) -> dict[str, Any]:
    """Returns the ids of a text or a conversation.

    Raises:
        InvalidRequestError: a value is invalid.
        NoRoomError: too many texts are being tokenised.
    """
    if body.prompt is not None:
        ids = await core.tokenize(body.prompt, caller, with_special=body.add_special_tokens)
    else:
        ids = await core.render_chat(conversation_of(body, body.messages, body.tools), caller)
    texts = {"token_strs": [core.token_text(token) for token in ids]} if body.return_token_strs else {}
    return {"count": len(ids), "max_model_len": core.description.context_length, "tokens": ids, **texts}


async def detokenize(body: DetokenizeBody, core: GatewayCore, _caller: str) -> dict[str, Any]:
    """Returns the text of ids.

    Raises:
        InvalidRequestError: a value is invalid.
    """
    return {"prompt": await core.detokenize(body.tokens)}


@dataclass(frozen=True, slots=True)
class TextRoute(Generic[TextBody]):
    """An ASGI application for one of these. `Guard` around it converts its exceptions into responses."""

    body: type[TextBody]
    answer: Callable[[TextBody, GatewayCore, str], Awaitable[dict[str, Any]]]
    core: GatewayCore
    drafters: ListDrafters
    access: Access
    bodies: BodyReader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        caller = self.access.authenticate(header(scope, "authorization"))
        with self.bodies.budget.share(caller.name) as share:
            body = await self.bodies.read(self.body, scope, receive, share)
            if body.model is not None:
                check_model(body.model, self.core.model_names, self.drafters())
            with in_names(HTTP_NAMES):
                answer = await self.answer(body, self.core, caller.name)
        await send_whole(send, iter([json.dumps(answer, ensure_ascii=False)]))
