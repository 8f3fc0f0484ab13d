"""Tool calls over HTTP, as users of the openai package see them: valid, by the law of their form, streamed or not."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from jsonschema import Draft202012Validator
from scipy.stats import chisquare
from tiny_models import save_spelling_model
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.law import stack_options
from draftwire_gateway.http.response_models import ChatCompletion, ChatCompletionChunk, ResponseBody
from tests.in_process import InProcessStack

TOKENS = [*"abcdefghijklmnopqrstuvwxyz", *'{}[]":,;0123456789.<>_/-ĠĊ', "<e>"]
"""A space and a line break are spelt as byte-level tokenizers do."""
STOP = len(TOKENS) - 1
TEMPLATE = (
    "{% for tool in tools or [] %}tool:{{ tool.function.name }}{{ tool.function.description }}"
    "{{ tool.function.parameters | tojson }};{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }};"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>"""
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
USER: Any = {"role": "user", "content": "hello"}
TIGHT = {"whitespace_flexible": False}


def token_of(sign: str) -> int:
    return TOKENS.index({" ": "Ġ", "\n": "Ċ"}.get(sign, sign))


def tool(name: str, values: list[Any], **more: Any) -> Any:
    parameters = {"type": "object", "properties": {"a": {"enum": values}}, "required": ["a"]}
    parameters |= {"additionalProperties": False, "x-guidance": TIGHT}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("f", [1, 2]), tool("g", ["x", "yz"])]
ASKED: dict[str, Any] = {"model": "target", "messages": [USER], "tools": TOOLS, "tool_choice": "required"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[InProcessStack]:
    target, drafter = (
        save_spelling_model(folder / name, TOKENS, STOP, seed, 512) for name, seed in (("target", 6), ("drafter", 9))
    )
    for model in (target, drafter):
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
    with InProcessStack(stack_options(target, drafter)) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(running: InProcessStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.http_address}/v1", api_key="none", max_retries=0, timeout=60.0) as connected:
        yield connected


def check(name: str, arguments: str) -> None:
    """Checks a call against its tool."""
    (own,) = [one["function"] for one in TOOLS if one["function"]["name"] == name]
    Draft202012Validator(own["parameters"]).validate(json.loads(arguments))


def test_required_calls_are_valid_and_streamed_as_they_come(client: openai.OpenAI) -> None:
    num_parts: list[int] = []
    for seed in range(8):
        coupled = {"rejection_sample_method": "coupled"}
        asked = {**ASKED, "parallel_tool_calls": False, "seed": seed, "extra_body": coupled}
        answer = client.chat.completions.create(**asked)
        ChatCompletion.model_validate(answer.model_dump(exclude_unset=True))
        (choice,) = answer.choices
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        check(call.function.name, call.function.arguments)
        assert (choice.finish_reason, choice.message.content, len(call.id)) == ("tool_calls", None, 9)
        parts: list[str] = []
        names, reasons = [], []
        for chunk in client.chat.completions.create(**asked, stream=True):
            ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
            for part in chunk.choices[0].delta.tool_calls or []:
                assert part.index == 0
                assert part.function is not None
                names += [part.function.name] if part.id else []
                parts.append(part.function.arguments or "")
            assert not chunk.choices[0].delta.content
            reasons.append(chunk.choices[0].finish_reason)
        assert (names, "".join(parts)) == ([call.function.name], call.function.arguments)
        assert reasons[-1] == "tool_calls"
        num_parts.append(len(parts))
    assert max(num_parts) > 2, "arguments come in parts"


def test_named_function_is_called_and_nothing_else(client: openai.OpenAI) -> None:
    for name in ("f", "g"):
        choice: Any = {"type": "function", "function": {"name": name}}
        answer = client.chat.completions.create(**{**ASKED, "tool_choice": choice, "n": 4})
        for one in answer.choices:
            assert one.finish_reason == "stop", "as at OpenAI"
            assert one.message.tool_calls is not None
            (call,) = one.message.tool_calls
            assert call.type == "function"
            assert call.function.name == name
            check(name, call.function.arguments)


def test_several_calls_have_ids_of_their_own(client: openai.OpenAI) -> None:
    asked = {**ASKED, "n": 16, "logit_bias": {str(token_of("\n")): 4.0}}
    answers = [one.message.tool_calls or [] for one in client.chat.completions.create(**asked).choices]
    assert max(map(len, answers)) > 1
    ids = [call.id for calls in answers for call in calls]
    assert len(set(ids)) == len(ids)


def test_call_that_is_cut_short_ends_by_its_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED, max_tokens=40)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content in (None, "")
    assert not choice.message.tool_calls, "what is cut is no call"


def test_answers_are_taken_when_they_come_back_as_they_were(client: openai.OpenAI) -> None:
    """Whole ones, one that was cut within a call, and one whose parts a client has joined to a call that is none."""
    whole, cut = (client.chat.completions.create(**ASKED, max_tokens=most).choices[0].message for most in (150, 40))
    for answer in (whole, cut):
        sent = [USER, answer.model_dump() | {"annotations": [{"type": "x"}], "refusal": None, "odd": 1}, USER]
        client.chat.completions.create(model="target", messages=sent, max_tokens=2)  # type: ignore[arg-type]
    broken = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, '}}
    sent = [USER, {"role": "assistant", "content": None, "tool_calls": [broken]}, USER]
    client.chat.completions.create(model="target", messages=sent, max_tokens=2)  # type: ignore[arg-type]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match="the model takes text alone, no images"):
        client.chat.completions.create(model="target", messages=[{"role": "user", "content": [image]}])  # type: ignore[list-item, misc]


