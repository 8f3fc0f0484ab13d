"""Gateways that command what is not theirs, ask for what has no end, and open what they never use."""

import asyncio
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc

from draftwire.cli.service_metrics import fetch
from draftwire.method.keys import KEY_BYTES
from draftwire.runtime.messages import fence_to_proto
from draftwire.v1 import drafter_pb2, drafter_pb2_grpc, session_pb2, verifier_pb2
from tests.attacks.raw_sessions import BLOCK, PROMPT, SECONDS, UNLIMITED, kept_streams, raw_drafter, raw_lease
from tests.attacks.victim import Figures, Victim, attack, judged
from tests.bad_inputs import Stream

LARGEST = 2**32 - 1
QUIET_SECONDS = 0.2
"""How long to wait for what must not come."""
NUM_STREAMS = 3_000
NUM_SESSIONS = 8
LONG_RUN = 100
"""Tokens at which a session without end has to end."""


def draft_request(lease_id: int, verifier_address: str, **changes: Any) -> drafter_pb2.OpenDraftSessionRequest:
    """Returns a good request to open a session on the drafter, but for some fields."""
    rule = session_pb2.VerificationRule(name="block", is_lossless=True, needs_draft_probs=True)
    fields = {
        "lease_id": lease_id,
        "session_id": secrets.randbits(64),
        "token_ids": PROMPT,
        "drafting_key": secrets.token_bytes(KEY_BYTES),
        "verifier_address": verifier_address,
        "target_vocab_size": 4096,
        "max_len": 64,
        "parameters": session_pb2.SessionParameters(prompt_len=len(PROMPT), rule=rule, max_draft_tokens=BLOCK),
    }
    return drafter_pb2.OpenDraftSessionRequest(**{**fields, **changes})


@contextmanager
def draft_lease(channel: grpc.Channel) -> Iterator[tuple[Stream, int]]:
    """Opens a gateway's stream to the drafter, and returns its lease too."""
    stream = Stream(drafter_pb2_grpc.DrafterServiceStub(channel).RunDraftSessions)
    try:
        (event,) = stream.next().events
        yield stream, event.lease.lease_id
    finally:
        stream.close()


class Forwarding:
    """Forwards connections of any address of this machine to a port. A context manager."""

    def __init__(self, port: int) -> None:
        self._to, self.num_open, self.port = port, 0, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "Forwarding":
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._forward, "0.0.0.0", 0), self._loop
        ).result()
        self.port = server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        onwards, sink = await asyncio.open_connection("127.0.0.1", self._to)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await asyncio.gather(_pass_on(reader, sink), _pass_on(onwards, writer))
        finally:
            self.num_open -= 1
            writer.close()
            sink.close()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(2**16):
        sink.write(data)
        await sink.drain()
    sink.close()


@attack("gateway")
def commands_for_others(victim: Victim) -> Figures:
    """Closes the session of another gateway, runs it plainly, and opens it again, by its id."""
    until, num_sent, harm = time.monotonic() + victim.seconds, 0, Counter[str]()
    with (
        grpc.insecure_channel(victim.verifier, UNLIMITED) as channel,
        raw_lease(channel) as lease,
        grpc.insecure_channel(victim.verifier, UNLIMITED) as another,
        raw_lease(another) as thief,
        raw_drafter(channel) as drafter,
    ):
        while time.monotonic() < until:
            session = lease.open()
            for epoch in (0, 1, LARGEST):
                thief.command(close_session=session_pb2.CloseSession(session_id=session.session_id, epoch=epoch))
            for fence in (session.fence, replace(session.fence, prefix_hash=1), replace(session.fence, epoch=LARGEST)):
                thief.command(plain_run=verifier_pb2.PlainRun(fence=fence_to_proto(fence), num_rounds=LARGEST))
            for key in (session.permit_key, secrets.token_bytes(KEY_BYTES)):
                with suppress(grpc.RpcError):
                    thief.stub.OpenTargetSession(
                        thief.request(session_id=session.session_id, permit_key=key), timeout=SECONDS
                    )
                    harm["an open session's id was opened again"] += 1
            num_sent += 8
            harm["the session was touched"] += lease.event_of(session, QUIET_SECONDS) is not None
            drafter.push(session.block())
            event = lease.event_of(session)
            harm["the session does not go on"] += event is None or not event.HasField("verdict")
            lease.close(session)
    return judged({"commands": num_sent}, {what: bool(count) for what, count in harm.items()})


