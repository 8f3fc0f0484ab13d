"""The HTTP edge, as users of the openai package see it: the texts are those of gRPC, and nothing is ignored."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import openai
import pytest
from observing import wait_until
from pydantic import BaseModel
from tiny_models import save_spelling_model
from transformers import AutoTokenizer

import draftwire
from benchmarks.law import stack_options
from draftwire.client import Client, Completion, StructuredOutput
from draftwire_gateway.http.choice_deltas import IMPOSSIBLE
from draftwire_gateway.http.response_models import (
    ChatCompletion,
    ChatCompletionChunk,
    CompletionChunk,
    DetokenizedBody,
    HealthBody,
    ListedModel,
    ListedModels,
    TextCompletion,
    TokenizedBody,
)
from tests.in_process import InProcessStack

TOKENS = [*"abcdefghijklmnopqrstuvwxyz", *'{}[]":,;0123456789.', "<e>"]
STOP = len(TOKENS) - 1
TEMPLATE = (
    "{% for tool in tools or [] %}tool:{{ tool.function.name }};{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ 'quiet' if quiet else '' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
USER = {"role": "user", "content": "hello"}
SEED = 11
COUPLED: dict[str, Any] = {"rejection_sample_method": "coupled", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessStack]:
    folder = tmp_path_factory.mktemp("http")
    target, drafter = (
        save_spelling_model(folder / name, TOKENS, STOP, seed, 256) for name, seed in (("target", 6), ("drafter", 9))
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    with InProcessStack(stack_options(target, drafter)) as stack:
        yield stack


@pytest.fixture(scope="module")
def grpc_client(running: InProcessStack) -> Iterator[Client]:
    with Client(running.address) as client:
        yield client


@pytest.fixture(scope="module")
def client(running: InProcessStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.http_address}/v1", api_key="none", max_retries=0, timeout=60.0) as connected:
        yield connected


# Texts

COMPLETIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}, {}),
    "temperature": ({"temperature": 0.3}, {}, {"temperature": 0.3}),
    "temperature, 0": ({"temperature": 0}, {}, {"temperature": 0.0}),
    "top_p": ({"top_p": 0.4}, {}, {"top_p": 0.4}),
    "penalties": (
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.4},
    ),
    "logit_bias": ({"logit_bias": {"3": 4.0, "7": 4}}, {}, {"logit_bias": {3: 4.0, 7: 4.0}}),
    "stop": ({"stop": "x"}, {}, {"stop": ["x"]}),
    "stop, several": ({"stop": ["ab", "l5", "q"]}, {}, {"stop": ["ab", "l5", "q"]}),
    "max_tokens": ({"max_tokens": 3}, {}, {"max_tokens": 3}),
    "max_tokens, left out": ({"max_tokens": None}, {}, {"max_tokens": 16}),
    "echo": ({"echo": True}, {}, {"echo": True}),
    "n": ({"n": 3, "best_of": 3}, {}, {"num_choices": 3}),
    "user": ({"user": "somebody", "suffix": ""}, {}, {}),
    "top_k": ({}, {"top_k": 2}, {"top_k": 2}),
    "min_p": ({}, {"min_p": 0.3}, {"min_p": 0.3}),
    "allowed_token_ids": ({}, {"allowed_token_ids": [1, 2, 3]}, {"allowed_token_ids": [1, 2, 3]}),
    "min_tokens": (
        {"logit_bias": {str(STOP): 9.0}},
        {"min_tokens": 9},
        {"logit_bias": {STOP: 9.0}, "min_tokens": 9},
    ),
    "stop_token_ids": ({}, {"stop_token_ids": [4, 5, 6, 7, 8]}, {"stop_token_ids": [4, 5, 6, 7, 8]}),
    "ignore_eos": (
        {"logit_bias": {str(STOP): 5.0}},
        {"ignore_eos": True},
        {"logit_bias": {STOP: 5.0}, "ignore_eos": True},
    ),
    "cache_salt": ({}, {"cache_salt": "salt"}, {"cache_salt": "salt"}),
    "plain": ({}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 0}),
    "json": (
        {"max_tokens": 40},
        {"structured_output": {"json": SCHEMA}},
        {"max_tokens": 40, "structured_output": StructuredOutput.json(SCHEMA)},
    ),
    "regex": (
        {},
        {"structured_output": {"regex": "[abc]{2,9}"}},
        {"structured_output": StructuredOutput.regex("[abc]{2,9}")},
    ),
    "choice": (
        {},
        {"structured_output": {"choice": ["yes", "no", "abc"]}},
        {"structured_output": StructuredOutput.choice(["yes", "no", "abc"])},
    ),
    "grammar": (
        {},
        {"structured_output": {"grammar": 'start: "a" start "b" | "c"'}},
        {"structured_output": StructuredOutput.grammar('start: "a" start "b" | "c"')},
    ),
}
"""What is asked for with the package's own parameters, beside them, and over gRPC."""


