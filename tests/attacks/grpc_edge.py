"""What reaches gRPC ports: messages that grow, requests that never end, streams that are kept, and eavesdroppers."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.relay import Relay
from draftwire.client import Client
from draftwire.errors import DraftwireError
from draftwire.v1 import drafter_pb2, drafter_pb2_grpc, gateway_pb2
from tests.attacks.victim import HARM, Figures, Victim, attack, judged
from tests.bad_inputs import draft_fields

MIB = 2**20
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
GENERATE = "/draftwire.v1.GatewayService/Generate"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
PROBE_SECONDS = 5.0
"""What Kubernetes waits for an answer."""


@contextmanager
def probed(victim: Victim) -> Iterator[Figures]:
    """Probes the gateway's health within the block, as Kubernetes would; a probe that fails is harm."""
    figures: Figures = {}
    waits: list[float] = []
    failed: list[float] = []
    stopping = threading.Event()

    def look() -> None:
        with grpc.insecure_channel(victim.gateway, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            while not stopping.wait(0.02):
                asked = time.monotonic()
                request = health_pb2.HealthCheckRequest(service="draftwire.v1.GatewayService")
                try:
                    health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_SECONDS)
                except grpc.RpcError:
                    failed.append(asked)
                waits.append(time.monotonic() - asked)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield figures
    finally:
        stopping.set()
        thread.join()
        figures |= judged({"slowest_probe_s": max(waits), "probes": len(waits)}, {"health probes failed": bool(failed)})


def with_statuses(figures: Figures, statuses: Counter[str]) -> Figures:
    """Adds the statuses of calls of which none may be carried out."""
    served = ["calls were carried out"] * ("OK" in statuses)
    return figures | {"statuses": dict(statuses), HARM: [*figures[HARM], *served]}


def answers(calls: Sequence[Any]) -> dict[str, int]:
    """Returns how many calls got each status, or none yet."""
    return dict(Counter(call.code().name if call.done() else "none" for call in calls))


@contextmanager
def channels(address: str, count: int) -> Iterator[list[grpc.Channel]]:
    """Opens connections of their own."""
    with ExitStack() as stack:
        yield [stack.enter_context(grpc.insecure_channel(address, UNLIMITED)) for _ in range(count)]


