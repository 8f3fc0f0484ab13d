"""The gateway's edge: what is refused before anything is made of a request."""

import asyncio
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_fakes import FakePeers, describe, make_generation

from benchmarks.pair_simulation import round_times
from draftwire.errors import InvalidRequestError, NoRoomError, UnauthenticatedError
from draftwire.options.structured_output.form_sandbox import FormCost
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import MASKS_PER_TOKEN_S, StructuredOutput
from draftwire.v1 import gateway_pb2
from draftwire_gateway import core as core_module
from draftwire_gateway.auth.access import Access, Caller
from draftwire_gateway.auth.tokens import TokenEntry, digest_of
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.body import CompletionBody
from draftwire_gateway.http.choice_deltas import ResponseOptions
from draftwire_gateway.http.routes import COMPLETIONS
from draftwire_gateway.server import GENERATE, GatewayServicer
from draftwire_gateway.session.session_state import SessionState
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

    def __call__(self, text: str, **options: bool) -> Any:
        self.num_requests.append(self._core.num_requests)
        raise InvalidRequestError(f"no ids of {text}")


def make_core(**config: Any) -> tuple[GatewayCore, CountingTokenizer]:
    core = GatewayCore(GatewayConfig(**config), FakePeers([]))
    tokenizer = CountingTokenizer(core)
    core.description = describe("target", CONTEXT_LENGTH)
    core._tokenizers = TokenizerPool(tokenizer, core.description)  # type: ignore[arg-type]
    return core, tokenizer


def num_refused(core: GatewayCore, by: str) -> float | None:
    return core.metrics.registry.get_sample_value("draftwire:requests_refused_total", {"by": by})


async def generate(core: GatewayCore, request: gateway_pb2.GenerateRequest) -> None:
    servicer = GatewayServicer(core, None, Access(None))  # type: ignore[arg-type]
    await servicer.Generate(request, Context())  # type: ignore[arg-type]


async def test_full_gateway_reads_no_prompt_and_choices_that_are_finished_count() -> None:
    """Their prompts are read all the same, so one who says that all are finished would have room without end."""
    core, tokenizer = make_core(max_requests=4, max_waiting_requests=0)
    finished = [gateway_pb2.GeneratedChoice(choice=choice, is_finished=True) for choice in range(4)]
    for before in ([], finished[:1], finished):
        request = gateway_pb2.GenerateRequest(text="abc", num_choices=4, generated_choices=before)
        async with core.queue.place(1):
            with pytest.raises(NoRoomError):
                await generate(core, request)
    assert tokenizer.num_requests == []
    for before in ([], finished[:3]):
        request = gateway_pb2.GenerateRequest(text="abc", num_choices=3, generated_choices=before)
        async with core.queue.place(1):
            with pytest.raises(InvalidRequestError, match="no ids of abc"):
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


SHOWN = (("authorization", "Bearer alice"),)


def servicer_for(core: GatewayCore, path: Path, **limits: Any) -> GatewayServicer:
    path.write_text(TokenEntry("alice", digest_of("alice"), **limits).to_toml())
    return GatewayServicer(core, None, Access(path))  # type: ignore[arg-type]


