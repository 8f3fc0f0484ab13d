"""Conversations are rendered as transformers renders them, and whatever the template leaves out is refused."""

import asyncio
import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from observing import until

from draftwire.client.prompts import chat_to_proto
from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.runtime.time_limits import Deadline
from draftwire_gateway.text import chat
from draftwire_gateway.text.chat import ChatTemplate, render
from draftwire_gateway.text.conversation import ChatTurn, Conversation, Tool, ToolCall
from tests.chat_templates import LLAMA, MISTRAL, PLAIN, QWEN, with_template

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("weather", "What it is like", json.dumps(SCHEMA))
TIME = Tool("time")
CALL = ToolCall("call00001", "weather", '{"city": "Bonn"}')
OTHER_CALL = ToolCall("call00002", "time", "{}")
USER, ASSISTANT, SYSTEM = ChatTurn("user", "Hello "), ChatTurn("assistant", "Hi, "), ChatTurn("system", "Be short.")
CALLING = ChatTurn("assistant", "", tool_calls=(CALL,))
ANSWER = ChatTurn("tool", "4 C", tool_call_id=CALL.id)
OTHER_ANSWER = ChatTurn("tool", "5", tool_call_id=OTHER_CALL.id)

MESSAGES: dict[ChatTurn, dict[str, Any]] = {
    USER: {"role": "user", "content": "Hello "},
    ASSISTANT: {"role": "assistant", "content": "Hi, "},
    SYSTEM: {"role": "system", "content": "Be short."},
    CALLING: {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}, "id": "call00001"}
        ],
    },
    ANSWER: {"role": "tool", "content": "4 C", "tool_call_id": "call00001"},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "What it is like", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "time"}},
]
"""The same in OpenAI's form, written down again."""


def said(*turns: ChatTurn, tools: tuple[Tool, ...] = (), arguments: dict[str, Any] | None = None) -> Conversation:
    return Conversation(turns, tools, "" if arguments is None else json.dumps(arguments))


def rendered(tokenizer: Any, conversation: Conversation) -> str:
    render_time = Deadline(chat.RENDER_SECONDS)
    render_time.begin()
    return render(tokenizer, "model", conversation, render_time)


def refusal(template: Any, conversation: Conversation) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        rendered(with_template(template), conversation)
    return str(refused.value)


RENDERED = {
    "llama": (LLAMA, said(SYSTEM, USER, ASSISTANT, USER)),
    "llama, tools": (LLAMA, said(SYSTEM, USER, CALLING, ANSWER, tools=(WEATHER, TIME))),
    "llama, variable": (LLAMA, said(USER, arguments={"date_string": "1 May 2025"})),
    "qwen": (QWEN, said(SYSTEM, USER, ASSISTANT, USER)),
    "qwen, tools": (QWEN, said(USER, CALLING, ANSWER, tools=(WEATHER, TIME))),
    "qwen, variable": (QWEN, said(USER, arguments={"enable_thinking": False})),
    "qwen, variable as it is anyway": (QWEN, said(USER, arguments={"enable_thinking": True})),
    "mistral": (MISTRAL, said(USER, ASSISTANT, USER)),
    "mistral, tools": (MISTRAL, said(USER, CALLING, ANSWER, ASSISTANT, USER, tools=(WEATHER, TIME))),
    "without tools": (PLAIN, said(USER, ASSISTANT, USER)),
    "several templates": ({"default": PLAIN, "tool_use": QWEN}, said(USER, CALLING, ANSWER, tools=(WEATHER,))),
    "default of several": ({"default": PLAIN, "tool_use": QWEN}, said(USER)),
}


def by_transformers(tokenizer: Any, conversation: Conversation, **options: Any) -> Any:
    return tokenizer.apply_chat_template(
        [MESSAGES[turn] for turn in conversation.turns],
        tools=TOOLS[: len(conversation.tools)] or None,
        tokenize=False,
        **options,
        **json.loads(conversation.template_arguments or "{}"),
    )


@pytest.mark.parametrize("name", RENDERED)
def test_text_is_that_of_transformers(name: str) -> None:
    template, conversation = RENDERED[name]
    tokenizer = with_template(template)
    text = rendered(tokenizer, conversation)
    assert text == by_transformers(tokenizer, conversation, add_generation_prompt=True)
    assert text != by_transformers(tokenizer, conversation, add_generation_prompt=False) or template is MISTRAL


@pytest.mark.parametrize("name", ["llama", "llama, tools", "llama, variable", "qwen", "qwen, tools", "without tools"])
def test_text_that_is_to_be_continued_ends_with_the_last_message(name: str) -> None:
    template, conversation = RENDERED[name]
    tokenizer = with_template(template)
    begun = replace(conversation, turns=(*conversation.turns, ASSISTANT), continues_last=True)
    text = rendered(tokenizer, begun)
    assert text == by_transformers(tokenizer, begun, continue_final_message=True)
    assert text.endswith("Hi,") or text.endswith("Hi, ")


REFUSED = {
    "tools, of which the template knows nothing": (PLAIN, said(USER, tools=(TIME,)), "has no place for tools"),
    "tools that this conversation has no place for": (MISTRAL, said(USER, ASSISTANT, tools=(TIME,)), "tools[0].name"),
    "a role that is left out": (PLAIN, said(SYSTEM, USER), "messages[0].content"),
    "a role that the template refuses": (MISTRAL, said(SYSTEM, USER), "Unknown role:"),
    "turns out of order": (MISTRAL, said(USER, USER), "Conversation roles must alternate"),
    "a name": (QWEN, said(replace(USER, name="bob")), "messages[0].name"),
    "an assistant's name": (MISTRAL, said(USER, replace(ASSISTANT, name="bob")), "messages[1].name"),
    "a content beside tool calls": (LLAMA, said(USER, replace(CALLING, content="Well")), "messages[1].content"),
    "tool calls": (PLAIN, said(USER, CALLING), "messages[1].tool_calls[0]"),
    "tool calls of a user": (QWEN, said(replace(USER, tool_calls=(CALL,))), "messages[0].tool_calls[0]"),
    "two tool calls where one is possible": (
        LLAMA,
        said(USER, replace(CALLING, tool_calls=(CALL, OTHER_CALL))),
        "single tool-calls",
    ),
    "the second of two tool calls": (
        PLAIN.replace("message.content", "(message.content ~ (message.tool_calls or [{}])[0].function)"),
        said(USER, replace(CALLING, tool_calls=(CALL, OTHER_CALL))),
        "tool_calls[1]",
    ),
    "a second system message": (
        LLAMA.replace("message['content'] | trim", "(message['content'] if message.role != 'system' else '')"),
        said(SYSTEM, USER, SYSTEM, USER),
        "messages[2].content",
    ),
    "the parameters of tools": (
        "{% for tool in tools %}{{ tool.function.name ~ tool.function.description }}{% endfor %}" + PLAIN,
        said(USER, tools=(WEATHER,)),
        "parameters of tools",
    ),
    "the description of a tool": (
        "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + PLAIN,
        said(USER, tools=(WEATHER,)),
        "tools[0].description",
    ),
    "the arguments of calls": (
        PLAIN.replace(
            "message.content", "(message.content ~ (message.tool_calls or [{'function': {}}])[0].function.name)"
        ),
        said(USER, CALLING),
        "arguments of tool calls",
    ),
    "an answer to no call": (QWEN, said(USER, ANSWER), "messages[1].tool_call_id"),
    "answers in another order": (
        QWEN,
        said(USER, replace(CALLING, tool_calls=(CALL, OTHER_CALL)), OTHER_ANSWER, ANSWER),
        "messages[2].tool_call_id",
    ),
    "a variable that the template does not have": (QWEN, said(USER, arguments={"depth": 1}), "are: enable_thinking"),
    "another template": (
        PLAIN + "{{ chat_template }}",
        said(USER, arguments={"chat_template": "{{ 1 }}"}),
        "template_arguments",
    ),
    "other messages": (QWEN, said(USER, arguments={"messages": []}), "template_arguments"),
    "what every template has": (MISTRAL, said(USER, arguments={"namespace": 1}), "template_arguments"),
    "a variable that the template sets itself": (
        LLAMA,
        said(USER, arguments={"system_message": "Obey."}),
        "system_message makes no difference",
    ),
    "a variable of no effect where the last message is continued": (
        QWEN,
        Conversation((USER, ASSISTANT), (), '{"enable_thinking": false}', continues_last=True),
        "enable_thinking makes no difference",
    ),
    "a variable of no effect here": (LLAMA, said(USER, arguments={"tools_in_user_message": True}), "no difference"),
    "arguments that are no JSON": (QWEN, Conversation((USER,), (), "{"), "template_arguments has to be"),
    "arguments that are no object": (QWEN, Conversation((USER,), (), "[1]"), "template_arguments has to be"),
    "arguments with a key twice": (
        QWEN,
        Conversation((USER,), (), '{"enable_thinking": true, "enable_thinking": false}'),
        "twice",
    ),
    "a number that is none": (QWEN, Conversation((USER,), (), '{"enable_thinking": NaN}'), "has to be a JSON object"),
    "parameters in 33 levels": (
        QWEN,
        said(USER, tools=(Tool("t", "", '{"a":' * 33 + "1" + "}" * 33),)),
        "32 objects and lists",
    ),
    "parameters in 100,000 levels": (
        QWEN,
        said(USER, tools=(Tool("t", "", '{"a":' * 100_000 + "1" + "}" * 100_000),)),
        "has to be a JSON object",
    ),
    "parameters with half a character": (QWEN, said(USER, tools=(Tool("t", "", '{"a": "\\ud800"}'),)), "UTF-8"),
    "a tool without a name": (QWEN, said(USER, tools=(Tool(""),)), "tools[0] has no name"),
    "a call without a name": (
        QWEN,
        said(replace(CALLING, tool_calls=(ToolCall("", "", "{}"),))),
        "messages[0].tool_calls[0] has no name",
    ),
    "a call without arguments": (
        QWEN,
        said(replace(CALLING, tool_calls=(ToolCall("", "time", "[]"),))),
        "messages[0].tool_calls[0].arguments has to be",
    ),
    "a call that is continued": (
        QWEN,
        Conversation((USER, replace(CALLING, content="Well")), continues_last=True),
        "messages[1].tool_calls[0]",
    ),
    "a content that is left out and continued": (
        PLAIN,
        Conversation((USER, SYSTEM), continues_last=True),
        "continue_final_message",
    ),
    "a template that is broken": ("{% if %}", said(USER), "cannot be used"),
    "several templates without a default": ({"tool_use": QWEN}, said(USER), "cannot be used"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_template_leaves_out_or_refuses_is_refused(name: str) -> None:
    template, conversation, says = REFUSED[name]
    assert says in refusal(template, conversation)


def test_answers_follow_the_order_of_calls_or_have_ids_that_the_text_shows() -> None:
    asked = (USER, replace(CALLING, tool_calls=(CALL, OTHER_CALL)))
    assert rendered(with_template(QWEN), said(*asked, ANSWER, OTHER_ANSWER))
    shown = rendered(with_template(MISTRAL), said(*asked, OTHER_ANSWER, ANSWER))
    assert '{"content": 5, "call_id": "call00002"}' in shown


def test_name_that_the_template_compares_and_does_not_show_is_not_left_out() -> None:
    template = PLAIN.replace("'User: '", "('Bob: ' if message.name == 'bob' else 'User: ')")
    assert rendered(with_template(template), said(replace(USER, name="bob"))).startswith("Bob: Hello")
    assert "messages[0].name" in refusal(template, said(replace(USER, name="alice")))


def test_reason_is_the_templates_own_and_does_not_quote_the_conversation() -> None:
    assert refusal(MISTRAL, said(ChatTurn("zebra", "x"))).endswith("Unknown role:")
    quoting = "{{ raise_exception(messages[0].content) }}"
    assert "zebra" not in refusal(quoting, said(ChatTurn("user", "zebra")))
    assert "zebra" not in refusal("{{ messages[0].content.zebra() }}", said(ChatTurn("user", "zebra")))
    continued = Conversation((USER, ChatTurn("system", "zebra")), continues_last=True)
    assert "zebra" not in refusal(PLAIN, continued)
    assert "zebra" not in refusal(QWEN, said(USER, arguments={"zebra": 1}))


def test_every_block_that_transformers_reads_is_read() -> None:
    """Templates for training have blocks, and loops that can be left."""
    template = PLAIN.replace("{% if message.role", "{% if loop.index > 2 %}{% break %}{% endif %}{% if message.role", 1)
    assert rendered(with_template(template), said(USER, ASSISTANT))
    assert "messages[2].content" in refusal(template, said(USER, ASSISTANT, USER))


async def test_model_without_a_template_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await ChatTemplate(with_template(None), "model").render(said(USER))


def test_conversation_has_one_message_with_the_characters_of_all_its_parts() -> None:
    call = ToolCall("1", "22", "333")
    turn = ChatTurn("4444", "55555", "666666", (call,), "7777777")
    tool = Tool("a" * 100, "b" * 200, "c" * 300)
    assert Conversation((turn,), (tool,), "d" * 1000).num_characters == 1 + 2 + 3 + 4 + 5 + 6 + 7 + 600 + 1000
    for turns, tools, says in (
        ((), (), "prompt is empty"),
        ((USER,), (Tool("a", "b" * 999_999, "{}"),), "at most 1000000"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            Conversation(turns, tools)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes renderings wait until they are let go, and little time for them."""
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.2)
    released = threading.Event()
    original = chat.render

    def waiting(*args: Any) -> str:
        released.wait(20.0)
        return original(*args)

    monkeypatch.setattr(chat, "render", waiting)
    yield released
    released.set()


async def test_rendering_that_hangs_is_given_up_and_the_event_loop_goes_on(stuck: Any) -> None:
    template = ChatTemplate(with_template(QWEN), "model")
    before = time.monotonic()
    with pytest.raises(InvalidRequestError, match="needs more than"):
        await template.render(said(USER))
    assert time.monotonic() - before < 10.0, "not the time of the rendering"


async def test_conversations_that_wait_for_others_are_told_to_come_back(stuck: Any) -> None:
    template = ChatTemplate(with_template(QWEN), "model")
    waiting = [template.render(said(USER)) for _ in range(chat.RENDER_THREADS + 2)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    kinds = [type(result) for result in results]
    assert kinds == [InvalidRequestError] * chat.RENDER_THREADS + [NoRoomError] * 2


async def test_conversation_whose_time_others_used_up_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins before its time is over, and takes little."""
    monkeypatch.setattr(chat, "RENDER_SECONDS", 1.0)
    original = chat.render

    def slow(*args: Any) -> str:
        time.sleep(0.7)
        return original(*args)

    monkeypatch.setattr(chat, "render", slow)
    template = ChatTemplate(with_template(QWEN), "model")
    waiting = [template.render(said(USER)) for _ in range(chat.RENDER_THREADS + 1)]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [str] * chat.RENDER_THREADS + [NoRoomError]


async def test_callers_take_turns_at_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    released, begun = threading.Event(), list[str]()

    def note(_tokenizer: Any, _name: str, conversation: Conversation, _time: Deadline) -> str:
        begun.append(conversation.turns[0].content)
        released.wait(10.0)
        return ""

    monkeypatch.setattr(chat, "render", note)
    template = ChatTemplate(with_template(QWEN), "model")
    callers = "a" * (chat.RENDER_THREADS + 3) + "bbc"
    turns = [
        asyncio.create_task(template.render(said(ChatTurn("user", f"{caller}{number}")), caller))
        for number, caller in enumerate(callers)
    ]
    await until(lambda: len(begun) == chat.RENDER_THREADS, "the first conversations are rendered")
    released.set()
    await asyncio.gather(*turns)
    assert sorted("".join(name[0] for name in begun[chat.RENDER_THREADS : chat.RENDER_THREADS + 3])) == ["a", "b", "c"]


def test_time_that_others_used_up_is_noticed_between_renderings() -> None:
    before = time.monotonic() - 2 * chat.RENDER_SECONDS
    late = Deadline(chat.RENDER_SECONDS, before, begun_at=before + chat.RENDER_SECONDS / 2)
    with pytest.raises(NoRoomError, match="busy"):
        render(with_template(QWEN), "model", said(USER), late)


async def test_too_many_waiting_conversations_are_refused_at_once(stuck: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_WAITING", 3)
    template = ChatTemplate(with_template(QWEN), "model")
    results = await asyncio.gather(*(template.render(said(USER)) for _ in range(4)), return_exceptions=True)
    assert [isinstance(result, NoRoomError) and "limit" in str(result) for result in results] == [False] * 3 + [True]
    stuck.set()
    assert await template.render(said(USER)), "those that have gone do not count"


def test_time_is_looked_at_between_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that takes a little for each of very many comparisons."""
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.3)
    template = "{% for message in messages %}{{ message.content | length }}{% endfor %}"
    turns = tuple(ChatTurn("user", "x" * index) for index in range(1, 3000))
    before = time.monotonic()
    assert "needs more than" in refusal(template, said(*turns))
    assert time.monotonic() - before < 5.0


# The client


def decoded(prompt: Any) -> tuple[Any, ...]:
    """Returns what a message says, as the server reads it."""
    turns = tuple(
        ChatTurn(
            one.role,
            one.content,
            one.name,
            tuple(ToolCall(call.id, call.name, call.arguments) for call in one.tool_calls),
            one.tool_call_id,
        )
        for one in prompt.messages
    )
    tools = tuple(Tool(one.name, one.description, one.parameters) for one in prompt.tools)
    return turns, tools, prompt.template_arguments, prompt.continue_final_message


def test_openais_form_is_encoded_whole() -> None:
    turns = (SYSTEM, replace(USER, name="bob"), CALLING, ANSWER)
    messages = [MESSAGES[SYSTEM], MESSAGES[USER] | {"name": "bob"}, MESSAGES[CALLING], MESSAGES[ANSWER]]
    prompt = chat_to_proto(messages, TOOLS, {"enable_thinking": False}, True)
    assert decoded(prompt) == (turns, (WEATHER, TIME), '{"enable_thinking": false}', True)


def test_forms_that_mean_the_same_are_encoded_the_same() -> None:
    function = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    call = {"id": "call00001", "type": "function", "function": function}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    parts = {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo "}]}
    assert decoded(chat_to_proto([parts, answer]))[0] == (USER, CALLING)


USER_MESSAGE = MESSAGES[USER]
UNSENDABLE: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "unknown key": ([USER_MESSAGE | {"zebra": 1}], {}, "role, tool_call_id, tool_calls and nothing else"),
    "image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "zebra"}}]}],
        {},
        r"content\[0\] is not text",
    ),
    "text with annotations": (
        [{"role": "user", "content": [{"type": "text", "text": "a", "zebra": 1}]}],
        {},
        "text, type and nothing else",
    ),
    "content that is a number": ([{"role": "user", "content": 1}], {}, "content has to be text"),
    "no content": ([{"role": "user"}], {}, "has no content"),
    "no role": ([{"content": "zebra"}], {}, "has no role"),
    "role that is no text": ([{"role": 1, "content": "zebra"}], {}, "role has to be text"),
    "message that is none": ([USER_MESSAGE, "zebra"], {}, r"messages\[1\] has to be a dict"),
    "one call": ([{"role": "assistant", "tool_calls": {"name": "zebra"}}], {}, "tool_calls has to be a list"),
    "call of another type": (
        [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}],
        {},
        "function, id, type and nothing else",
    ),
    "call without a type": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "zebra", "arguments": "{}"}}]}],
        {},
        'of the type "function"',
    ),
    "arguments that are a list": (
        [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "a", "arguments": [1]}}]}],
        {},
        "arguments has to be a dict",
    ),
    "tool without a function": ([USER_MESSAGE], {"tools": [{"type": "function"}]}, "function has to be a dict"),
    "tool that is strict": (
        [USER_MESSAGE],
        {"tools": [{"type": "function", "function": {"name": "zebra", "strict": True}}]},
        "description, name, parameters and nothing else",
    ),
    "one tool": ([USER_MESSAGE], {"tools": TOOLS[0]}, "tools are lists"),
    "template_arguments that are a list": ([USER_MESSAGE], {"template_arguments": ["zebra"]}, "has to be a dict"),
    "what JSON does not have": ([USER_MESSAGE], {"template_arguments": {"a": float("nan")}}, "JSON does not have"),
}


@pytest.mark.parametrize("name", UNSENDABLE)
def test_what_has_no_field_is_refused_by_the_client(name: str) -> None:
    messages, options, says = UNSENDABLE[name]
    with pytest.raises(InvalidRequestError, match=says) as refused:
        chat_to_proto(messages, **options)
    assert "zebra" not in str(refused.value)


WITH_SYSTEM = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}{{ '<assistant>' }}"


def test_system_message_tells_of_tools_where_templates_have_no_place() -> None:
    told = (
        'Call functions by a list in JSON: [{"name": ..., "arguments": {...}}]. These are there:\n'
        f'{{"name": "weather", "description": "What it is like", "parameters": {json.dumps(SCHEMA)}}}\n'
        '{"name": "time", "parameters": {}}\n'
    )
    tokenizer = with_template(WITH_SYSTEM)
    assert not ChatTemplate(tokenizer, "m").takes_tools
    assert ChatTemplate(with_template(QWEN), "m").takes_tools
    conversation = said(USER, tools=(WEATHER, TIME)).with_tools_told()
    assert rendered(tokenizer, conversation) == f"<system>{told}<user>Hello <assistant>"
    conversation = said(SYSTEM, USER, tools=(WEATHER, TIME)).with_tools_told()
    assert rendered(tokenizer, conversation) == f"<system>Be short.\n\n{told}<user>Hello <assistant>"
