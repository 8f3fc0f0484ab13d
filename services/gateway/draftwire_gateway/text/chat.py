"""Conversations, rendered by the target's own chat template.

Templates may silently ignore parts of a conversation: tools, names, unknown roles. Here such a conversation is refused,
by comparing renderings with and without each part.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from inspect import signature
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError
from draftwire.runtime.time_limits import Deadline
from draftwire_gateway.text.control_tokens import control_tokens
from draftwire_gateway.text.conversation import ChatTurn, Conversation, Tool, ToolCall
from draftwire_gateway.text.fair_threads import FairThreads

MAX_JSON_DEPTH = 32
"""Deepest nesting of objects and lists. Indented, the text of n brackets in d levels has 4 * n * d spaces."""
RENDER_SECONDS = 10.0
"""Timeout of rendering one conversation, with its time in the queue."""
RENDER_THREADS = 2
"""More than one, so that a slow conversation does not block all others. Because of the GIL, more would not help."""
MAX_WAITING = 256
"""Most conversations being rendered or in the queue."""

_OWN_ARGUMENTS = (
    frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    | frozenset(jinja2.defaults.DEFAULT_NAMESPACE)
    | {"messages", "conversations", "raise_exception", "strftime_now"}
) - {"documents"}
"""Names that transformers or every template defines, and that users cannot set."""

_MARK = re.compile("Draftwire([0-9]{6})mark")


def _late_error(render_time: Deadline) -> DraftwireError:
    """Returns the error of a timeout: no room if the conversation waited for others, else an invalid request."""
    if render_time.has_waited:
        return NoRoomError("other conversations keep the chat template busy")
    return InvalidRequestError(f"the chat template needs more than {RENDER_SECONDS:g} s for this conversation")


class ChatTemplate:
    """A model's chat template. transformers renders it, in a sandbox, on dedicated threads: a conversation that takes
    seconds delays neither the event loop nor text prompts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model_name: str) -> None:
        """`model_name` is for error messages. The tokenizer may have no template."""
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._threads = FairThreads(RENDER_THREADS, "chat")
        self._num_waiting = 0

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template has a place for tools."""
        try:
            return "tools" in parse_template(self._tokenizer.get_chat_template(tools=[])).variables
        except (ValueError, jinja2.TemplateError):  # which is said when something is to be rendered
            return False

    async def render(self, conversation: Conversation, caller: str = "") -> str:
        """Renders a conversation up to the start of the answer, when it is the caller's turn. Runs on the event loop.

        Raises:
            InvalidRequestError: there is no template, the template refuses the conversation or leaves something out, or
                rendering takes longer than `RENDER_SECONDS`.
            NoRoomError: the queue is full, or the timeout passed because of other conversations.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequestError(f"{self._model_name} has no chat template; send a text prompt")
        if self._num_waiting >= MAX_WAITING:
            raise NoRoomError(f"{MAX_WAITING} conversations wait for the chat template, which is the limit")
        render_time = Deadline(RENDER_SECONDS)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(RENDER_SECONDS):  # not `wait_for`: see form_compiler_pool.py
                return await self._threads.run(caller, partial(self._render, conversation, render_time))
        except TimeoutError as error:
            raise _late_error(render_time) from error
        finally:
            self._num_waiting -= 1

    def _render(self, conversation: Conversation, render_time: Deadline) -> str:
        render_time.begin()
        return render(self._tokenizer, self._model_name, conversation, render_time)


def render(
    tokenizer: PreTrainedTokenizerBase, model_name: str, conversation: Conversation, render_time: Deadline
) -> str:
    """Renders a conversation; `ChatTemplate.render` calls this on a thread.

    Raises:
        InvalidRequestError, NoRoomError: as `ChatTemplate.render`. The timeout is checked between renderings; the time
            of a single one is bounded by the size of the conversation.
    """
    rendering = _Rendering(tokenizer, model_name, conversation, render_time)
    text = rendering.text()
    rendering.check_nothing_is_left_out(text)
    try:
        text.encode()
    except UnicodeError as error:  # a lone surrogate from a JSON escape; the message would quote the prompt
        raise InvalidRequestError("a text holds characters that UTF-8 cannot encode") from error
    return text


@dataclass(frozen=True, slots=True)
class _Place:
    """A text among the template's inputs."""

    what: str
    """Name in error messages."""
    owner: dict[str, Any]
    key: str


class _Rendering:
    """One conversation, which is rendered repeatedly with changes to see whether the text changes."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, model_name: str, conversation: Conversation, render_time: Deadline
    ) -> None:
        self._render_time = render_time
        self._tokenizer = tokenizer
        self._conversation = conversation
        self._tools = [_tool_to_json(index, tool) for index, tool in enumerate(conversation.tools)]
        self._messages = [_turn_to_json(index, turn) for index, turn in enumerate(conversation.turns)]
        try:
            source = tokenizer.get_chat_template(tools=self._tools or None)
            self._template = parse_template(source)
        except (ValueError, jinja2.TemplateError) as error:
            raise InvalidRequestError(f"the chat template of {model_name} cannot be used") from error
        if self._tools and "tools" not in self._template.variables:
            raise InvalidRequestError(f"the chat template of {model_name} has no place for tools")
        self._arguments = _json_object("template_arguments", conversation.template_arguments or "{}")
        known = self._template.variables - _OWN_ARGUMENTS
        if self._arguments.keys() - known:  # unknown names may be user data, and are not quoted
            names = ", ".join(sorted(known)) or "none"
            raise InvalidRequestError(f"template_arguments: the variables of the chat template are: {names}")
        self._mark_control_tokens()

    def _mark_control_tokens(self) -> None:
        """Marks control tokens in the inputs. An assistant's message may hold those that are not special, as models do
        that show their thoughts.
        """
        control = control_tokens(self._tokenizer, self._template.literals)
        self._messages = [
            control.marked(f"messages[{index}]", message, special_only=message["role"] == "assistant")
            for index, message in enumerate(self._messages)
        ]
        self._tools = [control.marked(f"tools[{index}]", tool) for index, tool in enumerate(self._tools)]
        self._arguments = control.marked("template_arguments", self._arguments)

    def text(self) -> str:
        """Renders the conversation with the current changes.

        Raises:
            InvalidRequestError: the template refuses the conversation, or the timeout has passed.
            NoRoomError: the timeout passed because of other conversations.
        """
        if self._render_time.left_s < 0.0:
            raise _late_error(self._render_time)
        continues = self._conversation.continues_last
        try:
            text = self._tokenizer.apply_chat_template(
                self._messages,
                tools=list(self._tools) or None,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **self._arguments,
            )
        except Exception as error:  # templates may raise any exception
            raise InvalidRequestError(f"the chat template refuses the messages: {self._reason(error)}") from error
        assert isinstance(text, str), "one conversation, not tokenized"
        return text

    def _reason(self, error: Exception) -> str:
        """Returns the template's own literal from its error message, without parts of the conversation."""
        message = str(error)
        if type(error) is jinja2.TemplateError:  # raise_exception
            prefixes = [literal for literal in self._template.literals if message.startswith(literal)]
            if prefixes:
                return max(prefixes, key=len).strip()
        if self._conversation.continues_last and isinstance(error, ValueError) and "continue_final_message" in message:
            return "continue_final_message: the last message has no content that the template ends with"
        return type(error).__name__

    def check_nothing_is_left_out(self, text: str) -> None:
        """Compares `text` with renderings of changed conversations.

        Raises:
            InvalidRequestError: a part of the conversation has no effect on the text.
        """
        places = list(self._places())
        with _kept([place.owner for place in places]):
            for number, place in enumerate(places):
                place.owner[place.key] += _mark(number)
            shown = {int(number) for number in _MARK.findall(self._text_or_empty())}
        for number, place in enumerate(places):
            if number in shown:
                continue
            with _kept([place.owner]):  # a part that is tested but not printed still changes the text
                place.owner[place.key] += _mark(number)
                if self._text_or_empty() == text:
                    raise InvalidRequestError(f"the chat template leaves out {place.what}")
        self._check_arguments(text)
        for what, owners, key in self._groups():
            with _kept(owners):
                for owner in owners:
                    if key == "arguments":  # which every call must have
                        owner[key] = {}
                    else:
                        del owner[key]
                if not owners or self._text_or_empty() != text:
                    continue
            if key != "tool_call_id":
                raise InvalidRequestError(f"the chat template leaves out {what}")
            _check_order(self._conversation.turns)

    def _check_arguments(self, text: str) -> None:
        """Refuses variables without effect, such as those that the template sets itself. Default values are allowed."""
        for name in self._arguments:
            with _kept([self._arguments]):
                del self._arguments[name]
                for other in (None, False, True, _mark(0)):
                    if other is not None:
                        self._arguments[name] = other
                    if self._text_or_empty() != text:
                        break
                else:
                    raise InvalidRequestError(f"template_arguments: {name} makes no difference")

    def _places(self) -> Iterator[_Place]:
        """Yields the texts that each must have an effect."""
        for index, message in enumerate(self._messages):
            for key in ("content", "name"):
                if message.get(key):
                    yield _Place(f"messages[{index}].{key}", message, key)
            for number, call in enumerate(message.get("tool_calls", ())):
                yield _Place(f"messages[{index}].tool_calls[{number}]", call["function"], "name")
        for index, tool in enumerate(self._tools):
            for key in ("name", "description"):
                if key in tool["function"]:
                    yield _Place(f"tools[{index}].{key}", tool["function"], key)

    def _groups(self) -> Iterator[tuple[str, list[dict[str, Any]], str]]:
        """Yields name, dicts and key of the parts that must have an effect together."""
        functions = [tool["function"] for tool in self._tools]
        calls = [call["function"] for message in self._messages for call in message.get("tool_calls", ())]
        yield "parameters of tools", [tool for tool in functions if tool.get("parameters")], "parameters"
        yield "arguments of tool calls", [call for call in calls if call["arguments"]], "arguments"
        yield "tool_call_id", [message for message in self._messages if "tool_call_id" in message], "tool_call_id"

    def _text_or_empty(self) -> str:
        """Renders a changed conversation; empty if the template refuses it, which counts as an effect."""
        try:
            return self.text()
        except InvalidRequestError:
            if self._render_time.left_s < 0.0:
                raise
            return ""


