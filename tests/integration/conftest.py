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
    """Reads one number from a service's `/metrics`: the only one of that name, or the one with these labels."""
    url = f"http://{host}:{stack.services[service].metrics_port}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    wanted = re.escape(labels) or "[^}]*"
    match = re.search(rf"^draftwire:{name}(?:_total)?(?:{{{wanted}}})? (\S+)$", text, re.MULTILINE)
    assert match is not None, f"{service} exports no {name}"
    return float(match.group(1))