def over_grpc(client: Client, prompt: Any, options: dict[str, Any]) -> list[Completion]:
    asked = {"max_tokens": 24, "seed": SEED, "num_choices": 1, **COUPLED, **options}
    (completions,) = client.generate_many([prompt], token_details=True, **asked)
    return completions


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_are_those_of_grpc(client: openai.OpenAI, grpc_client: Client, name: str, streams: bool) -> None:
    own, extra, options = COMPLETIONS[name]
    completions = over_grpc(grpc_client, "hello", options)
    asked = {"max_tokens": 24, "model": "target", "prompt": "hello", "seed": SEED, **own}
    asked["extra_body"] = {**COUPLED, "token_details": True, **extra}
    if streams:
        choices = joined(client.completions.create(**asked, stream=True))
    else:
        choices = {
            choice.index: (choice.text, choice.finish_reason, choice.draftwire["tokens"])
            for choice in client.completions.create(**asked).choices
        }
    assert len(choices) == len(completions)
    for completion in completions:
        text, reason, tokens = choices[completion.choice]
        assert text == completion.text
        assert reason == completion.finish_reason
        assert [token["id"] for token in tokens] == completion.token_ids
        assert [token["text"] for token in tokens] == completion.token_texts


def joined(chunks: Any) -> dict[int, tuple[str, str | None, list[dict[str, Any]]]]:
    """Puts chunks of completions together."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    tokens: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        assert chunk.object == "text_completion"
        for choice in chunk.choices:
            assert reasons.get(choice.index) is None, "nothing comes after the end"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
            tokens.setdefault(choice.index, []).extend(choice.draftwire["tokens"])
    return {index: (text, reasons[index], tokens[index]) for index, text in texts.items()}


SAME = {"nothing", "n", "user", "cache_salt", "plain"}
"""Cases whose text is that of none: under "coupled" they change nothing else."""


def test_cases_have_other_texts_than_none(grpc_client: Client) -> None:
    """Else they would show nothing."""
    plain = over_grpc(grpc_client, "hello", {})[0].text
    texts = {name: over_grpc(grpc_client, "hello", options)[0].text for name, (_, _, options) in COMPLETIONS.items()}
    assert {name for name, text in texts.items() if text == plain} == SAME
    assert 0 < len(texts["stop"]) < len(texts["stop, several"]) < len(plain)


PROMPTS = ["hello", [1, 2, 3], ["hello", "world"], [[1, 2, 3], [4, 5]]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["text", "ids", "texts", "lists of ids"])
def test_prompts_of_every_kind_are_completed(client: openai.OpenAI, grpc_client: Client, prompt: Any) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "seed": SEED}
    several = prompt if isinstance(prompt[0], str | list) and not isinstance(prompt, str) else [prompt]
    expected = grpc_client.generate_many(several, num_choices=2, **asked, **COUPLED)
    answer = client.completions.create(model="target", prompt=prompt, n=2, **asked, extra_body=COUPLED)
    assert [choice.text for choice in answer.choices] == [one.text for of_prompt in expected for one in of_prompt]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(several)))
    num_prompt_tokens = sum(of_prompt[0].statistics.num_prompt_tokens for of_prompt in expected)
    assert answer.usage.prompt_tokens == num_prompt_tokens, "each prompt counts once"
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for of_prompt in expected for one in of_prompt)
    assert answer.usage.total_tokens == num_prompt_tokens + answer.usage.completion_tokens


CHATS: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    "one message": ({}, {}, [USER], {}),
    "turns": ({}, {}, [USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "abc"}], {}),
    "parts": ({}, {}, [{"role": "user", "content": [{"type": "text", "text": "hello"}]}], {}),
    "max_completion_tokens": ({"max_tokens": None, "max_completion_tokens": 7}, {}, [USER], {"max_tokens": 7}),
    "tools": ({"tools": [TOOL], "tool_choice": "auto"}, {}, [USER], {"tools": [TOOL]}),
    "tools, none": ({"tools": [TOOL], "tool_choice": "none"}, {}, [USER], {}),
    "text": ({"response_format": {"type": "text"}}, {}, [USER], {}),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {},
        [USER],
        {"structured_output": StructuredOutput.json(SCHEMA)},
    ),
    "object": (
        {"response_format": {"type": "json_object"}, "max_tokens": 60},
        {},
        [USER],
        {"structured_output": StructuredOutput.json({"type": "object"}), "max_tokens": 60},
    ),
    "form": (
        {},
        {"structured_output": {"regex": "[xyz]{3}"}},
        [USER],
        {"structured_output": StructuredOutput.regex("[xyz]{3}")},
    ),
    "variable": (
        {},
        {"chat_template_kwargs": {"quiet": True}},
        [USER],
        {"template_arguments": {"quiet": True}},
    ),
    "continued": (
        {},
        {"continue_final_message": True},
        [USER, {"role": "assistant", "content": "quiet"}],
        {"continue_final_message": True},
    ),
    "sampling": (
        {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ["7"]},
        {"top_k": 9, "min_p": 0.01},
        [USER],
        {
            "temperature": 0.7,
            "top_p": 0.8,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "stop": ["7"],
            "top_k": 9,
            "min_p": 0.01,
        },
    ),
    "n": ({"n": 2, "logit_bias": {"4": 3.0}, "user": "u"}, {}, [USER], {"num_choices": 2, "logit_bias": {4: 3.0}}),
}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CHATS)
def test_chats_are_those_of_grpc(client: openai.OpenAI, grpc_client: Client, name: str, streams: bool) -> None:
    own, extra, messages, options = CHATS[name]
    completions = over_grpc(grpc_client, messages, options)
    asked = {"max_tokens": 24, "model": "target", "messages": messages, "seed": SEED, **own}
    asked["extra_body"] = {**COUPLED, **extra}
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    if streams:
        for chunk in client.chat.completions.create(**asked, stream=True):
            assert chunk.object == "chat.completion.chunk"
            for choice in chunk.choices:
                assert choice.delta.role == (None if choice.index in texts else "assistant")
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                reasons[choice.index] = choice.finish_reason
    else:
        answer = client.chat.completions.create(**asked)
        assert answer.object == "chat.completion"
        for choice in answer.choices:
            assert choice.message.role == "assistant"
            texts[choice.index], reasons[choice.index] = choice.message.content, choice.finish_reason
    assert texts == {one.choice: one.text for one in completions}
    assert reasons == {one.choice: one.finish_reason for one in completions}


def test_max_tokens_defaults_to_16_and_in_a_chat_to_the_rest_of_context(client: openai.OpenAI) -> None:
    ignoring = {"ignore_eos": True}
    short = client.completions.create(model="target", prompt="hello", extra_body=ignoring)
    assert short.usage.completion_tokens == 16
    long = client.chat.completions.create(model="target", messages=[USER], extra_body=ignoring)
    assert long.usage.total_tokens == 256
    assert long.choices[0].finish_reason == "length"


async def test_many_ask_at_once_through_the_asynchronous_package(running: InProcessStack, grpc_client: Client) -> None:
    async def draw(seed: int) -> str:
        if seed % 2:
            answer = await connected.completions.create(**asked, seed=seed)
            return answer.choices[0].text
        stream = await connected.completions.create(**asked, seed=seed, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    asked: dict[str, Any] = {"model": "target", "prompt": "hello", "max_tokens": 20, "extra_body": COUPLED}
    async with openai.AsyncOpenAI(base_url=f"{running.http_address}/v1", api_key="x", max_retries=0) as connected:
        texts = await asyncio.gather(*(draw(seed) for seed in range(24)))
    expected = [grpc_client.generate("hello", max_tokens=20, seed=seed, **COUPLED).text for seed in range(24)]
    assert texts == expected
    assert len(set(texts)) > 12


# What is reported


def test_log_probabilities_of_completions_are_those_of_grpc(client: openai.OpenAI, grpc_client: Client) -> None:
    """With the prompt's, which are those of the echo."""
    asked: dict[str, Any] = {"max_tokens": 12, "seed": SEED, "echo": True}
    expected = grpc_client.generate([1, 2, 3], logprobs=2, prompt_logprobs=2, **asked, **COUPLED)
    extra = {**COUPLED, "prompt_logprobs": 1}
    for streams in (False, True):
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        text, prompt = "", []
        answer = client.completions.create(
            model="target", prompt=[1, 2, 3], logprobs=2, extra_body=extra, stream=streams, **asked
        )
        for part in answer if streams else [answer]:
            (choice,) = part.choices
            text += choice.text
            prompt += getattr(choice, "prompt_logprobs", [])
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens
                logprobs += choice.logprobs.token_logprobs
                tops += choice.logprobs.top_logprobs
                offsets += choice.logprobs.text_offset
        told = [*expected.prompt_logprobs, *expected.logprobs]
        assert tokens == [TOKENS[1], *(TOKENS[one.token_id] for one in told)]
        assert logprobs == [None, *(pytest.approx(one.logprob, abs=1e-5) for one in told)]
        assert tops[0] is None
        for top, one in zip(tops[1:], told, strict=True):
            with_drawn = {**dict(one.top), one.token_id: one.logprob}
            assert top == {TOKENS[token]: pytest.approx(value, abs=1e-5) for token, value in with_drawn.items()}
        assert text == expected.text
        assert offsets == [0, *list(accumulate(map(len, tokens)))[:-1]]
        assert prompt[0] is None
        assert [entry["id"] for entry in prompt[1:]] == [2, 3]
        for entry, one in zip(prompt[1:], expected.prompt_logprobs, strict=True):
            assert entry["logprob"] == pytest.approx(one.logprob, abs=1e-5)
            assert [(top["id"], top["text"]) for top in entry["top"]] == [(one.top[0][0], TOKENS[one.top[0][0]])]


def test_log_probabilities_of_chats_are_those_of_grpc(client: openai.OpenAI, grpc_client: Client) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "seed": SEED}
    mode = {"logprobs_mode": "processed", "top_k": 2}
    expected = grpc_client.generate([USER], logprobs=3, **asked, **COUPLED, **mode)
    for streams in (False, True):
        answer = client.chat.completions.create(
            model="target",
            messages=[USER],
            logprobs=True,
            top_logprobs=3,
            stream=streams,
            extra_body={**COUPLED, **mode},
            **asked,
        )
        parts = [part.choices[0].logprobs for part in answer] if streams else [answer.choices[0].logprobs]
        content = [entry for part in parts if part is not None for entry in part.content]
        assert [entry.token for entry in content] == [TOKENS[token] for token in expected.token_ids]
        assert [entry.bytes for entry in content] == [list(TOKENS[token].encode()) for token in expected.token_ids]
        for entry, one in zip(content, expected.logprobs, strict=True):
            assert entry.logprob == pytest.approx(one.logprob, abs=1e-5)
            assert [top.token for top in entry.top_logprobs] == [TOKENS[token] for token, _ in one.top]
            assert len(entry.top_logprobs) == 2, "of three that were asked for: no other is possible"
    bare = client.chat.completions.create(model="target", messages=[USER], logprobs=True, **asked)
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content] == [[]] * len(
        bare.choices[0].logprobs.content
    )
    assert client.chat.completions.create(model="target", messages=[USER], **asked).choices[0].logprobs is None


def test_token_that_cannot_be_has_a_log_probability_that_json_can_say(client: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": 0, "logprobs_mode": "processed", "top_k": 1, "token_details": True}
    answer = client.completions.create(model="target", prompt=[1, 2, 3, 4, 5, 6], max_tokens=2, extra_body=extra)
    told = [entry["logprob"] for entry in answer.choices[0].prompt_logprobs[1:]]
    assert IMPOSSIBLE in told
    assert all(value in (IMPOSSIBLE, 0.0) for value in told)


def test_details_state_each_tokens_source_and_draft_probability(client: openai.OpenAI, grpc_client: Client) -> None:
    asked: dict[str, Any] = {"model": "target", "prompt": "hello", "max_tokens": 60, "seed": SEED, "logprobs": 0}
    extra = {
        "token_details": True,
        "ignore_eos": True,
        "logprobs_mode": "processed",
        "rejection_sample_method": "token",
    }
    wait_until(lambda: accepted(client.completions.create(**asked, extra_body=extra)) > 0, "drafts are accepted")
    answer = client.completions.create(**asked, extra_body=extra)
    chunks = list(client.completions.create(**asked, extra_body=extra, stream=True))
    told = answer.choices[0].draftwire
    assert set(told) == {"tokens", "rounds"}
    check_details(told["tokens"])
    rounds = told["rounds"]
    assert sum(one["num_tokens"] for one in rounds) == 60
    metrics = answer.metrics["speculative_decoding"]
    assert sum(one["num_draft_tokens"] for one in rounds) == metrics["num_draft_tokens"]
    assert "".join(token["text"] for token in told["tokens"]) == answer.choices[0].text
    streamed = [chunk.choices[0].draftwire for chunk in chunks]
    assert all(set(one) == {"num_draft_tokens", "num_draft_positions", "tokens"} for one in streamed)
    assert all(one["num_draft_positions"] == one["num_draft_tokens"] for one in streamed), "chains"
    check_details([token for one in streamed for token in one["tokens"]])
    for chunk, one in zip(chunks, streamed, strict=True):
        assert "".join(token["text"] for token in one["tokens"]) == chunk.choices[0].text
        sources = [token["source"] for token in one["tokens"]]
        assert (one["num_draft_tokens"] == 0) == (set(sources) <= {"plain"})
    undetailed = client.completions.create(model="target", prompt="hello", max_tokens=5, logprobs=0)
    assert not hasattr(undetailed.choices[0], "draftwire")


def accepted(answer: Any) -> int:
    return int(answer.metrics["speculative_decoding"]["num_accepted_draft_tokens"])


def check_details(tokens: list[dict[str, Any]]) -> None:
    assert len(tokens) == 60
    for token in tokens:
        assert set(token) == {"id", "text", "source", "logprob", "draft_logprob"}
        assert token["text"] == ("" if token["id"] == STOP else TOKENS[token["id"]])
        assert token["logprob"] <= 0.0
        assert (token["draft_logprob"] is None) == (token["source"] in ("plain", "bonus"))
    assert {"accepted", "recovered", "plain"} <= {token["source"] for token in tokens}


def test_usage_and_metrics_add_up(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "target", "prompt": ["hello", "abc"], "n": 2, "max_tokens": 40, "seed": SEED}
    extra = {"ignore_eos": True, "rejection_sample_method": "token"}
    whole = client.completions.create(**asked, extra_body=extra)
    *chunks, last = client.completions.create(
        **asked, extra_body=extra, stream=True, stream_options={"include_usage": True}
    )
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    every = {"include_usage": True, "continuous_usage_stats": True}
    counted: dict[int, int] = {}
    for chunk in client.completions.create(**asked, extra_body=extra, stream=True, stream_options=every):
        if chunk.choices and chunk.usage is not None:
            assert chunk.usage.prompt_tokens + chunk.usage.completion_tokens == chunk.usage.total_tokens
            assert chunk.usage.completion_tokens >= counted.get(chunk.choices[0].index, 0)
            counted[chunk.choices[0].index] = chunk.usage.completion_tokens
    assert counted == dict.fromkeys(range(4), 40)
    for answer in (whole, last):
        usage, metrics = answer.usage, answer.metrics["speculative_decoding"]
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (8, 160, 168)
        assert usage.completion_tokens_details.accepted_prediction_tokens == metrics["num_accepted_draft_tokens"]
        assert usage.completion_tokens_details.rejected_prediction_tokens == (
            metrics["num_draft_tokens"] - metrics["num_accepted_draft_tokens"]
        )
        assert usage.prompt_tokens_details.cached_tokens >= 0
        assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
        assert sum(metrics["num_accepted_tokens_per_pos"]) == metrics["num_accepted_draft_tokens"]
        assert metrics["seed"] == SEED
        assert metrics["rejection_sample_method"] == "token"
        assert metrics["is_lossy"] is False
        assert metrics["drafter_error"] == ""
        assert 0 < metrics["time_to_first_token_ms"] < metrics["duration_ms"]
        assert metrics["block_efficiency"] >= 1.0
        assert [one["index"] for one in metrics["choices"]] == [0, 1, 2, 3]
        for name in ("num_draft_tokens", "num_rounds", "num_spec_steps", "num_drafters_lost", "num_verifiers_lost"):
            assert metrics[name] == sum(one[name] for one in metrics["choices"])
    one = client.completions.create(model="target", prompt="hello", max_tokens=5).metrics["speculative_decoding"]
    assert "choices" not in one


def test_lossy_rule_is_marked(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="target", messages=[USER], max_tokens=5, extra_body={"rejection_sample_method": "typical"}
    )
    assert answer.metrics["speculative_decoding"]["is_lossy"] is True


# What is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "best_of": ({"best_of": 4}, "best_of"),
    "suffix": ({"suffix": "x"}, "suffix"),
    "best_of beside n": ({"n": 2, "best_of": 3}, "best_of"),
    "too hot": ({"temperature": 101.0}, "temperature"),
    "text for a number": ({"temperature": "0.5"}, "temperature"),
    "a number with a point": ({"max_tokens": 2.5}, "max_tokens"),
    "no choice": ({"n": 0}, "n"),
    "too many choices": ({"n": 129}, "n"),
    "too many log-probabilities": ({"logprobs": 21}, "logprobs"),
    "biases of no tokens": ({"logit_bias": {"hello": 1}}, "logit_bias"),
    "biases beyond the vocabulary": ({"logit_bias": {"99999": 1}}, "logit_bias"),
    "usage without a stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "unknown option of streams": ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "mode without log-probabilities": ({"logprobs_mode": "raw"}, "logprobs_mode"),
    "unknown rule": ({"rejection_sample_method": "x"}, "rejection_sample_method"),
    "two forms": ({"structured_output": {"regex": "a", "choice": ["b"]}}, "structured_output"),
    "no form": ({"structured_output": {}}, "structured_output"),
    "unknown form": ({"structured_output": {"yaml": "a"}}, "structured_output.yaml"),
    "form that cannot be read": ({"structured_output": {"regex": "("}}, "structured_output"),
    "no tokens allowed": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "too long": ({"max_tokens": 300}, "max_tokens"),
    "unknown": ({"temprature": 1.0}, "temprature"),
    "use_beam_search": ({"use_beam_search": True}, "use_beam_search"),
    "prompt": ({"prompt": {"text": "x"}}, "prompt"),
    "empty prompt": ({"prompt": []}, "prompt"),
    "mixed prompts": ({"prompt": ["a", 1]}, "prompt"),
    "no ids": ({"prompt": [True, False]}, "prompt"),
}  # type: ignore[dict-item]


@pytest.mark.parametrize("name", REFUSED)
def test_completion_that_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, name: str) -> None:
    changes, param = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="target", prompt="hello", extra_body=changes)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.param == param
    assert param in refused.value.body["message"]


CHAT_REFUSED: dict[str, Any] = {
    "audio": {"voice": "x", "format": "wav"},
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "metadata": "a",
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": 1,
    "service_tier": "flex",
    "store": "yes",
    "verbosity": 1,
    "web_search_options": {},
    "tool_choice": "required",
    "top_logprobs": 2,
    "max_completion_tokens": 3,
    "suffix": "x",
    "echo": True,
    "messages": [],
}


@pytest.mark.parametrize("name", CHAT_REFUSED)
def test_chat_that_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="target", messages=[USER], max_tokens=4, extra_body={name: CHAT_REFUSED[name]}
        )
    assert refused.value.param == name
    assert name in refused.value.body["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({**USER, "tool_call_id": 3}, "messages"),
        ({"role": "user"}, "messages"),
        ({**USER, "audio": {"id": "x"}}, "messages"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages"),
        ({**USER, "name": "bob"}, "messages"),  # which the template leaves out
    ],
)
def test_message_that_cannot_be_rendered_is_refused(client: openai.OpenAI, message: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="target", messages=[message], max_tokens=4)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"max_completion_tokens": 300}, "max_completion_tokens"),
        ({"max_tokens": 300}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
        ({"extra_body": {"top_k": 10**12}}, "top_k"),
        ({"extra_body": {"logit_bias": {"1": 10**400}}}, "logit_bias"),
    ],
)
def test_chat_out_of_range_is_refused_by_the_name_that_was_said(
    client: openai.OpenAI, said: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "target", "messages": [USER], **said})
    assert refused.value.param == param
    assert param in refused.value.body["message"]


