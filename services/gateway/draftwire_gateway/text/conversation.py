"""Input of a chat template: messages, tools and template arguments."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from draftwire.errors import InvalidRequestError

MAX_CHAT_MESSAGES = 4096
"""Most messages of a conversation."""
MAX_TOOLS = 1024
"""Most tools of a conversation."""
MAX_TOOL_CALLS = 4096
"""Most tool calls, over all messages of a conversation."""
MAX_TOOL_CHARACTERS = 1_000_000
"""Most characters of all tools and arguments together: templates indent them, which multiplies their length."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in an assistant's message."""

    id: str
    """Empty if left out."""
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation; empty fields were left out."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    """Empty if left out."""
    parameters: str = ""
    """JSON schema, a JSON object; empty if left out."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt that a chat template renders.

    Raises:
        InvalidRequestError: the conversation is empty or too large.
    """

    turns: tuple[ChatTurn, ...]
    tools: tuple[Tool, ...] = ()
    template_arguments: str = ""
    """A JSON object of further variables of the template; empty for none."""
    continues_last: bool = False
    """Whether the model continues the last message instead of answering it."""

    def __post_init__(self) -> None:
        if not self.turns:
            raise InvalidRequestError("the prompt is empty")
        if sum(map(len, self._tool_texts())) > MAX_TOOL_CHARACTERS:
            raise InvalidRequestError(f"tools and template_arguments take at most {MAX_TOOL_CHARACTERS} characters")

    def with_tools_told(self) -> "Conversation":
        """Returns the conversation for a template without a place for tools: a system message tells of them."""
        told = 'Call functions by a list in JSON: [{"name": ..., "arguments": {...}}]. These are there:\n'
        for tool in self.tools:
            facts = {"name": tool.name, "description": tool.description or None}
            parameters = json.loads(tool.parameters) if tool.parameters else {}
            told += (
                json.dumps({key: value for key, value in facts.items() if value} | {"parameters": parameters}) + "\n"
            )
        first, *rest = self.turns
        if first.role == "system":
            turns = (replace(first, content=f"{first.content}\n\n{told}"), *rest)
        else:
            turns = (ChatTurn("system", told), *self.turns)
        return replace(self, turns=turns, tools=())

    @property
    def num_characters(self) -> int:
        """Total number of characters."""
        return sum(map(len, self._tool_texts())) + sum(map(len, self._turn_texts()))

    def _tool_texts(self) -> Iterator[str]:
        yield self.template_arguments
        for tool in self.tools:
            yield from (tool.name, tool.description, tool.parameters)

    def _turn_texts(self) -> Iterator[str]:
        for turn in self.turns:
            yield from (turn.role, turn.content, turn.name, turn.tool_call_id)
            for call in turn.tool_calls:
                yield from (call.id, call.name, call.arguments)
