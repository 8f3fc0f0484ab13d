"""Validity and cost of structured output: JSON of several schemas, and tool calls, beside free and plain decoding.

    python -m benchmarks.structured_output --output benchmarks/results/structured_output.json

Every schema is requested `--outputs` times through the three services, on the embedded pair, at temperature 1,
alternating with the same prompt unconstrained and with constrained plain decoding, so that noise of the machine affects
all three. Each text is parsed and checked against its schema by hand-written code, not by the library that makes the
masks. Times of masks are measured in this process, along the same texts, position by position.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from draftwire.client import Client, Completion, StructuredOutput
from draftwire.options.structured_output.grammar_automaton import FormCompiler, FormVocabulary


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _is_int(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_text(value: object, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most


@dataclass(frozen=True, slots=True)
class Task:
    """A schema with its prompt and check."""

    prompt: str
    schema: dict[str, Any]
    is_valid: Callable[[Any], bool]
    """Whether a parsed value is valid against the schema; written by hand."""
    tool: str = ""
    """Name of the function whose arguments have the schema, if the text is to be a call of it."""

    @property
    def form(self) -> StructuredOutput:
        """The form of the text."""
        if self.tool:
            return StructuredOutput.tool_calls("hermes", {self.tool: json.dumps(self.schema)}, at_most=1)
        return StructuredOutput.json(self.schema)

    def value_in(self, text: str) -> Any:
        """Returns what a text says, parsed.

        Raises:
            ValueError: it is no JSON, or no call.
        """
        if not self.tool:
            return json.loads(text)
        start, end = "<tool_call>\n", "\n</tool_call>"
        call = json.loads(text.removeprefix(start).removesuffix(end))
        if not (text.startswith(start) and text.endswith(end)) or list(call) != ["name", "arguments"]:
            raise ValueError("no call")
        return call["arguments"]


COORDINATE = {"type": "integer", "minimum": -99, "maximum": 99}
POINT = _object(x=COORDINATE, y=COORDINATE)
ROW = {"type": "array", "items": {"type": ["boolean", "null"]}, "minItems": 2, "maxItems": 3}
TASKS = {
    "pet": Task(
        "A pet:\n",
        _object(
            name={"type": "string", "maxLength": 16},
            kind={"enum": ["dog", "cat", "bird"]},
            age={"type": "integer", "minimum": 0, "maximum": 40},
            vaccinated={"type": "boolean"},
        ),
        lambda value: (
            list(value) == ["name", "kind", "age", "vaccinated"]
            and _is_text(value["name"], 16)
            and value["kind"] in ("dog", "cat", "bird")
            and _is_int(value["age"], 0, 40)
            and type(value["vaccinated"]) is bool
        ),
    ),
    "points": Task(
        "Points:\n",
        _object(points={"type": "array", "items": POINT, "minItems": 1, "maxItems": 4}),
        lambda value: (
            list(value) == ["points"]
            and 1 <= len(value["points"]) <= 4
            and all(list(p) == ["x", "y"] and all(_is_int(one, -99, 99) for one in p.values()) for p in value["points"])
        ),
    ),
    "table": Task(
        "A table:\n",
        {"type": "array", "items": ROW, "minItems": 1, "maxItems": 4},
        lambda value: (
            1 <= len(value) <= 4
            and all(2 <= len(row) <= 3 and all(cell in (True, False, None) for cell in row) for row in value)
        ),
    ),
    "order": Task(
        "An order:\n",
        _object(
            id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            state={"enum": ["open", "paid", "sent", None]},
            lines={
                "type": "array",
                "maxItems": 3,
                "items": _object(
                    item={"type": "string", "minLength": 1, "maxLength": 12},
                    count={"type": "integer", "minimum": 1, "maximum": 9},
                    marks={"type": "array", "items": {"enum": ["new", "gift"]}, "maxItems": 2},
                ),
            },
        ),
        lambda value: (
            list(value) == ["id", "state", "lines"]
            and len(value["id"]) == 7
            and value["id"][:2].isupper()
            and value["id"][2] == "-"
            and value["id"][3:].isdecimal()
            and value["state"] in ("open", "paid", "sent", None)
            and len(value["lines"]) <= 3
            and all(
                list(line) == ["item", "count", "marks"]
                and _is_text(line["item"], 12)
                and line["item"]
                and _is_int(line["count"], 1, 9)
                and len(line["marks"]) <= 2
                and all(mark in ("new", "gift") for mark in line["marks"])
                for line in value["lines"]
            )
        ),
    ),
}
TASKS["tool call"] = replace(TASKS["pet"], tool="pet")


@dataclass(slots=True)
class Ways:
    """Completions of each way, in order."""

    constrained: list[Completion] = field(default_factory=list)
    plain: list[Completion] = field(default_factory=list)
    """Constrained, without draft tokens."""
    free: list[Completion] = field(default_factory=list)
    """Unconstrained, as many tokens."""


def is_valid(completion: Completion, task: Task) -> bool:
    """Whether a text is JSON that is valid against its task's schema, and ended by a stop token."""
    try:
        return completion.finish_reason == "stop" and bool(task.is_valid(task.value_in(completion.text)))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return False


