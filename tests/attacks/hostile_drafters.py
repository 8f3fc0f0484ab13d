"""Drafters that send what no drafter sends: blocks of every wrong form, again, too soon, for others, and no hello."""

import itertools
import random
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import torch

from benchmarks.relay import free_port
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED, embedded_model
from draftwire.cli.stack_options import stack_options
from draftwire.method.keys import KEY_BYTES
from draftwire.options.heads.head_loading import load_fusion
from draftwire.runtime.messages import fence_to_proto
from draftwire.v1 import drafter_pb2, session_pb2, verifier_pb2
from tests.attacks.greedy_readers import GreedyReaders, Seen
from tests.attacks.peers import MAX_MORE_MIB
from tests.attacks.raw_sessions import (
    BLOCK,
    SECONDS,
    SENT,
    UNLIMITED,
    RawLease,
    RawSession,
    kept_streams,
    raw_drafter,
    raw_lease,
)
from tests.attacks.victim import Figures, Victim, attack, judged, resident_mib

DENSE = session_pb2.DISTRIBUTION_ENCODING_DENSE_FLOAT32
SPARSE = session_pb2.DISTRIBUTION_ENCODING_SPARSE_UINT16
LARGEST = 2**32 - 1
QUIET_SECONDS = 0.2
"""How long to wait for what must not come."""

Wrong = Callable[[RawSession], session_pb2.DraftBlock]


def dense(session: RawSession, *entries: float) -> session_pb2.DraftBlock:
    """Returns a block of one token, of a row that begins with some entries and has the rest at the token."""
    row = [0.0] * session.lease.model.vocab_size
    row[SENT] = 1.0
    row[: len(entries)] = entries
    stated = session_pb2.DraftDistributions(
        encoding=DENSE, vocab_size=len(row), data=struct.pack(f"<{len(row)}f", *row)
    )
    return session.block(token_ids=[SENT], distributions=stated)


def sparse(session: RawSession, ids: list[int], weights: list[int], **changes: list[int]) -> session_pb2.DraftBlock:
    """Returns a block of one token, of a support with weights."""
    numbers = [weight - 1 for weight in weights]
    data = b"".join(token.to_bytes(2, "little") for token in ids)
    data += bytes(number & 255 for number in numbers) + bytes(number >> 8 & 255 for number in numbers)
    sizes = {"support_sizes": [len(ids)], "wide_sizes": [len(ids)], **changes}
    vocab_size = session.lease.model.vocab_size
    stated = session_pb2.DraftDistributions(encoding=SPARSE, vocab_size=vocab_size, data=data, **sizes)
    return session.block(token_ids=[SENT], distributions=stated)


def tree(session: RawSession, *parents: int) -> session_pb2.DraftBlock:
    return session.block(token_ids=[SENT] * len(parents), parent_indices=parents)


WRONG: Mapping[str, Wrong] = {
    "a row that sums to 2": lambda session: dense(session, 1.0),
    "a row that sums to 0": lambda session: dense(session, *[0.0] * (SENT + 1)),
    "NaN in a row": lambda session: dense(session, float("nan")),
    "an infinity in a row": lambda session: dense(session, float("inf")),
    "a negative weight": lambda session: dense(session, -1.0, 1.0),
    "weights beyond 65,536": lambda session: sparse(session, [SENT, 12], [40_000, 40_000]),
    "weights of 2": lambda session: sparse(session, [SENT, 12], [1, 1]),
    "an id twice": lambda session: sparse(session, [SENT, SENT], [32_768, 32_768]),
    "ids out of range": lambda session: sparse(session, [SENT, 65_535], [32_768, 32_768]),
    "the token not in its support": lambda session: sparse(session, [12, 13], [32_768, 32_768]),
    "a support of 2^32 - 1": lambda session: sparse(session, [SENT], [65_536], support_sizes=[LARGEST]),
    "a token out of range": lambda session: session.block(token_ids=[session.lease.model.vocab_size]),
    "a longer block than allowed": lambda session: session.block(token_ids=[SENT] * (BLOCK + 1)),
    "no tokens": lambda session: session.block(token_ids=[]),
    "a tree that was not allowed": lambda session: tree(session, -1, 0, 0),
    "a cycle in a tree": lambda session: tree(session, 1, 0),
    "a node that is its own parent": lambda session: tree(session, 0, 1, 2),
    "parents out of range": lambda session: tree(session, -1, 2**31 - 1, -(2**31)),
    "a round of the future": lambda session: session.block(fence=fence_to_proto(replace(session.fence, round=LARGEST))),
    "another prefix": lambda session: session.block(fence=fence_to_proto(replace(session.fence, prefix_hash=1))),
}
"""Blocks that have to be refused, by what is wrong with them."""


