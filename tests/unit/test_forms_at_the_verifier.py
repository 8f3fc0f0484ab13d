"""What follows the form of a session's text at a verifier: its own, and from where the text is."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from session_specs import target_spec
from test_automaton import ids_of
from tiny_models import save_spelling_model

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import TargetSessionSpec, Verdict
from draftwire.options.structured_output import form_compiler_pool, form_sandbox
from draftwire.options.structured_output.grammar_automaton import GrammarAutomaton
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.structured_output import StructuredOutput
from draftwire.runtime.settings import ModelSettings
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.core import VerifierCore
from draftwire_verifier.slow_masks import FAILED

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


async def test_form_without_a_gateways_measure_is_measured_before_compilation(
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


NUM_ROUNDS = 6


class SlowForm:
    """Has the masks of one session made apart, from its second round on, and has them wait."""

    def __init__(self, automaton: GrammarAutomaton) -> None:
        self.may_go_on = threading.Event()
        self.threads: list[str] = []
        self.error: Exception | None = None
        self._along, self._automaton = automaton.along, automaton
        automaton.along = self.along  # type: ignore[method-assign]
        automaton._place_s = 1.0

    def along(self, *arguments: Any) -> Any:
        self.threads.append(threading.current_thread().name.partition("_")[0])
        if self.threads[-1] != "torch":
            assert self.may_go_on.wait(10.0)
            if self.error is not None:
                raise self.error
        return self._along(*arguments)


async def run_two(core: VerifierCore, slow: SlowForm | None, automata: list[GrammarAutomaton]) -> dict[int, list[int]]:
    """Runs two texts in plain rounds, and returns the tokens of each once both are over; `slow` waits for the other."""
    lease_id, outbox = core.open_lease()
    for choice, automaton in enumerate(automata):
        spec = replace(spec_of("[abc]{18}", [], choice), plain_rounds=NUM_ROUNDS)
        core.open_session(spec, lease_id, automaton)
    texts: dict[int, list[int]] = {1: [], 2: []}
    running = asyncio.create_task(core.run_steps())
    try:
        while len(texts[1]) < NUM_ROUNDS:
            for event in await asyncio.wait_for(outbox.take_all(), 10.0):
                if not isinstance(event, Verdict):
                    assert FAILED in str(event)
                    return texts
                texts[event.fence.session_id] += event.token_ids
            if len(texts[2]) == NUM_ROUNDS and slow is not None:
                assert len(texts[1]) == 1 or slow.may_go_on.is_set(), "only the first round went without its masks"
                slow.may_go_on.set()
    finally:
        running.cancel()
        core.end_lease(lease_id)
    return texts


async def two_texts(core: VerifierCore, *, is_slow: bool) -> tuple[SlowForm | None, dict[int, list[int]]]:
    automata = [await core.automaton_of(spec_of("[abc]{18}", [], choice)) for choice in range(2)]
    assert automata[0] is not None
    slow = SlowForm(automata[0]) if is_slow else None
    return slow, await run_two(core, slow, [one for one in automata if one is not None])


async def test_session_with_slow_masks_waits_alone_and_has_the_same_text(core: VerifierCore) -> None:
    """The other session's rounds all go on meanwhile."""
    _, expected = await two_texts(core, is_slow=False)
    slow, texts = await two_texts(core, is_slow=True)
    assert texts == expected
    assert slow is not None
    assert slow.threads == ["torch"] + ["slow-masks"] * (NUM_ROUNDS - 1)


async def test_session_whose_slow_masks_cannot_be_made_fails_alone(core: VerifierCore) -> None:
    _, expected = await two_texts(core, is_slow=False)
    automata = [await core.automaton_of(spec_of("[abc]{18}", [], choice)) for choice in range(2)]
    assert automata[0] is not None
    slow = SlowForm(automata[0])
    slow.error = RuntimeError("of a library")
    texts = await run_two(core, slow, [one for one in automata if one is not None])
    assert texts == {1: expected[1][:1], 2: expected[2]}


async def test_session_closed_while_its_slow_masks_are_made_is_in_no_step(core: VerifierCore) -> None:
    automaton = await core.automaton_of(spec_of("[abc]{18}", []))
    assert automaton is not None
    slow = SlowForm(automaton)
    lease_id, outbox = core.open_lease()
    core.open_session(replace(spec_of("[abc]{18}", []), plain_rounds=NUM_ROUNDS), lease_id, automaton)
    running = asyncio.create_task(core.run_steps())
    await asyncio.wait_for(outbox.take_all(), 10.0)
    core.close_session(1, 0)
    slow.may_go_on.set()
    await asyncio.sleep(0.05)
    running.cancel()
    assert outbox._items == []
    assert core._scheduler._ready == []
