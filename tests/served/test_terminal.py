"""The command line on a terminal and in pipes, with the embedded pair."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from command_line import run
from observing import read_metric, wait_until
from terminal import SGR, Terminal

from draftwire.cli.colors import PALETTE
from draftwire.method.token_source import TokenSource
from tests.in_process import InProcessStack

PROMPT = "def merge_sorted(a, b):"
GREEDY = ["--temperature", "0", "--max-tokens", "64", "--seed", "3", "--num-speculative-tokens", "4", "--ignore-eos"]
STATISTICS = (
    r"\d+ tokens · [\d.]+ tokens/s · block efficiency [\d.]+ · acceptance rate 0\.\d+ · \d+ rounds · rule block"
)


def code(source: TokenSource) -> str:
    number, mark = PALETTE[source]
    return f"\x1b[{mark}38;5;{number}m"


def test_terminal_shows_sources_of_tokens_and_a_pipe_the_text_alone(embedded_stack: InProcessStack) -> None:
    command = ["generate", PROMPT, *GREEDY, "--address", embedded_stack.address]
    piped = run(*command, NO_COLOR="", FORCE_COLOR="")
    assert piped.returncode == 0, piped.stderr
    assert "\x1b" not in piped.stdout + piped.stderr
    assert piped.stdout.startswith(PROMPT)
    assert len(piped.stdout) > 100
    assert re.fullmatch(STATISTICS + r" · seed 3", piped.stderr.strip())
    with Terminal(*command, "--stats") as terminal:
        assert terminal.wait() == 0
    for source in TokenSource:
        assert code(source) in terminal.shown, source
    legend, text = terminal.text.split("\n", 1)
    assert legend == "accepted · recovered (in place of a draft token) · bonus (after a whole block) · plain"
    assert text.startswith(piped.stdout)
    assert "time to first token" in text.removeprefix(piped.stdout)
    assert "tokens/s" not in piped.stdout


def test_terminal_gets_no_colors_where_they_are_not_wanted(embedded_stack: InProcessStack) -> None:
    command = ["generate", PROMPT, *GREEDY, "--address", embedded_stack.address, "--quiet"]
    with Terminal(*command, NO_COLOR="1") as terminal:
        assert terminal.wait() == 0
    assert not SGR.search(terminal.shown)
    assert terminal.shown.startswith(PROMPT)


@contextmanager
def cancelling(stack: InProcessStack, count: int) -> Iterator[None]:
    """Makes sure that what is done ends so many generations."""

    def cancelled() -> float:
        return read_metric(stack, "gateway", "requests", 'result="cancelled"')

    before = cancelled()
    yield
    wait_until(lambda: cancelled() == before + count, f"{count} generations end")


LONG = ["--max-tokens", "450", "--ignore-eos", "--num-speculative-tokens", "0"]


def test_interrupt_of_a_stream_exits_with_130_and_ends_the_generation(embedded_stack: InProcessStack) -> None:
    command = ["generate", "import", *LONG, "--temperature", "0", "--address", embedded_stack.address]
    with cancelling(embedded_stack, 1), Terminal(*command) as terminal:
        terminal.wait_for("import" + code(TokenSource.PLAIN))  # the legend shows the colour before anything is asked
        terminal.type("\x03")
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown


def test_reader_that_has_seen_enough_ends_the_generation_in_silence(embedded_stack: InProcessStack) -> None:
    command = [sys.executable, "-m", "draftwire.cli", "generate", f"first\n{PROMPT}", *LONG]
    command += ["--address", embedded_stack.address]
    with (
        cancelling(embedded_stack, 1),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_interrupt_ends_bench_and_what_it_has_begun(embedded_stack: InProcessStack) -> None:
    command = ["bench", "--max-tokens", "450", "--ignore-eos", "--requests", "2", "--concurrency", "2"]
    with cancelling(embedded_stack, 2), Terminal(*command, "--address", embedded_stack.address) as terminal:
        terminal.wait_for("speculation, run 1 of 3")
        wait_until(lambda: read_metric(embedded_stack, "gateway", "num_requests_running") >= 2, "both requests run")
        terminal.type("\x03")
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown


def test_bench_shows_a_bar_on_a_terminal_and_prints_json_to_a_pipe(embedded_stack: InProcessStack) -> None:
    command = ["bench", "--requests", "3", "--runs", "2", "--max-tokens", "16", "--ignore-eos"]
    command += ["--address", embedded_stack.address]
    with Terminal(*command) as terminal:
        assert terminal.wait() == 0
    assert "plain, run 2 of 2" in terminal.shown
    assert re.search(r"block efficiency\s+[\d.]+\s+1\.00", terminal.text)
    piped = run(*command, "--json", "--temperature", "0", "--num-speculative-tokens", "3")
    assert (piped.returncode, piped.stderr) == (0, "")
    results = json.loads(piped.stdout)
    assert results["options"] == {
        "ignore_eos": True,
        "max_tokens": 16,
        "num_speculative_tokens": 3,
        "temperature": 0.0,
    }
    for name in ("speculation", "plain"):
        assert results[name]["tokens"] == 2 * 3 * 16
        assert 0.0 < results[name]["time_to_first_token_ms"]["p50"] < results[name]["completion_ms"]["p50"]
    assert results["plain"]["block_efficiency"] == 1.0 < results["speculation"]["block_efficiency"] <= 4.0
    assert results["speedup"]["least"] <= results["speedup"]["median"] <= results["speedup"]["most"]


WRONG: list[tuple[int, list[str], str]] = [
    (1, ["generate", ""], "the prompt is empty"),
    (1, ["generate", "x", "--temperature", "-1"], "temperature must be in"),
    (1, ["generate", "x", "--temperature", "nan"], "temperature must be in"),
    (1, ["generate", "x", "--top-p", "0"], "top_p must be in"),
    (1, ["generate", "x", "--num-choices", "0"], "num_choices must be in"),
    (1, ["generate", "x", "--max-tokens", "99999"], "max_tokens must be in"),
    (1, ["generate", "x", "--rejection-sample-method", "magic"], "known: block, token"),
    (1, ["generate", "x", "--max-tokens", "-5"], "^error: max_tokens: "),
    (1, ["generate", "x", "--seed", "-1"], "^error: seed: "),
    (1, ["generate", "x", "--top-k", "-1"], "^error: top_k: "),
    (1, ["generate", "x", "--num-choices", "-1"], "^error: num_choices: "),
    (1, ["generate", "x", "--regex", "("], "regex|expression"),
    (1, ["bench", "--temperature", "-1"], "temperature must be in"),
    (1, ["bench", "--max-tokens", "0"], "nothing to measure"),
    (1, ["generate", "x", "--tls-ca", "/nowhere"], "tls_ca: /nowhere cannot be read"),
    (1, ["generate", "x", "--token", "a\nb"], "a token consists of"),
    (3, ["generate", "x", "--address", "127.0.0.1:1"], r"^error: no gateway answered at 127\.0\.0\.1:1 "),
    (3, ["generate", "x", "--address", "127.0.0.1:99999"], "no gateway answered"),
    (1, ["models", "--address", "no port at all"], "has no port"),
    (3, ["bench", "--address", "127.0.0.1:1"], "no gateway answered"),
    (3, ["chat", "--address", "127.0.0.1:1"], "no gateway answered"),
]
"""Exit statuses, commands, and what they say."""


def test_wrong_input_and_no_gateway_are_one_line_and_a_status(embedded_stack: InProcessStack) -> None:
    for status, arguments, message in WRONG:
        address = [] if "--address" in arguments else ["--address", embedded_stack.address]
        result = run(*arguments, *address, "--wait", "0.3")
        assert (result.returncode, result.stderr.count("\n")) == (status, 1), (arguments, result)
        assert result.stderr.startswith("error: "), arguments
        assert re.search(message, result.stderr), (arguments, result)
        assert status == 1 or not result.stdout, arguments


def test_chat_with_a_target_without_a_template_is_one_line_and_a_status(scripted_stack: InProcessStack) -> None:
    result = run("chat", "--address", scripted_stack.address)
    assert (result.returncode, result.stdout) == (1, "")
    hint = "has no chat template; send a text prompt: `draftwire generate` continues texts"
    assert re.fullmatch(f"error: .*{hint}\n", result.stderr)


def test_ports_and_variables_that_cannot_be_are_wrong_usage() -> None:
    assert run("up", "--port", "99999").returncode == 2
    assert run("up", "--http-port", "-1").returncode == 2
    result = run("generate", "x", DRAFTWIRE_ADRESS="typo")
    assert result.returncode == 2
    assert "DRAFTWIRE_ADRESS" in result.stderr


def test_models_of_the_running_pair_are_listed(embedded_stack: InProcessStack) -> None:
    result = run("models", "--address", embedded_stack.address)
    assert result.returncode == 0, result.stderr
    heading, target, drafter, *_ = result.stdout.splitlines()
    assert heading.split() == ["role", "name", "dtype", "context", "vocabulary", "revision"]
    assert target.split()[:3] == ["target", "target", "float32"]
    assert drafter.split()[:3] == ["drafter", "drafter", "float32"]
