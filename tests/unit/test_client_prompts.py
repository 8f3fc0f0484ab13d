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


ONE: list[tuple[Any, Any]] = [
    ("text", "text"),
    ("", ""),
    ([1, 2], [1, 2]),
    ((1, 2), [1, 2]),
    (range(3), [0, 1, 2]),
    ([], []),
    (np.array([1, 2]), [1, 2]),
    (TURNS, [("user", "hi")]),
]
SEVERAL: list[tuple[Any, Any]] = [
    (["a", "b"], ["a", "b"]),
    (["a"], ["a"]),
    ([[1, 2], [3]], [[1, 2], [3]]),
    (([1],), [[1]]),
    ([range(2), []], [[0, 1], []]),
    ([TURNS, TURNS], [[("user", "hi")]] * 2),
    (["a", [1], TURNS], ["a", [1], [("user", "hi")]]),
]


def test_text_numbers_and_messages_are_one_prompt_and_a_list_is_several() -> None:
    for prompt, expected in ONE:
        assert not is_several(prompt)
        assert shown(gateway_pb2.GenerateRequest(**prompt_fields(prompt))) == expected
    for prompts, expected in SEVERAL:
        assert is_several(prompts)
        request = gateway_pb2.GenerateRequest(**prompt_fields(prompts))
        assert [shown(prompt) for prompt in request.prompts.prompts] == expected


def test_what_is_no_prompt_is_refused_before_it_is_sent() -> None:
    """Bytes are numbers, and no token ids."""
    wrong: list[Any] = [[1, "a"], ["a", 1], [[1], [-1]], [TURNS, [{"role": "user"}]], [1.5]]
    likely: list[Any] = [b"abc", bytearray(b"abc"), memoryview(b"abc"), [b"abc"], ["ab", 5], ["ab", None], 5, None]
    with Client("127.0.0.1:1") as client:
        for prompt in wrong:
            with pytest.raises(InvalidRequestError):
                client.stream(prompt)
        for prompt in [*likely, TURNS[0], [[1], {2}]]:
            with pytest.raises(InvalidRequestError, match="a prompt is text, token ids or chat messages"):
                client.stream(prompt)


def test_one_completion_is_not_asked_for_with_several() -> None:
    cases: list[tuple[Any, dict[str, Any]]] = [(["a"], {}), ([[1]], {}), ("a", {"num_choices": 2})]
    with Client("127.0.0.1:1") as client:
        for prompt, options in cases:
            with pytest.raises(InvalidRequestError, match="generate_many"):
                client.generate(prompt, **options)
