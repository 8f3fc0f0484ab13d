"""Several completions in one request, through the three services."""

import math
import secrets
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from observing import read_metric, wait_until
from scipy.stats import chi2

from benchmarks.law import BLOCK_LENGTH, LENGTH, VOCAB_SIZE, exact_law, stack_options
from benchmarks.law import PROMPT as LAW_PROMPT
from draftwire.client import Client, Completion
from draftwire.errors import InvalidRequestError
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.requests.parameters import SamplingParams
from tests.in_process import InProcessStack
from tests.tiny_models import save_tiny_model

ALPHA = 1e-6
"""Probability of a false alarm of each comparison with a law."""
TAIL = 2
"""The last tokens of each choice, whose joint law with another choice's is compared."""
PROMPTS = [[0, 2, 1, 1], [2, 2], [1, 0, 1]]
STOP, WORDS = 4, ["a", "b", "c", "d", "end"]
RULES = [
    "block",
    pytest.param("coupled", marks=pytest.mark.slow),
    pytest.param("token", marks=pytest.mark.evidence),
]


@pytest.fixture(scope="module")
def tail_law(pair: tuple[Path, Path]) -> dict[tuple[int, ...], float]:
    law: Counter[tuple[int, ...]] = Counter()
    for text, mass in exact_law(pair[0], SamplingParams()).items():
        law[text[-TAIL:]] += mass
    return dict(law)


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessStack]:
    """Models that often draw the token that ends their texts."""
    folder = tmp_path_factory.mktemp("stopping")
    options = {"sharpness": 2.0, "context_length": 4 * BLOCK_SIZE, "tokens": WORDS, "stop_token_id": STOP}
    target, drafter = (
        save_tiny_model(folder / name, len(WORDS), seed=seed, **options)
        for name, seed in (("target", 3), ("drafter", 5))
    )
    with InProcessStack(stack_options(target, drafter)) as running:
        yield running


def tails(completions: list[Completion]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(completion.token_ids[-TAIL:]) for completion in completions)


def p_value(observed: Counter[tuple[tuple[int, ...], ...]], law: dict[tuple[int, ...], float]) -> float:
    """Of pairs of choices, against the product of the law with itself; rare outcomes are one cell."""
    count = observed.total()
    cells = [(p * q * count, observed[first, second]) for first, p in law.items() for second, q in law.items()]
    judged = [cell for cell in cells if cell[0] >= 5.0]
    rare = [cell for cell in cells if cell[0] < 5.0]
    judged += [(sum(expected for expected, _ in rare), sum(seen for _, seen in rare))] if rare else []
    return float(chi2.sf(sum((seen - expected) ** 2 / expected for expected, seen in judged), len(judged) - 1))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_choices_follow_the_law_of_the_target_each_and_are_independent(
    client: Client, tail_law: dict[tuple[int, ...], float], rule: str
) -> None:
    """250 requests of 3 choices: all three pairs against the product of the exact laws. False alarm: 3e-6."""

    def draw(seed: int) -> list[Completion]:
        (completions,) = client.generate_many(
            LAW_PROMPT,
            num_choices=3,
            max_tokens=LENGTH,
            seed=seed,
            num_speculative_tokens=BLOCK_LENGTH,
            rejection_sample_method=rule,
        )
        return completions

    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(draw, range(250)))
    every = [completion for completions in drawn for completion in completions]
    rounds = sum(completion.statistics.num_rounds for completion in every)
    assert sum(completion.statistics.num_drafts for completion in every) > 0.1 * rounds, "the drafter took part"
    for first, second in ((0, 1), (0, 2), (1, 2)):
        observed = Counter(tails([completions[first], completions[second]]) for completions in drawn)
        assert p_value(observed, tail_law) > ALPHA, (first, second)


def test_choice_of_a_seed_has_the_same_text_in_every_batch_under_coupled(client: Client) -> None:
    options = {"max_tokens": 30, "seed": 6, "rejection_sample_method": "coupled"}
    (few,) = client.generate_many(PROMPTS[0], num_choices=2, **options)
    (many,) = client.generate_many(PROMPTS[0], num_choices=5, num_speculative_tokens=2, **options)
    listed = client.generate_many([PROMPTS[0]] * 3, num_speculative_tokens=0, **options)
    assert [one.token_ids for one in few] == [one.token_ids for one in many[:2]]
    assert [one.token_ids for one in many[:3]] == [one.token_ids for (one,) in listed]
    assert many[0].token_ids == client.generate(PROMPTS[0], **options).token_ids
    assert len({tuple(one.token_ids) for one in many}) == 5
    assert [one.choice for one in many] == list(range(5))


