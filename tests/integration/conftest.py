"""The three real services with tiny models."""

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.law import save_tiny_pair, stack_options
from draftwire.client import Client
from draftwire.services.local_stack import LocalStack


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def stack(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    """One stack for all tests that leave it as it was."""
    with LocalStack(stack_options(*pair)) as running:
        yield running


@pytest.fixture
def client(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.address) as connected:
        yield connected


def read_metric(stack: LocalStack, service: str, name: str, labels: str = "", host: str = "127.0.0.1") -> float:
    """Reads one number from a service's `/metrics`: the only one of that name, or the one with these labels.

    What `labels` does not name may have any value.
    """
    url = f"http://{host}:{stack.services[service].metrics_port}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    name, wanted = name.partition("{")[0], {*re.findall(r'\w+="[^"]*"', name), *re.findall(r'\w+="[^"]*"', labels)}
    lines = re.finditer(rf"^draftwire:{name}(?:_total)?(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    for labels_of_line, value in (line.groups() for line in lines):
        if wanted <= set(re.findall(r'\w+="[^"]*"', labels_of_line or "")):
            return float(value)
    raise AssertionError(f"{service} exports no {name}{wanted or ''}")