@attack("gateway")
def runs_without_end(victim: Victim) -> Figures:
    """Sessions that are to decode 2^32 - 1 tokens each: they end at their `max_len`."""
    until, num_ended, lengths = time.monotonic() + victim.seconds, 0, Counter[int]()
    with grpc.insecure_channel(victim.verifier, UNLIMITED) as channel, raw_lease(channel) as lease:
        while time.monotonic() < until:
            sessions = [lease.open(max_len=LONG_RUN) for _ in range(NUM_SESSIONS)]
            for session in sessions:
                session.run_plain(LARGEST)
            lease.waiting.clear()
            by_id = {session.session_id: session for session in sessions}
            while any(len(session.committed) < LONG_RUN for session in sessions):
                response = lease.stream.next()
                if not hasattr(response, "events"):
                    break
                for event in response.events:
                    by_id[event.verdict.fence.session_id].commit(event.verdict)
            for session in sessions:
                lengths[len(session.committed)] += 1
                session.run_plain(LARGEST)  # is refused
                lease.close(session)
            num_ended += len(sessions)
    return judged(
        {"sessions": num_ended, "lengths": dict(lengths)},
        {"a session went on beyond its max_len": max(lengths) > LONG_RUN, "a session stopped": min(lengths) < LONG_RUN},
    )


@attack("gateway")
def absurd_sessions(victim: Victim) -> Figures:
    """Sessions beyond every limit, ids that are used again, and runs for prefixes that do not fit."""
    changes: list[dict[str, Any]] = [
        {"max_len": LARGEST},
        {"max_len": 0},
        {"token_ids": PROMPT * 100_000},
        {"token_ids": [LARGEST]},
        {"first_round": LARGEST},
        {"max_held_blocks": LARGEST},
        {"max_tree_nodes": LARGEST},
        {"permit_key": b"x"},
        {"lease_id": 1},
    ]
    until, statuses, harm = time.monotonic() + victim.seconds, Counter[str](), Counter[str]()
    with grpc.insecure_channel(victim.verifier, UNLIMITED) as channel, raw_lease(channel) as lease:
        while time.monotonic() < until:
            for change in changes:
                try:
                    lease.stub.OpenTargetSession(lease.request(**change), timeout=SECONDS)
                    harm[f"opened with {next(iter(change))}"] += 1
                except grpc.RpcError as error:
                    statuses[error.code().name] += 1
            wrong, good = lease.open(), lease.open()
            wrong.run_plain(1, replace(wrong.fence, prefix_hash=1))
            event = lease.event_of(wrong)
            harm["a run for another prefix was carried out"] += event is None or not event.HasField("failure")
            good.run_plain()
            event = lease.event_of(good)
            harm["a session beside it ended"] += event is None or not event.HasField("verdict")
            lease.close(good)
            with suppress(grpc.RpcError):  # the command to close it may still be on the way
                lease.close(lease.open(session_id=good.session_id))
    return judged({"statuses": dict(statuses)}, {what: bool(count) for what, count in harm.items()})


