"""Which random numbers are fresh: only texts whose numbers were never drawn before draft and choose for others."""

from typing import Any

import pytest
from gateway_fakes import PROMPT, FakeDrafter, FakePeers, FakeTarget, LetterTokenizer, describe, make_generation
from session_specs import FACTS
from virtual_time import in_virtual_time

from draftwire.requests.parameters import SamplingParams
from draftwire.v1 import gateway_pb2
from draftwire_gateway.auth.access import Access
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.body import CompletionBody
from draftwire_gateway.http.choice_deltas import ResponseOptions
from draftwire_gateway.http.routes import COMPLETIONS
from draftwire_gateway.requested_generation import (
    GeneratedChoice,
    RequestedGeneration,
    SpeculationDefaults,
    complete_request,
)
from draftwire_gateway.server import GatewayServicer
from draftwire_gateway.session.session_state import SessionState

SAMPLED = [("block", 1.0), ("token", 1.0), ("block", 0.01)]
DECIDED = [("block", 0.0), ("token", 0.0), ("coupled", 1.0), ("coupled", 0.0)]
"""Rules and temperatures at which no random number lets a draft bias the text."""
FRESH_IF_SAMPLED = {
    # the seed is the request's, an attempt before may have drawn, epoch
    (False, False, -1): True,
    (False, False, 0): True,
    (False, False, 1): False,
    (False, False, 2): False,
    (False, True, -1): False,
    (False, True, 0): False,
    (False, True, 1): False,
    (False, True, 2): False,
    (True, False, -1): False,
    (True, False, 0): False,
    (True, False, 1): False,
    (True, False, 2): False,
    (True, True, -1): False,
    (True, True, 0): False,
    (True, True, 1): False,
    (True, True, 2): False,
}
"""Epoch -1 is that of a session that no verifier was asked to open yet."""


@pytest.mark.parametrize(("rule", "temperature"), [*SAMPLED, *DECIDED])
def test_numbers_are_fresh_if_nobody_can_have_drawn_them_or_none_decides(rule: str, temperature: float) -> None:
    is_sampled = (rule, temperature) in SAMPLED
    for (has_own_seed, is_retried, epoch), is_fresh in FRESH_IF_SAMPLED.items():
        generation = make_generation(
            rule=rule, sampling=SamplingParams(temperature), has_own_seed=has_own_seed, is_retried=is_retried
        )
        expected = is_fresh if is_sampled else True
        assert generation.numbers_are_fresh(epoch) is expected
        session = SessionState(generation)
        session.epoch = epoch
        assert session.numbers_are_fresh is expected
        assert session.parameters.shares_text is expected
        assert generation.numbers_are_fresh() is generation.numbers_are_fresh(0)


@pytest.mark.parametrize("rule", FACTS)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("generated_ids", [(), (1, 2)])
def test_what_a_request_says_decides_who_shares_and_who_is_chosen_for(
    rule: str, temperature: float, seed: int | None, generated_ids: tuple[int, ...]
) -> None:
    """Tokens that came before an interruption say nothing of the numbers: without a seed new ones are drawn."""
    request = RequestedGeneration(
        [list(PROMPT)],
        SamplingParams(temperature),
        "",
        max_tokens=20,
        seed=seed,
        rule=rule,
        generated_choices=(GeneratedChoice(0, generated_ids),),
    )
    defaults = SpeculationDefaults(4, 16, "block", adapts_length=True)
    (generation,) = complete_request(request, describe("target"), defaults)
    is_fresh = seed is None or temperature == 0.0 or FACTS[rule].is_coupled
    session = SessionState(generation)
    session.epoch = 0
    assert session.round == len(generated_ids), "rounds are counted on"
    assert generation.numbers_are_fresh() is is_fresh
    assert session.parameters.shares_text is is_fresh
    assert generation.adapts_length is is_fresh
    if seed is not None:
        assert generation.seed == seed


class Context:
    """As much of a call's context as is looked at."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, response: gateway_pb2.GenerateResponse) -> None:
        pass


async def over_grpc(core: GatewayCore, said: dict[str, Any]) -> None:
    request = gateway_pb2.GenerateRequest(token_ids=gateway_pb2.TokenIds(ids=PROMPT), max_tokens=20, **said)
    await GatewayServicer(core, None, Access(None)).Generate(request, Context())  # type: ignore[arg-type]


async def over_http(core: GatewayCore, said: dict[str, Any]) -> None:
    body = CompletionBody(model="target", prompt=[list(PROMPT)], max_tokens=20, **said)
    async with core.queue.place(1) as place:
        generations = await core.complete(await COMPLETIONS.requested(body, ResponseOptions(1), core, ""))
        async for _ in core.generate(generations, place):
            pass


@pytest.mark.parametrize("send", [over_grpc, over_http])
@pytest.mark.parametrize(
    ("said", "is_fresh"),
    [
        ({}, True),
        ({"seed": 5}, False),
        ({"seed": 5, "has_random_seed": True}, False),
        ({"has_random_seed": True}, True),
    ],
)
def test_resent_request_with_a_seed_shares_nothing_and_has_fixed_lengths(
    send: Any, said: dict[str, Any], is_fresh: bool
) -> None:
    """Whether it says that the seed was drawn for it alone, as clients of earlier versions do, or not."""

    @in_virtual_time
    async def send_twice() -> None:
        target = FakeTarget()
        core = GatewayCore(GatewayConfig(max_waiting_requests=0), FakePeers([target], [FakeDrafter(target)]))
        core.description = describe("target")
        core._tokenizer = LetterTokenizer()  # type: ignore[assignment]
        for _ in range(2):
            await send(core, said)
        assert [spec.parameters.shares_text for spec in target.attempts] == [is_fresh] * 2
        assert bool(core.pairs.explain()) is is_fresh
        keys = {spec.verifying_key for spec in target.attempts}
        assert len(keys) == (1 if "seed" in said else 2)

    send_twice()