def test_null_counts_as_left_out_in_messages_that_are_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model="target", messages=[USER], max_tokens=4, extra_body={"ignore_eos": True}
    )
    back = first.choices[0].message.model_dump()
    assert None in back.values()
    asked: dict[str, Any] = {"max_tokens": 4, "seed": SEED, "extra_body": COUPLED}
    again = client.chat.completions.create(model="target", messages=[USER, back, USER], **asked)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    plain = client.chat.completions.create(model="target", messages=[USER, said, USER], **asked)
    assert again.choices[0].message.content == plain.choices[0].message.content


def test_other_models_are_not_found_and_drafters_only_draft(client: openai.OpenAI) -> None:
    for kind in ("completions", "chat"):
        with pytest.raises(openai.NotFoundError) as missing:
            ask(client, kind, "gpt")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="only draft") as refused:
            ask(client, kind, "drafter")
        assert refused.value.param == "model"


def ask(client: openai.OpenAI, kind: str, model: str) -> Any:
    if kind == "chat":
        return client.chat.completions.create(model=model, messages=[USER], max_tokens=2)
    return client.completions.create(model=model, prompt="hello", max_tokens=2)


def test_models_are_the_target_alone(client: openai.OpenAI) -> None:
    (target,) = client.models.list().data
    assert (target.id, target.owned_by, target.max_model_len) == ("target", "draftwire", 256)
    assert target.draftwire["drafters"] == ["drafter"]
    assert client.models.retrieve("target") == target
    for other in ("drafter", "gpt"):
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(other)


