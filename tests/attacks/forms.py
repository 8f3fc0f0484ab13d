"""Forms that cost more to compile than they are long, and grammars that cost more to search."""

import http.client
import json
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

from draftwire.cli.local_stack import LocalStack
from draftwire.cli.up_command import stack_options
from tests.attacks.victim import Figures, Victim, attack

NUM_ATTACKERS = 4
OTHER_HOST = "127.0.0.2"
"""Where a user comes from who has nothing to do with the attackers."""


def endless_form(number: int) -> dict[str, Any]:
    """Returns a schema whose compilation ends after hours; another one for each number."""
    if number % 2:
        return {"type": "integer", "multipleOf": 9_999_991 - 2 * number}
    patterns = [f".*{(one * 7 + number) % 1000:03}.*" for one in range(40)]
    return {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}


@cache
def model_of(address: str) -> str:
    with urllib.request.urlopen(f"{address}/v1/models") as response:
        return str(json.load(response)["data"][0]["id"])


def ask(address: str, body: dict[str, Any], source: str = "127.0.0.1", timeout_s: float = 30.0) -> tuple[int, float]:
    """Sends a completion over HTTP; returns the status, or 0 without an answer, and how long it took, seconds."""
    started = time.monotonic()
    connection = http.client.HTTPConnection(
        address.removeprefix("http://"), timeout=timeout_s, source_address=(source, 0)
    )
    with suppress(OSError, http.client.HTTPException):
        text = json.dumps({"model": model_of(address), "prompt": "a", "max_tokens": 4} | body)
        connection.request("POST", "/v1/completions", text, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status, time.monotonic() - started
    return 0, time.monotonic() - started


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"structured_output": {"json": schema}}


@attack("user")
def endless_forms(victim: Victim) -> Figures:
    """Several connections send forms that never end; another user's forms are to be compiled all the same."""
    until = time.monotonic() + victim.seconds
    statuses, others, peaks = Counter[int](), [], Counter[str]()

    def send(first: int) -> None:
        number = first
        while time.monotonic() < until:
            status, _ = ask(victim.http, form(endless_form(number)))
            statuses[status] += 1
            number += NUM_ATTACKERS

    with ThreadPoolExecutor(NUM_ATTACKERS) as threads:
        attackers = [threads.submit(send, number) for number in range(NUM_ATTACKERS)]
        number = 0
        while time.monotonic() < until:
            number += 1
            others.append(ask(victim.http, form({"enum": ["yes", "no", f"{number}"]}), OTHER_HOST))
            for name in victim.pids:
                peaks[name] = max(peaks[name], round(victim.resident_mib(name)))
            time.sleep(0.1)
        for attacker in attackers:
            attacker.result()
    return {
        "statuses": dict(statuses),
        "others_refused": sum(status != 200 for status, _ in others),
        "others_slowest_s": max(seconds for _, seconds in others),
        "peak_mib": dict(peaks),
    }


@attack("user")
def newlines_as_grammar(victim: Victim) -> Figures:
    """A grammar of many newlines, and others that backtracking searches read again and again."""
    until, statuses = time.monotonic() + victim.seconds, Counter[int]()
    while time.monotonic() < until:
        for filling in ("\n" * 24_000, "<" * 24_000, "start[" * 4_000, '"\\' * 12_000, "/\\" * 12_000):
            status, _ = ask(victim.http, {"structured_output": {"grammar": f'start: "a"\n{filling}'}})
            statuses[status] += 1
    return {"statuses": dict(statuses)}


@attack("user")
def forms_at_the_end(victim: Victim) -> Figures:
    """Services of its own are told to stop while forms that never end are compiled. `victim` is left alone."""
    with LocalStack(stack_options(None, None, 4)) as stack, ThreadPoolExecutor(NUM_ATTACKERS) as threads:
        for number in range(NUM_ATTACKERS):
            threads.submit(ask, stack.http_address, form(endless_form(number)), timeout_s=5.0)
        time.sleep(1.0)
        left = []
        for name, service in stack.services.items():
            service.process.send_signal(signal.SIGTERM)
            try:
                service.process.wait(30.0)  # sessions may go on for 20 s
            except subprocess.TimeoutExpired:
                left.append(name)
                service.process.kill()
    if left:
        raise RuntimeError(f"still running after SIGTERM: {left}")
    return {"left": left}


@attack("user")
def patterns_that_meet(victim: Victim) -> Figures:
    """A schema that compiles in milliseconds, and has a derivative without end after thirty x."""
    patterns = [f"^(x{{0,30}}z|x{{30}}y.*{number:03}.*)$" for number in range(40)]
    schema = {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    asked = form(schema) | {"prompt": '"' + "x" * 300, "max_tokens": 40, "temperature": 0}
    status, seconds = ask(victim.http, asked, timeout_s=victim.seconds)
    return {"status": status, "seconds": seconds}
