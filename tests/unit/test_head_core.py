"""A verifier with a head of its own: what it loads and refuses, forms, the audit, and the size of caches."""

import re
from pathlib import Path
from typing import Any

import pytest
from session_specs import target_spec
from structlog.testing import capture_logs
from tiny_heads import EAGLE3, MEDUSA, MTP, save_tiny_head, save_tiny_mimo
from tiny_models import save_spelling_model, save_tiny_model

from draftwire.audit import AuditSums
from draftwire.engine.target_session import TargetSession
from draftwire.errors import InvalidRequestError
from draftwire.method.rounds import LocalDraft, PlainRun, Verdict
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire_verifier.config import HeadSettings, VerifierConfig
from draftwire_verifier.core import VerifierCore
from tests.dishonest_drafter import argmax
from tests.unit.verdict_parts import strategy_of

TOKENS = ["a", "b", "ab", "c", "<e>"]
STOP = 4
PROMPT = [3, 3]
EXPRESSION = "(ab{1,2}c)*"
ENDS = ("", "c", "bc")
"""What is missing, at most, from the beginning of a text of the form."""
DISHONEST = AuditSums(10_000, 5_000.0, 100.0, 0.0, 100.0)


def config_of(target: Path, head: Path | None, **engine: Any) -> VerifierConfig:
    heads = HeadSettings(None if head is None else str(head))
    return VerifierConfig(ModelSettings(str(target), threads=1), engine=EngineSettings(**engine), heads=heads)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return save_spelling_model(folder, TOKENS, STOP, seed=1, context_length=128)


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    own = {MTP: save_tiny_mimo(folder / MTP, len(TOKENS))[0]}
    return {kind: save_tiny_head(folder / kind, target, kind) for kind in (EAGLE3, MEDUSA)} | own


def decide(core: VerifierCore) -> list[Verdict]:
    """Runs steps until nothing is left to do."""
    scheduler, verdicts = core._scheduler, []
    while (step := scheduler.next_step()) is not None:
        result = core._engine.step(step)
        verdicts += [event for _, event in scheduler.complete(step, result) if isinstance(event, Verdict)]
        core.peers.learn(step, result, result.audit())
    return verdicts


async def open_session(core: VerifierCore, **changes: Any) -> TargetSession:
    spec = target_spec(token_ids=PROMPT, plain_rounds=1, max_draft_tokens=4, max_len=60, **changes)
    session = core._scheduler.open(spec, 0, await core.automaton_of(spec))
    decide(core)
    return session


@pytest.mark.parametrize(("kind", "most"), [(EAGLE3, 4), (MEDUSA, 3), (MTP, 4)])
@pytest.mark.parametrize("tokens", [512, "auto"])
async def test_verifier_offers_its_head_and_drafts_with_it(
    target: Path, heads: dict[str, Path], kind: str, most: int, tokens: int | str
) -> None:
    """A layer of multi-token prediction lies in its target's own folder."""
    model = heads[MTP] if kind == MTP else target
    core = VerifierCore(config_of(model, heads[kind], kv_cache_tokens=tokens, max_sessions=4))
    await core.start()
    assert core.description.local_strategies == (kind, "suffix", "lookup")
    session = await open_session(core, stop_token_ids=frozenset())
    core.run_plain(PlainRun(session.fence, 20, LocalDraft(kind, 4)))
    verdicts = decide(core)
    assert {
        verdict.num_draft_tokens for verdict in verdicts if session.spec.max_len - verdict.fence.prefix_len > 5
    } == {most}
    assert any(verdict.num_accepted_tokens for verdict in verdicts)
    core.stop()


@pytest.mark.parametrize("seed", range(3))
async def test_drafts_of_a_head_keep_to_the_form_of_the_text(target: Path, heads: dict[str, Path], seed: int) -> None:
    core = VerifierCore(config_of(target, heads[EAGLE3], kv_cache_tokens=512))
    await core.start()
    form = SamplingParams(structured_output=StructuredOutput.regex(EXPRESSION))
    stops = frozenset({STOP})
    session = await open_session(core, sampling=form, stop_token_ids=stops, verifying_key=bytes([seed]) * 16)
    core.run_plain(PlainRun(session.fence, 30, LocalDraft(EAGLE3, 4)))
    num_drafted = 0
    while (step := core._scheduler.next_step()) is not None:
        generated = session.committed.ids[len(PROMPT) :]
        result = core._engine.step(step)
        for block in filter(None, result.drafted.values()):
            num_drafted += len(block.token_ids)
            ids = generated + block.token_ids
            is_ended = STOP in ids
            text = "".join(TOKENS[token] for token in (ids[: ids.index(STOP)] if is_ended else ids))
            assert any(re.fullmatch(EXPRESSION, text + end) for end in ENDS[: 1 if is_ended else None]), text
        core._scheduler.complete(step, result)
    assert STOP in session.committed.ids or num_drafted > 0
    core.stop()