@attack("drafter")
def malformed_blocks(victim: Victim) -> Figures:
    """Blocks of every wrong form, with genuine permits. Each is refused, and the session goes on without drafts."""
    until, outcomes, wrong_ones = time.monotonic() + victim.seconds, Counter[str](), itertools.cycle(WRONG.items())
    with (
        grpc.insecure_channel(victim.verifier, UNLIMITED) as channel,
        raw_lease(channel) as lease,
        raw_drafter(channel) as drafter,
    ):
        for what, make in wrong_ones:
            if time.monotonic() > until and len(outcomes) > 1:
                break
            session = lease.open()
            drafter.push(make(session))
            event = lease.event_of(session)
            is_refused = event is not None and event.HasField("refusal")
            outcomes["refused" if is_refused else f"{what}: not refused"] += 1
            session.run_plain()
            event = lease.event_of(session)
            goes_on = event is not None and event.HasField("verdict") and event.verdict.num_draft_tokens == 0
            outcomes["went on" if goes_on else f"{what}: the session did not go on"] += 1
            lease.close(session)
        honest = lease.open()
        drafter.push(honest.block())
        event = lease.event_of(honest)
        is_judged = event is not None and event.HasField("verdict")  # it may be audited alone, after other attacks
    accepted = [what for what in outcomes if ":" in what]
    return judged(
        {"blocks": outcomes["refused"], "outcomes": dict(outcomes)},
        {**dict.fromkeys(accepted, True), "an honest block is not judged, so that nothing was shown": not is_judged},
    )


@attack("drafter")
def mutated_blocks(victim: Victim) -> Figures:
    """Blocks some bytes of which were changed at random, by the thousand. No session fails by them."""
    generator, until = random.Random(0), time.monotonic() + victim.seconds
    num_sent, failures = 0, Counter[str]()
    with grpc.insecure_channel(victim.verifier, UNLIMITED) as channel, raw_lease(channel) as lease:
        while time.monotonic() < until:
            session = lease.open()
            good = sparse(session, [SENT, *range(20, 50)], [65_536 - 30, *[1] * 30]).SerializeToString()
            with raw_drafter(channel) as drafter:
                for _ in range(100):
                    data = bytearray(good)
                    for _ in range(generator.randrange(1, 4)):
                        data[generator.randrange(len(data))] = generator.randrange(256)
                    try:
                        block = session_pb2.DraftBlock.FromString(bytes(data))
                    except Exception:  # the verifier would end the stream
                        continue
                    block.fence.session_id = session.session_id
                    drafter.push(block)
                    num_sent += 1
                session.run_plain()
                while (event := lease.event_of(session, QUIET_SECONDS)) is not None:
                    if event.HasField("failure"):
                        failures[event.failure.message] += 1
                    elif event.HasField("verdict"):
                        session.commit(event.verdict)
            lease.close(session)
    return judged({"blocks": num_sent}, {f"a session failed: {message}": True for message in failures})


@attack("drafter")
def replayed_blocks(victim: Victim) -> Figures:
    """Each block 64 times, in the round after again, and for rounds far away: each round is decided once."""
    until, num_rounds, others = time.monotonic() + victim.seconds, 0, Counter[str]()
    with (
        grpc.insecure_channel(victim.verifier, UNLIMITED) as channel,
        raw_lease(channel) as lease,
        raw_drafter(channel) as drafter,
    ):
        while time.monotonic() < until:
            session, old = lease.open(), list[session_pb2.DraftBlock]()
            while len(session.committed) + BLOCK + 1 < 200 and time.monotonic() < until:
                block = session.block()
                drafter.push(*old, *[block] * 64)
                event = lease.event_of(session)
                if event is None or not event.HasField("verdict"):
                    others["nothing" if event is None else str(event.WhichOneof("event"))] += 1
                    break
                try:
                    session.commit(event.verdict)
                except ValueError as error:
                    others[str(error)] += 1
                    break
                num_rounds += 1
                old = [*old, block][-16:]
            extra = lease.event_of(session, QUIET_SECONDS)
            others[f"one more {extra.WhichOneof('event')}" if extra is not None else ""] += 1
            lease.close(session)
    others.pop("", None)
    return judged(
        {"rounds": num_rounds, "others": dict(others)},
        {**dict.fromkeys(others, True), "nothing was judged": not num_rounds},
    )


