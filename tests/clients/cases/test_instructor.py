"""instructor, in its default mode, that of schemas and that of responses."""

import instructor
import openai
from conftest import check_person
from pydantic import BaseModel, Field

ASKED = [{"role": "user", "content": "Who is it?"}]


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


def check(url: str, model: str, mode: object) -> None:
    more = {} if mode is None else {"mode": mode}
    client = instructor.from_openai(openai.OpenAI(base_url=url), **more)
    found = client.chat.completions.create(model=model, messages=ASKED, response_model=Person, max_retries=0)
    check_person(found.model_dump())


def test_tools(url: str, model: str) -> None:
    check(url, model, None)


def test_schema(url: str, model: str) -> None:
    check(url, model, instructor.Mode.JSON_SCHEMA)


def test_responses(url: str, model: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=url), mode=instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(model=model, input="Who is it?", response_model=Person, max_retries=0)
    check_person(found.model_dump())