def _mark(number: int) -> str:
    return f"Draftwire{number:06d}mark"


@contextmanager
def _kept(owners: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Reverts changes to some of the template's inputs at the end."""
    originals = [dict(owner) for owner in owners]
    try:
        yield
    finally:
        for owner, original in zip(owners, originals, strict=True):
            owner.clear()
            owner.update(original)  # in the same order, which templates may show


@dataclass(frozen=True, slots=True)
class _Template:
    """Variables and literals of a template."""

    variables: frozenset[str]
    """Variables that it reads without setting them first."""
    literals: frozenset[str]
    """Strings in its source: literals and the text between tags."""


class _Generation(Extension):
    """The `generation` block, with which training templates mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    @override
    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache
def parse_template(source: str) -> _Template:
    """Parses a chat template.

    Raises:
        jinja2.TemplateError: the text is none.
    """
    environment = ImmutableSandboxedEnvironment(extensions=[_Generation, "jinja2.ext.loopcontrols"])
    tree = environment.parse(source)
    literals = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    literals |= {node.data for node in tree.find_all(nodes.TemplateData)}
    return _Template(frozenset(meta.find_undeclared_variables(tree)), frozenset(literals - {""}))


def _turn_to_json(index: int, turn: ChatTurn) -> dict[str, Any]:
    """Returns a message in OpenAI's format, but with parsed arguments, as templates expect."""
    what = f"messages[{index}].tool_calls"
    calls = [_call_to_json(f"{what}[{number}]", call) for number, call in enumerate(turn.tool_calls)]
    given = {"name": turn.name, "tool_call_id": turn.tool_call_id, "tool_calls": calls}
    return {"role": turn.role, "content": turn.content} | {key: value for key, value in given.items() if value}


def _call_to_json(what: str, call: ToolCall) -> dict[str, Any]:
    if not call.name:
        raise InvalidRequestError(f"{what} has no name")
    function = {"name": call.name, "arguments": _arguments(f"{what}.arguments", call.arguments)}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def _arguments(what: str, text: str) -> dict[str, Any] | str:
    """Returns a call's arguments; as text where they are no JSON, as of an answer that was cut within them."""
    if not text.strip():
        return {}
    try:
        json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        pass  # too deep, which is refused in words
    return _json_object(what, text)


def _tool_to_json(index: int, tool: Tool) -> dict[str, Any]:
    if not tool.name:
        raise InvalidRequestError(f"tools[{index}] has no name")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = _json_object(f"tools[{index}].parameters", tool.parameters)
    return {"type": "function", "function": function}


def _json_object(what: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_object_of, parse_constant=_refuse_constant)
        if not isinstance(value, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:  # its message could quote the text
        raise InvalidRequestError(f"{what} has to be a JSON object, without a key twice") from error
    if _is_deeper_than(MAX_JSON_DEPTH, value):
        raise InvalidRequestError(f"{what} holds more than {MAX_JSON_DEPTH} objects and lists within each other")
    return value


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key twice")
    return made


def _refuse_constant(_: str) -> None:
    raise ValueError("NaN and infinity are no JSON")


def _is_deeper_than(levels: int, value: Any) -> bool:
    if not isinstance(value, dict | list):
        return False
    if levels == 0:
        return True
    inner = value.values() if isinstance(value, dict) else value
    return any(_is_deeper_than(levels - 1, one) for one in inner)


def _check_order(turns: tuple[ChatTurn, ...]) -> None:
    """Refuses tool call ids that contradict the order of the messages, if the template shows no ids."""
    waiting: list[str] = []
    for index, turn in enumerate(turns):
        if turn.tool_calls:
            waiting = [call.id for call in turn.tool_calls]
        elif turn.tool_call_id and (not waiting or waiting.pop(0) != turn.tool_call_id):
            raise InvalidRequestError(
                f"messages[{index}].tool_call_id: the chat template shows no ids, and the answers are not in the order "
                "of the calls"
            )