def test_prompt_of_several_choices_is_computed_once(stopping: InProcessStack) -> None:
    """Up to its last block, of which at least the last token is read by each; in a context of several blocks."""
    options = {"num_choices": 8, "max_tokens": 6, "num_speculative_tokens": 0, "ignore_eos": True}
    for length in (2 * BLOCK_SIZE + 8, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE):
        prompt, covered = [index % VOCAB_SIZE for index in range(length)], (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        before = {name: read_metric(stopping, "verifier", f"prefix_cache_{name}") for name in ("queries", "hits")}
        with Client(stopping.address) as client:
            (completions,) = client.generate_many(prompt, cache_salt=secrets.token_hex(8), **options)
        assert [one.statistics.num_cached_prompt_tokens for one in completions] == [0, *[covered] * 7], length
        assert read_metric(stopping, "verifier", "prefix_cache_queries") - before["queries"] == 8 * length
        assert read_metric(stopping, "verifier", "prefix_cache_hits") - before["hits"] == 7 * covered


def test_prompts_of_every_kind_are_completed_as_if_asked_for_alone(client: Client) -> None:
    options = {"temperature": 0.0, "max_tokens": 12}
    alone = [client.generate(prompt, **options) for prompt in PROMPTS]
    texts = [" ".join(f"t{token}" for token in prompt) for prompt in PROMPTS]
    for prompts in (PROMPTS, texts, [texts[0], PROMPTS[1], texts[2]]):
        found = client.generate_many(prompts, num_choices=2, **options)
        assert [[one.token_ids for one in of_prompt] for of_prompt in found] == [[one.token_ids] * 2 for one in alone]
        assert [one.choice for of_prompt in found for one in of_prompt] == list(range(6))
    with pytest.raises(InvalidRequestError, match="chat template"):
        client.generate_many([[{"role": "user", "content": "t1"}]], **options)


def test_echo_begins_every_text_with_its_prompt(client: Client) -> None:
    found = client.generate_many(PROMPTS, num_choices=2, max_tokens=5, seed=2, rejection_sample_method="coupled")
    options = {"num_choices": 2, "max_tokens": 5, "seed": 2, "rejection_sample_method": "coupled", "echo": True}
    stream = client.stream(PROMPTS, **options)
    pieces = list(stream)
    for prompt, plain, echoed in zip(
        PROMPTS, found, [stream.completions[first : first + 2] for first in (0, 2, 4)], strict=True
    ):
        text = " ".join(f"t{token}" for token in prompt if token)  # 0 is special: it has no text
        for one, other in zip(plain, echoed, strict=True):
            assert (other.prompt_text, other.prompt_token_ids) == (text, prompt)
            assert (other.text, other.token_ids) == (text + one.text, one.token_ids)
            assert (one.prompt_text, one.prompt_token_ids) == (None, None)
            assert "".join(piece.text for piece in pieces if piece.choice == other.choice) == other.text


def test_prompt_is_scored_where_no_token_is_asked_for(client: Client) -> None:
    prompt = PROMPTS[0]
    options = {"logprobs": 0, "prompt_logprobs": 1, "echo": True}
    first, second = client.generate_many(prompt, num_choices=2, max_tokens=0, **options)[0]
    whole = client.generate(prompt, max_tokens=3, **options)
    for one in (first, second):
        assert (one.token_ids, one.logprobs, one.text, one.finish_reason) == ([], [], "t2 t1 t1", "length")
        assert one.statistics.num_generated_tokens == 0
        assert one.prompt_logprobs is not None
        assert whole.prompt_logprobs is not None
        for said, expected in zip(one.prompt_logprobs, whole.prompt_logprobs, strict=True):
            assert said.token_id == expected.token_id
            assert said.logprob == pytest.approx(expected.logprob, abs=1e-5)
    bare = client.generate(prompt, max_tokens=0)
    assert (bare.token_ids, bare.text, bare.statistics.num_rounds) == ([], "", 0)


def test_prompts_are_reported_each_once_to_all_their_choices(client: Client) -> None:
    found = client.generate_many(PROMPTS, num_choices=2, max_tokens=4, prompt_logprobs=0)
    for prompt, completions in zip(PROMPTS, found, strict=True):
        for one in completions:
            assert [said.token_id for said in one.prompt_logprobs or []] == prompt[1:]


@pytest.mark.parametrize("rule", RULES)
def test_ignored_stop_token_of_the_model_is_a_token_like_others(stopping: InProcessStack, rule: str) -> None:
    """With the token made likely, and against its own probability: 300 completions of 12 tokens. False alarm: 1e-6."""
    with Client(stopping.address) as client:
        options = {"max_tokens": 12, "rejection_sample_method": rule, "num_speculative_tokens": 3}
        wait_until(
            lambda: client.generate([0], ignore_eos=True, max_tokens=30).statistics.num_drafts > 0,
            "the drafter takes part",
        )
        sure = client.generate([0, 1], ignore_eos=True, logit_bias={STOP: 100.0}, **options)
        assert (sure.token_ids, sure.finish_reason) == ([STOP] * 12, "length")
        ended = client.generate([0, 1], logit_bias={STOP: 100.0}, **options)
        assert (ended.token_ids, ended.finish_reason) == ([STOP], "stop")
        own = client.generate([0, 1], ignore_eos=True, stop_token_ids=[STOP], logit_bias={STOP: 100.0}, **options)
        assert (own.token_ids, own.finish_reason) == ([STOP], "stop")
        found = client.generate_many([[0, 1]] * 3, num_choices=40, ignore_eos=True, logprobs=len(WORDS), **options)
    completions = [one for of_prompt in found for one in of_prompt]
    assert {len(one.token_ids) for one in completions} == {12}
    assert sum(one.statistics.num_drafts for one in completions) > 50, "the drafter took part"
    # Of each place the probability that was reported; what was drawn less what was expected adds up to a martingale.
    excess, variance = 0.0, 0.0
    for one in completions:
        assert one.logprobs is not None
        for said in one.logprobs:
            chance = math.exp(dict(said.top)[STOP])
            excess, variance = excess + (said.token_id == STOP) - chance, variance + chance * (1.0 - chance)
    assert variance > 50.0
    assert abs(excess) < 4.9 * math.sqrt(variance), "1e-6, two-sided normal"
