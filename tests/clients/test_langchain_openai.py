"""LangChain's ChatOpenAI."""

import pytest
from conftest import check_person
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@tool
def person(name: str, age: int) -> str:
    """Looks somebody up."""
    return name


@pytest.fixture(scope="module")
def chat(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, model=model, max_tokens=200)


def test_text(chat: ChatOpenAI) -> None:
    assert chat.invoke("Who is it?").content


def test_streaming(chat: ChatOpenAI) -> None:
    assert "".join(str(chunk.content) for chunk in chat.stream("Who is it?"))


def test_tools(chat: ChatOpenAI) -> None:
    answer = chat.bind_tools([person], tool_choice="person").invoke("Who is it?")
    (call,) = answer.tool_calls
    assert (call["name"], set(call["args"])) == ("person", {"name", "age"})
    assert chat.bind_tools([person]).invoke("Who is it?") is not None


def test_streamed_tools(chat: ChatOpenAI) -> None:
    whole = None
    for chunk in chat.bind_tools([person], tool_choice="any", parallel_tool_calls=False).stream("Who is it?"):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    assert set(call["args"]) == {"name", "age"}


def test_schema(chat: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Person, method=method).invoke("Who is it?")
        check_person(found.model_dump())


def test_responses(url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=url, model=model, max_tokens=16, use_responses_api=True)
    assert chat.invoke("Who is it?").content
