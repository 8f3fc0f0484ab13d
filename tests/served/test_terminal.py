"""The command line on a terminal and in pipes, with the embedded pair."""

import json
import re
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from terminal import SGR, Terminal
from test_embedded_pair import run, services_marked

from draftwire.cli.colors import PALETTE
from draftwire.cli.up import stack_options
from draftwire.token_source import TokenSource
from tests.in_process import InProcessStack

PROMPT = "def merge_sorted(a, b):"
GREEDY = ["--temperature", "0", "--max-tokens", "64", "--seed", "3", "--ignore-eos"]


@pytest.fixture(scope="module")
def stack() -> Iterator[InProcessStack]:
    with InProcessStack(stack_options(None, None, 4)) as running:
        yield running


def code(source: TokenSource) -> str:
    number, mark = PALETTE[source]
    return f"\x1b[{mark}38;5;{number}m"


def test_terminal_shows_where_tokens_came_from_and_a_pipe_the_same_text_alone(stack: InProcessStack) -> None:
    command = ["generate", PROMPT, *GREEDY, "--address", stack.address]
    piped = run(*command, NO_COLOR="", FORCE_COLOR="")
    assert piped.returncode == 0, piped.stderr
    assert "\x1b" not in piped.stdout + piped.stderr
    with Terminal(*command, "--stats") as terminal:
        assert terminal.wait() == 0
    for source in TokenSource:
        assert code(source) in terminal.shown, source
    legend, text = terminal.text.split("\n", 1)
    assert legend == "accepted · recovered (in place of a draft token) · bonus (after a whole block) · plain"
    assert text.startswith(piped.stdout)
    assert "time to first token" in text.removeprefix(piped.stdout)
    assert "tokens/s" not in piped.stdout