@attack("gateway")
def leases_without_end(victim: Victim) -> Figures:
    """Thousands of gateways' streams at verifier and drafter, on which nothing is opened, and a gateway that comes."""
    figures: Figures = {}
    run_target, run_draft = "VerifierService/RunTargetSessions", "DrafterService/RunDraftSessions"
    for address, method in ((victim.verifier, run_target), (victim.drafter, run_draft)):
        with kept_streams(address, f"/draftwire.v1.{method}", NUM_STREAMS // 2) as calls:
            time.sleep(victim.seconds / 2)
            statuses = Counter(call.code().name if call.done() else "open" for call in calls)
            figures[method] = dict(statuses)
            with grpc.insecure_channel(victim.verifier, UNLIMITED) as channel, raw_lease(channel) as lease:
                session = lease.open()
                lease.close(session)
    return judged(figures, {})


COMMANDS = 60_000
"""In one message, which then has some 250 KB."""


@attack("gateway")
def floods_of_commands(victim: Victim) -> Figures:
    """Messages of 60,000 commands each, for sessions that there are not, to verifier and drafter, without a pause."""
    until, num_sent = time.monotonic() + victim.seconds, Counter[str]()
    close = session_pb2.CloseSession(epoch=1)
    closes = [verifier_pb2.TargetCommand(close_session=close)] * COMMANDS
    target = verifier_pb2.RunTargetSessionsRequest(commands=closes)
    drafts = drafter_pb2.RunDraftSessionsRequest(commands=[drafter_pb2.DraftCommand(close_session=close)] * COMMANDS)
    methods = {
        victim.verifier: ("/draftwire.v1.VerifierService/RunTargetSessions", target.SerializeToString()),
        victim.drafter: ("/draftwire.v1.DrafterService/RunDraftSessions", drafts.SerializeToString()),
    }

    def messages(method: str, data: bytes) -> Iterator[bytes]:
        while time.monotonic() < until:
            num_sent[method] += 1
            yield data

    def send(address: str) -> None:
        method, data = methods[address]
        with grpc.insecure_channel(address, UNLIMITED) as channel, suppress(grpc.RpcError):
            list(channel.stream_stream(method)(messages(method, data), timeout=victim.seconds + SECONDS))

    threads = [threading.Thread(target=send, args=(address,)) for address in methods]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return judged({"messages": dict(num_sent)}, {"nothing was sent": not num_sent})


@attack("gateway")
def openings_that_never_come(victim: Victim) -> Figures:
    """Thousands of calls that are to open sessions, at verifier and drafter, and whose request never comes."""
    figures: Figures = {}
    open_target, open_draft = "VerifierService/OpenTargetSession", "DrafterService/OpenDraftSession"
    for address, method in ((victim.verifier, open_target), (victim.drafter, open_draft)):
        with kept_streams(address, f"/draftwire.v1.{method}", NUM_STREAMS // 2) as calls:
            time.sleep(victim.seconds / 2)
            figures[method] = dict(Counter(call.code().name if call.done() else "open" for call in calls))
    return judged(figures, {})


@attack("gateway")
def openings_that_hang(victim: Victim) -> Figures:
    """Has the drafter draft for verifiers that accept connections and say nothing, in one session after the other."""
    until, statuses, lock = time.monotonic() + victim.seconds, Counter[str](), threading.Lock()
    listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(64)]
    with grpc.insecure_channel(victim.drafter, UNLIMITED) as channel, draft_lease(channel) as (_, lease_id):
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)

        def hang(listener: socket.socket) -> None:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            while time.monotonic() < until:
                try:
                    stub.OpenDraftSession(draft_request(lease_id, address), timeout=max(0.1, until - time.monotonic()))
                except grpc.RpcError as error:
                    with lock:
                        statuses[error.code().name] += 1
                    time.sleep(0.05)

        threads = [threading.Thread(target=hang, args=(listener,)) for listener in listeners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for listener in listeners:
        listener.close()
    return judged({"statuses": dict(statuses)}, {"a session was opened": "OK" in statuses})


@attack("gateway")
def verifiers_without_end(victim: Victim) -> Figures:
    """Has the drafter connect to the verifier under one address after the other, a session each."""
    until, statuses = time.monotonic() + victim.seconds, Counter[str]()
    port = int(victim.verifier.rpartition(":")[2])
    before = victim.resident_mib("drafter")
    with (
        Forwarding(port) as forwarding,
        grpc.insecure_channel(victim.drafter, UNLIMITED) as channel,
        draft_lease(channel) as (stream, lease_id),
    ):
        stub, number = drafter_pb2_grpc.DrafterServiceStub(channel), 0
        while time.monotonic() < until:
            number += 1
            address = f"127.{1 + number // 62_500}.{1 + number // 250 % 250}.{1 + number % 250}:{forwarding.port}"
            request = draft_request(lease_id, address)
            try:
                stub.OpenDraftSession(request, timeout=SECONDS)
                statuses["OK"] += 1
            except grpc.RpcError as error:
                statuses[f"{error.code().name}: {error.details()}"[:80]] += 1
            close = session_pb2.CloseSession(session_id=request.session_id)
            stream.send(drafter_pb2.RunDraftSessionsRequest(commands=[drafter_pb2.DraftCommand(close_session=close)]))
        num_open = forwarding.num_open
    after = victim.resident_mib("drafter")
    metrics = fetch(int(victim.metrics["drafter"].rpartition(":")[2]), timeout_s=5.0) or {}
    return judged(
        {
            "addresses": number,
            "statuses": dict(statuses),
            "links_left": num_open,
            "drafter_mib_before": before,
            "drafter_mib_after": after,
            "sessions": metrics.get("num_sessions"),
        },
        {"links are kept that no session uses": num_open > 100},
    )
