"""`draftwire chat`: what is said stays in the conversation, what is stopped is stopped at the server."""

from collections.abc import Callable

import pytest
from cli_fakes import ROUNDS, TEXT, FakeClient, fake_client
from typer.testing import CliRunner, Result

from draftwire.cli import chat_command as chat_module
from draftwire.cli.__main__ import app
from draftwire.errors import InvalidRequestError, NoRoomError, UnavailableError

SYSTEM = {"role": "system", "content": "be brief"}
ANSWER = {"role": "assistant", "content": TEXT}
PROBE = {"role": "user", "content": "Hello"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


client = pytest.fixture(fake_client)


def piped(text: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=text)


Typed = str | BaseException


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch, client: FakeClient) -> Callable[..., Result]:
    """Chats at a terminal, where these lines are typed, and these keys pressed."""

    def chat(*typed: Typed, arguments: tuple[str, ...] = ()) -> Result:
        lines = iter([*typed, EOFError()])

        def ask() -> str:
            line = next(lines)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(chat_module, "_ask", ask)
        monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda self: self.name == "<stdin>")
        return CliRunner().invoke(app, ["chat", *arguments])

    return chat


def test_each_line_of_a_pipe_is_a_message_and_output_is_the_answers(client: FakeClient) -> None:
    result = piped("one\n\n  two\nlast", "--system", "be brief", "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stdout_bytes == f"{TEXT}\n{TEXT}\n{TEXT}\n".encode()
    assert result.stderr == ""
    assert [asked for asked, _ in client.asked] == [
        [SYSTEM, PROBE],
        [SYSTEM, user("one")],
        [SYSTEM, user("one"), ANSWER, user("  two")],
        [SYSTEM, user("one"), ANSWER, user("  two"), ANSWER, user("last")],
    ]


def test_first_question_generates_nothing_and_others_the_rest_of_context(client: FakeClient) -> None:
    piped("one\n", "--temperature", "0.5", "--min-tokens", "3")
    (_, probe), (_, asked) = client.asked
    assert (probe["max_tokens"], probe["min_tokens"], probe["temperature"]) == (0, None, 0.5)
    assert (asked["max_tokens"], asked["min_tokens"], asked["temperature"]) == (None, 3, 0.5)


def test_refusal_is_one_line_before_any_input_with_a_hint_for_templates(client: FakeClient) -> None:
    hint = ": `draftwire generate` continues texts"
    for message, more in (
        ("m has no chat template; send a text prompt", hint),
        ("temperature must be in [0, 100]", ""),
    ):
        client.fails, client.asked = [(0, InvalidRequestError(message))], []
        assert str(piped("one\n").exception) == message + more
        assert len(client.asked) == 1


def test_commands_reset_tell_and_leave(client: FakeClient) -> None:
    result = piped("/stats\none\n/stats\n/reset\ntwo\n/exit\nthree\n", "--quiet")
    assert [asked for asked, _ in client.asked] == [[PROBE], [user("one")], [user("two")]]
    assert result.stderr.startswith("there is no answer to tell of\ntokens ")
    assert "block efficiency" in result.stderr
    assert result.stdout == f"{TEXT}\n{TEXT}\n"


def test_unknown_commands_are_told_and_paths_are_messages(client: FakeClient, typing: Callable[..., Result]) -> None:
    unknown = "unknown command /rest: /reset begins anew"
    ended = piped("/etc/passwd\n/rest\ntwo\n", "--quiet").exception  # nobody is there to be told
    assert isinstance(ended, InvalidRequestError)
    assert str(ended).startswith(unknown)
    assert typing("/rest", "/etc/passwd", arguments=("--quiet",)).stderr.startswith(unknown)
    assert [asked for asked, _ in client.asked] == [[PROBE], [user("/etc/passwd")]] * 2


def test_error_ends_a_pipe(client: FakeClient) -> None:
    for error in (UnavailableError("lost"), NoRoomError("full")):
        client.fails, client.asked = [None, (1, error)], []
        assert piped("one\ntwo\n").exit_code == 3
        assert len(client.asked) == 2


def test_interrupt_stops_the_answer_at_the_server_and_what_was_shown_stays(
    client: FakeClient, typing: Callable[..., Result]
) -> None:
    client.fails = [None, (len(ROUNDS) - 1, KeyboardInterrupt())]
    result = typing("one", "two")
    assert result.exit_code == 0, result.output
    assert [stream.is_cancelled for stream in client.streams] == [False, True, False]
    shown = "".join(text for tokens in ROUNDS[:-1] for text, _ in tokens)
    assert client.asked[2][0] == [user("one"), {"role": "assistant", "content": shown}, user("two")]
    assert result.stdout == f"{shown}\n{TEXT}\n"
    assert "(stopped)" in result.stderr


def test_question_without_any_answer_is_forgotten(client: FakeClient, typing: Callable[..., Result]) -> None:
    client.fails = [None, (0, KeyboardInterrupt()), (0, InvalidRequestError("too long"))]
    result = typing("one", "two", "three")
    assert client.asked[3][0] == [user("three")]
    assert "error: too long\n" in result.stderr
    assert client.streams[2].is_cancelled


def test_interrupt_at_the_prompt_leaves_with_130_and_end_of_input_with_0(
    client: FakeClient, typing: Callable[..., Result]
) -> None:
    endings = (("one", KeyboardInterrupt()), ("one", EOFError()), ("/exit", "never asked"))
    assert [typing(*typed).exit_code for typed in endings] == [130, 0, 0]


def test_stopped_answer_has_no_statistics(client: FakeClient, typing: Callable[..., Result]) -> None:
    client.fails = [None, None, (1, KeyboardInterrupt())]
    assert "there is no answer to tell of" in typing("one", "two", "/stats").stderr


def test_colors_are_asked_for_in_answers_and_not_in_the_first_question(client: FakeClient) -> None:
    result = piped("one\n", "--color", "always")
    assert "token_details" not in client.asked[0][1]
    assert client.asked[1][1]["token_details"] is True
    assert "\x1b[1;38;5;63mf\x1b[0m" in result.stdout
