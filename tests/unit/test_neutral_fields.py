"""Fields that ask for what happens anyway change nothing; the same fields with other values are refused by name."""

import json
from typing import Any

import pytest

from draftwire_gateway.http.body import ChatBody, CompletionBody, read
from draftwire_gateway.http.neutral_fields import NEUTRAL
from draftwire_gateway.http.refusal import RefusedError

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
ASKS_FOR_NOTHING: dict[str, list[Any]] = {
    "background": [False],
    "include": [[], ["reasoning.encrypted_content"]],
    "reasoning": [{}, {"effort": None}, {"effort": "low"}],
    "reasoning_effort": ["low"],
    "verbosity": ["low"],
    "truncation": ["disabled"],
    "best_of": [1],
    "detokenize": [True],
    "early_stopping": [False],
    "include_stop_str_in_output": [False],
    "length_penalty": [1, 1.0],
    "metadata": [{}, {"a": "b"}],
    "modalities": [["text"]],
    "priority": [0],
    "prompt_cache_key": ["", "k"],
    "request_id": ["r"],
    "safety_identifier": ["s"],
    "service_tier": ["auto", "default"],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "store": [False, True],
    "use_beam_search": [False],
}
ASKS_FOR_SOMETHING: dict[str, list[Any]] = {
    "background": [True],
    "include": [["message.output_text.logprobs"], "a"],
    "reasoning": ["low"],
    "reasoning_effort": [1],
    "verbosity": [1],
    "truncation": ["auto"],
    "best_of": [2, True],
    "detokenize": [False],
    "early_stopping": [True],
    "include_stop_str_in_output": [True],
    "length_penalty": [0.5, True],
    "metadata": ["a"],
    "modalities": [["text", "audio"], "text"],
    "priority": [1],
    "prompt_cache_key": [1],
    "request_id": [1],
    "safety_identifier": [[]],
    "service_tier": ["flex"],
    "skip_special_tokens": [False, 1],
    "spaces_between_special_tokens": [False],
    "store": [0],
    "use_beam_search": [True],
}


def parsed(base: dict[str, Any], **more: Any) -> Any:
    kind = ChatBody if "messages" in base else CompletionBody
    return read(kind, json.dumps(base | more).encode())


def test_every_field_of_the_table_is_tried() -> None:
    assert set(ASKS_FOR_NOTHING) == set(ASKS_FOR_SOMETHING) == set(NEUTRAL)


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize("base", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_neutral_value_changes_nothing_and_any_other_is_refused(base: dict[str, Any], name: str) -> None:
    is_own = name in (ChatBody if base is CHAT else CompletionBody).model_fields
    for value in ASKS_FOR_NOTHING[name]:
        assert is_own or parsed(base, **{name: value}) == parsed(base)
    for value in ASKS_FOR_SOMETHING[name]:
        with pytest.raises(RefusedError) as refused:
            parsed(base, **{name: value})
        assert refused.value.param == name


def test_all_of_them_at_once_change_nothing() -> None:
    everything = {name: values[0] for name, values in ASKS_FOR_NOTHING.items()} | {"user": "u", "top_k": -1}
    assert parsed(CHAT, **everything, guided_json=None) == parsed(CHAT, user="u")


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"top_k": -1}, {}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_output": {"regex": "a+"}}),
        ({"guided_regex": "a+"}, {"structured_output": {"regex": "a+"}}),
        ({"guided_choice": ["a", "b"]}, {"structured_output": {"choice": ["a", "b"]}}),
        ({"guided_grammar": 'start: "a"'}, {"structured_output": {"grammar": 'start: "a"'}}),
        ({"guided_json": {"type": "object"}}, {"structured_output": {"json": {"type": "object"}}}),
        ({"guided_json": ' {"type": "object"}'}, {"structured_output": {"json": {"type": "object"}}}),
    ],
)
def test_names_of_others_mean_the_same(given: dict[str, Any], own: dict[str, Any]) -> None:
    for base in (COMPLETION, CHAT):
        assert parsed(base, **given) == parsed(base, **own)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"guided_regex": "a", "structured_output": {"regex": "a"}}, "guided_regex"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_output"),
        ({"guided_json": [1]}, "structured_output"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"top_k": -1.0}, "top_k"),
        ({"stores": False}, "stores"),
    ],
)
def test_what_is_said_twice_or_not_known_is_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RefusedError) as refused:
        parsed(COMPLETION, **given)
    assert (refused.value.param or "").partition(".")[0] == param


@pytest.mark.parametrize("text", ["{", "[]", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": ' + "[" * 200 + "]" * 200 + "}"])
def test_schema_in_a_text_has_the_limits_of_a_body(text: str) -> None:
    with pytest.raises(RefusedError):
        parsed(COMPLETION, guided_json=text)
    many = '{"a": [' + ",".join(["[]"] * 70_000) + "]}"
    with pytest.raises(RefusedError, match="lists"):
        parsed(COMPLETION, guided_json=many)


def test_reasoning_in_the_history_and_usage_in_all_chunks_have_no_effect() -> None:
    message = {"role": "assistant", "content": "b", "reasoning_content": "why"}
    (parsed_message,) = parsed({"model": "m", "messages": [message]}).messages
    assert parsed_message.content[0].text == "b"
    assert parsed(COMPLETION, stream=True, stream_options={"continuous_usage_stats": True}).stream
