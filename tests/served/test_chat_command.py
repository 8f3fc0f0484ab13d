"""`draftwire chat` with a target that has a chat template."""

from command_line import run
from terminal import SGR, Terminal

from draftwire.client import Client
from tests.in_process import InProcessStack

SYSTEM = {"role": "system", "content": "sun rain"}
OPTIONS = ["--seed", "5", "--max-tokens", "6", "--ignore-eos", "--system", "sun rain"]
COUPLED = ["--rejection-sample-method", "coupled"]
"""A rule that gives the same text for a seed, wherever the blocks end."""


def answers(chat_stack: InProcessStack, *messages: str) -> list[str]:
    """What the model answers in a conversation, asked by the client."""
    said, found = [SYSTEM], []
    with Client(chat_stack.address) as client:
        for message in messages:
            said.append({"role": "user", "content": message})
            done = client.generate(said, seed=5, max_tokens=6, ignore_eos=True, rejection_sample_method="coupled")
            said.append({"role": "assistant", "content": done.text})
            found.append(done.text)
    return found


def test_piped_conversation_is_the_clients(chat_stack: InProcessStack) -> None:
    command = ["chat", *OPTIONS, *COUPLED, "--address", chat_stack.address, "-q"]
    result = run(*command, typed="hello Bonn\nrain\n")
    assert (result.returncode, result.stderr) == (0, "")
    first, second = answers(chat_stack, "hello Bonn", "rain")
    assert first
    assert result.stdout == f"{first}\n{second}\n"


def test_conversation_at_a_terminal_takes_commands_and_ends_with_ctrl_d(chat_stack: InProcessStack) -> None:
    first, second = answers(chat_stack, "hello Bonn", "rain")
    (alone,) = answers(chat_stack, "rain")
    with Terminal("chat", *OPTIONS, *COUPLED, "--address", chat_stack.address) as terminal:
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


def test_ctrl_c_at_the_prompt_leaves(chat_stack: InProcessStack) -> None:
    with Terminal("chat", *OPTIONS, "--address", chat_stack.address) as terminal:
        terminal.wait_for("> ")
        # Python notices a signal that comes just before it waits for a key with the next key alone.
        while not terminal.ends_after("\x03", seconds=3.0):
            pass
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown
