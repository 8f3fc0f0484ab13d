"""Prompts as the clients accept them, and their encoding as protos."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from draftwire.errors import InvalidRequestError
from draftwire.v1 import gateway_pb2

_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id"}
_TOOL = {"name", "description", "parameters"}
_CALL = {"name", "arguments"}


def chat_to_proto(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    template_arguments: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> gateway_pb2.ChatPrompt:
    """Encodes a conversation. A key whose value is None counts as absent.

    Args:
        messages: {"role", "content", "name", "tool_calls", "tool_call_id"}; a content is text, or a list of parts
            {"type": "text", "text"}; a call is {"id", "type": "function", "function": {"name", "arguments"}} with
            arguments as a dict or as its JSON.
        tools: {"type": "function", "function": {"name", "description", "parameters"}}.
        template_arguments: further variables of the chat template.
        continue_final_message: whether the model goes on with the last message.

    Raises:
        InvalidRequestError: a value has the wrong form, or a key is unknown to the gateway.
    """
    if isinstance(messages, str | Mapping) or isinstance(tools, str | Mapping) or not hasattr(tools, "__iter__"):
        raise InvalidRequestError("messages and tools are lists")
    if not isinstance(template_arguments, Mapping | None):
        raise InvalidRequestError("template_arguments has to be a dict")
    if not isinstance(continue_final_message, bool):
        raise InvalidRequestError("continue_final_message has to be true or false")
    return gateway_pb2.ChatPrompt(
        messages=[_message(f"messages[{index}]", message) for index, message in enumerate(messages)],
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)],
        template_arguments=_json("template_arguments", template_arguments) if template_arguments else "",
        continue_final_message=continue_final_message,
    )


def _message(what: str, given: Any) -> gateway_pb2.ChatMessage:
    message = _checked(what, given, _MESSAGE)
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(f"{what}.tool_calls has to be a list")
    if "content" not in message and not calls:
        raise InvalidRequestError(f"{what} has no content")
    return gateway_pb2.ChatMessage(
        role=_text(what, message, "role", is_needed=True),
        content=_content(f"{what}.content", message.get("content", "")),
        name=_text(what, message, "name"),
        tool_calls=[_call(f"{what}.tool_calls[{number}]", call) for number, call in enumerate(calls)],
        tool_call_id=_text(what, message, "tool_call_id"),
    )


def _content(what: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{what} has to be text")
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise InvalidRequestError(f"{what}[{number}] is not text, and the gateway takes nothing else")
        texts.append(_text(f"{what}[{number}]", _checked(f"{what}[{number}]", part, {"type", "text"}), "text"))
    return "".join(texts)


def _call(what: str, given: Any) -> gateway_pb2.ToolCall:
    call = _checked(what, given, {"id", "type", "function"})
    function = _function(what, call, _CALL)
    arguments = function.get("arguments", {})
    return gateway_pb2.ToolCall(
        id=_text(what, call, "id"),
        name=_text(what, function, "name", is_needed=True),
        arguments=arguments if isinstance(arguments, str) else _json(f"{what}.arguments", arguments),
    )


def _tool(what: str, given: Any) -> gateway_pb2.Tool:
    function = _function(what, _checked(what, given, {"type", "function"}), _TOOL)
    parameters = function.get("parameters")
    return gateway_pb2.Tool(
        name=_text(what, function, "name", is_needed=True),
        description=_text(what, function, "description"),
        parameters="" if parameters is None else _json(f"{what}.parameters", parameters),
    )


def _function(what: str, given: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    if given.get("type") != "function":
        raise InvalidRequestError(f'{what} has to be of the type "function"')
    return _checked(f"{what}.function", given.get("function"), keys)


def _checked(what: str, given: Any, keys: set[str]) -> dict[str, Any]:
    """Returns a dict without the keys whose value is None, after checking the keys."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{what} has to be a dict")
    present = {key: value for key, value in given.items() if value is not None}
    if not present.keys() <= keys:  # unknown keys may be user data, and are not quoted
        raise InvalidRequestError(f"{what} takes {', '.join(sorted(keys))} and nothing else")
    return present


def _text(what: str, given: Mapping[str, Any], key: str, is_needed: bool = False) -> str:
    value = given.get(key, "")
    if not isinstance(value, str):
        raise InvalidRequestError(f"{what}.{key} has to be text")
    if is_needed and not value:
        raise InvalidRequestError(f"{what} has no {key}")
    return value


def _json(what: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{what} has to be a dict")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # its message could quote the value
        raise InvalidRequestError(f"{what} holds what JSON does not have") from error


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages; see `chat_to_proto`."""

Prompts = Sequence[Prompt]
"""Several prompts, each of any kind. A list of numbers, or of messages, is a single prompt."""


def is_several(prompt: Prompt | Prompts) -> bool:
    """Returns whether this is a list of prompts, not a single one."""
    return _is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Sequence)


def _is_list(prompt: Any) -> bool:
    """Returns whether this is a sequence of items: a list, tuple, range or array, but not text, bytes or a mapping."""
    is_other = isinstance(prompt, str | bytes | bytearray | memoryview | Mapping)
    return not is_other and hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__")


def prompt_fields(
    prompt: Prompt | Prompts,
    tools: Sequence[Mapping[str, Any]] = (),
    template_arguments: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> dict[str, Any]:
    """Returns the field of a request that holds the prompt, or the prompts.

    The arguments after `prompt` are for chat messages only: see `chat_to_proto`.

    Raises:
        InvalidRequestError: a prompt or a chat message has the wrong form, or an argument for chat messages is set
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
