"""Sources of blocks by import path: the example drafts in a whole verifier, and its texts have the law."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
from session_specs import target_spec
from verdict_parts import strategy_of

from draftwire.engine.own_sources import own_sources
from draftwire.errors import InvalidRequestError
from draftwire.method.rounds import CommittedTokens, Fence, LocalDraft, PlainRun, Verdict
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime.settings import ModelSettings
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.core import VerifierCore
from tests.enumerated.cases import tables
from tests.enumerated.scenes import BOUND, Scene

EXAMPLE = "examples.sources.second_time:SecondTime"
NUM_ROUNDS = 12


async def verdicts_of(draft: LocalDraft | None) -> list[Verdict]:
    """Returns the verdicts of a greedy text of the embedded target, the first of them of a plain round."""
    core = VerifierCore(VerifierConfig(ModelSettings("models/target", threads=1), block_sources=EXAMPLE))
    await core.start()
    assert "second_time" in core.description.local_strategies
    lease_id, outbox = core.open_lease()
    running = asyncio.create_task(core.run_steps())
    committed = CommittedTokens([5, 6, 7, 8, 5, 6, 7, 8, 5])
    spec = target_spec(token_ids=committed.ids, plain_rounds=1, max_draft_tokens=4, max_len=80)
    spec = dataclasses.replace(spec, parameters=dataclasses.replace(spec.parameters, sampling=SamplingParams(0.0)))
    core.open_session(spec, lease_id)
    verdicts: list[Verdict] = []
    while len(verdicts) < 1 + NUM_ROUNDS:
        new = [event for event in await asyncio.wait_for(outbox.take_all(), 30.0) if isinstance(event, Verdict)]
        for verdict in new:
            committed.append(verdict.token_ids)
        if not verdicts:
            fence = Fence(spec.session_id, spec.epoch, spec.first_round + 1, len(committed), committed.hash)
            core.run_plain(PlainRun(fence, NUM_ROUNDS, draft))
        verdicts += new
    running.cancel()
    core.stop()
    return verdicts


async def test_example_drafts_in_a_verifier_that_is_told_its_import_path() -> None:
    drafted, plain = await verdicts_of(LocalDraft("second_time", 4)), await verdicts_of(None)
    texts = [[token for verdict in verdicts for token in verdict.token_ids] for verdicts in (drafted, plain)]
    assert texts[0][: len(texts[1])] == texts[1]
    assert {strategy_of(verdict) for verdict in drafted if verdict.num_draft_tokens} == {"second_time"}
    assert sum(verdict.num_accepted_tokens for verdict in drafted) > 0


@pytest.mark.parametrize("rule", ["block", "token"])
def test_texts_that_the_example_drafts_for_have_the_law_of_the_target(rule: str) -> None:
    """Through the services' own code, enumerated over all random numbers."""
    scene = Scene(
        name="a source of one's own",
        **tables(2, 3, num_drafters=0),
        length=4,
        num_draft_tokens=2,
        rule=rule,
        network={"sources": (EXAMPLE,)},
        fields={"local_strategies": ("second_time",)},
        happens=frozenset({"guess", "whole block", "rejection"}),
    )
    result = scene.enumerate()
    assert result.deviation < BOUND
    assert result.shown >= scene.happens


OWN = """
from draftwire.engine.target_session import LocalSource
class Nameless(LocalSource):
    pass
class Blank(LocalSource):
    name = "two words"
class Suffix(LocalSource):
    name = "suffix"
number = 3
"""


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module:Source", "cannot import 'no_such_module:Source': ModuleNotFoundError"),
        ("own_blocks:Missing", "cannot import 'own_blocks:Missing': AttributeError"),
        ("own_blocks:number", "own_blocks:number is no class derived from LocalSource"),
        ("own_blocks:Nameless", "own_blocks:Nameless has no name that is a Python identifier"),
        ("own_blocks:Blank", "own_blocks:Blank has no name that is a Python identifier"),
        ("own_blocks:Suffix", "calls itself 'suffix', as another strategy does"),
    ],
)
def test_path_that_is_no_source_is_refused_in_one_line(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_blocks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequestError, match=said) as refused:
        own_sources([path], 8, ["suffix"])
    assert "\n" not in str(refused.value)


def test_path_without_an_attribute_is_refused_by_the_configuration() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"block_sources takes package\.module:Class, by commas, not 'a\.b,c:D'"
    ):
        VerifierConfig(ModelSettings("scripted:"), block_sources="a.b,c:D")
