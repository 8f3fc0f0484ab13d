"""What tests see of running services from outside, and how they wait for it."""

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Stack(Protocol):
    """Running services: of `LocalStack` or `InProcessStack`."""

    @property
    def services(self) -> dict[str, Any]:
        """By name."""


def read_metric(stack: Stack, service: str, name: str, labels: str = "", host: str = "127.0.0.1") -> float:
    """Reads one number from a service's `/metrics`: the first of `read_metrics`."""
    numbers = read_metrics(stack, service, name, labels, host)
    if not numbers:
        raise AssertionError(f"{service} exports no {name} {labels}")
    return numbers[0]


def read_metrics(stack: Stack, service: str, name: str, labels: str = "", host: str = "127.0.0.1") -> list[float]:
    """Reads a service's numbers of this name and with these labels from `/metrics`.

    What `labels` does not name may have any value: a drafter that has come back, say, has a second address.
    """
    url = f"http://{host}:{stack.services[service].metrics_port}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    name, wanted = name.partition("{")[0], {*re.findall(r'\w+="[^"]*"', name), *re.findall(r'\w+="[^"]*"', labels)}
    lines = re.finditer(rf"^draftwire:{name}(?:_total)?(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return [
        float(value)
        for labels_of_line, value in (line.groups() for line in lines)
        if wanted <= set(re.findall(r'\w+="[^"]*"', labels_of_line or ""))
    ]


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and that nobody has waited for does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], object], reason: str, seconds: float = 20.0) -> None:
    """Returns once a condition holds, looked at a hundred times a second.

    Raises:
        AssertionError: it did not hold in time; the message names the reason for waiting.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {reason}"
        time.sleep(0.01)


async def until(condition: Callable[[], object], reason: object, seconds: float = 10.0) -> None:
    """`wait_until` for what happens in this event loop. The reason is formatted when the time is over.

    Raises:
        AssertionError: it did not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {reason}"
        await asyncio.sleep(0.002)
