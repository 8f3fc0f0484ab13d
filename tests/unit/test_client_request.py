"""What the Python clients make of their options."""

import math
from pathlib import Path
from typing import Any

import pytest

from draftwire.client import Options, StructuredOutput
from draftwire.client.request_maker import (
    ChatOptions,
    SamplingOptions,
    TextOptions,
    check_seconds,
    make_request,
    make_retry_policy,
)
from draftwire.client.retry_policy import LONGEST_SECONDS
from draftwire.errors import InvalidRequestError
from draftwire.v1 import gateway_pb2, session_pb2

VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {2: -1.0},
    "allowed_token_ids": [1, 2],
    "min_tokens": 4,
    "num_choices": 2,
    "max_tokens": 5,
    "stop": ["x", "yz"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "seed": 11,
    "num_speculative_tokens": 6,
    "num_draft_nodes": 12,
    "stop_below": 0.5,
    "drafter": ["suffix", "lookup"],
    "rejection_sample_method": "token",
    "logprobs": 1,
    "prompt_logprobs": 2,
    "logprobs_mode": "processed",
    "echo": True,
    "token_details": True,
    "cache_salt": "salt",
}
"""Of every option that is a field of the same name."""


def value_of(message: Any, name: str) -> Any:
    value = getattr(message, name)
    if name == "logit_bias":
        return dict(value)
    return value if isinstance(value, str | bool | int | float) else list(value)


def test_every_option_is_in_the_request_under_its_name() -> None:
    assert set(VALUES) == {*SamplingOptions.__annotations__, *TextOptions.__annotations__}
    request = make_request("a", Options(**VALUES))
    for name, value in VALUES.items():
        message = request.sampling if name in SamplingOptions.__annotations__ else request
        assert value_of(message, name) == value, name
    assert request.text == "a"
    single = make_request("a", Options(stop="end", drafter="suffix"))
    assert (list(single.stop), list(single.drafter)) == (["end"], ["suffix"]), "a text is one, and not its letters"


def test_every_field_of_a_request_has_an_option() -> None:
    """But for the prompts, which are no options, what the client says of itself, and what has no effect."""
    fields = [*gateway_pb2.GenerateRequest.DESCRIPTOR.fields, *session_pb2.SamplingParameters.DESCRIPTOR.fields]
    others = {"text", "token_ids", "chat", "prompts", "sampling", "generated_choices", "has_random_seed"}
    assert {field.name for field in fields} - others <= set(Options.__annotations__)


def test_every_option_is_explained() -> None:
    source = Path(make_request.__code__.co_filename).read_text()
    for name in Options.__annotations__:
        assert f"\n    {name}: " in source
        assert source.partition(f"\n    {name}: ")[2].splitlines()[1].startswith('    """'), name


def test_none_is_as_if_nothing_were_said_and_false_and_zero_are_said() -> None:
    for name in VALUES:
        assert make_request("a", Options(**{name: None})) == make_request("a", Options()), name  # type: ignore[misc]
    request = make_request("a", Options(temperature=0.0, max_tokens=0, num_speculative_tokens=0, logprobs=0, seed=0))
    assert request.sampling.HasField("temperature")
    assert all(request.HasField(name) for name in ("max_tokens", "num_speculative_tokens", "logprobs", "seed"))
    assert (request.seed, request.max_tokens) == (0, 0)


def test_chat_and_form_travel() -> None:
    chat = {"tools": [{"type": "function", "function": {"name": "f"}}], "template_arguments": {"x": 1}}
    assert set(chat) | {"continue_final_message"} == set(ChatOptions.__annotations__)
    turns = [{"role": "user", "content": "hi"}]
    request = make_request(turns, Options(structured_output=StructuredOutput.regex("a+"), **chat))
    assert request.sampling.structured_output.regex == "a+"
    assert (request.chat.tools[0].name, request.chat.template_arguments) == ("f", '{"x": 1}')
    assert make_request(turns, Options(continue_final_message=True)).chat.continue_final_message


def test_misspelt_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="'temprature'"):
        make_request("a", {"temprature": 1.0})


REFUSED: list[dict[str, Any]] = [
    {"allowed_token_ids": []},
    {"top_k": -1},
    {"seed": 2**64},
    {"seed": -1},
    {"max_tokens": 1.5},
    {"stop": [1]},
    {"stop": ["\ud800"]},
    {"max_tokens": -77},
    {"allowed_token_ids": [1, -77]},
    {"stop_token_ids": [-77]},
]
JUNK: list[Any] = [object(), {"type": "object"}, [object()], 10**30, -(10**30), 1.5, "\ud800", b"\xff"]


def test_bad_value_of_an_option_is_refused_by_its_name_and_value() -> None:
    for options in REFUSED:
        with pytest.raises(InvalidRequestError, match=f"^{next(iter(options))}\\b") as refused:
            make_request("a", options)  # type: ignore[arg-type]
        assert "77" not in str(refused.value)
    for name in Options.__annotations__:
        messages = []
        for junk in JUNK:
            try:
                make_request([{"role": "user", "content": "hi"}], {name: junk})  # type: ignore[misc]
            except InvalidRequestError as error:
                messages.append(str(error))
        assert len(messages) >= 3, name
        assert all(name in message for message in messages), messages


def test_token_id_that_is_none_is_not_quoted() -> None:
    prompts: list[Any] = [[1, -77], [77 * 2**40], [[1], [-77]], [1, "77"]]
    for prompt in prompts:
        with pytest.raises(InvalidRequestError, match=r"^prompt: ") as refused:
            make_request(prompt, {})
        assert "77" not in str(refused.value)


def test_seed_is_sent_where_the_caller_gave_one_and_nowhere_else() -> None:
    """The server draws the others, and knows then that nobody has drawn with them before."""
    options: list[Options] = [{}, {"seed": None}, {"seed": 0}, {"seed": 2**64 - 1}]
    requests = [make_request("a", one) for one in options]
    assert [request.HasField("seed") for request in requests] == [False, False, True, True]
    assert [request.seed for request in requests] == [0, 0, 0, 2**64 - 1]
    assert not any(request.has_random_seed for request in requests)


def test_seconds_that_are_nan_are_refused_and_infinity_is_a_long_time() -> None:
    for timeout_s in (1e10, math.inf):
        patience = make_retry_policy({"timeout_s": timeout_s}, 1)
        patience.begin()
        assert patience.left_s == LONGEST_SECONDS, "beyond all that gRPC can count"
    wrong: list[tuple[Any, str]] = [("5", "a value is no number"), (math.nan, "a value is no number")]
    for name in ("timeout_s", "wait_for_server_s", "resume_s"):
        for value, says in [*wrong, (10**400, "a number is out of range")]:
            with pytest.raises(InvalidRequestError, match=f"{name}: {says}"):
                check_seconds({name: value})  # type: ignore[misc]


def test_calls_are_tried_for_as_long_as_the_options_say() -> None:
    patience = make_retry_policy({"timeout_s": 5.0, "resume_s": 0.0}, 1)
    assert patience.left_s is None, "before it begins"
    patience.begin()
    assert patience.left_s is not None
    assert 4.0 < patience.left_s <= 5.0
    patience.renew()
    assert patience.pause_after(InvalidRequestError("lost")) is None
    unhurried = make_retry_policy({"timeout_s": None, "resume_s": None}, 1)
    unhurried.begin()
    unhurried.renew()
    assert unhurried.left_s is None
    assert unhurried.pause_after(InvalidRequestError("lost")) == 0.0
