"""pydantic-ai, by chat completions and by responses."""

import asyncio

import pytest
from conftest import check_person
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

SETTINGS = ModelSettings(max_tokens=1000)


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def chat(url: str, model: str) -> OpenAIChatModel:
    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=url))


def test_text(chat: OpenAIChatModel) -> None:
    agent = Agent(chat, instructions="Be short.", model_settings=ModelSettings(max_tokens=32))
    first = agent.run_sync("Who is it?")
    assert first.output
    assert agent.run_sync("And then?", message_history=first.all_messages()).output


def test_streaming(chat: OpenAIChatModel) -> None:
    async def stream() -> str:
        async with Agent(chat, model_settings=ModelSettings(max_tokens=32)).run_stream("Who is it?") as result:
            return "".join([delta async for delta in result.stream_text(delta=True)])

    assert asyncio.run(stream())


def test_tools(chat: OpenAIChatModel) -> None:
    """What is asked for is a tool's arguments, the default of the package."""
    found = Agent(chat, output_type=Person, model_settings=SETTINGS).run_sync("Who is it?").output
    check_person(found.model_dump())


def test_schema(chat: OpenAIChatModel) -> None:
    found = Agent(chat, output_type=NativeOutput(Person), model_settings=SETTINGS).run_sync("Who is it?").output
    check_person(found.model_dump())


def test_responses(url: str, model: str) -> None:
    responses = OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=url))
    found = Agent(responses, output_type=Person, model_settings=SETTINGS).run_sync("Who is it?").output
    check_person(found.model_dump())