def test_text_beyond_the_context_is_refused_as_clients_expect(client: openai.OpenAI) -> None:
    for asked in ({"prompt": "a" * 300}, {"prompt": "hello", "max_tokens": 300}):
        with pytest.raises(
            openai.BadRequestError, match="This model's maximum context length is 256 tokens"
        ) as refused:
            client.completions.create(model="target", **asked)
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.param == ("max_tokens" if "max_tokens" in asked else "prompt")


def post(running: InProcessStack, path: str, asked: dict[str, Any]) -> Any:
    data = json.dumps(asked).encode()
    status, _, content = fetch(f"{running.http_address}{path}", data, content_type="application/json")
    return status, json.loads(content)


def test_texts_become_ids_and_texts_again(running: InProcessStack) -> None:
    said = {"prompt": "hello", "return_token_strs": True}
    status, answer = post(running, "/tokenize", said)
    TokenizedBody.model_validate(answer)
    assert (status, answer["count"], answer["max_model_len"]) == (200, 5, 256)
    assert answer["token_strs"] == list("hello")
    status, back = post(running, "/detokenize", {"tokens": answer["tokens"], "model": "target"})
    DetokenizedBody.model_validate(back)
    assert (status, back) == (200, {"prompt": "hello"})
    _, rendered = post(running, "/tokenize", {"messages": [USER]})
    prompt = "user:hello;assistant:"
    assert rendered["tokens"] == post(running, "/tokenize", {"prompt": prompt})[1]["tokens"]
    for path, asked, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/detokenize", {"tokens": [999]}, None),
        ("/tokenize", {"prompt": "a", "modle": "x"}, "modle"),
    ):
        status, refused = post(running, path, asked)
        assert (status, refused["error"]["param"]) == (400, param)
    assert post(running, "/tokenize", {"prompt": "a", "model": "gpt"})[0] == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_interrupted_stream_goes_on_after_what_came_of_it(running: InProcessStack, path: str) -> None:
    asked = {"model": "target", "max_tokens": 24, "seed": SEED, "stream": True, "return_token_ids": True, **COUPLED}
    asked |= {"ignore_eos": True, "n": 2}
    asked |= {"prompt": "hello"} if path == "/v1/completions" else {"messages": [USER]}
    whole = events_of(running, path, asked)
    expected = {choice: of_choice(whole, choice) for choice in range(2)}
    assert [len(ids) for ids, _, _ in expected.values()] == [24, 24]
    for num_seen in (1, 3, 7):
        seen = whole[:num_seen]
        parts = {choice: of_choice(seen, choice) for choice in range(2)}
        before = [
            {"choice": choice, "token_ids": ids, **({"event_id": last} if last else {})}
            for choice, (ids, _, last) in parts.items()
        ]
        rest = events_of(running, path, {**asked, "generated_choices": before})
        for choice, (ids, text, _) in parts.items():
            more_ids, more_text, last = of_choice(rest, choice)
            assert ([*ids, *more_ids], text + more_text, last) == expected[choice]


def events_of(running: InProcessStack, path: str, asked: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns id and choice of each event of a stream."""
    data = json.dumps(asked).encode()
    status, _, content = fetch(f"{running.http_address}{path}", data, content_type="application/json")
    assert status == 200, content
    found = []
    for event in content.decode().split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in event.splitlines())
        if fields.get("data", "[DONE]") != "[DONE]":
            found.append((fields["id"], json.loads(fields["data"])["choices"][0]))
    return found


def of_choice(events: list[tuple[str, dict[str, Any]]], choice: int) -> tuple[list[int], str, str]:
    """Returns ids and text of a choice, and the id of its last event."""
    own = [(event_id, one) for event_id, one in events if one["index"] == choice]
    ids = [token for _, one in own for token in one["token_ids"]]
    text = "".join(one["text"] if "text" in one else one["delta"].get("content", "") for _, one in own)
    return ids, text, own[-1][0] if own else ""


def test_probes_of_others_are_answered(running: InProcessStack) -> None:
    assert json.loads(fetch(f"{running.http_address}/version")[2]) == {"version": draftwire.__version__}
    assert json.loads(fetch(f"{running.http_address}/ping")[2]) == {"status": "ok"}
    for path in ("/health", "/ping"):
        request = urllib.request.Request(f"{running.http_address}{path}", method="HEAD")
        with urllib.request.urlopen(request) as answer:
            assert (answer.status, answer.read()) == (200, b"")


# What there is besides


def fetch(url: str, data: bytes | None = None, **headers: str) -> tuple[int, Any, bytes]:
    request = urllib.request.Request(url, data, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_health_and_metrics_are_served(running: InProcessStack) -> None:
    assert fetch(f"{running.http_address}/health")[0] == 200
    status, headers, text = fetch(f"{running.http_address}/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b"draftwire:requests_total" in text


def test_what_no_route_takes_is_an_error_of_the_same_form(running: InProcessStack) -> None:
    for path, data, status in (("/v1/nothing", None, 404), ("/v1/completions", None, 405), ("/v1/models", b"{}", 405)):
        got, headers, text = fetch(running.http_address + path, data)
        assert got == status
        assert headers["content-type"] == "application/json"
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("data", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"model": "target", "prompt": "\\ud800"}', "application/json", 400),
        (b'{"model": "target", "prompt": "a", "temperature": NaN}', "application/json", 400),
        (b"\xff", "application/json", 400),
        (b'{"model": "target", "prompt": "a", "max_tokens": 1}', "text/plain", 415),
        (b'{"model": "target", "prompt": "a", "max_tokens": 1}', "application/x-www-form-urlencoded", 415),
        (b'{"model": "target", "prompt": "a", "max_tokens": 1}', "application/json; charset=utf-8", 200),
        (b'{"prompt": "a"}', "application/json", 400),
        (b'{"model": "target"}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
    ],
)
def test_body_that_is_no_request_is_refused(
    running: InProcessStack, data: bytes, content_type: str, status: int
) -> None:
    got, _, text = fetch(f"{running.http_address}/v1/completions", data, content_type=content_type)
    assert got == status, text
    assert status == 200 or json.loads(text)["error"]["message"]


def test_stream_is_made_of_server_sent_events_and_ends_with_done(running: InProcessStack) -> None:
    body = {"model": "target", "prompt": "hello", "max_tokens": 5, "stream": True}
    status, headers, text = fetch(
        f"{running.http_address}/v1/completions", json.dumps(body).encode(), content_type="application/json"
    )
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-store"
    *events, done, rest = text.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


ROUTES: dict[str, tuple[dict[str, Any], type[BaseModel], type[BaseModel]]] = {
    "/v1/completions": ({"prompt": "hello", "echo": True, "logprobs": 2}, TextCompletion, CompletionChunk),
    "/v1/chat/completions": (
        {"messages": [USER], "logprobs": True, "top_logprobs": 2},
        ChatCompletion,
        ChatCompletionChunk,
    ),
}


@pytest.mark.parametrize("more", [{}, {"n": 2, "prompt_logprobs": 1, "token_details": True}], ids=["little", "all"])
@pytest.mark.parametrize("path", ROUTES)
def test_answers_are_as_openapi_describes_them(running: InProcessStack, path: str, more: dict[str, Any]) -> None:
    own, whole, chunk = ROUTES[path]
    body = {"model": "target", "max_tokens": 6, **more, **(own if more else {key: own[key] for key in list(own)[:1]})}

    def answer(**also: Any) -> str:
        data = json.dumps({**body, **also}).encode()
        return fetch(running.http_address + path, data, content_type="application/json")[2].decode()

    whole.model_validate_json(answer(), strict=True)
    *events, done, _ = answer(stream=True, stream_options={"include_usage": True}).split("\n\n")
    assert done == "data: [DONE]"
    for event in events:
        chunk.model_validate_json(event.removeprefix("data: "), strict=True)


def test_models_and_health_are_as_openapi_describes_them(running: InProcessStack) -> None:
    listed = ListedModels.model_validate_json(fetch(f"{running.http_address}/v1/models")[2], strict=True)
    one = fetch(f"{running.http_address}/v1/models/{listed.data[0].id}")[2]
    assert ListedModel.model_validate_json(one, strict=True) == listed.data[0]
    HealthBody.model_validate_json(fetch(f"{running.http_address}/health")[2], strict=True)
