"""The stacks that tests share: one of each kind in a process, started by whoever asks first.

A test that needs a clean stack, or one of other options, starts its own and says why. See `InProcessStack`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from draftwire.client import Client
    from tests.in_process import InProcessStack

SCRIPT = "scripted:acceptance=0.8/0.5,verify_ms=2"
SCRIPTED_ROOM = 2048
"""Tokens of the KV cache of the scripted verifier: little, so that it can be filled."""
CHAT_WORDS = [
    "<unk>",
    "system",
    "user",
    "assistant",
    "tool",
    "tools",
    "call",
    "weather",
    "Bonn",
    "Paris",
    "hello",
    "sun",
    "rain",
    "</s>",
    "quiet",
]
"""The vocabulary of the pair that chats. A text of other words would be lost on the models."""
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %} tools {{ tool.function.name }} {{ tool.function.description }} {% endfor %}"
    "{% for message in messages %} {{ message.role }} {{ message.content }} "
    "{% for call in message.tool_calls or [] %} call {{ call.function.name }} {{ call.function.arguments.city }} "
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} assistant {{ 'quiet' if quiet else '' }} {% endif %}"
)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and a drafter with three tokens, whose law can be enumerated; see `benchmarks.law`."""
    from benchmarks.law import save_tiny_pair

    return save_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def stack(pair: tuple[Path, Path]) -> "Iterator[InProcessStack]":
    """The tiny pair. Also the stack of the laws."""
    from benchmarks.law import stack_options
    from tests.in_process import InProcessStack

    with InProcessStack(stack_options(*pair, max_tree_nodes=12)) as running:
        yield running


@pytest.fixture
def client(stack: "InProcessStack") -> "Iterator[Client]":
    """A client of the tiny pair."""
    from draftwire.client import Client

    with Client(stack.address) as connected:
        yield connected


@pytest.fixture(scope="session")
def scripted_stack() -> "Iterator[InProcessStack]":
    """No models: a script says what is accepted. The verifier has little room, for which nobody waits, and takes its
    time.
    """
    from benchmarks.law import stack_options
    from tests.in_process import InProcessStack

    options = stack_options(Path(SCRIPT), Path(SCRIPT))
    options["verifier"]["kv_cache_tokens"] = SCRIPTED_ROOM
    options["gateway"]["max_waiting_requests"] = 0
    with InProcessStack(options) as running:
        yield running


@pytest.fixture
def scripted_client(scripted_stack: "InProcessStack") -> "Iterator[Client]":
    """A client of the scripted pair."""
    from draftwire.client import Client

    with Client(scripted_stack.address) as connected:
        yield connected


@pytest.fixture(scope="session")
def chat_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target with a chat template, whose vocabulary is `CHAT_WORDS`, and of a drafter."""
    from transformers import AutoTokenizer

    from tests.tiny_models import save_tiny_model

    folder = tmp_path_factory.mktemp("chat")
    target = save_tiny_model(folder / "target", len(CHAT_WORDS), 6, tokens=CHAT_WORDS)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(target)
    return target, save_tiny_model(folder / "drafter", len(CHAT_WORDS), 9, tokens=CHAT_WORDS)


@pytest.fixture(scope="session")
def chat_stack(chat_pair: tuple[Path, Path]) -> "Iterator[InProcessStack]":
    """The pair that chats."""
    from benchmarks.law import stack_options
    from tests.in_process import InProcessStack

    with InProcessStack(stack_options(*chat_pair)) as running:
        yield running


@pytest.fixture(scope="session")
def embedded_stack() -> "Iterator[InProcessStack]":
    """The embedded pair, as `draftwire up` sets it up."""
    from draftwire.cli.named_models import EMBEDDED
    from draftwire.cli.stack_options import stack_options
    from tests.in_process import InProcessStack

    with InProcessStack(stack_options(EMBEDDED, None, 4)) as running:
        yield running