async def test_head_that_draws_otherwise_than_declared_is_not_asked_again(
    target: Path, heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = VerifierCore(config_of(target, heads[EAGLE3], kv_cache_tokens=512))
    await core.start()
    (record,) = core.drafters
    assert (record.model_name, record.origin.name) == (EAGLE3, "verifier")
    session = await open_session(core)
    core.run_plain(PlainRun(session.fence, 2, LocalDraft(EAGLE3, 3)))
    assert all(verdict.num_draft_tokens for verdict in decide(core))
    assert record.audit.total.num_positions == 6
    monkeypatch.setattr("draftwire_verifier.engine.audits_of", lambda *_: [DISHONEST])
    core.run_plain(PlainRun(session.fence, 2, LocalDraft(EAGLE3, 3)))
    with capture_logs() as logs:
        verdicts = decide(core)
    assert [verdict.num_draft_tokens for verdict in verdicts] == [3, 0]
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["verifier.drafter_quarantined"]
    monkeypatch.undo()
    session.committed.append([2, 2, 2, 2])
    core.run_plain(PlainRun(session.fence, 3, LocalDraft(EAGLE3, 3)))
    assert {strategy_of(verdict) for verdict in decide(core)} == {""}
    session.committed.append([2, 2, 2, 2])
    core.run_plain(PlainRun(session.fence, 1, LocalDraft(EAGLE3, 3, instead="suffix")))
    (verdict,) = decide(core)
    assert (strategy_of(verdict), verdict.num_draft_tokens) == ("suffix", 3), "what else it has goes on"
    core.stop()


@pytest.mark.slow
@pytest.mark.parametrize("lies", [False, True])
async def test_audit_finds_a_head_of_likeliest_tokens_and_no_honest_one(
    target: Path, heads: dict[str, Path], lies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any drafter. An honest one is flagged in 1 of a million runs, and the seeds are fixed."""
    core = VerifierCore(config_of(target, heads[EAGLE3], kv_cache_tokens=512))
    await core.start()
    if lies:
        argmax(monkeypatch)
    for batch in range(3):
        keys = [bytes([8 * batch + number]) * 16 for number in range(8)]
        sessions = [await open_session(core, session_id=key[0], verifying_key=key) for key in keys]
        for session in sessions:
            core.run_plain(PlainRun(session.fence, 40, LocalDraft(EAGLE3, 4)))
        decide(core)
        for session in sessions:
            core._scheduler.close(*session.key)
            core._engine.forget(session.key)
    (record,) = core.drafters
    assert record.audit.total.num_positions > 100
    assert core.trust.may_draft(EAGLE3) is not lies
    core.stop()


async def test_cache_of_the_head_counts_where_the_size_is_found(target: Path, heads: dict[str, Path]) -> None:
    """A token takes what the layers store, its features, and what the head stores."""
    sizes = []
    for head in (None, heads[EAGLE3]):
        with capture_logs() as logs:
            core = VerifierCore(config_of(target, head, kv_cache_tokens="auto", max_sessions=4))
            await core.start()
            core.stop()
        sizes.append(next(entry["token_bytes"] for entry in logs if entry["event"] == "models.cache_sized"))
    assert sizes[1] == sizes[0] + 16 * 4 + 2 * 8 * 4


async def refused(config: VerifierConfig) -> str:
    core = VerifierCore(config)
    with pytest.raises(InvalidRequestError) as error:
        await core.start()
    core.stop()
    return str(error.value)


async def test_head_for_another_target_and_a_target_without_states_are_refused(
    tmp_path: Path, heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save_tiny_model(tmp_path / "other", 7)
    with monkeypatch.context() as patched:  # before the target is loaded, which may take minutes
        patched.setattr("draftwire_verifier.target_loader.load_target", lambda *_: pytest.fail("the target was loaded"))
        assert "vocabulary of 5 tokens, and its target has 7" in await refused(config_of(other, heads[EAGLE3]))
    assert "has no config.json" in await refused(config_of(other, tmp_path / "nothing"))
    scripted = VerifierConfig(ModelSettings("scripted:"), heads=HeadSettings(str(heads[EAGLE3])))
    assert "a scripted model has none" in await refused(scripted)
    with pytest.raises(InvalidRequestError, match="draft_head needs the hidden states"):
        VerifierConfig(ModelSettings("x", engine="vllm"), heads=HeadSettings("y"))
