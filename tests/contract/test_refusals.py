"""Every request of `tests/bad_inputs.py` that an edge refuses alone, tried at that edge without servers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from benchmarks.law import stack_options
from draftwire.errors import UnavailableError, Violation
from draftwire.method.rounds import CommittedTokens, PlainRun, Verdict
from draftwire.models.tokenizer import tokenizer_files
from draftwire.runtime.messages import model_to_proto
from draftwire.runtime.metrics import PREFIX
from draftwire.runtime.status import status_of
from draftwire.v1 import drafter_pb2, gateway_pb2, verifier_pb2
from draftwire_drafter.core import DrafterCore
from draftwire_drafter.server import DrafterServicer
from draftwire_gateway.auth.access import Access
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.server import GatewayServicer
from draftwire_verifier.core import VerifierCore
from draftwire_verifier.drafter_peers import BlockRefused
from draftwire_verifier.server import VerifierServicer
from tests.bad_inputs import (
    CASES,
    MAX_MESSAGE_BYTES,
    OK,
    PAGE,
    PROMPT,
    REQUESTS,
    SECONDS,
    SERVED,
    Answer,
    MakeBlock,
    TargetSide,
    blocks,
    draft_fields,
    page,
    refused,
    target_fields,
    wrong_answers,
)
from tests.in_process import parse

CONTEXT: Any = SimpleNamespace(invocation_metadata=tuple, write=AsyncMock(), auth_context=dict, peer=str)
LIMITS = {"max_message_bytes": MAX_MESSAGE_BYTES}
NOWHERE = "127.0.0.1:1"


class Edges:
    """The edges of a verifier and a drafter, and of a gateway without peers. Answers as a `Stage` does."""

    def __init__(self, runner: asyncio.Runner, options: Mapping[str, Mapping[str, object]]) -> None:
        self._runner = runner
        self._verifier = VerifierCore(parse("verifier", options["verifier"]))
        self._drafter = DrafterCore(parse("drafter", options["drafter"]), AsyncMock(side_effect=UnavailableError))
        self._gateway = GatewayCore(parse("gateway", options["gateway"]), SimpleNamespace(targets=list))
        runner.run(self._start())

    async def _start(self) -> None:
        for core in (self._verifier, self._drafter):
            await core.start()
        self._running = asyncio.create_task(self._verifier.run())
        self._gateway.serve_model(self._verifier.description, tokenizer_files(self._verifier.card.tokenizer))

    def stop(self) -> None:
        self._running.cancel()
        for core in (self._verifier, self._drafter):
            core.stop()

    def generate(self, request: gateway_pb2.GenerateRequest) -> Answer:
        servicer = GatewayServicer(self._gateway, SimpleNamespace(), Access(None))
        return self._answer_to(servicer.Generate(request, CONTEXT))

    def open_target(self, changes: Mapping[str, Any]) -> Answer:
        lease_id, _ = self._verifier.open_lease()
        request = verifier_pb2.OpenTargetSessionRequest(**target_fields(lease_id, **changes))
        return self._answer_to(VerifierServicer(self._verifier).OpenTargetSession(request, CONTEXT))

    def open_draft(self, changes: Mapping[str, Any]) -> Answer:
        lease_id, _ = self._drafter.open_lease()
        request = drafter_pb2.OpenDraftSessionRequest(**draft_fields(NOWHERE, lease_id, **changes))
        return self._answer_to(DrafterServicer(self._drafter).OpenDraftSession(request, CONTEXT))

    def offer(self, make: MakeBlock) -> Answer:
        return self._runner.run(asyncio.wait_for(self._offer(make), SECONDS))

    async def _offer(self, make: MakeBlock) -> Answer:
        servicer, (lease_id, outbox) = VerifierServicer(self._verifier), self._verifier.open_lease()
        fields = target_fields(lease_id, plain_rounds=0)
        await servicer.OpenTargetSession(verifier_pb2.OpenTargetSessionRequest(**fields), CONTEXT)
        committed = CommittedTokens(PROMPT)
        session = TargetSide(None, lease_id, fields["session_id"], fields["permit_key"], committed, 0)  # type: ignore[arg-type]
        before = self._refusals()

        async def requests() -> AsyncIterator[verifier_pb2.PushDraftBlocksRequest]:
            hello = verifier_pb2.DrafterHello(model=model_to_proto(self._verifier.description), instance_id=1)
            yield verifier_pb2.PushDraftBlocksRequest(hello=hello)
            yield blocks(make(session))

        await servicer.PushDraftBlocks(requests(), CONTEXT)
        (event,) = await outbox.take_all()
        assert isinstance(event, BlockRefused), event
        self._verifier.run_plain(PlainRun(session.fence, 1))
        (verdict,) = await outbox.take_all()
        assert isinstance(verdict, Verdict), "the session goes on"
        self._verifier.end_lease(lease_id)
        return Answer(refused(", ".join(self._refusals() - before)), event.reason)

    def _refusals(self) -> Counter[str]:
        value, name = self._verifier.metrics.registry.get_sample_value, PREFIX + "blocks_refused_total"
        return Counter({one.value: int(value(name, {"violation": one.value}) or 0) for one in Violation})

    def _answer_to(self, call: Coroutine[Any, Any, Any]) -> Answer:
        try:
            self._runner.run(asyncio.wait_for(call, SECONDS))
        except Exception as error:
            code, message = status_of(error)
            return Answer(code.name, message)
        return Answer(OK)


@pytest.fixture(scope="module")
def edges(pair: tuple[Path, Path]) -> Iterator[Edges]:
    with asyncio.Runner() as runner:
        edges = Edges(runner, {name: given | LIMITS for name, given in stack_options(*pair).items()})
        yield edges
        edges.stop()


def test_every_bad_request_is_refused_as_documented_without_a_server(edges: Edges) -> None:
    assert not wrong_answers(REQUESTS, edges)
    assert len(REQUESTS) > 150


def test_every_bad_input_is_tried_and_of_each_kind_one_on_real_servers() -> None:
    """With the page that lists them."""
    assert PAGE.read_text() == page(), "python -m tests.bad_inputs --write tests/bad-inputs.md"
    assert {case.title for case in (*REQUESTS, *SERVED)} == {case.title for case in CASES}
    assert len({case.title for case in CASES}) == len(CASES) >= 279
    assert {(case.call, case.answer) for case in SERVED} == {(case.call, case.answer) for case in CASES}
