"""Tokens: who is let in, how much they may use, and what happens when the file changes."""

import hmac
import tomllib
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from typer.testing import CliRunner

from draftwire.cli.__main__ import app
from draftwire.errors import InvalidRequestError, NoRoomError, UnauthenticatedError
from draftwire.runtime.addresses import host_of_peer
from draftwire.runtime.status import status_of
from draftwire_gateway.auth import access as access_module
from draftwire_gateway.auth.access import EXPIRED, MESSAGE, Access, Caller, payer
from draftwire_gateway.auth.tokens import TokenEntry, digest_of, new_token, parse_tokens
from draftwire_gateway.http.error_bodies import body_of
from draftwire_gateway.http.error_bodies import status_of as http_status_of

ALICE, BOB = "alice's token", "bob's token"


class Clock:
    """Time that stands still until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(TokenEntry("alice", digest_of(ALICE)).to_toml() + TokenEntry("bob", digest_of(BOB)).to_toml())
    return path


def bearer(token: str) -> str:
    return f"Bearer {token}"


def limited(clock: Clock, **limits: int) -> Caller:
    return Caller(TokenEntry("alice", digest_of(ALICE), **limits), clock)


def refused(caller: Caller, num_choices: int = 1) -> NoRoomError:
    """Returns why a request is refused, which it has to be."""
    with pytest.raises(NoRoomError) as error, caller.request(num_choices):
        pass
    return error.value


# Who is let in


def test_holder_of_a_token_is_known_by_name(path: Path) -> None:
    access = Access(path)
    assert access.authenticate(bearer(ALICE)).name == "alice"
    assert access.authenticate(f"bearer   {BOB} ").name == "bob"
    assert access.authenticate(bearer(ALICE)) is access.authenticate(bearer(ALICE))


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        ALICE,
        f"Basic {ALICE}",
        f"Bearer{ALICE}",
        bearer("alice"),
        bearer(ALICE + "x"),
        bearer(ALICE[:-1]),
        bearer(ALICE.upper()),
        bearer(digest_of(ALICE)),
        bearer("\udc80"),
        bearer(f"{ALICE} {BOB}"),
    ],
)
def test_everybody_else_is_refused_with_the_same_message(path: Path, authorization: str | None) -> None:
    with pytest.raises(UnauthenticatedError) as refused:
        Access(path).authenticate(authorization)
    assert str(refused.value) == MESSAGE


def test_without_a_file_nobody_needs_a_token_and_nothing_is_limited(clock: Clock) -> None:
    caller = Access(None, clock).authenticate(None)
    caller.charge(10**9)
    with caller.request(), caller.request():
        pass


@pytest.mark.parametrize(
    ("peer", "whose"),
    [
        ("ipv4:10.0.0.7:50051", "host 10.0.0.7"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:50051", "host 2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2::9%5D:50052", "host 2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:50051", "host 10.0.0.7"),
        ("unix:", "host unix"),
    ],
)
def test_without_tokens_the_host_pays_and_with_them_the_token(clock: Clock, peer: str, whose: str) -> None:
    assert payer(Caller(None, clock), host_of_peer(peer)) == whose
    assert payer(limited(clock), host_of_peer(peer)) == "token alice"


@pytest.mark.parametrize("token", [ALICE, BOB, "wrong"])
def test_every_entry_is_compared_whichever_fits(path: Path, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """So the time that a refusal takes tells nothing about the entries."""
    compare = Mock(side_effect=hmac.compare_digest)
    monkeypatch.setattr(access_module.hmac, "compare_digest", compare)
    with suppress(UnauthenticatedError):
        Access(path).authenticate(bearer(token))
    assert [call.args[0].decode() for call in compare.call_args_list] == [digest_of(ALICE), digest_of(BOB)]


# Limits


def test_requests_beyond_the_limit_are_refused_until_one_ends(clock: Clock) -> None:
    caller = limited(clock, max_sessions=2)
    with caller.request():
        with caller.request():
            error = refused(caller)
        assert "2 requests of alice" in str(error)
        assert error.retry_after_s == 1.0
        with caller.request():
            pass


def test_every_choice_of_a_request_counts(clock: Clock) -> None:
    caller = limited(clock, max_sessions=4)
    with pytest.raises(InvalidRequestError, match="num_choices"), caller.request(5):
        pass
    with caller.request(3):
        refused(caller, 2)
        with caller.request(1):
            refused(caller)
    with caller.request(4):
        pass


def test_request_that_fails_ends_too_and_one_that_is_refused_costs_nothing(clock: Clock) -> None:
    caller = limited(clock, max_sessions=1, max_tokens_per_minute=60)
    with pytest.raises(KeyError), caller.request():
        raise KeyError
    with caller.request():
        for _ in range(3):
            refused(caller)
    with caller.request():
        pass


def test_running_request_is_never_cut_but_the_next_waits_for_its_use(clock: Clock) -> None:
    caller = limited(clock, max_tokens_per_minute=60)
    with caller.request():
        for _ in range(20):
            caller.charge(10)
    error = refused(caller)
    assert "60 tokens a minute" in str(error)
    assert error.retry_after_s == pytest.approx(141.0)  # 200 used, 60 allowed, one a second comes back


@pytest.mark.parametrize("rate", [1, 7, 60, 60_000])
@pytest.mark.parametrize("used", [0, 1, 5, 1000])
def test_hint_says_exactly_when_it_is_worth_while_to_try_again(clock: Clock, rate: int, used: int) -> None:
    caller = limited(clock, max_tokens_per_minute=rate)
    caller.charge(rate + used)
    clock.now += refused(caller).retry_after_s - 1e-3
    refused(caller)
    clock.now += 2e-3
    with caller.request():
        pass


def test_bucket_holds_a_minute_and_no_more(clock: Clock) -> None:
    caller = limited(clock, max_tokens_per_minute=60)
    clock.now += 3600.0  # an idle hour saves nothing up
    caller.charge(59)
    with caller.request():
        caller.charge(1)
    refused(caller)


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 200)), max_size=40))
def test_no_caller_gets_more_than_its_rate_but_for_one_request(steps: list[tuple[float, int]]) -> None:
    """Requests one after another: what was charged stays within a full bucket, what came back, and the last request."""
    clock, rate = Clock(), 60
    caller = limited(clock, max_tokens_per_minute=rate)
    began, charged = clock.now, 0
    for pause, tokens in steps:
        clock.now += pause
        with suppress(NoRoomError), caller.request():
            assert charged <= rate + (clock.now - began) * rate / 60.0 + 1e-6
            caller.charge(tokens)
            charged += tokens


# Files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[token]", "TOML"),
        ("token = 3", r"\[\[token\]\]"),
        ("token = [3]", r"\[\[token\]\]"),
        ("[[tokens]]\nname = 'a'", r"\[\[token\]\]"),
        (f"[[token]]\nsha256 = '{'0' * 64}'", "no name"),
        ("[[token]]\nname = 'a'", "no sha256"),
        (f"[[token]]\nname = 'a'\nsha256 = '{'0' * 63}'", "sha256 of a"),
        (f"[[token]]\nname = 'a'\nsha256 = '{'G' * 64}'", "sha256 of a"),
        (f"[[token]]\nname = ''\nsha256 = '{'0' * 64}'", "name"),
        (f"[[token]]\nname = 'a b'\nsha256 = '{'0' * 64}'", "name"),
        (f"[[token]]\nname = 3\nsha256 = '{'0' * 64}'", "name"),
        (f"[[token]]\nname = 'a'\nsha256 = '{'0' * 64}'\nmax_sesions = 3", "unknown key max_sesions"),
        (f"[[token]]\nname = 'a'\nsha256 = '{'0' * 64}'\nmax_sessions = 0", "max_sessions of a"),
        (f"[[token]]\nname = 'a'\nsha256 = '{'0' * 64}'\nmax_sessions = true", "max_sessions of a"),
        (f"[[token]]\nname = 'a'\nsha256 = '{'0' * 64}'\nmax_tokens_per_minute = 1.5", "max_tokens_per_minute of a"),
        *(
            (f"[[token]]\nname = 'a'\nsha256 = '{'0' * 64}'\nexpires_at = {time}", "expires_at of a")
            for time in ("2027-01-31T12:00:00", "2027-01-31", "12:00:00", "1800000000", "'soon'", "''", "'2027-01-31'")
        ),
        (f"[[token]]\nname = 'a'\nsha256 = '{'0' * 64}'\n" * 2, "same name"),
        (f"[[token]]\nname = 'a'\nsha256 = '{'0' * 64}'\n[[token]]\nname = 'b'\nsha256 = '{'0' * 64}'", "same sha256"),
    ],
)
def test_file_that_is_no_good_is_refused_with_its_name_and_option(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=message) as refused:
        Access(path)
    assert str(refused.value).startswith(f"tokens_file: {path}: ")


def test_file_without_entries_lets_nobody_in(path: Path) -> None:
    path.write_text("# nobody\n")
    with pytest.raises(UnauthenticatedError):
        Access(path).authenticate(bearer(ALICE))


def test_file_that_cannot_be_read_is_refused(path: Path) -> None:
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidRequestError, match=r"tokens_file: .* UTF-8"):
        Access(path)
    path.unlink()
    with pytest.raises(InvalidRequestError, match=r"tokens_file: .* cannot be read"):
        Access(path)


def test_tokens_come_and_go_with_the_file(path: Path) -> None:
    access = Access(path)
    path.write_text(TokenEntry("bob", digest_of(BOB)).to_toml() + TokenEntry("carol", digest_of("c")).to_toml())
    assert access.authenticate(bearer("c")).name == "carol"
    assert access.authenticate(bearer(BOB)).name == "bob"
    with pytest.raises(UnauthenticatedError):
        access.authenticate(bearer(ALICE))


def test_broken_file_keeps_the_old_tokens_and_is_logged_once(path: Path) -> None:
    access = Access(path)
    path.write_text("[[token]")
    with capture_logs() as lines:
        for _ in range(3):
            assert access.authenticate(bearer(ALICE)).name == "alice"
    assert [line["event"] for line in lines] == ["files.reload_failed"]
    path.unlink()
    assert access.authenticate(bearer(ALICE)).name == "alice"


def test_what_is_used_and_what_runs_outlives_a_change_of_the_limits(path: Path, clock: Clock) -> None:
    access = Access(path, clock)

    def changed(token: str, **limits: int) -> Caller:
        path.write_text(TokenEntry("alice", digest_of(token), **limits).to_toml())
        return access.authenticate(bearer(token))

    caller = access.authenticate(bearer(ALICE))
    with caller.request():
        assert changed(ALICE, max_sessions=1) is caller
        assert "1 requests" in str(refused(caller))
    changed("a new token", max_tokens_per_minute=60).charge(60)
    assert "50 tokens" in str(refused(changed("a new token", max_tokens_per_minute=50)))


# Expiry


@pytest.mark.parametrize(
    "time", ["2027-01-31T12:00:00Z", "2027-01-31T14:00:00+02:00", "'2027-01-31T12:00:00Z'", "2027-01-31 06:30:00-05:30"]
)
def test_token_is_refused_from_its_expiry_on_and_its_holder_hears_why(path: Path, time: str) -> None:
    calendar = Clock()
    path.write_text(TokenEntry("alice", digest_of(ALICE)).to_toml() + f"expires_at = {time}\n")
    access = Access(path, calendar=calendar)
    calendar.now = datetime(2027, 1, 31, 12, tzinfo=UTC).timestamp() - 1.0
    caller = access.authenticate(bearer(ALICE))
    with caller.request():
        calendar.now += 1.0
        with pytest.raises(UnauthenticatedError) as refused:
            access.authenticate(bearer(ALICE))
        assert str(refused.value) == EXPIRED
        caller.charge(1)  # what runs goes on, as with a token that is gone
    for authorization in (None, bearer(BOB), f"Basic {ALICE}"):
        with pytest.raises(UnauthenticatedError) as refused:
            access.authenticate(authorization)
        assert str(refused.value) == MESSAGE
    path.write_text(TokenEntry("alice", digest_of(ALICE)).to_toml())
    assert access.authenticate(bearer(ALICE)) is caller, "the file gave it more time"


def test_file_with_an_expiry_that_is_none_keeps_the_old_tokens(path: Path) -> None:
    access = Access(path)
    path.write_text(path.read_text() + "expires_at = 2020-01-31T12:00:00\n")
    with capture_logs() as lines:
        assert access.authenticate(bearer(BOB)).name == "bob"
    assert [line["event"] for line in lines] == ["files.reload_failed"]
    assert "expires_at of bob" in lines[0]["reason"]


def test_expired_token_is_answered_as_an_unknown_one(path: Path) -> None:
    path.write_text(path.read_text() + "expires_at = 2020-01-31T12:00:00Z\n")
    with capture_logs() as lines:
        access = Access(path)
    assert lines == [{"event": "gateway.tokens_loaded", "log_level": "info", "num_tokens": 2, "num_expired": 1}]
    with pytest.raises(UnauthenticatedError) as refused:
        access.authenticate(bearer(BOB))
    assert http_status_of(refused.value) == 401
    assert status_of(refused.value) == (grpc.StatusCode.UNAUTHENTICATED, EXPIRED)
    assert EXPIRED in body_of(refused.value).decode()


# The command


def test_new_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 43  # 32 bytes


def test_command_prints_a_token_and_an_entry_that_lets_it_in(tmp_path: Path) -> None:
    arguments = ["token", "alice", "--max-sessions", "4", "--max-tokens-per-minute", "60000"]
    arguments += ["--expires-at", "2127-01-31T12:00:00Z"]
    expires_at = datetime(2127, 1, 31, 12, tzinfo=UTC)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    token = result.stderr.strip()
    assert parse_tokens(result.stdout) == (TokenEntry("alice", digest_of(token), 4, 60000, expires_at),)
    assert token not in result.stdout
    path = tmp_path / "tokens.toml"
    path.write_text(result.stdout + CliRunner().invoke(app, ["token", "bob"]).stdout)
    assert Access(path).authenticate(bearer(token)).name == "alice"
    assert [entry["name"] for entry in tomllib.loads(path.read_text())["token"]] == ["alice", "bob"]


def test_command_refuses_what_the_file_could_not_hold() -> None:
    for arguments in (['a"b'], ["a", "--expires-at", "tomorrow"], ["a", "--expires-at", "2127-01-31T12:00:00"]):
        result = CliRunner().invoke(app, ["token", *arguments])
        assert isinstance(result.exception, InvalidRequestError)
        assert result.stdout == ""
