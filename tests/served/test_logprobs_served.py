"""Log-probabilities through the three processes are those of a plain forward pass over prompt and text."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import read_metric, wait_until
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.law import stack_options
from draftwire.client import Client, Completion, TokenLogprob
from draftwire.errors import InvalidRequestError
from draftwire.method.sampling import Span, probabilities_of_spans
from draftwire.method.token_source import TokenSource
from draftwire.requests.parameters import PARAMETERS, SamplingParams
from draftwire.verification import RULES
from tests.in_process import InProcessStack
from tests.tiny_models import save_tiny_model

VOCAB_SIZE, CONTEXT_LENGTH = 13, 400
TOLERANCE = 1e-4
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 4},
    {"temperature": 1.5, "top_p": 0.7},
    {"min_p": 0.1, "logit_bias": {2: 1.5, 7: -3.0}},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"allowed_token_ids": [1, 3, 5, 8], "min_tokens": 3},
]
Options = dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("logprobs")
    models = [("target", 6), ("drafter", 9)]
    target, drafter = (
        save_tiny_model(folder / name, VOCAB_SIZE, seed=seed, context_length=CONTEXT_LENGTH) for name, seed in models
    )
    return target, drafter


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def stack(folders: tuple[Path, Path]) -> Iterator[InProcessStack]:
    with InProcessStack(stack_options(*folders)) as running:
        yield running


@pytest.fixture
def client(stack: InProcessStack) -> Iterator[Client]:
    with Client(stack.address) as connected:
        wait_until(lambda: connected.generate([1], max_tokens=30).statistics.num_drafts > 0, "the drafter takes part")
        yield connected


@torch.inference_mode()
def expected_rows(model: PreTrainedModel, ids: Sequence[int], prompt_len: int, options: Options) -> list[Tensor]:
    """Log-probabilities before each token but the first, `[vocab] float64` each, by a plain forward pass."""
    logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()
    if options.get("logprobs_mode") != "processed":
        return list(logits.log_softmax(-1))
    given = {name: value for name, value in options.items() if name in PARAMETERS}
    given["logit_bias"] = tuple(given.get("logit_bias", {}).items())
    params = SamplingParams(**given)
    rows = []
    for end in range(1, len(ids)):
        span = Span(params, 1, ids[:end], min(prompt_len, end), frozenset())
        rows.append(probabilities_of_spans(logits[end - 1 : end].clone(), [span])[0].log())
    return rows


def check(tokens: Sequence[TokenLogprob], rows: Sequence[Tensor], ids: Sequence[int], num_top: int) -> None:
    """Compares what was said of tokens with what stands in their places."""
    assert [token.token_id for token in tokens] == list(ids)
    for token, row in zip(tokens, rows, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=TOLERANCE)
        assert len(token.top) == min(num_top, int((row > -math.inf).sum()))
        best = row.sort(descending=True).values
        for place, (one, value) in enumerate(token.top):
            assert value == pytest.approx(float(row[one]), abs=TOLERANCE)
            assert value == pytest.approx(float(best[place]), abs=TOLERANCE)


def check_completion(model: PreTrainedModel, prompt: list[int], options: Options, completion: Completion) -> None:
    rows = expected_rows(model, prompt + completion.token_ids, len(prompt), options)
    for name, start, ids in (("prompt_logprobs", 1, prompt[1:]), ("logprobs", len(prompt), completion.token_ids)):
        told = getattr(completion, name)
        if options.get(name) is None:
            assert told is None
        else:
            check(told, rows[start - 1 : start - 1 + len(ids)], ids, options[name])


def test_tokens_have_the_log_probability_of_a_plain_forward_pass(client: Client, reference: PreTrainedModel) -> None:
    """All rules, blocks of 0 to 4, prompts of any length, several at once; some ask, some do not."""
    generator = random.Random(4)
    requests: list[tuple[list[int], Options]] = []
    for number, (rule, sampling) in enumerate(itertools.product([*RULES, "block"], SAMPLINGS)):
        options: Options = {
            **sampling,
            "max_tokens": generator.randint(5, 25),
            "rejection_sample_method": rule,
            "num_speculative_tokens": generator.choice([0, 1, 2, 4, 4]),
            "seed": number,
            "logprobs": generator.choice([None, 0, 1, 5, 20]),
            "prompt_logprobs": generator.choice([None, None, 0, 3]),
            "logprobs_mode": generator.choice([None, "raw", "processed"]),
        }
        if options["logprobs"] is None and options["prompt_logprobs"] is None:
            options["logprobs_mode"] = None
        requests.append(([generator.randrange(VOCAB_SIZE) for _ in range(generator.choice([1, 2, 9, 60]))], options))
    with ThreadPoolExecutor(6) as pool:
        completions = list(pool.map(lambda request: client.generate(request[0], **request[1]), requests))
    for (prompt, options), completion in zip(requests, completions, strict=True):
        check_completion(reference, prompt, options, completion)
    assert sum(completion.statistics.num_accepted_tokens for completion in completions) > 20
    assert any(completion.logprobs is None for completion in completions)


def test_text_cut_at_a_stop_string_keeps_its_log_probabilities(client: Client, reference: PreTrainedModel) -> None:
    prompt, options = [1, 2, 3], {"rejection_sample_method": "coupled", "max_tokens": 30, "logprobs": 2}
    for seed in range(6):
        whole = client.generate(prompt, seed=seed, **options)
        words = whole.text.split()
        stop = " ".join(words[seed + 3 : seed + 5])
        pieces = list(stream := client.stream(prompt, seed=seed, stop=[stop], **options))
        cut = stream.completion
        assert cut is not None
        assert cut.finish_reason == "stop"
        assert len(cut.token_ids) < len(whole.token_ids)
        assert whole.text.startswith(cut.text)
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        check_completion(reference, prompt, options, cut)
        for piece in pieces:
            assert piece.logprobs is not None
            assert [token.token_id for token in piece.logprobs] == piece.token_ids
        assert [token for piece in pieces for token in piece.logprobs or []] == cut.logprobs


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_prompts_with_a_common_beginning_are_each_reported_whole(
    client: Client, reference: PreTrainedModel, mode: str
) -> None:
    """Though they were read before, and while others run; and they are still shared with those who do not ask."""
    generator = random.Random(mode)
    shared = [generator.randrange(VOCAB_SIZE) for _ in range(300)]
    options: Options = {"temperature": 0.8, "top_k": 6, "max_tokens": 8, "seed": 3}
    asks = options | {"prompt_logprobs": 2, "logprobs": 0, "logprobs_mode": mode}
    prompts = [[*shared, number, 0, number] for number in range(6)]
    client.generate(shared, **options)
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(client.generate, prompt, **options) for prompt in prompts[:3]]
        asked = [pool.submit(client.generate, prompt, **asks) for prompt in prompts]
        for prompt, future in zip(prompts, asked, strict=True):
            completion = future.result()
            assert completion.statistics.num_cached_prompt_tokens == 0
            check_completion(reference, prompt, asks, completion)
        for future in others:
            assert future.result().prompt_logprobs is None
            assert future.result().statistics.num_cached_prompt_tokens > 250
    pieces = list(client.stream(prompts[0], **asks))
    parts = [piece for piece in pieces if piece.prompt_logprobs is not None]
    assert len(parts) >= 3, "it is read in parts, and they are told as they come"
    assert pieces[: len(parts)] == parts
    assert all(part.token_ids == [] and part.text == "" for part in parts)


@pytest.mark.slow
def test_text_for_a_seed_is_the_same_with_and_without(client: Client) -> None:
    prompt = [5, 1, 4, 4, 2]
    wishes: list[Options] = [
        {},
        {"logprobs": 0},
        {"logprobs": 20, "logprobs_mode": "processed"},
        {"prompt_logprobs": 5},
        {"logprobs": 3, "prompt_logprobs": 0},
    ]
    for seed, sampling in enumerate(SAMPLINGS):
        options = {**sampling, "seed": seed, "max_tokens": 30, "rejection_sample_method": "coupled"}
        texts = {tuple(client.generate(prompt, **options, **wish).token_ids) for wish in wishes}
        assert len(texts) == 1


def test_completion_whose_verifier_is_killed_keeps_its_log_probabilities(
    folders: tuple[Path, Path], reference: PreTrainedModel
) -> None:
    prompt = [number % VOCAB_SIZE for number in range(150)]
    options: Options = {"max_tokens": CONTEXT_LENGTH - 150, "seed": 1, "logprobs": 1, "prompt_logprobs": 1}
    verifier = {"verifier": stack_options(*folders)["verifier"]}
    with ExitStack() as exits:
        stacks = [exits.enter_context(InProcessStack(verifier)) for _ in range(2)]
        addresses = ",".join(f"127.0.0.1:{one.services['verifier'].port}" for one in stacks)
        gateway = exits.enter_context(InProcessStack({"gateway": {"verifier": addresses}}))
        client = exits.enter_context(Client(gateway.address))
        stream = client.stream(prompt, **options)
        pieces = iter(stream)
        told = list(next(pieces).prompt_logprobs or [])
        (holder,) = [one for one in stacks if read_metric(one, "verifier", "num_sessions")]
        holder.kill("verifier")
        for piece in pieces:
            told += piece.prompt_logprobs or []
        assert stream.completion is not None
        assert stream.completion.statistics.num_verifiers_lost == 1
        assert told == stream.completion.prompt_logprobs
        check_completion(reference, prompt, options, stream.completion)


def test_statistics_say_how_many_tokens_rounds_accepted(client: Client) -> None:
    completion = client.generate([1, 2, 3], max_tokens=60, num_speculative_tokens=3, seed=8)
    numbers = completion.statistics
    histogram = completion.acceptance_histogram
    assert sum(histogram) == numbers.num_drafts == completion.num_spec_steps > 0
    assert sum(count * index for index, count in enumerate(histogram)) == completion.num_accepted_draft_tokens
    assert len(histogram) == 4
    assert completion.mean_acceptance_length == pytest.approx(1 + numbers.num_accepted_tokens / numbers.num_drafts)
    assert numbers.draft_acceptance_rate == pytest.approx(completion.acceptance_rate)
    plain = client.generate([1, 2, 3], max_tokens=5, num_speculative_tokens=0)
    assert plain.acceptance_histogram == []
    assert (plain.mean_acceptance_length, plain.draft_acceptance_rate) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"logprobs": 21}, "logprobs"), ({"prompt_logprobs": 99}, "prompt_logprobs"), ({"logprobs_mode": "x"}, "mode")],
)
def test_wish_out_of_range_is_refused_by_name(client: Client, options: Options, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        client.generate([1], max_tokens=2, **options)


def test_token_details_state_each_tokens_source_and_draft_probability(client: Client) -> None:
    """Under `token`, what is drawn in place of a rejected token is what the target has more of than the drafter."""
    num_certain = 0
    options: Options = {"max_tokens": 60, "token_details": True, "logprobs": 0, "logprobs_mode": "processed"}
    for seed in range(8):
        stream = client.stream([1, 2, 3], seed=seed, rejection_sample_method="token", **options)
        rounds = [piece for piece in stream if piece.token_ids]
        completion = stream.completion
        assert completion is not None
        assert completion.token_texts is not None
        assert completion.draft_logprobs is not None
        assert completion.logprobs is not None
        assert "".join(completion.token_texts) == completion.text
        assert [source for piece in rounds for source in piece.sources] == completion.sources
        for piece in rounds:
            assert piece.draft_logprobs is not None
            *accepted, last = piece.sources
            assert all(source is TokenSource.ACCEPTED for source in accepted)
            assert (last is TokenSource.PLAIN) == (piece.num_draft_tokens == 0)
            for source, value in zip(piece.sources, piece.draft_logprobs, strict=True):
                is_known = source in (TokenSource.ACCEPTED, TokenSource.RECOVERED)
                assert math.isnan(value) is not is_known
        for source, token, draft in zip(
            completion.sources, completion.logprobs, completion.draft_logprobs, strict=True
        ):
            if source is TokenSource.RECOVERED:  # drawn from what the target has more of
                assert draft < token.logprob + TOLERANCE
            num_certain += source is TokenSource.ACCEPTED and -math.inf < draft <= 0.0
        statistics = completion.statistics
        assert sum(piece.num_draft_tokens for piece in rounds) == statistics.num_draft_tokens
        assert completion.sources.count(TokenSource.ACCEPTED) <= statistics.num_accepted_tokens
    assert num_certain > 20
    coupled = client.generate([1], rejection_sample_method="coupled", **options)
    assert coupled.draft_logprobs is not None
    assert all(map(math.isnan, coupled.draft_logprobs))
    bare = client.generate([1], max_tokens=20)
    assert (bare.token_texts, bare.draft_logprobs) == (None, None)
    assert len(bare.sources) == len(bare.token_ids) == 20
