"""The same keys and the same blocks: vLLM's engine decides what our own decides, in float32."""

import random
from typing import Any

import pytest
import torch

from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.quantization import Encoding
from draftwire.method.randomness import exponentials
from draftwire.requests.logprobs import LogprobsMode, LogprobsRequest
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES
from on_vllm.duel import SAMPLINGS, Duel
from on_vllm.models import RANKS, VOCAB_SIZE

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
    assert duel.seen["near ties"] == duel.seen["near ties of vLLM"]
    for what in ("logprobs", "prompt logprobs"):
        assert duel.seen[what.replace("prompt logprobs", "prompt tokens")] > 0
        assert duel.largest[what] < CLOSE
    if RULES[rule].needs_draft_probs:
        assert duel.seen["audits"] > num_rounds / 5
        assert duel.largest["audit sums"] < CLOSE


def test_near_ties_are_counted_alike(vllm, own) -> None:
    """Two tokens that a bias brings level in the race of their place: it is within rounding, on either engine."""
    duel = Duel(own, vllm.engine, random.Random(1))
    for number in range(1, 9):
        prompt = random_ids(duel.generator, 12)
        words = torch.tensor([DrawKey(number.to_bytes(KEY_BYTES, "little"), 0, 0).text_words])
        noise = exponentials(words, torch.tensor([len(prompt)]), VOCAB_SIZE)[0]
        ahead = duel.logits(prompt) - noise.log()
        first, second = sorted(duel.generator.sample(range(VOCAB_SIZE), 2))
        bias = ((second, float(ahead[first] - ahead[second])),)
        sampling = SamplingParams(logit_bias=bias, allowed_token_ids=frozenset({first, second}))
        session = duel.open(number, prompt, rule="coupled", sampling=sampling, plain_rounds=1)
        duel.step()
        duel.close(session)
    parted = len(duel.parted)
    assert all(mine.num_near_ties == other.num_near_ties == 1 for mine, other in duel.parted)
    assert duel.seen["near ties"] == duel.seen["near ties of vLLM"] == duel.rounds - parted
    assert duel.rounds == 8


def perturb(worker: Any, size: float) -> int:
    """Runs in each rank of vLLM: adds noise to all logits of ranks other than 0. Returns how often it did before."""
    runner = worker.model_runner
    given = getattr(runner, "_whole_compute_logits", None)
    num_perturbed = getattr(runner, "_num_perturbed", 0)
    if worker.rank and given is None:
        whole = runner._whole_compute_logits = runner.model.compute_logits

        def noisy(*arguments: Any, **options: Any) -> Any:
            logits = whole(*arguments, **options)
            runner._num_perturbed = getattr(runner, "_num_perturbed", 0) + 1
            return None if logits is None else logits + size * torch.randn_like(logits)

        runner.model.compute_logits = noisy
    elif worker.rank:
        runner.model.compute_logits = given
        del runner._whole_compute_logits
    return num_perturbed


@pytest.mark.skipif(RANKS == 1, reason="there is no other rank")
def test_logits_of_another_rank_change_nothing(vllm, own, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 decides: rank 1 follows it, although it would decide otherwise."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions of tests go to the ranks
    core = vllm.engine.core
    core.collective_rpc(perturb, args=(1e-2,))
    duel = Duel(own, vllm.engine, random.Random(2))
    play(duel, "block", 200)
    _, num_perturbed = core.collective_rpc(perturb, args=(0.0,))
    assert num_perturbed > 20
    assert not duel.parted