def test_strict_tools_are_taken_where_the_model_may_write_text(client: openai.OpenAI) -> None:
    """That their calls are valid, tests/unit/test_tool_call_forms.py shows: this model hardly ever makes one."""
    strict = [tool("f", [1, 2], strict=True), tool("g", ["x", "yz"], strict=True)]
    asked = {**ASKED, "tools": strict, "tool_choice": "auto", "max_tokens": 24, "n": 4}
    answers = client.chat.completions.create(**asked, extra_body={"min_p": 0.0}).choices
    assert any(one.message.content for one in answers)


def test_format_of_the_text_says_nothing_where_the_answer_is_calls(client: openai.OpenAI) -> None:
    """As instructor asks by responses."""
    answer = client.chat.completions.create(**{**ASKED, "response_format": {"type": "json_object"}}).choices[0].message
    assert answer.tool_calls
    assert not answer.content


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no tools": ({"tools": None}, "says nothing without tools", "tool_choice"),
    "another function": (
        {"tool_choice": {"type": "function", "function": {"name": "h"}}},
        "not among the tools",
        "tool_choice",
    ),
    "a form of its own": (
        {"extra_body": {"structured_output": {"choice": ["a"]}}},
        "cannot be calls and have",
        "tool_choice",
    ),
    "name twice": ({"tools": [TOOLS[0], TOOLS[0]]}, "two functions have the same name", "tools"),
    "name": ({"tools": [tool("a b", [1])]}, "the name of a function has", "tools"),
    "schema": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]},
        "'not' is not supported",
        "tools",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused(client: openai.OpenAI, name: str) -> None:
    more, message, param = REFUSED[name]
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        client.chat.completions.create(**{**ASKED, **more})
    assert refused.value.param == param


def test_responses_are_those_of_the_chat(client: openai.OpenAI) -> None:
    seeded = {"extra_body": {"seed": 5, "rejection_sample_method": "coupled"}}
    whole = client.responses.create(model="target", input="hello", instructions="be", max_output_tokens=12, **seeded)
    ResponseBody.model_validate(whole.model_dump(exclude_unset=True))
    messages: Any = [{"role": "system", "content": "be"}, USER]
    chat = client.chat.completions.create(model="target", messages=messages, max_tokens=12, **seeded)
    assert whole.output_text == chat.choices[0].message.content
    is_cut = chat.choices[0].finish_reason == "length"
    assert whole.status == ("incomplete" if is_cut else "completed")
    events = list(client.responses.create(model="target", input=messages, max_output_tokens=12, stream=True, **seeded))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert text == whole.output_text == last.response.output_text
    assert last.response.usage is not None
    assert whole.usage is not None
    assert last.response.usage.output_tokens == whole.usage.output_tokens == chat.usage.completion_tokens  # type: ignore[union-attr]


def test_responses_call_tools_and_take_what_they_returned(client: openai.OpenAI) -> None:
    flat: Any = [{"type": "function", **one["function"]} for one in TOOLS]
    asked: dict[str, Any] = {"model": "target", "tools": flat, "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(input="hello", **asked) as stream:
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        answer = stream.get_final_response()
    (call,) = answer.output
    assert call.type == "function_call"
    assert call.arguments == arguments
    check(call.name, call.arguments)
    conversation: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "ok"},
    ]
    again = client.responses.create(input=conversation, **asked)
    assert again.output[0].type == "function_call"


def law_of(folder: Path, prompt: list[int], texts: list[str]) -> dict[str, float]:
    """Returns the target's law of texts, given that it is one of these. All tokens are characters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    law = {}
    for text in texts:
        ids = [*map(token_of, text), STOP]
        with torch.inference_mode():
            rows = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 :]
        mass = 1.0
        for place, token in enumerate(ids):
            following = {
                token_of(other[place]) if place < len(other) else STOP
                for other in texts
                if other.startswith(text[:place])
            }
            mass *= rows[place][sorted(following)].softmax(0)[sorted(following).index(token)].item()
        law[text] = mass
    return law


@pytest.mark.slow
def test_calls_follow_the_law_of_the_target_under_their_form(
    running: InProcessStack, client: openai.OpenAI, folder: Path
) -> None:
    """400 of 400 are valid, and distributed as the target is among the four texts. False alarm: 1e-6."""
    asked = {**ASKED, "parallel_tool_calls": False}
    calls = {("f", 1), ("f", 2), ("g", "x"), ("g", "yz")}
    written = {
        (name, value): f'<tool_call>\n{{"name": "{name}", "arguments": {{"a":{json.dumps(value)}}}}}\n</tool_call>'
        for name, value in calls
    }
    rendered = AutoTokenizer.from_pretrained(folder / "target").apply_chat_template(
        [USER], tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    law = law_of(folder / "target", list(rendered), list(written.values()))
    assert sum(law.values()) == pytest.approx(1.0)
    found: Counter[str] = Counter()
    for seed in range(25):
        for one in client.chat.completions.create(**asked, n=16, seed=seed).choices:
            assert one.message.tool_calls is not None
            (call,) = one.message.tool_calls
            assert call.type == "function"
            check(call.function.name, call.function.arguments)
            found[written[call.function.name, json.loads(call.function.arguments)["a"]]] += 1
    total = sum(found.values())
    assert total == 400
    result = chisquare([found[text] for text in law], [total * mass for mass in law.values()])
    assert result.pvalue > 1e-6
