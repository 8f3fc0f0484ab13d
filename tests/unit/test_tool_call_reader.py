"""Tool calls are read as the families' templates write them, however the text is cut; anything else stays text."""

import json
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from cases import every
from chat_templates import LLAMA, MISTRAL, QWEN, with_template

from draftwire.requests.tool_calls import HERMES, LLAMA3_JSON, PLAIN_LIST, ToolSyntax, syntax_of_template
from draftwire.requests.tool_calls import MISTRAL as MISTRAL_SYNTAX
from draftwire_gateway.text.tool_call_reader import ToolCallReader
from tools.embedded_pair.conversations import CHAT_TEMPLATE

NAMES = ("weather", "time_in")
Calls = list[tuple[str, Any]]
CITY = {"city": 'Paris "}], <tool_call> \\ [x'}
ONE: Calls = [("weather", CITY)]
TWO: Calls = [("weather", CITY), ("time_in", {"zone": {"offset": [1, -2]}})]
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME: Calls = [("weather", {"city": "Rome"})]


def read(
    syntax: ToolSyntax, parts: Sequence[str], *, is_certain: bool = False, must_call: bool = False
) -> tuple[str, Calls]:
    """Returns text and calls of an answer whose text comes in parts."""
    ids = map(str, count())
    reader = ToolCallReader(syntax, NAMES, lambda: next(ids), is_certain=is_certain, must_call=must_call)
    text, calls = "", list[list[str]]()
    for read_text in [*map(reader.push, parts), reader.finish()]:
        text += read_text.text
        for call in read_text.calls:
            if call.id:
                assert call.index == len(calls) == int(call.id)
                calls.append([call.name, call.arguments])
            else:
                assert call.index == len(calls) - 1, "calls do not overlap"
                calls[-1][1] += call.arguments
    assert reader.num_calls == len(calls)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def at_every_split(syntax: ToolSyntax, text: str, *, is_certain: bool = False) -> tuple[str, Calls]:
    """Reads a text as a whole, in two parts at every place, and character by character; returns what all read."""
    whole = read(syntax, [text], is_certain=is_certain)
    assert read(syntax, list(text), is_certain=is_certain) == whole
    for place in range(len(text)):
        assert read(syntax, [text[:place], text[place:]], is_certain=is_certain) == whole, place
    return whole


def rendered(template: str, content: str, calls: Calls) -> str:
    """Returns an answer as a template writes it for the next question, without the tokens around it."""
    tokenizer = with_template(template)
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    tool_calls = [
        {"id": "call0000" + str(index), "type": "function", "function": function}
        for index, function in enumerate(functions)
    ]
    asked: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    answer: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    start = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template([*asked, answer], tokenize=False)
    assert isinstance(start, str)
    assert isinstance(text, str)
    assert text.startswith(start)
    for end in ("<|im_end|>\n", "<|eot_id|>", "</s>", "</s>\n"):
        text = text.removesuffix(end)
    return text[len(start) :]


RENDERED = {
    "qwen": (QWEN, HERMES, "", ONE),
    "qwen, text before": (QWEN, HERMES, "I look.", TWO),
    "llama": (LLAMA, LLAMA3_JSON, "", ONE),
    "mistral": (MISTRAL, MISTRAL_SYNTAX, "", TWO),
    "the models of this repository": (CHAT_TEMPLATE, HERMES, "So:", TWO),
}


@every(("template", "syntax", "content", "calls"), RENDERED.values())
def test_what_templates_write_is_read(template: str, syntax: ToolSyntax, content: str, calls: Calls) -> None:
    assert syntax_of_template(template) is syntax
    text = rendered(template, content, calls)
    assert at_every_split(syntax, text) == (content, calls)


WRITTEN = {
    "text alone": (HERMES, " Hello <tool_cal\n there. ", (" Hello <tool_cal\n there. ", [])),
    "text around": (HERMES, f"Yes.\n{HERMES_CALL}\n Done.", ("Yes.\n Done.", ROME)),
    "without its end": (HERMES, HERMES_CALL.removesuffix("\n</tool_call>"), ("", ROME)),
    "in one line": (HERMES, HERMES_CALL.replace("\n", ""), ("", ROME)),
    "space after it": (HERMES, HERMES_CALL + "\n\n", ("", ROME)),
    "arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>',
        ("", ROME),
    ),
    "arguments in a text": (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        ("", ROME),
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "weather"}</tool_call>', ("", [("weather", {})])),
    "llama, after its tag": (
        LLAMA3_JSON,
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}',
        ("", ROME),
    ),
    "llama, several": (
        LLAMA3_JSON,
        '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "weather", "parameters": {"city": "Rome"}}',
        ("", ROME * 2),
    ),
    "llama, type and key of others": (
        LLAMA3_JSON,
        ' {"type": "function", "name": "weather", "arguments": {"city": "Rome"}}\n',
        ("", ROME),
    ),
    "llama, text": (LLAMA3_JSON, 'Call {"name": "weather"}', ('Call {"name": "weather"}', [])),
    "mistral, later models": (
        MISTRAL_SYNTAX,
        'I see.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]weather {"city": "Rome"}',
        ("I see.", ROME * 2),
    ),
    "mistral, with an id": (MISTRAL_SYNTAX, '[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{"city": "Rome"}', ("", ROME)),
    "list": (PLAIN_LIST, '[{"name": "weather", "arguments": {"city": "Rome"}}]', ("", ROME)),
}


@every(("syntax", "text", "expected"), WRITTEN.values())
def test_calls_are_read_as_models_write_them(syntax: ToolSyntax, text: str, expected: tuple[str, Calls]) -> None:
    assert at_every_split(syntax, text) == expected


MALFORMED = {
    "no JSON": (HERMES, "<tool_call>\n{weather}\n</tool_call>"),
    "another function": (HERMES, HERMES_CALL.replace("weather", "wether")),
    "no name": (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    "name twice": (HERMES, '<tool_call>{"name": "weather", "name": "weather", "arguments": {}}</tool_call>'),
    "arguments are a list": (HERMES, '<tool_call>{"name": "weather", "arguments": []}</tool_call>'),
    "no number": (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": NaN}}</tool_call>'),
    "comma at the end": (HERMES, '<tool_call>{"name": "weather", "arguments": {},}</tool_call>'),
    "something else in it": (HERMES, '<tool_call>{"name": "weather", "arguments": {}, "x": 1}</tool_call>'),
    "brackets that do not fit": (HERMES, '<tool_call>{"name": "weather", "arguments": {]}</tool_call>'),
    "deep": (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"a": ' + "[" * 3_000 + "]" * 3_000 + "}}</tool_call>",
    ),
    "no object": (HERMES, "<tool_call>weather</tool_call>"),
    "cut": (HERMES, HERMES_CALL[:-20]),
    "marker alone": (HERMES, "so <tool_call>\n"),
    "much space in it": (MISTRAL_SYNTAX, f"[TOOL_CALLS]weather{' ' * 300}{{}}"),
    "space alone": (LLAMA3_JSON, " " * 600),
    "space at the end": (HERMES, f"so{' ' * 600}"),
    "llama": (LLAMA3_JSON, '{"name": "wether", "parameters": {}}'),
    "llama, JSON of its own": (LLAMA3_JSON, '{"a": {"b": 1}} and more'),
    "mistral": (MISTRAL_SYNTAX, "so [TOOL_CALLS] none"),
    "mistral, a list of texts": (MISTRAL_SYNTAX, '[TOOL_CALLS]["weather"]'),
    "mistral, later models": (MISTRAL_SYNTAX, "[TOOL_CALLS]weather[ARGS]{city}"),
    "list": (PLAIN_LIST, "no list"),
}


@every(("syntax", "text"), MALFORMED.values())
def test_malformed_calls_stay_text(syntax: ToolSyntax, text: str) -> None:
    read_text = read(syntax, [text]) if len(text) > 1_000 else at_every_split(syntax, text)
    assert read_text == (text, [])


def test_text_after_a_malformed_call_may_hold_another() -> None:
    text = f"<tool_call>\n{{}}\n</tool_call> {HERMES_CALL}"
    assert at_every_split(HERMES, text) == ("<tool_call>\n{}\n</tool_call>", ROME)


CERTAIN = {
    "hermes": (HERMES, f"Yes.\n{HERMES_CALL}\n{HERMES_CALL}", ("Yes.", ROME * 2)),
    "llama": (LLAMA3_JSON, '{"name": "weather", "parameters": {"city": "Rome"}}', ("", ROME)),
    "mistral": (
        MISTRAL_SYNTAX,
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time_in", "arguments": {}}]',
        ("", [*ROME, ("time_in", {})]),
    ),
    "list": (PLAIN_LIST, '[{"name": "weather", "arguments": {"city": "Rome"}}]', ("", ROME)),
    "text": (LLAMA3_JSON, "Hello { there", ("Hello { there", [])),
}


@every(("syntax", "text", "expected"), CERTAIN.values())
def test_certain_calls_are_passed_on_as_they_come(syntax: ToolSyntax, text: str, expected: tuple[str, Calls]) -> None:
    assert at_every_split(syntax, text, is_certain=True) == expected


def test_arguments_of_certain_calls_stream_and_those_of_others_come_whole() -> None:
    parts = ['<tool_call>\n{"name": "weather", "arguments": {"ci', 'ty": "Ro', 'me"}}', "\n</tool_call>"]

    def arguments(*, is_certain: bool) -> list[list[str]]:
        reader = ToolCallReader(HERMES, NAMES, lambda: "id", is_certain=is_certain)
        return [[call.arguments for call in reader.push(part).calls] for part in parts]

    assert arguments(is_certain=True) == [['{"ci'], ['ty": "Ro'], ['me"}'], []]
    assert arguments(is_certain=False) == [[], [], ['{"city": "Rome"}'], []]


def test_certain_call_that_is_cut_short_keeps_its_beginning_and_no_text() -> None:
    reader = ToolCallReader(HERMES, NAMES, lambda: "id", is_certain=True)
    read_text = reader.push('<tool_call>\n{"name": "weather", "arguments": {"city": "R')
    assert "".join(call.arguments for call in read_text.calls) == '{"city": "R'
    assert reader.finish().text == ""


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{{ messages }}",
        "<tool_call><function={{ tool_call.name }}>",
        "<tool_call>{{ name }}<arg_key>{{ arguments }}",
    ],
)
def test_templates_of_other_syntaxes_are_not_guessed_at(template: str) -> None:
    assert syntax_of_template(template) is None


@pytest.mark.parametrize("cut", ["", "<tool_ca", "<tool_call>", "<tool_call>\n", '<tool_call>\n{"na'])
def test_answer_that_has_to_be_calls_leaves_no_text_wherever_it_is_cut(cut: str) -> None:
    assert read(HERMES, [cut], is_certain=True, must_call=True) == ("", [])
    assert read(HERMES, list(cut), is_certain=True, must_call=True) == ("", [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", ["<tool_call>{", '<tool_call>{"', "<tool_call>[", "<tool_call>{}", " ", "<", "<tool_call> "]
)
def test_time_is_proportional_to_the_text_whatever_it_is(unit: str) -> None:
    """In parts of a few characters, and at once with an end that closes all."""

    def seconds(count: int) -> float:
        text = unit * count + "}" * count
        parts = [text[start : start + 7] for start in range(0, len(text), 7)]
        started = time.process_time()
        read(HERMES, parts)
        read(HERMES, [text])
        return time.process_time() - started

    short = min(seconds(500) for _ in range(3))
    assert min(seconds(4_000) for _ in range(2)) < 8 * 4 * max(short, 0.002)


def test_reader_tells_whether_the_last_call_is_whole() -> None:
    reader = ToolCallReader(HERMES, NAMES, lambda: "id", is_certain=True)
    seen = []
    for part in ('<tool_call>\n{"name": "weather", "arguments": {"city"', ': "Rome"}', "}", "\n</tool_call>"):
        reader.push(part)
        seen.append(reader.is_within_call)
    assert seen == [True, True, False, False]
