"""Attacks on the HTTP edge: bodies that never end, lists within lists, sockets that say nothing, names of others."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import grpc

from benchmarks.report import read_metric
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.attacks.http_requests import ask, split
from tests.attacks.victim import HARM, Figures, Victim, attack, judged

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY_BYTES = 7_900_000
NUM_BODIES = 60
NUM_SILENT = 4500
NUM_UNREAD = 1200
NUM_SCRAPERS = 400
MAX_PROBE_SECONDS = 5.0


def probes(victim: Victim, address: str, path: str) -> Figures:
    """Asks as an honest user would, until the attack's time is over."""
    answers = []
    until = time.monotonic() + victim.seconds
    while time.monotonic() < until:
        answers.append(ask(address, path, timeout_s=MAX_PROBE_SECONDS))
        time.sleep(0.05)
    slowest = max(seconds for _, seconds in answers)
    not_answered = sum(status == 0 for status, _ in answers)
    return judged({"asked": len(answers), "slowest_s": slowest}, {f"{not_answered} got no answer": not_answered > 0})


def unfinished(stack: ExitStack, address: str, head: bytes, body: bytes) -> socket.socket:
    """Returns a connection that has sent as much of a body as the other end takes within a moment."""
    raw = stack.enter_context(socket.create_connection(split(address), timeout=1.0))
    with suppress(OSError):
        raw.sendall(HEAD + head + b"\r\n" + body)
    return raw


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def bodies_that_never_end(victim: Victim, head: bytes, body: bytes) -> Figures:
    with ExitStack() as stack, ThreadPoolExecutor(NUM_BODIES) as threads:
        raws = list(threads.map(lambda _: unfinished(stack, victim.http, head, body), range(NUM_BODIES)))
        refused = 0
        for raw in raws:
            raw.settimeout(0.01)
            with suppress(OSError):
                refused += raw.recv(12) == b"HTTP/1.1 429"
        honest = probes(victim, victim.http, "/v1/models")
        small, _ = ask(victim.http, "/v1/completions", b"{}", timeout_s=MAX_PROBE_SECONDS)
    return {"refused": refused, "small_body": small, **honest}


@attack("user")
def unfinished_bodies(victim: Victim) -> Figures:
    """All but the last bytes of many of the largest bodies."""
    return bodies_that_never_end(victim, b"content-length: 8000000\r\n", b" " * BODY_BYTES)


