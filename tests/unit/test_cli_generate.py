"""`draftwire generate`: exactly the text for programs, colours for people, and what it took beside it."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli_fakes import ROUNDS, TEXT, FakeClient, completion, fake_client
from typer.testing import CliRunner, Result

from draftwire.cli import connection_options
from draftwire.cli.__main__ import app
from draftwire.cli.statistics_output import show_statistics, summary
from draftwire.cli.writer import Display, TextWriter
from draftwire.client import sync
from draftwire.errors import InvalidRequestError, NoRoomError, UnauthenticatedError, UnavailableError

SGR = re.compile(r"\x1b\[[0-9;]*m")
SHOWN = TEXT.replace("\x1b", "␛")


client = pytest.fixture(fake_client)


def generate(*arguments: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(app, ["generate", "def", *arguments])


def test_what_is_piped_is_exactly_the_text_and_one_newline(client: FakeClient) -> None:
    for arguments in ([], ["--quiet"], ["--stats"], ["--no-color"], ["--color", "never"]):
        result = generate(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout_bytes == f"def{TEXT}\n".encode(), arguments
        assert client.asked[-1][1]["token_details"] is False


def test_colors_ask_for_details_and_paint_each_token_by_its_source(client: FakeClient) -> None:
    for result in (generate("--color=always"), generate(FORCE_COLOR="1")):
        assert client.asked.pop()[1]["token_details"] is True
        assert SGR.sub("", result.stdout) == f"def{SHOWN}\n"
        assert "\x1b[38;5;29mb\x1b[0m\n\x1b[38;5;29mcdé\x1b[0m" in result.stdout
        assert "\x1b[4;38;5;163me␛[31m\x1b[0m" in result.stdout
        assert "\x1b[1;38;5;63mf\x1b[0m" in result.stdout
        assert result.stdout.startswith("def\x1b[3;38;5;243m a\x1b[0m")
    assert generate(FORCE_COLOR="1", NO_COLOR="1").stdout == f"def{TEXT}\n", "the stronger one"


def test_one_line_tells_what_it_took_and_legend_is_for_colors_alone(client: FakeClient) -> None:
    assert generate().stderr == (
        "6 tokens · 60.0 tokens/s · block efficiency 2.00 · acceptance rate 0.750 · 3 rounds · rule block · seed 123\n"
    )
    assert generate("--quiet").stderr == ""
    assert SGR.sub("", generate("--color=always").stderr).splitlines()[0] == (
        "accepted · recovered (in place of a draft token) · bonus (after a whole block) · plain"
    )
    assert generate("--color=always", "--quiet").stderr == ""


def test_table_tells_all_that_is_known_with_bars_of_the_right_length(client: FakeClient) -> None:
    lines = [line.rstrip() for line in generate("--stats", COLUMNS="100").stderr.splitlines()]
    rows = {re.split(r"  +", line)[0]: re.split(r"  +", line)[1:] for line in lines}
    assert rows == {
        "tokens": ["6"],
        "tokens/s": ["60.0"],
        "time to first token": ["12.3 ms"],
        "rounds": ["3"],
        "block efficiency": ["2.00"],
        "draft tokens accepted": ["3 of 4"],
        "acceptance rate": ["0.750"],
        "cached prompt tokens": ["2 of 7"],
        "lost drafters": ["1"],
        "lost verifiers": ["0"],
        "rule": ["block"],
        "seed": ["123"],
        "accepted at position 1": ["1.000", "█" * 20],
        "accepted at position 2": ["0.500", "█" * 10],
        "time in draft": ["40.0 ms", "█" * 8],
        "time in calibration": ["20.0 ms", "█" * 4],
        "time in verify": ["25.0 ms", "█" * 5],
        "time in queue": ["5.0 ms", "█"],
        "time in rest": ["10.0 ms", "█" * 2],
    }
    assert not any("tokens ·" in line for line in lines)


def test_overlapping_parts_leave_no_negative_rest_and_no_division_by_zero(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_statistics(completion(verify_duration_us=90_000), Display(stats=True))
    assert re.search(r"time in rest +0\.0 ms", capsys.readouterr().err)
    nothing = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0, "num_accepted_tokens_per_pos": []}
    plain = completion(**nothing, duration_us=0, draft_duration_us=0)
    show_statistics(plain, Display(stats=True))
    assert "acceptance rate 0.000" in summary(plain)
    assert "position" not in capsys.readouterr().err


def test_numbers_behind_an_interruption_are_told_apart_from_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    resumed = replace(completion(num_generated_tokens=2), num_resumed=3)
    assert summary(resumed).startswith("6 tokens · resumed 3 times, numbers of the last part: ")
    assert "resumed" not in summary(completion())
    show_statistics(resumed, Display(stats=True))
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert lines[:3] == [["tokens", "6"], ["resumed", "3", "times"], ["tokens", "of", "the", "last", "part", "2"]]


def test_required_notices_appear_even_when_quiet_and_control_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = replace(completion(is_lossy=True, drafter_error="\x1b[2J [x]"), rejection_sample_method="[/x]\x9b")
    for display in (Display(quiet=True), Display(), Display(stats=True)):
        show_statistics(told, display)
        lines = capsys.readouterr().err.splitlines()
        assert any(re.search(r"rule +\[/x\]�", line) for line in lines) is not display.quiet
        assert lines[-2:] == [
            "[/x]� is lossy: the text is not distributed as the target's",
            "went on without the drafter: ␛[2J [x]",
        ]


def test_several_completions_come_one_after_the_other(client: FakeClient) -> None:
    for color, text, marks in (("never", TEXT, 0), ("always", SHOWN, 2)):
        shown = generate("-n", "2", "--color", color).stdout
        assert (SGR.sub("", shown) if marks else shown) == f"choice 0:\ndef{text}\nchoice 1:\ndef{text}\n"
        assert shown.count("\x1b[1;38;5;63mf") == marks
        assert client.asked.pop()[1]["num_choices"] == 2


def test_terminal_without_colors_still_obeys_nothing_in_the_text() -> None:
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    writer = TextWriter(Display(no_color=True), screen)
    writer.text("a\x1b[2J")
    writer.tokens("b\x1b[2J", None, [])
    assert screen.getvalue() == "a␛[2Jb␛[2J"


def test_every_option_of_a_request_reaches_the_gateway(client: FakeClient) -> None:
    given = {
        "--max-tokens": 5,
        "--temperature": 0.5,
        "--top-k": 3,
        "--top-p": 0.9,
        "--min-p": 0.1,
        "--repetition-penalty": 1.1,
        "--presence-penalty": 0.2,
        "--frequency-penalty": 0.3,
        "--min-tokens": 2,
        "--seed": 9,
        "--num-speculative-tokens": 7,
        "--rejection-sample-method": "token",
    }
    words = [word for name, value in given.items() for word in (name, str(value))]
    result = generate(*words, "--stop", "x", "--stop", "y", "--ignore-eos", "--regex", "a+", "--wait", "2.5")
    assert result.exit_code == 0, result.output
    prompt, asked = client.asked[0]
    assert prompt == "def"
    assert {f"--{name.replace('_', '-')}": value for name, value in asked.items()}.items() >= given.items()
    assert asked["stop"] == ["x", "y"]
    assert asked["ignore_eos"] is True
    assert asked["structured_output"].texts == ("a+",)
    assert asked["wait_for_server_s"] == 2.5


def test_defaults_are_left_to_the_server(client: FakeClient) -> None:
    generate()
    asked = client.asked[0][1]
    said = {name: value for name, value in asked.items() if value is not None}
    assert said == {
        "max_tokens": 128,
        "stop": (),
        "ignore_eos": False,
        "num_choices": 1,
        "token_details": False,
        "wait_for_server_s": 5.0,
    }


def test_connection_comes_from_options_and_variables(client: FakeClient) -> None:
    generate("--token", "secret", DRAFTWIRE_ADDRESS="there:1", DRAFTWIRE_TLS_CA="ca.pem")
    nothing = {"tls_cert": None, "tls_key": None, "tls_target_name": None, "allow_plaintext": False}
    assert client.opened_with == ("there:1", {"tls_ca": "ca.pem", "token": "secret", **nothing})
    for words, variables in ((["--allow-plaintext"], {}), ([], {"DRAFTWIRE_ALLOW_PLAINTEXT": "true"})):
        generate(*words, **variables)
        assert client.opened_with[1]["allow_plaintext"] is True
    assert connection_options.DEFAULT_ADDRESS == sync.DEFAULT_ADDRESS


def test_unavailable_gateway_has_its_own_status_and_other_errors_status_1(
    client: FakeClient,
) -> None:
    """`main` prints the latter and ends with 1; see the end-to-end tests."""
    for error in (UnavailableError("nobody\nis there"), NoRoomError("full [bold]")):
        client.fails = [(0, error)]
        result = generate()
        assert (result.exit_code, result.stderr) == (3, f"error: {str(error).replace(chr(10), ' ')}\n")
    other = InvalidRequestError("temperature")
    client.fails = [(0, other)]
    assert generate().exception is other
    client.fails = [(0, UnauthenticatedError("no token"))]
    assert str(generate().exception) == "no token: --token, or the variable DRAFTWIRE_TOKEN"


def test_limit_that_was_not_asked_for_adapts_to_the_context(client: FakeClient) -> None:
    words = (
        "This model's maximum context length is 2048 tokens; max_tokens must be in 0..98, what the 1950 tokens leave"
    )
    refusal = InvalidRequestError(words)
    client.fails = [(0, refusal)]
    assert generate().exit_code == 0
    assert [options["max_tokens"] for _, options in client.asked] == [128, None]
    client.fails = [(0, refusal)]
    assert generate("--max-tokens", "128").exception is refusal


def test_interrupt_ends_with_130_and_what_was_shown_stays(client: FakeClient) -> None:
    client.fails = [(len(ROUNDS) - 1, KeyboardInterrupt())]
    result = generate()
    assert result.exit_code == 130
    assert result.stdout.startswith("def ab\nc")


def test_wrong_usage_ends_with_2_before_anything_is_asked(client: FakeClient) -> None:
    wrong = ["--json-schema=/nowhere/at/all", "--json-schema=/", "--max-tokens=many", "--wait=-1", "--color=mauve"]
    for argument in [*wrong, "--nonsense"]:
        assert generate(argument).exit_code == 2, argument
    assert client.asked == []


def test_two_forms_and_files_without_text_are_refused(client: FakeClient, tmp_path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        raise generate("--json-schema", str(schema), "--regex", "a").exception
    with pytest.raises(InvalidRequestError, match=r"schema\.json cannot be read: it is no UTF-8"):
        raise generate("--json-schema", str(schema)).exception


def test_prompt_is_read_from_standard_input_or_a_file_to_the_byte(client: FakeClient, tmp_path: Path) -> None:
    text = "é\n\tdef  \r\n\n"
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    ways = ((["-"], text), (["--prompt-file", str(tmp_path / "prompt.txt")], None))
    for arguments, given in ways:
        result = CliRunner().invoke(app, ["generate", *arguments], input=given and given.encode())
        assert result.exit_code == 0, result.output
        assert client.asked.pop()[0] == text, arguments
        assert result.stdout_bytes == f"{text}{TEXT}\n".encode()


def test_one_prompt_is_given_and_one_only(client: FakeClient, tmp_path: Path) -> None:
    (tmp_path / "prompt.bin").write_bytes(b"\xff")
    for arguments, status, said in (
        ([], 2, "one prompt"),
        (["def", "--prompt-file", str(tmp_path / "prompt.bin")], 2, "one prompt"),
        (["--prompt-file", str(tmp_path / "prompt.bin")], 1, "the prompt cannot be read"),
        (["--prompt-file", str(tmp_path / "nothing")], 2, "does not exist"),
    ):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["generate", *arguments])
        assert (result.exit_code, said in f"{result.stderr} {result.exception}") == (status, True), result.stderr
    assert client.asked == []


def test_nothing_is_written_before_the_first_token(client: FakeClient) -> None:
    client.fails = [(0, InvalidRequestError("no"))]
    assert generate("--color=always").stdout == ""
    client.fails = [(1, InvalidRequestError("no"))]
    assert generate().stdout == "def a"


def test_help_has_a_short_name_everywhere() -> None:
    for command in ([], ["generate"], ["serve"], ["serve", "gateway"], ["index", "build"]):
        assert CliRunner().invoke(app, [*command, "-h"]).stdout.lstrip().startswith("Usage:"), command
