"""What users ask stays out of logs and errors, however a request fails."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from observing import wait_until

from draftwire.cli.local_stack import LocalStack
from draftwire.client import Client
from draftwire.client.completion import Piece
from draftwire.errors import DraftwireError, InvalidRequestError, NoRoomError, UnavailableError
from draftwire.v1 import gateway_pb2

SCRIPT = "scripted:acceptance=1,verify_ms=10,context_length=4096"
MARKER = "Xq7-zebra-at-dawn"
IDS = list(MARKER.encode())
SECONDS = 10.0
FAULTS = Path(__file__).parents[1] / "injected" / "faults"


class Watched:
    """A stack with faults built in, and everything that its services have written."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.stack = LocalStack(
            {
                "verifier": {"model": SCRIPT},
                "drafter": {"model": SCRIPT},
                "gateway": {
                    "verdict_timeout_s": 5.0,
                    "failover_timeout_s": 0.5,
                    "max_requests": 2,
                    "max_waiting_requests": 0,
                },
            },
            on_log=lambda service, line: self.lines.append({**line, "service": service}),
        )

    def wait_for(self, event: str, count: int = 1) -> None:
        wait_until(lambda: sum(line["event"] == event for line in self.lines) >= count, f"{event} is logged")


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")]))
        watched = Watched()
        with watched.stack:
            yield watched


def quotes(text: str) -> bool:
    """Whether a text holds the marker, or its tokens."""
    return "zebra" in text or ", ".join(map(str, IDS[:8])) in text or ", ".join(map(str, IDS[-8:])) in text


def fail(client: Client, prompt: Any = MARKER, **options: Any) -> DraftwireError:
    """Sends a request that must fail, and returns its error."""
    with pytest.raises(DraftwireError) as failed:
        client.generate(prompt, **{"max_tokens": 50, **options})
    return failed.value


REFUSED: dict[str, dict[str, Any]] = {
    "id beyond the vocabulary": {"prompt": [*IDS, 9999]},
    "prompt beyond the context": {"prompt": IDS * 300},
    "characters beyond any context": {"prompt": MARKER * 300_000},
    "text that is no text": {"prompt": MARKER + "\udc80"},
    "chat that the template refuses": {"prompt": [{"role": "user", "content": MARKER}]},
    "chat with a stray key": {"prompt": [{"role": "user", "content": "x", MARKER: "x"}]},
    "chat without a role": {"prompt": [{"content": MARKER}]},
    "rule": {"rejection_sample_method": MARKER},
    "long stop string": {"stop": [MARKER * 20]},
    "stop string that is no text": {"stop": [MARKER + "\udc80"]},
    "long salt": {"cache_salt": MARKER * 20},
    "parameter": {"temperature": -1.0, "stop": [MARKER]},
    "number out of range": {"seed": -1},
    "logit bias": {"logit_bias": {9999: 1.0}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_does_not_quote_the_request(watched: Watched, name: str) -> None:
    with Client(watched.stack.address) as client:
        error = fail(client, **REFUSED[name])
    assert isinstance(error, InvalidRequestError)
    assert not quotes(str(error))
    assert "udc80" not in str(error), "not even one character"
    assert not any(quotes(json.dumps(line)) for line in watched.lines)


def test_message_that_cannot_be_read_is_not_quoted(watched: Watched) -> None:
    """A string that is not UTF-8, and one that ends too soon."""
    text = MARKER.encode()
    broken = [bytes([10, len(text) + 1]) + text + b"\xff", bytes([10, 100]) + text]
    for message in broken:
        with Client(watched.stack.address) as client:
            call = client._channels[0].unary_stream("/draftwire.v1.GatewayService/Generate")
            with pytest.raises(grpc.RpcError) as failed:
                list(call(message, timeout=SECONDS))
        assert not quotes(repr(failed.value))
    assert not any(quotes(json.dumps(line)) for line in watched.lines)


def faulty(place: str) -> str:
    return f"{MARKER} fault:{place} {MARKER}"


def test_internal_errors_quote_the_prompt_neither_in_logs_nor_to_clients(watched: Watched) -> None:
    with Client(watched.stack.address) as client:
        refused = fail(client, faulty("tokenize"))
        assert str(refused) == "internal error"
        watched.wait_for("rpc.method_failed")
        failed = fail(client, faulty("verify"))
        watched.wait_for("verifier.step_failed")
        completions = [client.generate(faulty(place), max_tokens=300, temperature=0.0) for place in ("draft", "spec")]
        watched.wait_for("drafter.step_failed")
        watched.wait_for("gateway.drafter_lost", 2)
        lost = client.generate(faulty("task"), max_tokens=3)
        watched.wait_for("process.error_lost")
    assert all(completion.drafter_error for completion in completions)
    said = [str(refused), str(failed), lost.drafter_error, *(completion.drafter_error for completion in completions)]
    assert not any(map(quotes, said))
    tracebacks = {line["event"]: line["exception"] for line in watched.lines if "exception" in line}
    for event in ("rpc.method_failed", "verifier.step_failed", "drafter.step_failed", "process.error_lost"):
        assert "ValueError" in tracebacks[event]
        assert "sitecustomize.py" in tracebacks[event]
    assert not any(quotes(json.dumps(line)) for line in watched.lines)


def begin(client: Client, **options: Any) -> Iterator[Piece]:
    """Returns a stream that has begun, once requests that were cut short have made room for it."""
    begun: list[Iterator[Piece]] = []

    def has_room() -> bool:
        stream = iter(client.stream(MARKER, **options))
        try:
            next(stream)
        except NoRoomError:
            return False
        begun.append(stream)
        return True

    wait_until(has_room, "what was cut short ends")
    return begun[0]


def test_requests_that_are_cut_short_leave_nothing_behind(watched: Watched) -> None:
    """By their deadline, by their user, by a full server, and by the death of a drafter and a verifier."""
    services = watched.stack.services
    said: list[str] = []
    options: dict[str, Any] = {"max_tokens": 2000, "temperature": 0.0, "stop": ["unlike " + MARKER], "resume_s": 0.0}
    with Client(watched.stack.address) as client:
        said.append(str(fail(client, timeout_s=0.3, **options)))
        cancelled = client.stream(MARKER, **options)
        next(iter(cancelled))
        cancelled.cancel()
        first, second = (begin(client, **options) for _ in range(2))  # to drop one would cancel it
        said.append(str(fail(client, **options)))
        services["drafter"].process.kill()
        watched.wait_for("gateway.peer_lost")
        services["verifier"].process.kill()
        for stream in (first, second):
            with pytest.raises(UnavailableError) as failed:
                list(stream)
            said.append(str(failed.value))
    assert not any(map(quotes, said))
    assert not any(quotes(json.dumps(line)) for line in watched.lines)


def test_marker_would_be_found() -> None:
    found: Callable[[Any], bool] = lambda value: quotes(json.dumps({"event": value}))  # noqa: E731
    assert found(f"lost {MARKER}")
    assert found(IDS)
    assert quotes(repr(gateway_pb2.GenerateRequest(text=MARKER)))
