"""Forms that cost more to compile than they are long, and grammars that cost more to search."""

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from tests.attacks.http_requests import ask, complete, model_of
from tests.attacks.victim import Attack, Figures, Victim, attack, judged

NUM_ATTACKERS = 4
OTHER_HOST = "127.0.0.2"
"""Where a user comes from who has nothing to do with the attackers."""


def endless_form(number: int) -> dict[str, Any]:
    """Returns a schema whose compilation ends after hours; another one for each number."""
    if number % 2:
        return {"type": "integer", "multipleOf": 9_999_991 - 2 * number}
    patterns = [f".*{(one * 7 + number) % 1000:03}.*" for one in range(40)]
    return {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"structured_output": {"json": schema}}


@attack("user")
def endless_forms(victim: Victim) -> Figures:
    """Several connections send forms that never end; another user's forms are to be compiled all the same."""
    until = time.monotonic() + victim.seconds
    statuses, others = Counter[int](), []

    def send(first: int) -> None:
        number = first
        while time.monotonic() < until:
            status, _ = complete(victim.http, form(endless_form(number)))
            statuses[status] += 1
            number += NUM_ATTACKERS

    with ThreadPoolExecutor(NUM_ATTACKERS) as threads:
        attackers = [threads.submit(send, number) for number in range(NUM_ATTACKERS)]
        number = 0
        while time.monotonic() < until:
            number += 1
            others.append(complete(victim.http, form({"enum": ["yes", "no", f"{number}"]}), source=OTHER_HOST))
            time.sleep(0.1)
        for attacker in attackers:
            attacker.result()
    figures = {"statuses": dict(statuses), "others": len(others), "others_slowest_s": max(s for _, s in others)}
    return judged(
        figures,
        {
            "an endless form was compiled": 200 in statuses,
            "requests were not answered": 0 in statuses,
            "forms of others were refused": any(status != 200 for status, _ in others),
        },
    )


@attack("user")
def newlines_as_grammar(victim: Victim) -> Figures:
    """A grammar of many newlines, and others that backtracking searches read again and again."""
    until, statuses = time.monotonic() + victim.seconds, Counter[int]()
    while time.monotonic() < until:
        for filling in ("\n" * 24_000, "<" * 24_000, "start[" * 4_000, '"\\' * 12_000, "/\\" * 12_000):
            status, _ = complete(victim.http, {"structured_output": {"grammar": f'start: "a"\n{filling}'}})
            statuses[status] += 1
    return judged({"statuses": dict(statuses)}, {"requests were not answered": 0 in statuses})


@attack("user")
def forms_at_the_end(victim: Victim) -> Figures:
    """Services of its own are told to stop while forms that never end are compiled. `victim` is left alone."""
    with LocalStack(stack_options(EMBEDDED, None, 4)) as stack, ThreadPoolExecutor(NUM_ATTACKERS) as threads:
        for number in range(NUM_ATTACKERS):
            threads.submit(complete, stack.http_address, form(endless_form(number)), timeout_s=5.0)
        time.sleep(1.0)
        left = []
        for name, service in stack.services.items():
            service.process.send_signal(signal.SIGTERM)
            try:
                service.process.wait(30.0)  # sessions may go on for 20 s
            except subprocess.TimeoutExpired:
                left.append(name)
                service.process.kill()
    return judged({}, {f"{name} was running after SIGTERM": True for name in left})


