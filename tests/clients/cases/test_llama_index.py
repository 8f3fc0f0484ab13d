"""LlamaIndex's OpenAILike."""

import pytest
from conftest import check_person
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def llm(url: str, model: str) -> OpenAILike:
    return OpenAILike(
        model=model, api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True, max_tokens=400
    )


def test_text(llm: OpenAILike) -> None:
    assert llm.complete("Who is it?").text
    assert llm.chat([ChatMessage(role="user", content="Who is it?")]).message.content


def test_streaming(llm: OpenAILike) -> None:
    assert "".join(each.delta or "" for each in llm.stream_chat([ChatMessage(role="user", content="Who is it?")]))


def test_tools(llm: OpenAILike) -> None:
    def person(name: str, age: int) -> str:
        """Looks somebody up."""
        return f"{name} {age}"

    tool = FunctionTool.from_defaults(fn=person, fn_schema=Person)
    answer = llm.chat_with_tools([tool], user_msg="Who is it?", tool_required=True, allow_parallel_tool_calls=False)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "person"
    check_person(call.tool_kwargs)


def test_schema(llm: OpenAILike) -> None:
    found = llm.structured_predict(Person, PromptTemplate("Who is it?"))
    check_person(found.model_dump())