@attack("drafter")
def blocks_for_others(victim: Victim) -> Figures:
    """Blocks for a session of another drafter: without a permit, with a forged one, with the other drafter's."""
    until, num_sent, harm = time.monotonic() + victim.seconds, 0, Counter[str]()
    with (
        grpc.insecure_channel(victim.verifier, UNLIMITED) as channel,
        raw_lease(channel) as lease,
        raw_drafter(channel) as drafter,
        grpc.insecure_channel(victim.verifier, UNLIMITED) as another,
        raw_drafter(another) as thief,
    ):
        while time.monotonic() < until:
            session = lease.open()
            own = session.permit(0, drafter.drafter_id)
            forged = session_pb2.DraftPermit(number=LARGEST, token=secrets.token_bytes(KEY_BYTES))
            for permit in (None, forged, own, session_pb2.DraftPermit(number=LARGEST, token=own.token)):
                thief.push(*[session.block(permit=permit)] * 64)
                thief.push(*[session.block(permit=permit, token_ids=[LARGEST])] * 64)
                strangers = (replace(session.fence, session_id=secrets.randbits(64)) for _ in range(64))
                thief.push(*[session.block(permit=permit, fence=fence_to_proto(fence)) for fence in strangers])
                num_sent += 3 * 64
            event = lease.event_of(session, QUIET_SECONDS)
            harm["another drafter's session was touched"] += event is not None
            drafter.push(session.block(permit=own))
            event = lease.event_of(session)
            is_judged = event is not None and event.HasField("verdict")
            harm["the session's drafter is not believed any more"] += not is_judged
            lease.close(session)
    return judged({"blocks": num_sent}, {what: bool(count) for what, count in harm.items()})


