"""What every engine's script has in common: options, and tasks and answers as lines of JSON."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypedDict


class Task(TypedDict):
    """Prompts to continue together."""

    prompts: list[list[int]]
    num_tokens: int
    """To generate for each prompt, exactly."""
    temperature: float
    seed: int


def parse_options(description: str | None) -> argparse.Namespace:
    """Returns the options of a script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--target", required=True, help="folder of the model")
    parser.add_argument("--drafter", help="folder of a draft model; the engine decodes plainly without")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--weights", default="f32", help="f32 or u8, of engines that have both")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-sessions", type=int, required=True, help="most prompts of a task")
    parser.add_argument("--cache-tokens", type=int, required=True, help="room of the KV cache")
    return parser.parse_args()


def answer_tasks(load: Callable[[], Callable[[Task], list[list[int]]]]) -> None:
    """Loads an engine and answers tasks until the standard input ends.

    Args:
        load: returns what continues the prompts of a task and returns their new tokens.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print
    generate = load()

    def say(facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    say({})
    for line in sys.stdin:
        task: Task = json.loads(line)
        started = time.perf_counter()
        token_ids = generate(task)
        say({"seconds": time.perf_counter() - started, "token_ids": token_ids})