@attack("anyone")
def empty_messages_in_a_message(victim: Victim) -> Figures:
    """A message within a message that is empty takes two bytes on the wire and a hundred in memory."""
    methods = {
        victim.gateway: (GENERATE, b"\xb2\x01\x00"),
        victim.verifier: ("/draftwire.v1.VerifierService/RunTargetSessions", b"\x0a\x00"),
        victim.drafter: ("/draftwire.v1.DrafterService/RunDraftSessions", b"\x0a\x00"),
    }
    codes: Counter[str] = Counter()
    until = time.monotonic() + victim.seconds
    with probed(victim) as figures:
        while time.monotonic() < until:
            for address, (method, unit) in methods.items():
                for size in (63 * MIB, 7 * MIB):
                    with channels(address, 1) as (channel,):
                        data = unit * (size // len(unit))
                        call = channel.stream_stream(method)(iter([data]), timeout=30.0)
                        with suppress(grpc.RpcError):
                            list(call)  # a status comes after all answers
                        codes[call.code().name] += 1
    return with_statuses(figures, codes)


@attack("user")
def compressed_requests(victim: Victim) -> Figures:
    """A few KB that become MiBs, by the compression of gRPC itself."""
    request = gateway_pb2.GenerateRequest(text="x" * (60 * MIB)).SerializeToString()
    codes: Counter[str] = Counter()
    until = time.monotonic() + victim.seconds
    with probed(victim) as figures, channels(victim.gateway, 4) as opened:
        while time.monotonic() < until:
            calls = [
                channel.unary_stream(GENERATE)(request, timeout=60.0, compression=grpc.Compression.Gzip)
                for channel in opened
            ]
            codes.update(call.code().name for call in calls)
    return with_statuses(figures, codes)


@attack("anyone")
def requests_that_never_come(victim: Victim) -> Figures:
    """Thousands of calls that are begun, and that send nothing."""
    stopping = threading.Event()

    def nothing() -> Iterator[bytes]:
        stopping.wait()
        yield from ()

    calls: list[Any] = []
    until = time.monotonic() + victim.seconds
    with probed(victim) as figures, channels(victim.gateway, 8) as opened:
        while time.monotonic() < until and len(calls) < 400:  # each has a thread here
            for channel in opened:
                calls += [channel.stream_stream(method)(nothing()) for method in (GENERATE, CHECK)]
            time.sleep(0.05)
        time.sleep(max(0.0, until - time.monotonic()))
        figures |= {"calls": len(calls), "answers": answers(calls)}
        stopping.set()
    return figures


@attack("anyone")
def streams_of_health(victim: Victim) -> Figures:
    """Streams that wait for the health to change, for which nobody has to show a token."""
    calls: list[Any] = []
    until = time.monotonic() + victim.seconds
    with probed(victim) as figures, channels(victim.gateway, 8) as opened:
        request = health_pb2.HealthCheckRequest().SerializeToString()
        while len(calls) < 8000 and time.monotonic() < until:
            calls += [channel.unary_stream(WATCH)(request) for channel in opened for _ in range(100)]
        time.sleep(max(0.0, until - time.monotonic()))
        figures |= {"streams": len(calls), "answers": answers(calls)}
    return figures


@attack("user")
def requests_that_stop_half_way(victim: Victim) -> Figures:
    """Large requests of which nearly all arrives, and then nothing more."""
    request = gateway_pb2.GenerateRequest(text="x" * (8 * MIB - 1000)).SerializeToString()
    port = int(victim.gateway.rpartition(":")[2])
    until = time.monotonic() + victim.seconds
    with probed(victim) as figures, Relay(port) as relay, channels(f"127.0.0.1:{relay.port}", 100) as opened:
        calls = [channel.unary_stream(GENERATE)(request) for channel in opened]
        num_stopped = 0
        while time.monotonic() < until:
            for connection in relay.connections:
                if connection.flowing.is_set() and connection.sent > 6 * MIB:
                    connection.pause()
                    num_stopped += 1
            time.sleep(0.001)
        figures |= {"stopped": num_stopped}
        for call in calls:
            call.cancel()
    return figures


@attack("anyone")
def silent_connections(victim: Victim) -> Figures:
    """Connections on which nothing is said."""
    host, _, port = victim.gateway.rpartition(":")
    until = time.monotonic() + victim.seconds
    with probed(victim) as figures, ExitStack() as stack:
        opened = []
        with suppress(OSError):
            while len(opened) < 900:
                opened.append(stack.enter_context(socket.create_connection((host, int(port)), 1.0)))
        time.sleep(max(0.0, until - time.monotonic()))
        figures["connections"] = len(opened)
    return figures


def own_address() -> str:
    """Returns an address of this machine that is not its loopback. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


@contextmanager
def eavesdropping() -> Iterator[tuple[str, bytearray]]:
    """Listens as another machine would, greets as an HTTP/2 server, and notes what arrives in plaintext."""
    heard = bytearray()
    with socket.create_server((own_address(), 0)) as listener:
        listener.settimeout(3.0)

        def hear() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(1.0)
                    connection.sendall(b"\0\0\0\x04\0\0\0\0\0")
                    while data := connection.recv(2**16):
                        heard.extend(data)

        thread = threading.Thread(target=hear)
        thread.start()
        host, port = listener.getsockname()
        yield f"{host}:{port}", heard
        thread.join()


@attack("anyone")
def token_on_the_way(victim: Victim) -> Figures:
    """A client with a token and without certificates, on a network where others listen."""
    outcome = ""
    with eavesdropping() as (address, heard):
        try:
            with Client(address, token="a-secret-of-alice") as client:
                client.generate("import os", max_tokens=1, timeout_s=2.0)
        except DraftwireError as error:
            outcome = str(error)[:100]
    was_heard = b"a-secret-of-alice" in heard
    return judged({"heard_bytes": len(heard), "client_says": outcome}, {"the token was heard": was_heard})


@attack("gateway")
def drafter_sent_elsewhere(victim: Victim) -> Figures:
    """A drafter is told that the verifier of a session is on another machine, which it would call in plaintext."""
    outcome = "accepted"
    with eavesdropping() as (address, heard), grpc.insecure_channel(victim.drafter) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        stopping = threading.Event()

        def wait() -> Iterator[drafter_pb2.RunDraftSessionsRequest]:
            stopping.wait()
            yield from ()

        stream = stub.RunDraftSessions(wait())
        lease = next(iter(stream)).events[0].lease
        try:
            stub.OpenDraftSession(
                drafter_pb2.OpenDraftSessionRequest(**draft_fields(address, lease.lease_id)), timeout=3.0
            )
        except grpc.RpcError as error:
            outcome = f"{error.code().name}: {error.details()}"[:160]
        stopping.set()
        stream.cancel()
    return judged({"drafter_says": outcome}, {f"{len(heard)} bytes were heard": len(heard) > 0})
