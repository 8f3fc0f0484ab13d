"""Prompts as users write them."""

from collections.abc import Mapping, Sequence
from typing import Any

from draftwire.client.chat_messages import chat_to_proto
from draftwire.errors import InvalidRequestError
from draftwire.v1 import gateway_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages; see `chat_to_proto`."""

Prompts = Sequence[Prompt]
"""Several, of any kind each. A list of numbers, and one of messages, is one prompt."""


def is_several(prompt: Prompt | Prompts) -> bool:
    """Whether this is a list of prompts."""
    return _is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Sequence)


def _is_list(prompt: Any) -> bool:
    """Whether this is a list or something like it: a tuple, a range, an array. Bytes are none, though of numbers."""
    is_other = isinstance(prompt, str | bytes | bytearray | memoryview | Mapping)
    return not is_other and hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__")


def prompt_fields(
    prompt: Prompt | Prompts,
    tools: Sequence[Mapping[str, Any]] = (),
    template_arguments: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> dict[str, Any]:
    """Returns the field of a request that holds the prompt, or the prompts.

    Args:
        prompt: one, or several.
        tools: of each, as the other arguments, which only chat messages have; see `chat_to_proto`.
        template_arguments: see there.
        continue_final_message: see there.

    Raises:
        InvalidRequestError: a prompt, or what a chat message holds, is something else, or what is about messages comes
            without them.
        ValueError, TypeError: a token id does not fit its field.
    """

    def one(single: Any) -> dict[str, Any]:
        if not isinstance(single, str) and not _is_list(single):
            raise InvalidRequestError("a prompt is text, token ids or chat messages")
        if not isinstance(single, str) and len(single) and isinstance(single[0], Mapping):
            return {"chat": chat_to_proto(single, tools, template_arguments, continue_final_message)}
        if tools or template_arguments or continue_final_message:
            raise InvalidRequestError("tools, template_arguments and continue_final_message need chat messages")
        return {"text": single} if isinstance(single, str) else {"token_ids": gateway_pb2.TokenIds(ids=single)}

    if not is_several(prompt):
        return one(prompt)
    return {"prompts": gateway_pb2.PromptList(prompts=[gateway_pb2.Prompt(**one(single)) for single in prompt])}