@attack("drafter")
def huge_blocks(victim: Victim) -> Figures:
    """Messages of 10 to 40 MB: 240 blocks of dense rows, a block of ten million tokens, or of 20 million supports."""
    until, statuses, lock = time.monotonic() + victim.seconds, Counter[str](), threading.Lock()

    def send(make: Callable[[RawSession], list[session_pb2.DraftBlock]]) -> None:
        while time.monotonic() < until:
            with (
                grpc.insecure_channel(victim.verifier, UNLIMITED) as channel,
                raw_lease(channel) as lease,
                raw_drafter(channel) as drafter,
            ):
                session = lease.open()
                drafter.push(*make(session))
                event = lease.event_of(session, 3.0)
                with lock:
                    statuses["nothing" if event is None else str(event.WhichOneof("event"))] += 1

    def rows(session: RawSession) -> list[session_pb2.DraftBlock]:
        row = dense(session, 0.5).distributions
        row.data *= BLOCK
        return [session.block(distributions=row)] * 240

    def tokens(session: RawSession) -> list[session_pb2.DraftBlock]:
        return [session.block(token_ids=[SENT] * 10_000_000)]

    def supports(session: RawSession) -> list[session_pb2.DraftBlock]:
        return [sparse(session, [SENT], [65_536], support_sizes=[1_000] * 20_000_000)]

    threads = [threading.Thread(target=send, args=(make,)) for make in (rows, tokens, supports)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return judged({"statuses": dict(statuses)}, {"such a block was judged": "verdict" in statuses})


TARGET_CACHE_TOKENS = 13_648
FLOOD = 256
"""Requests of features in a message, the most that there may be."""
MOST_SLOWNESS = 5.0
"""Of a run beside a flood of requests: its steps take turns with what is sent."""


def run_s(lease: RawLease) -> float:
    """Returns how long a plain run of 50 tokens takes, seconds."""
    session = lease.open()
    started = time.monotonic()
    session.run_plain(50)
    for _ in range(50):
        assert lease.event_of(session) is not None, "a run goes on"
    seconds = time.monotonic() - started
    lease.close(session)
    return seconds


@attack("drafter")
def features_without_end(victim: Victim) -> Figures:
    """Asks a verifier of its own for all features of a session, again and again, beside a run of another gateway."""
    models = Path(embedded_model("target")).parent
    fingerprint = load_fusion(models / "head", models / "target", torch.float32, "cpu").fingerprint
    source = verifier_pb2.FeatureSource(fingerprint=fingerprint, encoding=verifier_pb2.FEATURE_ENCODING_FLOAT32)
    options = stack_options(EMBEDDED, None, 4)["verifier"] | {"kv_cache_tokens": TARGET_CACHE_TOKENS}
    with LocalStack({"verifier": options | {"feature_head": models / "head"}}) as stack, ExitStack() as exits:
        service = stack.services["verifier"]
        channels = [
            exits.enter_context(grpc.insecure_channel(f"127.0.0.1:{service.port}", UNLIMITED)) for _ in range(2)
        ]
        honest, lease = (exits.enter_context(raw_lease(channel)) for channel in channels)
        alone_s = median(run_s(honest) for _ in range(3))
        before, until = resident_mib(service.process.pid), time.monotonic() + victim.seconds
        drafter = exits.enter_context(raw_drafter(channels[1], source))
        session = lease.open(token_ids=[5 + place % 4_000 for place in range(1_000)], max_len=1_200)
        permit, beside_s, num_sent = session.permit(0, drafter.drafter_id), list[float](), 0
        while time.monotonic() < until:
            for start in (0, LARGEST, 0, 500, None) * 20:
                request = verifier_pb2.FeatureRequest(
                    session_id=session.session_id, permit=permit, limit=LARGEST, first_position=start
                )
                requests = verifier_pb2.FeatureRequests(requests=[request] * FLOOD)
                drafter.stream.send(verifier_pb2.PushDraftBlocksRequest(feature_requests=requests))
                num_sent += FLOOD
            beside_s.append(run_s(honest))
        num_bytes = sum(len(each.features.rows) for each in list(drafter.stream.events.queue))
        after = resident_mib(service.process.pid)
        has_ended = service.process.poll() is not None
    return judged(
        {
            "requests": num_sent,
            "sent_mib": num_bytes / 2**20,
            "run_s_alone": alone_s,
            "run_s_beside": median(beside_s),
            "verifier_mib_before": before,
            "verifier_mib_after": after,
        },
        {
            "the verifier ended": has_ended,
            "the verifier grew": after > before + MAX_MORE_MIB,
            "runs of others waited": median(beside_s) > MOST_SLOWNESS * alone_s,
            "no features came, so that nothing was shown": not num_bytes,
        },
    )


NUM_STREAMS = 3_000


@attack("drafter")
def streams_without_hello(victim: Victim) -> Figures:
    """Thousands of streams of drafters that say nothing, on ten connections."""
    method = "/draftwire.v1.VerifierService/PushDraftBlocks"
    with kept_streams(victim.verifier, method, NUM_STREAMS) as calls:
        time.sleep(victim.seconds)
        statuses = Counter(call.code().name if call.done() else "open" for call in calls)
    return judged({"statuses": dict(statuses)}, {})


GARBAGE = b"\xff" * 6
PAUSE_SECONDS = 0.3
"""Between two messages of a drafter's that are none."""
MAX_GAP_S = 3.0
"""What a drafter may stop a session for."""


class FalseDrafter(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Passes calls on to an honest drafter, and says other things than that on the gateway's stream."""

    def __init__(self, honest: grpc.Channel) -> None:
        self._honest, self.num_said = honest, Counter[str]()

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if method.endswith("/RunDraftSessions"):
            return grpc.stream_stream_rpc_method_handler(lambda requests, _context: self._say(method, requests))
        call = self._honest.unary_unary(method)
        return grpc.unary_unary_rpc_method_handler(lambda request, _context: call(request, timeout=SECONDS))

    def _say(self, method: str, requests: Iterator[bytes]) -> Iterator[bytes]:
        answers = self._honest.stream_stream(method)(requests)
        yield next(answers)  # the lease
        sent = drafter_pb2.DraftEvent(sent=drafter_pb2.BlockSent(session_id=1))
        said = {
            "replies": drafter_pb2.RunDraftSessionsResponse(events=[sent] * 60_000).SerializeToString(),
            "nothing": b"",
            "garbage": GARBAGE,
        }
        for what, data in said.items():
            time.sleep(PAUSE_SECONDS)
            self.num_said[what] += 1
            yield data


@attack("drafter", is_long=True)
def garbage_for_the_gateway(victim: Victim) -> Figures:
    """A drafter of a gateway of its own says what is no message, and floods it with replies, stream after stream."""
    seen, options = Seen(), stack_options(EMBEDDED, None, 4)
    options["verifier"]["kv_cache_tokens"] = TARGET_CACHE_TOKENS
    options["drafter"]["port"] = free_port()
    with ExitStack() as exits:
        honest = exits.enter_context(grpc.insecure_channel(f"127.0.0.1:{options['drafter']['port']}", UNLIMITED))
        false, server = FalseDrafter(honest), grpc.server(ThreadPoolExecutor(16))
        server.add_generic_rpc_handlers((false,))
        options["gateway"]["drafter"] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        exits.callback(server.stop, None)
        stack = exits.enter_context(LocalStack(options))
        with GreedyReaders(stack.address, seen):
            time.sleep(max(8.0, victim.seconds))
        ended = [name for name, service in stack.services.items() if service.process.poll() is not None]
        sizes = {name: resident_mib(service.process.pid) for name, service in stack.services.items()}
    return judged(
        seen.figures() | {"said": dict(false.num_said), "resident_mib": sizes},
        {
            **{f"{name} ended": True for name in ended},
            "a text is another one": seen.num_changed > 0,
            "completions were lost": bool(seen.tally.errors),
            "a stream waited": seen.largest_gap_s() > MAX_GAP_S,
            "nothing was said, so that nothing was shown": not false.num_said["garbage"],
        },
    )