@attack("user")
def patterns_that_meet(victim: Victim) -> Figures:
    """A schema that compiles in milliseconds, and has a derivative without end after thirty x."""
    patterns = [f"^(x{{0,30}}z|x{{30}}y.*{number:03}.*)$" for number in range(40)]
    schema = {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    asked = form(schema) | {"prompt": '"' + "x" * 300, "max_tokens": 40, "temperature": 0}
    status, seconds = complete(victim.http, asked, timeout_s=victim.seconds)
    return judged({"status": status, "seconds": seconds}, {"the request was not answered": status == 0})


NUM_FOLLOWED = 12
"""Sessions whose masks are to cost much."""
NUM_CALLING = 7
"""The same for chats, whose prompts have a schema of a thousand tokens: the cache has room for others."""


def follow(victim: Victim, forms: Sequence[dict[str, Any]], prompt: str = "a") -> Figures:
    """Several sessions at a time have long texts of these forms, by turns; those that are refused are sent again."""
    until, statuses = time.monotonic() + victim.seconds, Counter[int]()

    def send(first: int) -> None:
        number = first
        while time.monotonic() < until:
            fields = {"structured_output": forms[number % len(forms)], "prompt": prompt, "max_tokens": 100}
            status, _ = complete(victim.http, fields)
            statuses[status] += 1
            number += 1
            if status != 200:
                time.sleep(0.1)

    with ThreadPoolExecutor(NUM_FOLLOWED) as threads:
        for attacker in [threads.submit(send, number) for number in range(NUM_FOLLOWED)]:
            attacker.result()
    return judged({"statuses": dict(statuses)}, {"requests were not answered": 0 in statuses})


def expressions_of_that_size(victim: Victim) -> Figures:
    """Regular expressions as large as those grammars, whose masks cost what is usual: what the gaps are to be like."""
    return follow(victim, [{"regex": "(a|b)+(a|b)*(ab|ba)*"}])


@attack("user", control=expressions_of_that_size, max_ratio=2.0)
def ambiguous_grammars(victim: Victim) -> Figures:
    """Grammars that compile in a millisecond, and whose masks cost more the longer the text is."""
    both, right = 'start: e\ne: e e | "a" | "b"', 'start: s\ns: "a" s s | "a" | '
    nullable = 'start: e\ne: e f e | "a" | "b" | \nf: e e | "a" | '
    return follow(victim, [{"grammar": grammar} for grammar in (both, right, nullable)])


@attack("user", control=expressions_of_that_size, max_ratio=2.0)
def ambiguous_behind_a_beginning(victim: Victim) -> Figures:
    """One that random texts hardly ever reach, since it is behind one of many beginnings, and the model often does."""
    return follow(victim, [{"grammar": 'start: /[A-Z]{30}/ | e\ne: e e | "a" | "b"'}])


def lists_in_lists_without_end(num_kinds: int) -> dict[str, Any]:
    """Returns the schema of lists of nothing but such lists, which may be of any kind: each has another least length.

    A mask costs as much as there are pairs of kinds: 0.6 ms with 40 of them, and none is counted as slow.
    """
    kinds = [{"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": least} for least in range(1, num_kinds)]
    lists = {"$ref": "#/$defs/n"}
    return {"type": "object", "properties": {"x": lists}, "required": ["x"], "$defs": {"n": {"anyOf": kinds}}}


def fair_schema(num_bytes: int) -> dict[str, Any]:
    """Returns a schema of about so many bytes whose masks cost what is usual, and whose texts are as long."""
    text, lists = {"type": "string"}, {"type": "array", "items": {"type": "array"}, "minItems": 100}
    names = [f"name_{number:03}" for number in range(num_bytes // len('"name_000": {"type": "string"}, '))]
    optional = {"type": "object", "properties": dict.fromkeys(names, text)}
    return {"type": "object", "properties": {"x": lists, "y": optional}, "required": ["x"]}


def call_tool(schema: dict[str, Any]) -> Attack:
    """Returns what has several sessions at a time call a tool whose arguments have a schema.

    The first request is alone: the others find its prompt, with the schema, in the cache.
    """
    function = {"name": "f", "parameters": schema}

    def run(victim: Victim) -> Figures:
        statuses = Counter[int]()
        fields = {
            "model": model_of(victim.http),
            "messages": [{"role": "user", "content": "["}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "max_tokens": 100,
        }
        body = json.dumps(fields).encode()
        ask(victim.http, "/v1/chat/completions", body)
        until = time.monotonic() + victim.seconds

        def send() -> None:
            while time.monotonic() < until:
                status, _ = ask(victim.http, "/v1/chat/completions", body)
                statuses[status] += 1
                if status != 200:
                    time.sleep(0.1)

        with ThreadPoolExecutor(NUM_CALLING) as threads:
            for attacker in [threads.submit(send) for _ in range(NUM_CALLING)]:
                attacker.result()
        return judged({"statuses": dict(statuses)}, {"requests were not answered": 0 in statuses})

    return run


COSTLY_SCHEMA = lists_in_lists_without_end(36)


@attack("user", control=call_tool(fair_schema(len(json.dumps(COSTLY_SCHEMA)))))
def tool_of_a_costly_schema(victim: Victim) -> Figures:
    """A tool whose calls compile in milliseconds, and have masks that cost half a millisecond each."""
    return call_tool(COSTLY_SCHEMA)(victim)
