"""The random numbers of a round are those of its number and attempt, wherever its session was opened."""

from dataclasses import replace

import pytest

from draftwire.encoding import Claim, DraftDistributions, decode_one
from draftwire.keys import KEY_BYTES
from draftwire.models.scripted import Script, ScriptedTarget
from draftwire.parameters import SamplingParams
from draftwire.quantization import Encoding
from draftwire.randomness import DrawKey
from draftwire.rounds import CommittedTokens, ReceivedBlock, TargetSessionSpec
from draftwire.services.verifier import engine as engines
from draftwire.services.verifier.scheduler import Step, StepItem, TargetSession
from draftwire.verification.target import Judging, StepOutcome

SPEC = TargetSessionSpec(
    session_id=1,
    epoch=3,
    first_round=5,
    choice=2,
    token_ids=[1, 2, 3],
    prompt_len=3,
    sampling=SamplingParams(),
    rule="block",
    verifying_key=bytes(range(KEY_BYTES)),
    max_draft_tokens=3,
    plain_rounds=1,
    stop_token_ids=frozenset(),
    max_len=20,
)


@pytest.mark.parametrize(("round_number", "attempt"), [(5, None), (5, 0), (6, 0), (6, 1)])
def test_key_of_a_judging(monkeypatch: pytest.MonkeyPatch, round_number: int, attempt: int | None) -> None:
    seen: list[Judging] = []

    def judge(_: object, judgings: list[Judging]) -> StepOutcome:
        seen.extend(judgings)
        return StepOutcome([], [])

    monkeypatch.setattr(engines, "judge", judge)
    session = TargetSession(SPEC, 0, CommittedTokens(SPEC.token_ids), round_number, 1, 3)
    block = None
    if attempt is not None:
        draft = decode_one(Claim([4], DraftDistributions(Encoding.ONE_HOT, 320)), 320)
        block = replace(ReceivedBlock(session.fence, [4], draft, True, 7), attempt=attempt)
    engine = engines.TargetEngine(ScriptedTarget(Script(), 64), 64)
    with pytest.raises(ValueError, match="zip"):  # nothing was decided
        engine.step(Step([StepItem(session, block, 3)], 0.0))
    assert seen[0].key == DrawKey(SPEC.verifying_key, 2, round_number, attempt or 0)
