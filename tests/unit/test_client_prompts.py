"""Prompts as users write them: what is one prompt, and what are several."""

from typing import Any

import numpy as np
import pytest

from draftwire.client import Client
from draftwire.client.prompts import is_several, prompt_fields
from draftwire.errors import InvalidRequestError
from draftwire.v1 import gateway_pb2

TURNS = [{"role": "user", "content": "hi"}]


def shown(prompt: Any) -> Any:
    """What a request says of a prompt."""
    kind = prompt.WhichOneof("prompt")
    value = getattr(prompt, kind)
    if kind == "chat":
        return [(turn.role, turn.content) for turn in value.messages]
    return list(value.ids) if kind == "token_ids" else value


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", "text"),
        ("", ""),
        ([1, 2], [1, 2]),
        ((1, 2), [1, 2]),
        (range(3), [0, 1, 2]),
        ([], []),
        (np.array([1, 2]), [1, 2]),
        (TURNS, [("user", "hi")]),
    ],
)
def test_text_numbers_and_messages_are_one_prompt_each(prompt: Any, expected: Any) -> None:
    assert not is_several(prompt)
    assert shown(gateway_pb2.GenerateRequest(**prompt_fields(prompt))) == expected


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (["a"], ["a"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (([1],), [[1]]),
        ([range(2), []], [[0, 1], []]),
        ([TURNS, TURNS], [[("user", "hi")]] * 2),
        (["a", [1], TURNS], ["a", [1], [("user", "hi")]]),
    ],
)
def test_list_of_prompts_is_several(prompts: Any, expected: Any) -> None:
    assert is_several(prompts)
    request = gateway_pb2.GenerateRequest(**prompt_fields(prompts))
    assert [shown(prompt) for prompt in request.prompts.prompts] == expected


@pytest.mark.parametrize("prompt", [[1, "a"], ["a", 1], [[1], [-1]], [TURNS, [{"role": "user"}]], [1.5]])
def test_what_is_no_prompt_is_refused_before_it_is_sent(prompt: Any) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequestError):
        client.stream(prompt)


@pytest.mark.parametrize(
    "prompt",
    [b"abc", bytearray(b"abc"), memoryview(b"abc"), [b"abc"], ["ab", 5], ["ab", None], 5, None, TURNS[0], [[1], {2}]],
)
def test_what_looks_like_a_prompt_and_is_none_is_told_so(prompt: Any) -> None:
    """Bytes are numbers, and no token ids."""
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(InvalidRequestError, match="a prompt is text, token ids or chat messages"),
    ):
        client.stream(prompt)


@pytest.mark.parametrize(("prompt", "options"), [(["a"], {}), ([[1]], {}), ("a", {"num_choices": 2})])
def test_one_completion_is_not_asked_for_with_several(prompt: Any, options: dict[str, Any]) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequestError, match="generate_many"):
        client.generate(prompt, **options)
