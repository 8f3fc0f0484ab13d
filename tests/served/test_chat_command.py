"""`draftwire chat` with a target that has a chat template."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from terminal import SGR, Terminal
from transformers import AutoTokenizer

from benchmarks.law import stack_options
from draftwire.client import Client
from tests.in_process import InProcessStack
from tests.tiny_models import save_tiny_model

WORDS = ["<unk>", "system", "user", "assistant", "hello", "sun", "rain", "Bonn", "</s>"]
TEMPLATE = (
    "{% for message in messages %} {{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %} assistant {% endif %}"
)
SYSTEM = {"role": "system", "content": "sun rain"}
OPTIONS = ["--seed", "5", "--max-tokens", "6", "--ignore-eos", "--system", "sun rain"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessStack]:
    folder = tmp_path_factory.mktemp("chat")
    target, drafter = (
        save_tiny_model(folder / name, len(WORDS), seed, tokens=WORDS) for name, seed in (("target", 6), ("drafter", 9))
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    with InProcessStack(stack_options(target, drafter)) as running:
        yield running


def answers(stack: InProcessStack, *messages: str) -> list[str]:
    """What the model answers in a conversation, asked by the client."""
    said, found = [SYSTEM], []
    with Client(stack.address) as client:
        for message in messages:
            said.append({"role": "user", "content": message})
            # The rule "coupled" gives the same text for a seed, wherever the blocks end.
            done = client.generate(said, seed=5, max_tokens=6, ignore_eos=True, rejection_sample_method="coupled")
            said.append({"role": "assistant", "content": done.text})
            found.append(done.text)
    return found


COUPLED = ["--rejection-sample-method", "coupled"]


def test_piped_conversation_is_the_clients(stack: InProcessStack) -> None:
    command = [sys.executable, "-m", "draftwire.cli", "chat", *OPTIONS, *COUPLED, "--address", stack.address, "-q"]
    result = subprocess.run(
        command, input="hello Bonn\nrain\n", capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert (result.returncode, result.stderr) == (0, "")
    first, second = answers(stack, "hello Bonn", "rain")
    assert first
    assert result.stdout == f"{first}\n{second}\n"


def test_conversation_at_a_terminal_takes_commands_and_ends_with_ctrl_d(stack: InProcessStack) -> None:
    first, second = answers(stack, "hello Bonn", "rain")
    (alone,) = answers(stack, "rain")
    with Terminal("chat", *OPTIONS, *COUPLED, "--address", stack.address) as terminal:
        terminal.wait_for("> ")
        for text, expected in (("hello Bonn", first), ("rain", second), ("/reset", ""), ("rain", alone)):
            start = len(terminal.shown)
            terminal.type(text + "\n")
            terminal.wait_for("> ", after=start + len(text))
            assert expected in SGR.sub("", terminal.shown[start:])
        start = len(terminal.shown)
        terminal.type("/stats\n")
        terminal.wait_for("acceptance rate", after=start)
        terminal.wait_for("> ", after=start + 10)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "\x1b[38;5;29m" in terminal.shown, "accepted tokens"


def test_ctrl_c_at_the_prompt_leaves(stack: InProcessStack) -> None:
    with Terminal("chat", *OPTIONS, "--address", stack.address) as terminal:
        terminal.wait_for("> ")
        # Python notices a signal that comes just before it waits for a key with the next key alone.
        while not terminal.ends_after("\x03", seconds=3.0):
            pass
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown
