"""How services are started and followed, with scripts in their place: whatever one says or does, no wait is endless."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwire.cli import supervisor
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.process_end import ProcessEnd
from draftwire.cli.supervisor import Loss, Supervisor
from draftwire.errors import UnavailableError

SCRIPT = """\
#!{python} -SI
import json, os, pathlib, sys, time
name = sys.argv[4]
def say(event, **values):
    print(json.dumps({{"event": f"{{name}}.{{event}}", **values}}), file=sys.stderr, flush=True)
def serve(**values):
    say("server_started", **{{"port": 1, "metrics_port": 2, "http_port": 3, "tls": False, **values}})
    sys.stdin.read()
exec((pathlib.Path(__file__).parent / name).read_text())
"""
LONG = "print('x' * 1_000_000, file=sys.stderr); serve()"
"""Far more than a pipe holds."""

Play = Callable[..., LocalStack]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Makes a stack whose services do what their scripts say."""
    program = tmp_path / "python"
    program.write_text(SCRIPT.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def make(scripts: dict[str, str], **options: object) -> LocalStack:
        for name, script in scripts.items():
            (tmp_path / name).write_text(script)
        return LocalStack({name: {} for name in scripts}, **{"start_timeout_s": 20.0, **options})  # type: ignore[arg-type]

    return make


def test_undecodable_bytes_and_too_deep_json_are_plain_lines(play: Play) -> None:
    lines: list[Any] = []
    script = r"os.write(2, b'a\xffb\n'); print('[' * 100_000, file=sys.stderr); " + LONG
    with play({"verifier": script}, on_log=lambda _, line: lines.append(line["event"])):
        assert (lines[0], lines[1][:3]) == ("a�b", "[[[")


@pytest.mark.parametrize("error", [BrokenPipeError(), SystemExit(1), ValueError("bug")])
def test_listener_that_fails_is_raised_and_the_service_is_still_read(play: Play, error: BaseException) -> None:
    calls = []

    def fail(*line: object) -> None:
        calls.append(line)
        raise error

    stack = play({"verifier": "say('begun'); print('x' * 1_000_000, file=sys.stderr)"}, on_log=fail)
    with pytest.raises(type(error)):
        stack.start()
    assert stack.services["verifier"].process.wait(20) == 0, "it would wait for room in the pipe"
    assert stack.next_end(None).name == "verifier"
    assert len(calls) == 1


def test_listener_that_fails_later_ends_the_wait(play: Play) -> None:
    def fail(_name: str, line: object) -> None:
        if "later" in str(line):
            raise BrokenPipeError

    script = "import threading; threading.Timer(0.3, say, ['later']).start(); serve()"
    with play({"verifier": script}, on_log=fail) as stack, pytest.raises(BrokenPipeError):
        stack.next_end(None)


def test_first_failure_ends_the_start_whatever_the_others_do(play: Play) -> None:
    started = time.monotonic()
    failing = "say('server_failed', reason='no model folder'); sys.exit(2)"
    with pytest.raises(UnavailableError, match="drafter did not come up: no model folder"):
        play({"verifier": "time.sleep(60)", "drafter": failing}).__enter__()
    assert time.monotonic() - started < 10


def test_service_that_ends_while_others_start_ends_the_start(play: Play) -> None:
    ending = "import threading; threading.Timer(0.3, os._exit, [0]).start(); serve()"
    with pytest.raises(UnavailableError, match="verifier did not come up"):
        play({"verifier": ending, "drafter": "time.sleep(60)"}).__enter__()


def test_deadline_is_of_all_services_and_can_be_none(play: Play) -> None:
    endless, slow = "time.sleep(60)", "time.sleep(0.5); serve()"
    with pytest.raises(UnavailableError, match=r"drafter and verifier did not come up within 0\.1 s"):
        play({"verifier": endless, "drafter": endless}, start_timeout_s=0.1).__enter__()
    with play({"verifier": slow, "drafter": slow}, start_timeout_s=None) as stack:
        assert stack.services["drafter"].port == 1


def test_address_has_the_scheme_that_the_gateway_says(play: Play) -> None:
    for has_tls, scheme in ((True, "https"), (False, "http")):
        with play({"gateway": f"serve(tls={has_tls})"}) as stack:
            assert stack.http_address == f"{scheme}://127.0.0.1:3"


def test_gateway_starts_while_models_load_and_is_told_their_ports(play: Play) -> None:
    loading = "say('server_listening', port=7, metrics_port=None); import time; time.sleep(0.3); serve(port=7)"
    lines: list[str] = []
    gateway = "say('arguments', given=sys.argv); serve()"
    names = {"verifier": loading, "drafter": loading, "gateway": gateway}
    with play(names, on_log=lambda name, line: lines.append(str(line))) as stack:
        assert stack.services["verifier"].is_serving
    asked = next(index for index, line in enumerate(lines) if "gateway.arguments" in line)
    assert "--verifier=127.0.0.1:7" in lines[asked]
    assert "--drafter=127.0.0.1:7" in lines[asked]
    served = [index for index, line in enumerate(lines) if "verifier.server_started" in line]
    assert served > [asked], "it does not wait for the models"


def test_killed_stack_stops_at_once(play: Play) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); serve(); time.sleep(60)"
    with play({"verifier": deaf}) as stack:
        started = time.monotonic()
        stack.kill()
    assert time.monotonic() - started < 10.0


def test_interrupt_while_a_process_starts_leaves_none_behind(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[str]] = []

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        process = begin(*arguments, **options)
        begun.append(process)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        return process

    begin = subprocess.Popen
    stack = play({"verifier": "serve(); time.sleep(60)", "drafter": "serve(); time.sleep(60)"})
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            stack.__enter__()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(begun) == 1
    assert begun[0].poll() is not None


def test_lost_service_restarts_on_its_ports_with_the_same_peers(play: Play) -> None:
    lines: list[str] = []
    model = "say('arguments', given=sys.argv); serve(port=7)"
    gateway = "say('arguments', given=sys.argv); serve(port=8, http_port=9)"
    with play({"verifier": model, "gateway": gateway}, on_log=lambda _, line: lines.append(str(line))) as stack:
        for name, expected in (("verifier", ["--port=7"]), ("gateway", ["--port=8", "--http-port=9", ":7"])):
            first = stack.services[name].process
            first.kill()
            lost = stack.next_end(20.0)
            assert lost is not None
            assert (lost.name, lost.ending) == (name, ProcessEnd(-signal.SIGKILL))
            lines.clear()
            stack.restart(name)
            assert stack.services[name].port, "its address does not change while it starts"
            assert stack.next_end(0.3) is None
            assert stack.services[name].is_serving
            assert all(text in lines[0] for text in expected)


def test_service_that_does_not_come_up_says_how_it_ended(play: Play) -> None:
    killed = "say('weights_read'); os.kill(os.getpid(), 9)"
    with pytest.raises(UnavailableError, match=r"did not come up: it was killed by SIGKILL \(verifier\.weights_read\)"):
        play({"verifier": killed}).__enter__()


def test_service_that_cannot_stay_up_is_given_up_while_others_go_on(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    losses: list[Loss] = []
    unsteady = "import threading; threading.Timer(0.1, os._exit, [3]).start(); serve()"
    with play({"verifier": "serve()", "drafter": unsteady}) as stack:
        last = Supervisor(stack, losses.append).run()
        assert stack.services["verifier"].ending is None
    assert (losses[-1], last.ending, last.pause_s) == (last, ProcessEnd(3), None)
    assert [loss.number for loss in losses] == [1, 2, 3]
    assert "the drafter ended with status 3, for the third time" in str(last)


def test_losses_after_a_minute_of_service_are_none_in_a_row(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", 0.05)
    losses: list[Loss] = []

    def note(loss: Loss) -> None:
        losses.append(loss)
        if len(losses) == 4:
            raise KeyboardInterrupt

    unsteady = "import threading; threading.Timer(0.1, os._exit, [3]).start(); serve()"
    with play({"drafter": unsteady}) as stack, pytest.raises(KeyboardInterrupt):
        Supervisor(stack, note).run()
    assert {loss.number for loss in losses} == {1}


def test_wait_names_the_service_that_ended(play: Play) -> None:
    with play({"verifier": "serve()", "drafter": "serve()"}) as stack:
        stack.services["drafter"].process.kill()
        assert stack.next_end(None).name == "drafter"


def test_script_speaks_as_a_service_does() -> None:
    """Keys of `server_started` that this stands in for, from the source that logs it."""
    source = (Path(__file__).parents[2] / "draftwire" / "runtime" / "process.py").read_text()
    call = source.partition('.server_started"')[2].partition("\n    )\n")[0]
    assert "tls=" in call
    assert "**running.ports" in call