def ask(client: Client, task: Task, outputs: int, block_length: int) -> Ways:
    """Requests one task in all ways."""
    ways, form = Ways(), task.form
    for seed in progress(range(outputs), task.prompt.strip()):
        common: Any = {"temperature": 1.0, "seed": seed}
        one = client.generate(task.prompt, structured_output=form, num_speculative_tokens=block_length, **common)
        ways.constrained.append(one)
        ways.plain.append(client.generate(task.prompt, structured_output=form, num_speculative_tokens=0, **common))
        length = max(1, len(one.token_ids))
        ways.free.append(client.generate(task.prompt, max_tokens=length, num_speculative_tokens=block_length, **common))
    return ways


def summary(completions: Sequence[Completion]) -> dict[str, float]:
    """Returns acceptance rate, block efficiency, and the median of tokens per second."""
    accepted = sum(one.statistics.num_accepted_tokens for one in completions)
    drafted = sum(one.statistics.num_draft_tokens for one in completions)
    emitted = sum(one.statistics.num_emitted_tokens for one in completions)
    rounds = sum(one.statistics.num_rounds for one in completions)
    return {
        "acceptance_rate": accepted / max(1, drafted),
        "block_efficiency": emitted / rounds,
        "median_tokens_per_second": statistics.median(one.tokens_per_second for one in completions),
        "median_tokens": statistics.median(len(one.token_ids) for one in completions),
    }


def mask_times(compiler: FormCompiler, task: Task, completions: Sequence[Completion]) -> list[float]:
    """Returns the mask time of each position of the texts, microseconds."""
    times: list[float] = []
    for completion in completions:
        automaton = compiler.compile(task.form)
        for end in range(len(completion.token_ids)):
            started = time.perf_counter()
            automaton.masks(completion.token_ids[:end])
            times.append((time.perf_counter() - started) * 1e6)
    return times


def main() -> None:
    """Measures, checks, prints a line for each task and way, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--outputs", type=int, default=50, help="texts of each schema")
    parser.add_argument("--block-length", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    report: dict[str, object] = {}
    options = stack_options(EMBEDDED, None, arguments.block_length)
    folder = str(options["verifier"]["model"])
    with LocalStack(options) as stack, Client(stack.address) as client:
        description = client.server().target
        tokenizer = AutoTokenizer.from_pretrained(folder)
        compiler = FormCompiler(FormVocabulary.of(tokenizer, description.vocab_size, description.stop_token_ids))
        for name, task in TASKS.items():
            ways = ask(client, task, arguments.outputs, arguments.block_length)
            times = mask_times(compiler, task, ways.constrained)
            constrained, plain = summary(ways.constrained), summary(ways.plain)
            free = summary(ways.free)
            rate = "median_tokens_per_second"
            report[name] = {
                "valid": sum(is_valid(one, task) for one in ways.constrained),
                "valid_plain": sum(is_valid(one, task) for one in ways.plain),
                "outputs": arguments.outputs,
                "constrained": constrained,
                "constrained_plain": plain,
                "unconstrained": free,
                "speed_up_over_plain": constrained[rate] / plain[rate],
                "speed_beside_unconstrained": constrained[rate] / free[rate],
                "mask_us_median": statistics.median(times),
                "mask_us_99th": statistics.quantiles(times, n=100)[-1],
            }
            print(name, json.dumps(report[name], indent=1))
    write_report(arguments, report)


if __name__ == "__main__":
    main()