@attack("user")
def unfinished_chunked_bodies(victim: Victim) -> Figures:
    """The same without a declared length."""
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    return bodies_that_never_end(victim, b"transfer-encoding: chunked\r\n", chunk * (BODY_BYTES // 2**16))


@attack("user")
def lists_in_lists(victim: Victim) -> Figures:
    """The largest bodies, of nothing but empty lists: 64 bytes in memory for each three."""
    body = b'{"model": "x", "prompt": [' + b"[]," * 2_600_000 + b"[]]}"
    statuses = set[int]()
    until = time.monotonic() + victim.seconds
    with ThreadPoolExecutor(8) as threads:
        while time.monotonic() < until:
            answered = threads.map(lambda _: ask(victim.http, "/v1/completions", body), range(8))
            statuses |= {status for status, _ in answered}
    return judged({"statuses": sorted(statuses)}, {"the lists were taken": 200 in statuses})


def silent(stack: ExitStack, address: str, number: int) -> int:
    """Opens connections that say nothing, and returns how many could be opened."""
    for opened in range(number):
        try:
            stack.enter_context(socket.create_connection(split(address), timeout=2.0))
        except OSError:
            return opened
    return number


@attack("anyone")
def silent_http_sockets(victim: Victim) -> Figures:
    """More connections than the edge takes, none of which asks for anything."""
    with ExitStack() as stack:
        opened = silent(stack, victim.http, NUM_SILENT)
        return {"opened": opened, **probes(victim, victim.http, "/health")}


@attack("anyone")
def bodies_for_no_route(victim: Victim) -> Figures:
    """The begins of bodies that no route reads, on as many connections as there may be."""
    head = HEAD.replace(b"/v1/completions", b"/nothing") + b"content-length: 8000000\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(NUM_SILENT):
            raw = stack.enter_context(socket.create_connection(split(victim.http), timeout=2.0))
            raw.setblocking(False)
            with suppress(OSError):
                raw.send(head + b" " * 2**18)
        time.sleep(0.5)
        return probes(victim, victim.http, "/health")


@attack("anyone")
def unread_answers(victim: Victim) -> Figures:
    """Requests for pages, many on each connection, of whose answers nothing is read."""
    asked = b"GET /playground.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 32
    with ExitStack() as stack:
        for _ in range(NUM_UNREAD):
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.settimeout(2.0)
            with suppress(OSError):
                raw.connect(split(victim.http))
                raw.send(asked)
        return probes(victim, victim.http, "/health")


@attack("anyone")
def silent_scrapers(victim: Victim) -> Figures:
    """Connections to the metrics of each service, none of which asks for anything."""
    threads = {name: num_threads(pid) for name, pid in victim.pids.items()}
    with ExitStack() as stack:
        for address in victim.metrics.values():
            silent(stack, address, NUM_SCRAPERS)
        time.sleep(0.5)
        more = {name: num_threads(pid) - threads[name] for name, pid in victim.pids.items()}
        figures = probes(victim, victim.metrics["verifier"], "/metrics")
    many = ["connections have threads"] * (max(more.values()) > NUM_SCRAPERS // 10)
    return figures | {"more_threads": more, HARM: [*figures[HARM], *many]}


@attack("page")
def rebound_names(victim: Victim) -> Figures:
    """Asks under a name that its owner has lead to this machine, as a page in a browser here can."""
    paths = {victim.http: "/v1/models", **dict.fromkeys(victim.metrics.values(), "/metrics")}
    host = {"host": "rebound.example"}
    statuses = [ask(address, path, headers=host)[0] for address, path in paths.items()]
    return judged({"statuses": statuses}, {"a name of others was answered": set(statuses) != {403}})


NUM_AT_ONCE = 9
"""Requests of 128 choices: 256 run at once, and 1,024 may wait."""


@attack("user")
def finished_choices(victim: Victim) -> Figures:
    """Requests of 128 choices that are all finished already: nothing is generated, but their prompts are read.

    As many at a time as fit into the queue beside others: callers without tokens count as one.
    """
    port = int(victim.metrics["gateway"].rpartition(":")[2])

    def requests() -> Iterator[gateway_pb2.GenerateRequest]:
        choices = [gateway_pb2.GeneratedChoice(choice=one, is_finished=True) for one in range(128)]
        for number in count():
            text = f"{number} " + "def f(x): return x\n" * 200
            yield gateway_pb2.GenerateRequest(text=text, num_choices=128, generated_choices=choices)

    async def asked() -> Figures:
        codes, until, source = dict[str, int](), time.monotonic() + victim.seconds, requests()
        async with grpc.aio.insecure_channel(victim.gateway) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]

            async def one() -> str:
                try:
                    async for _ in stub.Generate(next(source), timeout=10.0):
                        pass
                except grpc.aio.AioRpcError as error:
                    return error.code().name
                return "OK"

            most = 0.0
            while time.monotonic() < until:
                asked = [asyncio.create_task(one()) for _ in range(NUM_AT_ONCE)]
                await asyncio.sleep(0.05)
                most = max(most, await asyncio.to_thread(read_metric, port, "num_requests_waiting"))
                for code in await asyncio.gather(*asked):
                    codes[code] = codes.get(code, 0) + 1
        return judged({"codes": codes, "waiting": most}, {"finished choices were not counted": most < 128})

    return asyncio.run(asked())