async def test_completion_counts_for_its_caller_while_its_request_arrives(tmp_path: Path) -> None:
    core, _ = make_core(max_requests=2, max_waiting_requests=0)
    servicer = servicer_for(core, tmp_path / "tokens.toml", max_sessions=1)
    with (
        servicer.admit(GENERATE, SHOWN),
        pytest.raises(NoRoomError, match="1 requests of alice"),
        servicer.admit(GENERATE, SHOWN),
    ):
        pass
    async with core.queue.place(2):
        with pytest.raises(NoRoomError, match="2 requests are running"), servicer.admit(GENERATE, SHOWN):
            pass
        with servicer.admit("/draftwire.v1.GatewayService/GetServer", SHOWN):
            pass  # a full gateway says what it serves
    with servicer.admit(GENERATE, SHOWN):
        pass
    assert (num_refused(core, "caller"), num_refused(core, "gateway")) == (1.0, 1.0)
    with pytest.raises(NoRoomError), servicer.admit(GENERATE, SHOWN):
        raise NoRoomError("the request took too long to arrive")
    assert num_refused(core, "gateway") == 2.0


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer bob"),), SHOWN * 2])
@pytest.mark.parametrize("method", [GENERATE, "/draftwire.v1.GatewayService/GetServer"])
async def test_whoever_shows_no_token_has_no_place(tmp_path: Path, method: str, metadata: Any) -> None:
    core, _ = make_core()
    servicer = servicer_for(core, tmp_path / "tokens.toml")
    with pytest.raises(UnauthenticatedError), servicer.admit(method, metadata):
        pass
    assert core.num_requests == 0


async def test_place_is_given_back_when_the_request_does_not_arrive(tmp_path: Path) -> None:
    core, _ = make_core()
    servicer = servicer_for(core, tmp_path / "tokens.toml", max_sessions=1)
    with pytest.raises(ConnectionError), servicer.admit(GENERATE, SHOWN):
        raise ConnectionError
    with servicer.admit(GENERATE, SHOWN):
        pass


async def test_requests_that_wait_take_a_bounded_amount_together() -> None:
    core, _ = make_core(max_requests=1)
    request = gateway_pb2.GenerateRequest(text="a" * 2**20)
    servicer = GatewayServicer(core, None, Access(None))  # type: ignore[arg-type]
    async with core.queue.place(1):
        waiting = [asyncio.create_task(servicer.Generate(request, Context())) for _ in range(60)]  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        refused = [task for task in waiting if task.done()]
        assert len(waiting) - len(refused) == core.queue.num_waiting == 47, "three quarters of 64 MiB"
        for task in refused:
            assert isinstance(task.exception(), NoRoomError)
        assert num_refused(core, "gateway") == len(refused) == 13
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert core.num_requests == 0


async def test_sessions_carry_what_their_form_costs_and_the_caller_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = make_core()
    paid: list[tuple[StructuredOutput, str]] = []

    async def measure(wanted: StructuredOutput, caller: str) -> FormCost:
        paid.append((wanted, caller))
        return FormCost(0.1, 77)

    monkeypatch.setattr(core._forms, "measure", measure)
    form = StructuredOutput.regex("a")
    wanted = [make_generation(sampling=SamplingParams(structured_output=form), choice=choice) for choice in range(3)]
    checked = await core.check_form(wanted, "token alice")
    assert [SessionState(one).parameters.form_memory_bytes for one in checked] == [77] * 3
    assert [one.form_caller for one in checked] == ["token alice"] * 3, "who pays for their masks"
    assert paid == [(form, "token alice")], "once for all choices"
    assert await core.check_form([make_generation()], "token alice") == [make_generation()]
    assert len(paid) == 1


async def test_caller_pays_for_masks_that_take_longer_than_its_tokens_allow() -> None:
    core, _ = make_core()
    form = make_generation(sampling=SamplingParams(structured_output=StructuredOutput.regex("a")))
    for caller, mask_s, is_refused in (("usual", MASKS_PER_TOKEN_S, False), ("greedy", 0.1, True)):
        for number in range(200):
            core._charge_masks(caller, round_times(number, 0.0, 0.2, 0, 0, mask_us=round(mask_s * 1e6)))
        with pytest.raises(NoRoomError, match="used up") if is_refused else nullcontext():
            core._forms._check(caller)
    with pytest.raises(NoRoomError, match="used up"):
        await core.check_form([form], "greedy")


async def test_prompts_are_tokenised_in_the_turn_of_their_bearer_token() -> None:
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
        await COMPLETIONS.requested(body, ResponseOptions(1), core, "bob")
    assert callers == ["alice", "alice", "bob"]
