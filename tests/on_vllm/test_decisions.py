"""The same keys and the same blocks: vLLM's engine decides what our own decides, in float32."""

import random

import pytest

from draftwire.method.quantization import Encoding
from draftwire.requests.logprobs import LogprobsMode, LogprobsRequest
from draftwire.verification import RULES
from on_vllm.duel import SAMPLINGS, Duel

ROUNDS = 500
CLOSE = 1e-4
ENCODINGS = (Encoding.DENSE_FLOAT32, Encoding.SPARSE_UINT16, Encoding.ONE_HOT)


def random_ids(generator: random.Random, length: int) -> list[int]:
    return [generator.randrange(256) for _ in range(length)]


def play(duel: Duel, rule: str, num_rounds: int, num_sessions: int = 12) -> None:
    """Has sessions of one rule come and go until so many rounds are decided."""
    generator, number = duel.generator, 0
    open_sessions: dict[int, int] = {}
    while duel.rounds < num_rounds:
        while len(open_sessions) < num_sessions:
            number += 1
            ids = random_ids(generator, generator.choice([1, 2, 5, 17, 40, 150]))
            reports = generator.random() < 0.4
            mode = generator.choice(list(LogprobsMode))
            wanted = LogprobsRequest(3, generator.choice([None, 2]), mode) if reports else LogprobsRequest()
            opens_plain = generator.choice([0, 0, 1, 3])
            duel.open(
                number,
                ids,
                rule=rule,
                sampling=generator.choice(SAMPLINGS),
                logprobs=wanted,
                stop_token_ids=frozenset({3, 4}),
                plain_rounds=opens_plain,
            )
            open_sessions[number] = generator.randint(4, 25)
        for session in list(duel.scheduler.sessions.values()):
            if session.queued or generator.random() < 0.3:  # a gated session sits out
                continue
            room = session.spec.max_len - len(session.committed) - 1
            num_tokens = min(generator.randint(0, 8), room)
            if room < 1 or open_sessions[session.spec.session_id] <= 0:
                duel.close(session)
                del open_sessions[session.spec.session_id]
            elif num_tokens == 0:
                duel.plain(session, generator.randint(1, 3))
            else:
                encoding = generator.choice(ENCODINGS) if RULES[rule].needs_draft_probs else Encoding.NONE
                is_used = generator.random() > 0.1
                duel.offer(session, duel.block(session, num_tokens, encoding, is_used))
        for session, event in duel.step():
            open_sessions[session.spec.session_id] -= 1
            assert not isinstance(event, Exception), event


@pytest.mark.parametrize("budget", [512, 7])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_decisions_equal_those_of_our_own_engine(vllm, own, rule: str, budget: int) -> None:
    """500 rounds a rule with whole prompts, 250 with prompts in chunks: of 7 tokens, all sessions together."""
    num_rounds = ROUNDS if budget == 512 else ROUNDS // 2
    duel = Duel(own, vllm.engine, random.Random(rule), pacer_tokens=budget)
    play(duel, rule, num_rounds)
    print(f"\n{rule}, chunks of {budget}: {duel.rounds} rounds, {len(duel.parted)} parted, {dict(duel.seen)}")
    print(f"largest differences: {dict(duel.largest)}")
    assert duel.seen["rounds with drafts"] > num_rounds / 3
    assert duel.seen["accepted"] > num_rounds / 4, "rounds are not trivial"
    unexplained = [pair for pair in duel.parted if not pair[0].num_near_ties]
    assert not unexplained
    for what in ("logprobs", "prompt logprobs"):
        assert duel.seen[what.replace("prompt logprobs", "prompt tokens")] > 0
        assert duel.largest[what] < CLOSE
    if RULES[rule].needs_draft_probs:
        assert duel.seen["audits"] > num_rounds / 5
        assert duel.largest["audit sums"] < CLOSE