def test_terminal_gets_no_colors_where_they_are_not_wanted(stack: InProcessStack) -> None:
    command = ["generate", PROMPT, *GREEDY, "--address", stack.address, "--quiet"]
    for arguments, environment in ((["--no-color"], {}), ([], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"})):
        with Terminal(*command, *arguments, **environment) as terminal:
            assert terminal.wait() == 0
        assert not SGR.search(terminal.shown)
        assert terminal.shown.startswith(PROMPT)


def exported(stack: InProcessStack, series: str) -> float:
    """Returns the sum of the gateway's series that match an expression."""
    url = f"http://127.0.0.1:{stack.services['gateway'].metrics_port}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    values = re.findall(rf"^{series} (\S+)$", text, re.MULTILINE)
    assert values, f"no {series}"
    return sum(map(float, values))


def cancelled(stack: InProcessStack) -> float:
    return exported(stack, r'draftwire:requests_total\{.*result="cancelled".*\}')


def wait_until_cancelled(stack: InProcessStack, count: float) -> None:
    deadline = time.monotonic() + 20.0
    while cancelled(stack) != count:
        assert time.monotonic() < deadline, "the generation goes on"
        time.sleep(0.1)


LONG = ["--max-tokens", "450", "--ignore-eos", "--num-speculative-tokens", "0"]


def test_interrupt_while_text_is_streamed_ends_with_130_and_ends_the_generation(stack: InProcessStack) -> None:
    before = cancelled(stack)
    with Terminal("generate", "import os", *LONG, "--address", stack.address) as terminal:
        terminal.wait_for("import os" + code(TokenSource.PLAIN))  # the legend shows the colour before anything is asked
        terminal.type("\x03")
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown
    wait_until_cancelled(stack, before + 1)


def test_reader_that_has_seen_enough_ends_the_generation_in_silence(stack: InProcessStack) -> None:
    before = cancelled(stack)
    command = [sys.executable, "-m", "draftwire.cli", "generate", f"first\n{PROMPT}", *LONG, "--address", stack.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"first\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141
    process.stderr.close()
    wait_until_cancelled(stack, before + 1)


def test_bench_shows_a_bar_on_a_terminal_and_prints_json_to_a_pipe(stack: InProcessStack) -> None:
    command = [
        "bench",
        "--requests",
        "3",
        "--runs",
        "2",
        "--max-tokens",
        "16",
        "--ignore-eos",
        "--address",
        stack.address,
    ]
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


def test_interrupt_ends_bench_and_what_it_has_begun(stack: InProcessStack) -> None:
    before = cancelled(stack)
    long = ["--max-tokens", "450", "--ignore-eos", "--requests", "2", "--concurrency", "2"]
    with Terminal("bench", *long, "--address", stack.address) as terminal:
        terminal.wait_for("speculation, run 1 of 3")
        deadline = time.monotonic() + 20.0
        while exported(stack, r"draftwire:num_requests_running(?:\{.*\})?") < 2:
            assert time.monotonic() < deadline, "nothing runs"
            time.sleep(0.02)
        terminal.type("\x03")
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown
    wait_until_cancelled(stack, before + 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--max-tokens", "-5"], "^error: max_tokens: "),
        (["generate", "x", "--seed", "-1"], "^error: seed: "),
        (["generate", "x", "--top-k", "-1"], "^error: top_k: "),
        (["generate", "x", "--num-choices", "-1"], "^error: num_choices: "),
        (["generate", "x", "--regex", "("], "regex|expression"),
        (["bench", "--temperature", "-1"], "temperature must be in"),
        (["bench", "--max-tokens", "0"], "nothing to measure"),
        (["generate", "x", "--tls-ca", "/nowhere"], "tls_ca: /nowhere cannot be read"),
        (["generate", "x", "--token", "\n"], "a token consists of"),
        (["chat"], r"has no chat template; send a text prompt: `draftwire generate` continues texts"),
    ],
)
def test_wrong_input_is_one_line_and_status_1(stack: InProcessStack, arguments: list[str], message: str) -> None:
    result = run(*arguments, "--address", stack.address)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert result.stderr.startswith("error: ")
    assert re.search(message, result.stderr)


def test_models_of_the_running_pair_are_listed(stack: InProcessStack) -> None:
    result = run("models", "--address", stack.address)
    assert result.returncode == 0, result.stderr
    heading, target, drafter, *_ = result.stdout.splitlines()
    assert heading.split() == ["role", "name", "dtype", "context", "vocabulary", "revision"]
    assert (target.split()[:3], drafter.split()[:3]) == (
        ["target", "target", "float32"],
        ["drafter", "drafter", "float32"],
    )


@pytest.mark.parametrize(
    ("command", "address"),
    [
        (["generate", "x"], "127.0.0.1:99999"),
        (["models"], "no port at all"),
        (["bench"], "127.0.0.1:1"),
        (["chat"], "127.0.0.1:1"),
    ],
)
def test_no_gateway_is_one_line_and_status_3(command: list[str], address: str) -> None:
    result = run(*command, "--address", address, "--wait", "0.3")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (3, "", 1), result.stderr


def test_port_that_is_none_is_wrong_usage_and_one_that_is_taken_is_one_line(stack: InProcessStack) -> None:
    assert run("up", "--port", "99999").returncode == 2
    assert run("up", "--http-port", "-1").returncode == 2
    taken = str(stack.services["gateway"].port)
    result = run("up", "--port", taken, "--verifier-port", "0", "--drafter-port", "0", "--http-port", "0")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert re.fullmatch(f"error: gateway did not come up: cannot listen on 127.0.0.1:{taken}: .*", last)
    assert "Traceback" not in result.stderr


PORTS = ["--port", "50161", "--verifier-port", "50162", "--drafter-port", "50163", "--http-port", "0"]


def test_up_on_a_terminal_shows_a_table_and_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("TEST_MARK", mark)
    with Terminal("up", *PORTS) as terminal:
        terminal.wait_for("efficiency")
        terminal.wait_for("starting")
        terminal.wait_for("ready")
        result = run("generate", "import os", "--max-tokens", "32", "--ignore-eos", "--address", "127.0.0.1:50161")
        assert result.returncode == 0, result.stderr
        before = len(terminal.shown)
        efficiency = re.search(r"block efficiency ([\d.]+)", result.stderr)
        assert efficiency is not None
        terminal.wait_for(efficiency[1], 10.0, after=before)
        last = terminal.text.rpartition("service ")[2]
        rows = [line.split()[:2] for line in last.splitlines()[1:4]]
        assert rows == [["drafter", "serving"], ["verifier", "serving"], ["gateway", "serving"]]
        assert "http://127.0.0.1:" in terminal.text
        assert "gateway.server_started" in terminal.text
        assert "\x1b[?25l" in terminal.shown, "the cursor is hidden"
        terminal.type("\x03")
        assert terminal.wait() == 0
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l"), "and is back"
    assert "Traceback" not in terminal.shown
    assert services_marked(mark) == []


def test_up_on_a_terminal_prints_lines_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("TEST_MARK", mark)
    with Terminal("up", "--log", *PORTS) as terminal:
        terminal.wait_for("verifier")
        terminal.type("\x03")  # before all is up
        assert terminal.wait() == 130
    assert "efficiency" not in terminal.shown
    assert services_marked(mark) == []
