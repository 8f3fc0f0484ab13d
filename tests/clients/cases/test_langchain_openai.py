"""LangChain's ChatOpenAI."""

import pytest
from conftest import check_person
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """Somebody."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def chat(url: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, model=model, max_tokens=200)


def test_text(chat: ChatOpenAI) -> None:
    assert chat.invoke("Who is it?").content


def test_streaming(chat: ChatOpenAI) -> None:
    assert "".join(str(chunk.content) for chunk in chat.stream("Who is it?"))


def test_tools(chat: ChatOpenAI) -> None:
    answer = chat.bind_tools([Person], tool_choice="Person").invoke("Who is it?")
    (call,) = answer.tool_calls
    assert call["name"] == "Person"
    check_person(call["args"])
    assert chat.bind_tools([Person]).invoke("Who is it?") is not None


def test_streamed_tools(chat: ChatOpenAI) -> None:
    whole = None
    for chunk in chat.bind_tools([Person], tool_choice="any", parallel_tool_calls=False).stream("Who is it?"):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    check_person(call["args"])


def test_schema(chat: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Person, method=method).invoke("Who is it?")
        check_person(found.model_dump())


def test_responses(url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=url, model=model, max_tokens=16, use_responses_api=True)
    assert chat.invoke("Who is it?").content
