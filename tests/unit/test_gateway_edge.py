"""The gateway's edge: what is refused before anything is made of a request."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_fakes import FakePeers, describe

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.v1 import gateway_pb2
from draftwire_gateway import core as core_module
from draftwire_gateway.auth.access import Access, Caller
from draftwire_gateway.auth.tokens import TokenEntry
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.body import CompletionBody
from draftwire_gateway.http.routes import Completions
from draftwire_gateway.server import GatewayServicer
from draftwire_gateway.text.tokenizer_pool import TokenizerPool

CONTEXT_LENGTH = 50


class Context:
    """As much of a call's context as is looked at before the first response."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


class CountingTokenizer:
    """Refuses all texts, and counts them and the requests that run meanwhile."""

    def __init__(self, core: GatewayCore) -> None:
        self.num_requests: list[int] = []
        self._core = core

    def __call__(self, text: str) -> Any:
        self.num_requests.append(self._core.num_requests)
        raise InvalidRequestError(f"no ids of {text}")


def make_core(**config: Any) -> tuple[GatewayCore, CountingTokenizer]:
    core = GatewayCore(GatewayConfig(**config), FakePeers([]))
    tokenizer = CountingTokenizer(core)
    core.description = describe("target", CONTEXT_LENGTH)
    core._tokenizers = TokenizerPool(tokenizer, core.description)  # type: ignore[arg-type]
    return core, tokenizer


async def generate(core: GatewayCore, request: gateway_pb2.GenerateRequest) -> None:
    servicer = GatewayServicer(core, None, Access(None))  # type: ignore[arg-type]
    await servicer.Generate(request, Context())  # type: ignore[arg-type]


async def test_full_gateway_reads_no_prompt_and_choices_that_are_finished_need_no_room() -> None:
    core, tokenizer = make_core(max_requests=4)
    with core.admit(1), pytest.raises(NoRoomError):
        await generate(core, gateway_pb2.GenerateRequest(text="abc", num_choices=4))
    assert tokenizer.num_requests == []
    finished = [gateway_pb2.GeneratedChoice(choice=choice, is_finished=True) for choice in range(2)]
    for num_choices, before in ((3, []), (5, finished)):
        request = gateway_pb2.GenerateRequest(text="abc", num_choices=num_choices, generated_choices=before)
        with core.admit(1), pytest.raises(InvalidRequestError, match="no ids of abc"):
            await generate(core, request)
    assert tokenizer.num_requests == [4, 4], "it counts while it is prepared"
    assert core.num_requests == 0


@pytest.mark.parametrize("where", ["prompts", "generated_choices"])
async def test_largest_requests_are_checked_beside_the_event_loop(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ids there are in all, in lists of which each is none too long."""
    core, _ = make_core()
    core.description = describe("target", 10_000)
    threads: list[bool] = []

    def refusal(*_: Any) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        raise InvalidRequestError("looked at")

    monkeypatch.setattr(core_module, "complete_request", refusal)
    for num_lists in (10, 11):
        ids = [gateway_pb2.TokenIds(ids=range(10_000 - (num_lists == 10))) for _ in range(num_lists)]
        prompts = [gateway_pb2.Prompt(token_ids=one) for one in ids]
        request = gateway_pb2.GenerateRequest(prompts=gateway_pb2.PromptList(prompts=prompts))
        if where == "generated_choices":
            request = gateway_pb2.GenerateRequest(token_ids=gateway_pb2.TokenIds(ids=[1]), num_choices=num_lists)
            for choice, one in enumerate(ids):
                request.generated_choices.add(choice=choice, token_ids=one.ids)
        with pytest.raises(InvalidRequestError, match="looked at"):
            await generate(core, request)
    assert threads == [True, False]


async def test_prompts_are_tokenised_in_the_turn_of_the_token_that_came_with_them() -> None:
    core, _ = make_core()
    callers: list[str] = []

    async def tokenize(text: str, caller: str = "") -> list[int]:
        callers.append(caller)
        raise InvalidRequestError("seen")

    core.tokenize = core.render_chat = tokenize  # type: ignore[assignment,method-assign]
    access = SimpleNamespace(authenticate=lambda _: Caller(TokenEntry("alice", "0" * 64), time.monotonic))
    chat = gateway_pb2.ChatPrompt(messages=[gateway_pb2.ChatMessage(role="user", content="hello")])
    for request in (gateway_pb2.GenerateRequest(text="abc"), gateway_pb2.GenerateRequest(chat=chat)):
        servicer = GatewayServicer(core, None, access)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="seen"):
            await servicer.Generate(request, Context())  # type: ignore[arg-type]
    body = CompletionBody(model="target", prompt=["abc"])
    with pytest.raises(InvalidRequestError, match="seen"):
        await Completions().requested(body, core, "bob")
    assert callers == ["alice", "alice", "bob"]
