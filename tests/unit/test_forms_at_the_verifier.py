"""What follows the form of a session's text at a verifier: its own, and from where the text is."""

import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from session_specs import target_spec
from test_automaton import ids_of
from tiny_models import save_spelling_model

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import TargetSessionSpec
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime import form_compiler_pool, form_sandbox
from draftwire.runtime.settings import ModelSettings
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.core import VerifierCore

PROMPT = [3, 3]
A, B, _, C, STOP = range(5)


@pytest.fixture
async def core(tmp_path: Path) -> AsyncIterator[VerifierCore]:
    folder = save_spelling_model(tmp_path, ["a", "b", "ab", "c", "<e>"], STOP, seed=1, context_length=64)
    core = VerifierCore(VerifierConfig(ModelSettings(str(folder), threads=1)))
    await core.start()
    yield core
    core.stop()


def spec_of(expression: str, generated_ids: list[int], choice: int = 0, memory_bytes: int = 1) -> TargetSessionSpec:
    return target_spec(
        session_id=1 + choice,
        epoch=0,
        first_round=0,
        choice=choice,
        token_ids=PROMPT + generated_ids,
        prompt_len=len(PROMPT),
        sampling=SamplingParams(structured_output=StructuredOutput.regex(expression)),
        rule="block",
        verifying_key=bytes(KEY_BYTES),
        max_draft_tokens=3,
        plain_rounds=0,
        stop_token_ids=frozenset({STOP}),
        max_len=20,
        permit_key=bytes(KEY_BYTES),
        form_memory_bytes=memory_bytes,
    )


async def test_form_that_no_gateway_has_measured_is_measured_before_it_is_compiled(
    core: VerifierCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a gateway of an earlier version. Every form takes more than no time at all."""
    monkeypatch.setattr(form_sandbox, "MAX_CPU_S", 0.0)
    assert await core.automaton_of(spec_of("a", [])) is not None
    with pytest.raises(InvalidRequestError, match="compiling the form takes more than"):
        await core.automaton_of(spec_of("a", [], memory_bytes=0))


async def test_forms_of_open_sessions_share_memory_that_is_bounded(
    core: VerifierCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_compiler_pool, "MAX_OPEN_BYTES", 5)
    opened = [await core.automaton_of(spec_of("a", [], choice, memory_bytes=2)) for choice in range(2)]
    with pytest.raises(NoRoomError, match="forms of open sessions"):
        await core.automaton_of(spec_of("a", [], memory_bytes=2))
    with pytest.raises(InvalidRequestError):
        await core.automaton_of(spec_of("(", [], memory_bytes=1))
    opened.clear()
    gc.collect()
    assert await core.automaton_of(spec_of("a", [], memory_bytes=5)) is not None


async def test_a_text_that_is_moved_is_followed_from_where_it_is(core: VerifierCore) -> None:
    automaton = await core.automaton_of(spec_of("(abc){2}", [A, B, C, A]))
    assert automaton is not None
    masks = automaton.masks([A, B, C, A], [B, C])
    assert [ids_of(mask) for mask in masks] == [[B], [C], [STOP]]


async def test_a_text_that_is_moved_without_its_form_is_refused(core: VerifierCore) -> None:
    with pytest.raises(InvalidRequestError, match="do not have this form"):
        await core.automaton_of(spec_of("(abc){2}", [A, B, A]))


async def test_choices_of_one_request_do_not_share_what_follows_them(core: VerifierCore) -> None:
    """One that comes to where no token is possible ends alone."""
    first, second = [await core.automaton_of(spec_of("ax|bc", [], choice)) for choice in range(2)]
    assert first is not None
    assert second is not None
    with pytest.raises(InvalidRequestError, match="no token"):
        first.masks([A])
    assert ids_of(second.masks([B])[0]) == [C]
