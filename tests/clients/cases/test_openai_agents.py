"""OpenAI's Agents SDK, by chat completions and by responses."""

import asyncio
from typing import Annotated

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import Field

set_tracing_disabled(True)
SEEN: list[tuple[str, int]] = []


@function_tool
def person(name: Annotated[str, Field(max_length=12)], age: Annotated[int, Field(ge=0, le=120)]) -> str:
    """Looks somebody up."""
    SEEN.append((name, age))
    return "nobody"


def agent_of(url: str, model: str, kind: type, **settings: object) -> Agent:
    client = openai.AsyncOpenAI(base_url=url)
    return Agent(
        name="somebody",
        instructions="Be short.",
        tools=[person],
        model=kind(model=model, openai_client=client),
        model_settings=ModelSettings(max_tokens=1000, parallel_tool_calls=False, **settings),
    )


def run(agent: Agent) -> object:
    return asyncio.run(Runner.run(agent, "Who is it?", max_turns=4, run_config=RunConfig())).final_output


def test_text(url: str, model: str) -> None:
    """With a strict tool that the model may call or not."""
    assert isinstance(run(agent_of(url, model, OpenAIChatCompletionsModel)), str)


def test_tools(url: str, model: str) -> None:
    """A call, its output, and an answer to that: the choice is free again after the first call."""
    SEEN.clear()
    assert isinstance(run(agent_of(url, model, OpenAIChatCompletionsModel, tool_choice="required")), str)
    assert SEEN
    assert all(isinstance(age, int) for _, age in SEEN)


def test_streamed_tools(url: str, model: str) -> None:
    async def stream() -> None:
        agent = agent_of(url, model, OpenAIChatCompletionsModel, tool_choice="required")
        result = Runner.run_streamed(agent, "Who is it?", max_turns=4)
        async for _ in result.stream_events():
            pass

    SEEN.clear()
    asyncio.run(stream())
    assert SEEN


def test_responses(url: str, model: str) -> None:
    SEEN.clear()
    assert isinstance(run(agent_of(url, model, OpenAIResponsesModel, tool_choice="required")), str)
    assert SEEN
