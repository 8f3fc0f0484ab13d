"""Connections that are cut without being closed, that are idle, and that carry too much."""

import asyncio
import queue
import time
from collections.abc import Iterator

import pytest
from observing import read_metric, wait_until

from benchmarks.relay import Connection, Relay, free_port
from draftwire.client import AsyncClient, Client
from draftwire.client.health_check import check_health
from draftwire.client.security import Security
from draftwire.errors import InvalidRequestError, UnavailableError
from draftwire.models.script import expected_tokens
from tests.in_process import InProcessStack

KEEPALIVE_SECONDS = 2.0
"""Time and timeout together, 1 s each."""
SLACK_SECONDS = 2.0
"""For a busy machine with two cores; all other timeouts of the stack are longer than both together."""
KEEPALIVE = {"keepalive_time_s": 1.0, "keepalive_timeout_s": 1.0}
SCRIPT = "scripted:acceptance=1,verify_ms=20,context_length=4096"
MIB = 2**20
PROMPT = [1, 2, 3, 4, 5]


class Rig:
    """A scripted stack whose gateway reaches the others through relays, and so does the drafter the verifier."""

    def __init__(self, to_verifier: Relay, to_drafter: Relay, ports: dict[str, int]) -> None:
        self.to_verifier, self.to_drafter = to_verifier, to_drafter
        self.events: queue.Queue[str] = queue.Queue()
        peers = {"verifier": f"127.0.0.1:{to_verifier.port}", "drafter": f"127.0.0.1:{to_drafter.port}"}
        timeouts = {"block_timeout_s": 30.0, "verdict_timeout_s": 60.0}
        self.stack = InProcessStack(
            {
                # Asks less often than its clients do: they must not be sent away for it.
                "drafter": {"model": SCRIPT, "port": ports["drafter"], **KEEPALIVE, "keepalive_time_s": 2.0},
                "verifier": {"model": SCRIPT, "port": ports["verifier"], **KEEPALIVE},
                "gateway": {**peers, **timeouts, **KEEPALIVE, "max_message_bytes": MIB},
            },
            on_log=lambda _service, line: self.events.put(str(line["event"])),
        )

    def wait_for_event(self, event: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.events.get(timeout=max(deadline - time.monotonic(), 0.01)) != event:
            pass

    def forget_events(self) -> None:
        while not self.events.empty():
            self.events.get()

    def wait_for_sessions(self, service: str, count: int, seconds: float = 20.0) -> None:
        reason = f"{service} has {count} sessions"
        wait_until(lambda: read_metric(self.stack, service, "num_sessions") == count, reason, seconds)

    def wait_until_whole(self, client: Client) -> None:
        """Returns when completions use the drafter again."""

        def has_drafts() -> bool:
            try:
                return client.generate(PROMPT, max_tokens=30, temperature=0.0).statistics.num_drafts > 0
            except UnavailableError:
                return False

        wait_until(has_drafts, "the stack mends itself")


@pytest.fixture(scope="module")
def running_rig() -> Iterator[Rig]:
    ports = {"verifier": free_port(), "drafter": free_port()}
    with Relay(ports["verifier"]) as to_verifier, Relay(ports["drafter"]) as to_drafter:
        rig = Rig(to_verifier, to_drafter, ports)
        with rig.stack, Client(rig.stack.address) as client:
            rig.wait_until_whole(client)
            yield rig


@pytest.fixture
def rig(running_rig: Rig) -> Iterator[Rig]:
    """The stack, in one piece before and after."""
    running_rig.forget_events()
    yield running_rig
    running_rig.to_verifier.resume()
    running_rig.to_drafter.resume()
    with Client(running_rig.stack.address) as client:
        running_rig.wait_until_whole(client)


@pytest.fixture
def client(rig: Rig) -> Iterator[Client]:
    with Client(rig.stack.address) as connected:
        yield connected


class Running:
    """A completion that takes seconds, under way."""

    def __init__(self, client: Client, max_tokens: int = 200, **options: object) -> None:
        self.stream = client.stream(PROMPT, max_tokens=max_tokens, temperature=0.0, **options)
        self.expected = expected_tokens(len(PROMPT), max_tokens)
        self._pieces = iter(self.stream)
        self._token_ids: list[int] = []
        self.advance(10)

    def advance(self, count: int) -> None:
        """Reads on by so many tokens at least."""
        wanted = len(self._token_ids) + count
        while len(self._token_ids) < wanted:
            self._token_ids += next(self._pieces).token_ids

    def finish(self) -> list[int]:
        for piece in self._pieces:
            self._token_ids += piece.token_ids
        return self._token_ids


def test_silent_drafter_is_noticed_and_the_session_goes_on_without_it(rig: Rig, client: Client) -> None:
    running = Running(client, num_speculative_tokens=2)
    rig.wait_for_sessions("drafter", 1)
    rig.to_drafter.pause()
    started = time.monotonic()
    running.advance(40)  # more than can have been under way
    seconds = time.monotonic() - started
    print(f"drafter given up after {seconds:.2f} s")
    assert seconds < KEEPALIVE_SECONDS + SLACK_SECONDS
    assert running.finish() == running.expected
    completion = running.stream.completion
    assert completion is not None
    assert "lost" in completion.drafter_error
    assert completion.statistics.num_drafts > 0


@pytest.mark.slow
def test_sessions_of_a_gateway_that_vanished_are_freed_and_go_on_later(rig: Rig, client: Client) -> None:
    running = Running(client, num_speculative_tokens=0)
    rig.wait_for_sessions("verifier", 1)
    rig.to_verifier.pause()
    started = time.monotonic()
    rig.wait_for_event("gateway.verifier_lost", KEEPALIVE_SECONDS + SLACK_SECONDS)
    rig.wait_for_sessions("verifier", 0, KEEPALIVE_SECONDS + SLACK_SECONDS - (time.monotonic() - started))
    print(f"verifier given up and its sessions freed after {time.monotonic() - started:.2f} s")
    rig.to_verifier.resume()
    assert running.finish() == running.expected
    completion = running.stream.completion
    assert completion is not None
    assert completion.statistics.num_verifiers_lost == 1
    assert completion.num_resumed == 0


def test_sessions_of_a_user_who_vanished_are_freed(rig: Rig) -> None:
    with Relay(rig.stack.services["gateway"].port) as to_gateway, Client(f"127.0.0.1:{to_gateway.port}") as client:
        running = Running(client, max_tokens=2000, num_speculative_tokens=0)
        rig.wait_for_sessions("verifier", 1)
        to_gateway.pause()
        started = time.monotonic()
        rig.wait_for_sessions("verifier", 0, seconds=KEEPALIVE_SECONDS + SLACK_SECONDS)
        print(f"user given up after {time.monotonic() - started:.2f} s")
        assert running.stream.completion is None


def block_connection(rig: Rig, client: Client) -> Connection:
    """Returns the drafter's connection to the verifier: the one that blocks are sent on."""
    before = {id(connection): connection.sent for connection in rig.to_verifier.open_connections}
    client.generate(PROMPT, max_tokens=200, temperature=0.0, num_speculative_tokens=8)
    return max(rig.to_verifier.open_connections, key=lambda connection: connection.sent - before[id(connection)])


def test_drafter_notices_a_silent_verifier_and_finds_it_again(rig: Rig, client: Client) -> None:
    silent = block_connection(rig, client)
    rig.forget_events()
    silent.pause()
    started = time.monotonic()
    rig.wait_for_event("drafter.verifier_lost", KEEPALIVE_SECONDS + SLACK_SECONDS)
    print(f"silent verifier noticed after {time.monotonic() - started:.2f} s")
    completion = client.generate(PROMPT, max_tokens=60, temperature=0.0)
    assert completion.statistics.num_drafts > 0
    assert completion.token_ids == expected_tokens(len(PROMPT), 60)


def test_silence_is_noticed_on_idle_connections_too(rig: Rig, client: Client) -> None:
    """Of the prompts' connection, which no call keeps open, nobody reports it: but it is closed, and opened again."""
    old = rig.to_verifier.open_connections
    assert len(old) == 3
    rig.to_verifier.pause()
    started = time.monotonic()
    rig.wait_for_event("gateway.peer_lost", KEEPALIVE_SECONDS + SLACK_SECONDS)
    # Some connections report nothing; by then they have noticed it, too.
    time.sleep(max(0.0, started + KEEPALIVE_SECONDS + SLACK_SECONDS - time.monotonic()))
    rig.to_verifier.resume()
    rig.wait_until_whole(client)
    assert not any(connection.is_open for connection in old)


@pytest.mark.slow
def test_idle_stack_keeps_its_connections_however_often_it_pings(rig: Rig, client: Client) -> None:
    rig.wait_until_whole(client)
    rig.forget_events()
    relays = (rig.to_verifier, rig.to_drafter)
    before = [(connection, connection.sent) for relay in relays for connection in relay.open_connections]
    num_connections = [len(relay.connections) for relay in relays]
    assert len(before) == 5
    time.sleep(8.0)
    for connection, sent in before:
        assert connection.is_open
        assert 4 * 17 < connection.sent - sent < 1000, "pings, or answers to pings, of 17 bytes"
    assert [len(relay.connections) for relay in relays] == num_connections
    assert rig.events.empty()


def test_message_above_the_limit_fails_its_call_alone(rig: Rig, client: Client) -> None:
    running = Running(client)
    with pytest.raises(InvalidRequestError, match=rf"too large: .*{MIB}"):
        client.generate("x" * (MIB + 1000), max_tokens=5)
    with pytest.raises(InvalidRequestError, match="context"):
        client.generate("x" * (MIB - 1000), max_tokens=5)
    assert running.finish() == running.expected


def test_proxy_of_the_environment_is_for_the_outside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many machines have one, and few say that it is of no use for their own address."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def generate(address: str) -> list[int]:
        async with AsyncClient(address) as client:
            return (await client.generate(PROMPT, max_tokens=5)).token_ids

    with InProcessStack({"verifier": {"model": SCRIPT}, "drafter": {"model": SCRIPT}, "gateway": {}}) as stack:
        with Client(stack.address) as client:
            completion = client.generate(PROMPT, max_tokens=5)
            assert completion.statistics.num_accepted_tokens > 0, "the drafter reaches the verifier"
        assert asyncio.run(generate(stack.address.replace("127.0.0.1", "localhost"))) == completion.token_ids
        check_health(stack.address, "", Security(), 10.0)


def test_verifier_whose_prompts_cannot_fit_does_not_start() -> None:
    model = "scripted:context_length=300000"
    options = {"verifier": {"model": model, "kv_cache_tokens": 300_000, "max_message_bytes": MIB}}
    with pytest.raises(UnavailableError, match=f"max_message_bytes is {MIB}"), InProcessStack(options):
        pass
