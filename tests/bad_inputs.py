"""Bad inputs of every kind, each with the answer that it has to get, and the page that lists them.

    python -m tests.bad_inputs --write docs/bad-inputs.md

`CASES` is the table; `Stage` is what its inputs are tried on: one running stack, to which it plays a user, a gateway
and a drafter, good ones but for the one bad input.
"""

import argparse
import asyncio
import math
import queue
import re
import secrets
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from draftwire.keys import KEY_BYTES
from draftwire.rounds import CommittedTokens, Fence, Permit
from draftwire.services.local_stack import LocalStack
from draftwire.services.rpc.messages import fence_to_proto, permit_to_proto
from draftwire.v1 import drafter_pb2, gateway_pb2, model_pb2, session_pb2, verifier_pb2

VOCAB_SIZE = 3
CONTEXT_LENGTH = 64
MAX_MESSAGE_BYTES = 8 * 2**20
MAX_DRAFT_TOKENS = 16
"""The limits of the stack that the inputs are tried on."""

PROMPT = [0, 2, 1, 1]
GOOD_PROMPT = gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=PROMPT))
MAX_LEN = 16
SESSION_DRAFT_TOKENS = 4
"""Of the sessions that the bad inputs are about."""

SECONDS = 10.0
"""How long an answer may take: a hang is no answer."""
GARBAGE = b"\xff\xff\xff\xff\xff\xff"
UNKNOWN_FIELD = b"\xf8\xff\x07\x01"
"""Number 16383, of the value 1."""
NOT_UTF8 = b"\xc3\x28"
NO_SPAN = f"00-{1:032x}-{0:016x}-01"
LARGEST = 2**32 - 1
FLOOD = 20_000
NUM_STREAMS = 2_000
NAN, INFINITY = math.nan, math.inf

OK = "OK"
INVALID, FAILED, UNAVAILABLE, EXHAUSTED, UNIMPLEMENTED, LATE, CANCELLED = (
    grpc.StatusCode.INVALID_ARGUMENT.name,
    grpc.StatusCode.FAILED_PRECONDITION.name,
    grpc.StatusCode.UNAVAILABLE.name,
    grpc.StatusCode.RESOURCE_EXHAUSTED.name,
    grpc.StatusCode.UNIMPLEMENTED.name,
    grpc.StatusCode.DEADLINE_EXCEEDED.name,
    grpc.StatusCode.CANCELLED.name,
)
IGNORED = "no effect"
"""The input is dropped, and the session goes on as if it had not come."""
DONE = "carried out"
"""There is nothing wrong with the input, though it looks like it."""
NO_ANSWER = "no answer in time"


STATUSES = {code.name for code in grpc.StatusCode}


def refused(violation: str) -> str:
    """What becomes of a block that breaks the protocol: speculation ends, and the session goes on without."""
    return f"refused as `{violation}`, the session goes on plainly"


def ends(status: str) -> str:
    """What becomes of a session whose gateway breaks the protocol."""
    return f"the session fails with `{status}`"


# The stage


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    kind: str
    """A status, or what became of a session."""
    message: str = ""


class Stream:
    """A call with a stream in both directions; what comes is put into `events`, and its end as an `Answer`."""

    def __init__(self, method: Any, events: "queue.Queue[Any] | None" = None) -> None:
        self.events: queue.Queue[Any] = events or queue.Queue()
        self._outgoing: queue.Queue[Any] = queue.Queue()
        self._call = method(iter(self._outgoing.get, None), timeout=60.0)
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Any) -> None:
        self._outgoing.put(message)

    def next(self, seconds: float = SECONDS) -> Any:
        """Returns what comes next; an `Answer` if nothing does."""
        try:
            return self.events.get(timeout=seconds)
        except queue.Empty:
            return Answer(NO_ANSWER)

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()

    def _read(self) -> None:
        try:
            for response in self._call:
                self.events.put(response)
        except grpc.RpcError as error:
            self.events.put(answer_of(error))
        else:
            self.events.put(Answer(OK))


def answer_of(error: Any) -> Answer:
    return Answer(error.code().name, error.details() or "")


def answer_to(call: Callable[[], Any]) -> Answer:
    """Returns the status of a call, of one with a streamed response after its end."""
    try:
        response = call()
        if isinstance(response, Iterator):
            for _ in response:
                pass
    except grpc.RpcError as error:
        return answer_of(error)
    return Answer(OK)


@dataclass(slots=True)
class TargetSide:
    """A session on the verifier, as its gateway sees it. Round 0 is decided, and no more was asked for."""

    stream: Stream
    lease_id: int
    session_id: int
    permit_key: bytes
    committed: CommittedTokens
    round: int = 1

    @property
    def fence(self) -> Fence:
        return Fence(self.session_id, 0, self.round, len(self.committed), self.committed.hash)

    def command(self, **command: Any) -> None:
        self.stream.send(verifier_pb2.RunTargetSessionsRequest(commands=[verifier_pb2.TargetCommand(**command)]))

    def plain_run(self, num_rounds: int = 1, **changes: int) -> dict[str, Any]:
        fence = fence_to_proto(replace(self.fence, **changes))
        return {"plain_run": verifier_pb2.PlainRun(fence=fence, num_rounds=num_rounds)}

    def block(self, **changes: Any) -> session_pb2.DraftBlock:
        """Returns a good block of two tokens, or one that differs from it."""
        fields = {
            "fence": fence_to_proto(self.fence),
            "token_ids": [1, 0],
            "distributions": session_pb2.DraftDistributions(
                encoding=session_pb2.DISTRIBUTION_ENCODING_ONE_HOT, vocab_size=VOCAB_SIZE
            ),
            "permit": permit_to_proto(Permit.make(self.permit_key, 0)),
        }
        return session_pb2.DraftBlock(**{**fields, **changes})


@dataclass(slots=True)
class DraftSide:
    """A session on the drafter, for the one on the verifier. Events of both come together."""

    target: TargetSide
    stream: Stream
    lease_id: int

    def command(self, **command: Any) -> None:
        self.stream.send(drafter_pb2.RunDraftSessionsRequest(commands=[drafter_pb2.DraftCommand(**command)]))

    def calibration(self, num_draft_tokens: int = 2, **changes: Any) -> dict[str, Any]:
        target = self.target
        base_len = changes.pop("base_len", len(PROMPT))
        token_ids = changes.pop("token_ids", target.committed.ids[base_len:])
        attempt = changes.pop("attempt", 0)
        fence = fence_to_proto(replace(target.fence, **changes))
        return {
            "calibration": drafter_pb2.Calibration(
                fence=fence,
                base_len=base_len,
                token_ids=token_ids,
                num_draft_tokens=num_draft_tokens,
                attempt=attempt,
            )
        }


class Stage:
    """A running stack, and calls to its services without any client of ours in between. A context manager."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._exits = ExitStack()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.addresses = {name: f"127.0.0.1:{service.port}" for name, service in stack.services.items()}
        self._channels = {
            name: self._exits.enter_context(grpc.insecure_channel(address, options))
            for name, address in self.addresses.items()
        }
        described = self.unary("verifier", "ModelService", "GetModel")(model_pb2.GetModelRequest(), timeout=SECONDS)
        self.model = model_pb2.GetModelResponse.FromString(described).model

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def wait_for(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs what is asynchronous, always on the same loop: gRPC gets along with one in a process only."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60.0)

    def unary(self, service: str, grpc_name: str, method: str) -> Any:
        return self._channels[service].unary_unary(f"/draftwire.v1.{grpc_name}/{method}", serialized)

    def generate(self) -> Any:
        return self._channels["gateway"].unary_stream("/draftwire.v1.GatewayService/Generate", serialized)

    def streaming(self, service: str, method: str, response: Any) -> Any:
        name = f"/draftwire.v1.{service.capitalize()}Service/{method}"
        return self._channels[service].stream_stream(name, serialized, response.FromString)

    @contextmanager
    def target_stream(self) -> Iterator[tuple[Stream, int]]:
        """Opens a gateway's stream to the verifier, and returns its lease too."""
        method = self.streaming("verifier", "RunTargetSessions", verifier_pb2.RunTargetSessionsResponse)
        yield from _leased(Stream(method))

    @contextmanager
    def draft_stream(self, events: "queue.Queue[Any] | None" = None) -> Iterator[tuple[Stream, int]]:
        """Opens a gateway's stream to the drafter, and returns its lease too."""
        method = self.streaming("drafter", "RunDraftSessions", drafter_pb2.RunDraftSessionsResponse)
        yield from _leased(Stream(method, events))

    @contextmanager
    def push_stream(self) -> Iterator[Stream]:
        """Opens a drafter's stream to the verifier."""
        stream = Stream(self.streaming("verifier", "PushDraftBlocks", verifier_pb2.PushDraftBlocksResponse))
        try:
            yield stream
        finally:
            stream.close()

    def open_target(self, **fields: Any) -> Answer:
        request = verifier_pb2.OpenTargetSessionRequest(**fields)
        call = self.unary("verifier", "VerifierService", "OpenTargetSession")
        return answer_to(lambda: call(request, timeout=SECONDS))

    def open_draft(self, **fields: Any) -> Answer:
        request = drafter_pb2.OpenDraftSessionRequest(**fields)
        call = self.unary("drafter", "DrafterService", "OpenDraftSession")
        return answer_to(lambda: call(request, timeout=SECONDS))

    @contextmanager
    def target_side(self) -> Iterator[TargetSide]:
        with self.target_stream() as (stream, lease_id):
            fields = target_fields(lease_id)
            assert self.open_target(**fields).kind == OK
            session = TargetSide(
                stream, lease_id, fields["session_id"], fields["permit_key"], CommittedTokens(fields["token_ids"])
            )
            (event,) = stream.next().events
            session.committed.append(list(event.verdict.token_ids))
            yield session

    @contextmanager
    def draft_side(self) -> Iterator[DraftSide]:
        with self.target_side() as target, self.draft_stream(target.stream.events) as (stream, lease_id):
            fields = draft_fields(self, lease_id, target)
            assert self.open_draft(**fields).kind == OK
            yield DraftSide(target, stream, lease_id)

    def hello(self, **changes: Any) -> verifier_pb2.PushDraftBlocksRequest:
        """Returns a good hello, but for some fields of the model."""
        model = model_pb2.ModelDescription()
        model.CopyFrom(self.model)
        for name, value in changes.items():
            setattr(model, name, value)
        hello = verifier_pb2.DrafterHello(model=model, instance_id=secrets.randbits(64))
        return verifier_pb2.PushDraftBlocksRequest(hello=hello)

    def refusals(self) -> dict[str, float]:
        """Returns how many blocks the verifier has refused, by violation."""
        return self.metric("verifier", r'blocks_refused_total{violation="(\w+)"}')

    def dropped(self) -> dict[str, float]:
        """Returns how many messages had no effect at the verifier, by reason."""
        return self.metric("verifier", r'messages_dropped_total{reason="(\w+)"}')

    def metric(self, service: str, pattern: str) -> dict[str, float]:
        """Returns numbers from a service's `/metrics`, by the pattern's group."""
        url = f"http://127.0.0.1:{self._stack.services[service].metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=SECONDS) as response:
            text = response.read().decode()
        return {key: float(value) for key, value in re.findall(rf"^draftwire:{pattern} (\S+)$", text, re.MULTILINE)}

    def leftovers(self) -> dict[str, float]:
        """Returns what the model servers hold, of sessions and cache rows."""
        return {
            f"{service} {name}": value
            for service in ("verifier", "drafter")
            for name, value in self.metric(service, "(num_sessions|kv_cache_usage_perc)").items()
            if value
        }


def serialized(message: Any) -> bytes:
    """Puts a message on the wire; bytes go as they are."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def _leased(stream: Stream) -> Iterator[tuple[Stream, int]]:
    try:
        (event,) = stream.next().events
        yield stream, event.lease.lease_id
    finally:
        stream.close()


def target_fields(own_lease_id: int, **changes: Any) -> dict[str, Any]:
    """Returns a good opening of a session on the verifier, or one that differs from it."""
    return {
        "lease_id": own_lease_id,
        "session_id": secrets.randbits(64),
        "token_ids": PROMPT,
        "prompt_len": len(PROMPT),
        "rejection_sample_method": "block",
        "verifying_key": secrets.token_bytes(KEY_BYTES),
        "permit_key": secrets.token_bytes(KEY_BYTES),
        "max_draft_tokens": SESSION_DRAFT_TOKENS,
        "plain_rounds": 1,
        "max_len": MAX_LEN,
        **changes,
    }


def draft_fields(stage: Stage, own_lease_id: int, target: TargetSide | None = None, **changes: Any) -> dict[str, Any]:
    """Returns a good opening of a session on the drafter, or one that differs from it."""
    permit_key = target.permit_key if target is not None else secrets.token_bytes(KEY_BYTES)
    return {
        "lease_id": own_lease_id,
        "session_id": target.session_id if target is not None else secrets.randbits(64),
        "token_ids": PROMPT,
        "prompt_len": len(PROMPT),
        "rejection_sample_method": "block",
        "drafting_key": secrets.token_bytes(KEY_BYTES),
        "verifier_address": stage.addresses["verifier"],
        "target_vocab_size": VOCAB_SIZE,
        "max_draft_tokens": SESSION_DRAFT_TOKENS,
        "max_len": MAX_LEN,
        "permit": permit_to_proto(Permit.make(permit_key, 0)),
        **changes,
    }


# Ways to try an input. Each returns what tries it on a stage.

Attempt = Callable[[Stage], Answer]


def generate(bad: bytes | None = None, metadata: Sequence[tuple[str, str]] = (), **fields: Any) -> Attempt:
    """A completion with some other fields, or with other bytes altogether."""
    request = gateway_pb2.GenerateRequest(**{"token_ids": gateway_pb2.TokenIds(ids=PROMPT), "max_tokens": 4, **fields})
    message = request if bad is None else bad
    return lambda stage: answer_to(lambda: stage.generate()(message, timeout=SECONDS, metadata=metadata))


def sampled(**parameters: Any) -> Attempt:
    """A completion with some sampling parameters."""
    return generate(sampling=session_pb2.SamplingParameters(**parameters))


def prompt_ids(ids: Sequence[int]) -> Attempt:
    return generate(token_ids=gateway_pb2.TokenIds(ids=ids))


def several(prompts: Sequence[gateway_pb2.Prompt], **fields: Any) -> Attempt:
    return generate(token_ids=None, prompts=gateway_pb2.PromptList(prompts=prompts), **fields)


def resumed(*came: tuple[int, Sequence[int]]) -> Attempt:
    """A completion of which something came: of each of some choices these ids."""
    choices = [gateway_pb2.GeneratedChoice(choice=choice, token_ids=ids) for choice, ids in came]
    return generate(generated_choices=choices)


def chat(messages: Sequence[gateway_pb2.ChatMessage], tools: Sequence[gateway_pb2.Tool] = ()) -> Attempt:
    return generate(token_ids=None, chat=gateway_pb2.ChatPrompt(messages=messages, tools=tools))


def expired(stage: Stage) -> Answer:
    return answer_to(lambda: stage.generate()(gateway_pb2.GenerateRequest(text="t1"), timeout=1e-3))


def cancelled(stage: Stage) -> Answer:
    """Two hundred completions, each cancelled as soon as it was sent."""
    request = gateway_pb2.GenerateRequest(text="t1 t2", num_speculative_tokens=4)
    calls = [stage.generate()(request, timeout=SECONDS) for _ in range(200)]
    for call in calls:
        call.cancel()
    answers = {answer_to(lambda call=call: call).kind for call in calls}
    return Answer(CANCELLED if answers <= {CANCELLED, OK} else str(answers))


def unary(service: str, grpc_name: str, method: str, message: Any = b"") -> Attempt:
    return lambda stage: answer_to(lambda: stage.unary(service, grpc_name, method)(message, timeout=SECONDS))


def flood(service: str, grpc_name: str, method: str, count: int) -> Attempt:
    """As many empty calls at once."""

    def attempt(stage: Stage) -> Answer:
        call = stage.unary(service, grpc_name, method)
        running = [call.future(b"", timeout=SECONDS) for _ in range(count)]
        return next((answer for one in running if (answer := answer_to(one.result)).kind != OK), Answer(OK))

    return attempt


def streams(service: str, method: str) -> Attempt:
    """Thousands of streams, opened together and dropped; some of so many gRPC itself refuses, with the same status."""

    async def run(address: str) -> Answer:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = channel.stream_stream(f"/draftwire.v1.{service.capitalize()}Service/{method}")
            calls = [stub(timeout=SECONDS) for _ in range(NUM_STREAMS)]
            if method.startswith("Run"):
                await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)  # the leases
            for call in calls:
                call.cancel()
            codes = {(await call.code()).name for call in calls}
            return Answer(", ".join(sorted(codes)))

    return lambda stage: stage.wait_for(run(stage.addresses[service]))


def open_target(bad: bytes | None = None, **changes: Any) -> Attempt:
    """An opening of a session on the verifier; one that is answered well has to get its first verdict."""

    def attempt(stage: Stage) -> Answer:
        with stage.target_stream() as (stream, lease_id):
            if bad is not None:
                return unary("verifier", "VerifierService", "OpenTargetSession", bad)(stage)
            answer = stage.open_target(**target_fields(lease_id, **changes))
            return answer if answer.kind != OK else _first_of(stream)

    return attempt


def _first_of(stream: Stream) -> Answer:
    """Returns what becomes of a session whose stream holds nothing else."""
    while not isinstance(response := stream.next(), Answer):
        for event in response.events:
            if event.WhichOneof("event") != "prompt_read":
                return _became(event)
    return response


def _became(event: Any) -> Answer:
    match event.WhichOneof("event"):
        case "failure":
            name = next(code.name for code in grpc.StatusCode if code.value[0] == event.failure.status_code)
            return Answer(ends(name), event.failure.message)
        case "verdict":
            return Answer(DONE)
    return Answer(str(event.WhichOneof("event")))


def open_target_twice(stage: Stage) -> Answer:
    with stage.target_stream() as (_, lease_id):
        fields = target_fields(lease_id)
        assert stage.open_target(**fields).kind == OK
        return stage.open_target(**fields)


def open_target_after_close(stage: Stage) -> Answer:
    with stage.target_side() as session:
        other = target_fields(session.lease_id)
        close = session_pb2.CloseSession(session_id=other["session_id"])
        session.command(close_session=close)
        session.command(**session.plain_run())
        session.stream.next()
        return stage.open_target(**other)


def command(*makers: Callable[[TargetSide], dict[str, Any]], of_another: bool = False) -> Attempt:
    """Commands for a session in its round 1, from its own stream or another one."""

    def attempt(stage: Stage) -> Answer:
        with stage.target_side() as session, stage.target_side() as other:
            sender = other if of_another else session
            for make in makers:
                sender.command(**make(session))
            if of_another:  # when its own command is carried out, so are those before it
                other.command(**other.plain_run())
                other.stream.next()
            session.command(**session.plain_run())
            return _after_command(session)

    return attempt


def _after_command(session: TargetSide) -> Answer:
    response = session.stream.next(3.0)
    if isinstance(response, Answer):
        return response
    event = response.events[0]
    if event.WhichOneof("event") != "verdict":
        return _became(event)
    is_usual = event.verdict.fence.round == 1 and not event.verdict.plain_rounds_left
    return Answer(IGNORED if is_usual else DONE)


def raw_command(service: str, bad: bytes) -> Attempt:
    """Bytes in a gateway's stream."""

    def attempt(stage: Stage) -> Answer:
        with stage.target_stream() if service == "verifier" else stage.draft_stream() as (stream, _):
            stream.send(bad)
            answer = stream.next()
            return answer if isinstance(answer, Answer) else Answer("an event")

    return attempt


def command_flood(service: str, kind: str) -> Attempt:
    """Thousands of commands for sessions that do not exist, before one for a session that does."""

    def attempt(stage: Stage) -> Answer:
        if service == "verifier":
            with stage.target_side() as session:
                own = session.plain_run()["plain_run"]
                make: Any = verifier_pb2.TargetCommand
                session.stream.send(verifier_pb2.RunTargetSessionsRequest(commands=_unknown(make, kind, own)))
                session.command(plain_run=own)
                return _after_command(session)
        with stage.draft_side() as drafting:
            own = drafting.calibration(1)["calibration"]
            make = drafter_pb2.DraftCommand
            drafting.stream.send(drafter_pb2.RunDraftSessionsRequest(commands=_unknown(make, kind, own)))
            drafting.command(calibration=own)
            return _after_calibration(drafting)

    return attempt


def _unknown(make: Any, kind: str, example: Any) -> list[Any]:
    """Returns commands of a kind for sessions that do not exist."""
    commands = []
    for number in range(FLOOD):
        if kind in ("close_session", "send_drafted"):
            commands.append(make(**{kind: {"session_id": number}}))
        else:
            one = make(**{kind: example})
            getattr(one, kind).fence.session_id = number
            commands.append(one)
    return commands


def push(*requests: Callable[[Stage], Any]) -> Attempt:
    """What a drafter says, on a stream of its own; the answer is the last thing that comes within a moment."""

    def attempt(stage: Stage) -> Answer:
        with stage.push_stream() as stream:
            for request in requests:
                stream.send(request(stage))
            answer = stream.next()
            if not isinstance(answer, Answer):  # a welcome
                answer = stream.next(0.3)
            return Answer(OK) if answer.kind == NO_ANSWER else answer

    return attempt


def hello(**changes: Any) -> Callable[[Stage], Any]:
    return lambda stage: stage.hello(**changes)


def blocks(*given: session_pb2.DraftBlock) -> verifier_pb2.PushDraftBlocksRequest:
    return verifier_pb2.PushDraftBlocksRequest(blocks=verifier_pb2.DraftBlocks(blocks=given))


def block(make: Callable[[TargetSide], session_pb2.DraftBlock], times: int = 1, is_strange: bool = False) -> Attempt:
    """A block for a session in its round 1, then a good one.

    Args:
        make: makes the block.
        times: how often it is sent.
        is_strange: whether another drafter has a part in the session.
    """

    def attempt(stage: Stage) -> Answer:
        with stage.target_side() as session, stage.push_stream() as stream, stage.push_stream() as other:
            for one in (stream, other):
                one.send(stage.hello())
                one.next()
            before = stage.refusals()
            bad = blocks(*[make(session)] * times)
            if is_strange:  # the other one shows its permit with a block that is stale
                first = fence_to_proto(replace(session.fence, round=0))
                _send_alone(stage.dropped, other, blocks(session.block(fence=first)))
                _send_alone(stage.refusals, stream, bad)
            else:
                stream.send(bad)
            (other if is_strange else stream).send(blocks(session.block(token_ids=[2], calibration_duration_us=77)))
            response = session.stream.next(3.0)
            if isinstance(response, Answer):
                return response
            event = response.events[0]
            after = stage.refusals()
            violations = [name for name, count in after.items() if count != before.get(name, 0.0)]
            if event.WhichOneof("event") == "refusal":
                session.command(**session.plain_run())
                assert session.stream.next().events[0].WhichOneof("event") == "verdict", "the session goes on"
                return Answer(refused(", ".join(violations)), event.refusal.message)
            if event.WhichOneof("event") == "verdict" and event.verdict.calibration_duration_us == 77:
                return Answer(f"{IGNORED}, counted as `{violations[0]}`" if violations else IGNORED)
            return _became(event)

    return attempt


def _send_alone(counts: Callable[[], dict[str, float]], stream: Stream, message: Any) -> None:
    """Sends what is counted when it arrives, and waits for that: streams do not wait for each other."""
    before, deadline = counts(), time.monotonic() + SECONDS
    stream.send(message)
    while counts() == before and time.monotonic() < deadline:
        time.sleep(0.01)


def distributed(encoding: int, data: bytes, tokens: Sequence[int] = (1,), **sizes: Any) -> Attempt:
    """A block with other distributions."""

    def make(session: TargetSide) -> session_pb2.DraftBlock:
        fields = {"encoding": encoding, "vocab_size": VOCAB_SIZE, "data": data, **sizes}
        return session.block(token_ids=tokens, distributions=session_pb2.DraftDistributions(**fields))

    return block(make)


def sparse(weights: Mapping[int, int] | Sequence[tuple[int, int]], **changes: Any) -> Attempt:
    """A block of one token, 1, with a sparse distribution of token ids and weights."""
    pairs = list(weights.items()) if isinstance(weights, Mapping) else list(weights)
    less = [weight - 1 for _, weight in pairs]
    data = bytes([token for token, _ in pairs]) + bytes([value % 256 for value in less])
    data += bytes([value // 256 for value in less])
    sizes = {"support_sizes": [len(pairs)], "wide_sizes": [len(pairs)], **changes}
    return distributed(session_pb2.DISTRIBUTION_ENCODING_SPARSE_UINT16, data, **sizes)


def dense(*row: float) -> Attempt:
    """A block of one token, 1, with a dense distribution."""
    return distributed(session_pb2.DISTRIBUTION_ENCODING_DENSE_FLOAT32, struct.pack(f"<{len(row)}f", *row))


def fenced(**changes: int) -> Callable[[TargetSide], session_pb2.DraftBlock]:
    return lambda session: session.block(fence=fence_to_proto(replace(session.fence, **changes)))


def permitted(number: int | None, token: bytes | None = None) -> Callable[[TargetSide], session_pb2.DraftBlock]:
    """A block with another permit; genuine where no token is given, absent without a number."""

    def make(session: TargetSide) -> session_pb2.DraftBlock:
        if number is None:
            return session.block(permit=None)
        genuine = Permit.make(session.permit_key, number)
        return session.block(permit=permit_to_proto(replace(genuine, token=token or genuine.token)))

    return make


def block_flood(stage: Stage) -> Answer:
    """Thousands of blocks for sessions that do not exist, in one message."""
    with stage.target_side() as session:
        fence = session_pb2.Fence(session_id=1)
        many = blocks(*[session.block(fence=fence)] * FLOOD)
    return push(hello(), lambda _: many)(stage)


def open_draft(bad: bytes | None = None, **changes: Any) -> Attempt:
    """An opening of a session on the drafter."""

    def attempt(stage: Stage) -> Answer:
        with stage.draft_stream() as (_, lease_id):
            if bad is not None:
                return unary("drafter", "DrafterService", "OpenDraftSession", bad)(stage)
            return stage.open_draft(**draft_fields(stage, lease_id, **changes))

    return attempt


def open_draft_twice(stage: Stage) -> Answer:
    with stage.draft_stream() as (_, lease_id):
        fields = draft_fields(stage, lease_id)
        assert stage.open_draft(**fields).kind == OK
        return stage.open_draft(**fields)


def open_draft_after_close(stage: Stage) -> Answer:
    with stage.draft_side() as drafting:
        other = draft_fields(stage, drafting.lease_id)
        drafting.command(close_session=session_pb2.CloseSession(session_id=other["session_id"]))
        drafting.command(**drafting.calibration())
        drafting.target.stream.next()
        return stage.open_draft(**other)


def open_draft_elsewhere(service: str) -> Attempt:
    """An opening whose verifier is another service."""
    return lambda stage: open_draft(verifier_address=stage.addresses[service])(stage)


def open_draft_cancelled(stage: Stage) -> Answer:
    """Fifty openings, each cancelled as soon as it was sent, whose verifier is not there."""
    with stage.draft_stream() as (_, lease_id):
        call = stage.unary("drafter", "DrafterService", "OpenDraftSession")
        running = []
        for number in range(50):
            fields = draft_fields(stage, lease_id, verifier_address=f"127.0.0.1:{number + 1}")
            running.append(call.future(drafter_pb2.OpenDraftSessionRequest(**fields), timeout=SECONDS))
        time.sleep(0.02)
        for one in running:
            one.cancel()
        time.sleep(0.2)
        return Answer(CANCELLED if all(one.cancelled() for one in running) else OK)


def draft_command(*makers: Callable[[DraftSide], dict[str, Any]], of_another: bool = False) -> Attempt:
    """Commands for a session on the drafter in its round 1, from its own stream or another one; then a good one."""

    def attempt(stage: Stage) -> Answer:
        with stage.draft_side() as drafting, stage.draft_side() as other:
            sender = other if of_another else drafting
            for make in makers:
                sender.command(**make(drafting))
            if of_another:
                other.command(**other.calibration(1))
                other.target.stream.next()
            drafting.command(**drafting.calibration(1))
            return _after_calibration(drafting)

    return attempt


def _after_calibration(drafting: DraftSide) -> Answer:
    """Returns what became of the input before the good calibration, which asks for one token."""
    response = drafting.target.stream.next(3.0)
    if isinstance(response, Answer):
        return response
    event = response.events[0]
    if event.WhichOneof("event") != "verdict":
        return _became(event)
    return Answer(IGNORED if event.verdict.num_draft_tokens == 1 else DONE)


# The table


@dataclass(frozen=True, slots=True)
class Case:
    """One bad input."""

    service: str
    call: str
    what: str
    answer: str
    attempt: Attempt
    says: str = ""
    """Part of the answer's message."""

    @property
    def heading(self) -> str:
        return f"{self.service.capitalize()}: {self.call}"

    @property
    def title(self) -> str:
        return f"{self.service} {self.call}: {self.what}"

    @property
    def shown_answer(self) -> str:
        return f"`{self.answer}`" if self.answer in STATUSES else self.answer


def _text(count: int) -> str:
    return "t1 " * count


def _gateway_cases() -> Iterator[tuple[str, str, Attempt] | tuple[str, str, Attempt, str]]:
    yield "no prompt at all", INVALID, generate(bad=b""), "prompt"
    yield "empty text", INVALID, generate(token_ids=None, text=""), "prompt is empty"
    yield "empty list of ids", INVALID, prompt_ids([]), "prompt is empty"
    yield "a prompt as long as the context", INVALID, prompt_ids([1] * CONTEXT_LENGTH), "context"
    yield "a prompt of 1,000,000 tokens", INVALID, prompt_ids([1] * 10**6), "token_ids"
    yield "a text of 4,000,001 characters", INVALID, generate(token_ids=None, text="x" * 4_000_001), "characters"
    yield "a text as long as the context", INVALID, generate(token_ids=None, text=_text(64)), "context"
    yield "an id that is the vocabulary's size", INVALID, prompt_ids([1, VOCAB_SIZE]), "token ids"
    yield "an id of 2^32 - 1", INVALID, prompt_ids([LARGEST]), "token ids"
    yield "a chat without messages", INVALID, chat([]), "prompt is empty"
    yield "a chat, though the model has no template", INVALID, chat([gateway_pb2.ChatMessage(role="user")]), "template"
    many = [gateway_pb2.ChatMessage()] * 200_000
    yield "a chat of 200,000 empty messages", INVALID, chat(many), "messages"
    yield "a chat of 4,097 messages", INVALID, chat(many[:4097]), "messages takes at most 4096"
    hello = gateway_pb2.ChatMessage(role="user", content="hello")
    called = gateway_pb2.ChatMessage(role="assistant", tool_calls=[gateway_pb2.ToolCall(name="t")] * 4097)
    yield "a chat with 4,097 tool calls", INVALID, chat([hello, called]), "tool_calls"
    yield "a chat with 1,025 tools", INVALID, chat([hello], tools=[gateway_pb2.Tool(name="t")] * 1025), "tools"
    long_tool = gateway_pb2.Tool(name="t", parameters="x" * 10**6)
    yield "a chat with a tool of 1,000,001 characters", INVALID, chat([hello], tools=[long_tool]), "tools"
    long = gateway_pb2.ChatMessage(role="user", content="x" * 3_999_997)
    yield "a chat of 4,000,001 characters", INVALID, chat([long]), "characters"
    unknown = gateway_pb2.GenerateRequest(text="t1").SerializeToString() + UNKNOWN_FIELD
    yield "a field that does not exist", INVALID, generate(bad=unknown), "field 16383 of GenerateRequest"
    sampling = session_pb2.SamplingParameters.FromString(UNKNOWN_FIELD)
    yield "a sampling parameter that does not exist", INVALID, generate(sampling=sampling), "SamplingParameters"
    message = gateway_pb2.ChatMessage.FromString(UNKNOWN_FIELD)
    yield "a chat message with a field that does not exist", INVALID, chat([message]), "ChatMessage"
    for name, values in {
        "temperature": (NAN, INFINITY, -0.1, 100.5),
        "top_p": (NAN, INFINITY, 0.0, 1.5),
        "min_p": (NAN, INFINITY, -0.1, 1.5),
        "repetition_penalty": (NAN, INFINITY, 0.0, 101.0),
        "presence_penalty": (NAN, INFINITY, -2.5, 2.5),
        "frequency_penalty": (NAN, -INFINITY, -2.5, 2.5),
    }.items():
        for value in values:
            yield f"`{name}` {_number(value)}", INVALID, sampled(**{name: value}), name
    for value in (NAN, INFINITY, -100.5):
        yield f"a `logit_bias` of {_number(value)}", INVALID, sampled(logit_bias={1: value}), "logit_bias"
    yield "`logit_bias` of an id beyond the vocabulary", INVALID, sampled(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"
    biased = dict.fromkeys(range(100_000), 1.0)
    yield "`logit_bias` of 100,000 ids", INVALID, sampled(logit_bias=biased), "logit_bias"
    yield "an allowed id beyond the vocabulary", INVALID, sampled(allowed_token_ids=[1, LARGEST]), "allowed_token_ids"
    yield "1,000,000 allowed ids", INVALID, sampled(allowed_token_ids=[1] * 10**6), "allowed_token_ids"
    sampling = session_pb2.SamplingParameters(allowed_token_ids=[1], min_tokens=2)
    yield (
        "allowed ids that `min_tokens` keeps away",
        INVALID,
        generate(sampling=sampling, stop_token_ids=[1]),
        "min_tokens",
    )
    sampling = session_pb2.SamplingParameters(min_tokens=2)
    yield (
        "every id a stop token, and `min_tokens`",
        INVALID,
        generate(sampling=sampling, stop_token_ids=range(VOCAB_SIZE)),
        "min_tokens",
    )
    for title, form in {
        "`structured_output` without a form": session_pb2.StructuredOutput(),
        "an empty `regex`": session_pb2.StructuredOutput(regex=""),
        "no `choices`": session_pb2.StructuredOutput(choices=session_pb2.StructuredOutputChoices()),
        "a choice that comes twice": session_pb2.StructuredOutput(
            choices=session_pb2.StructuredOutputChoices(texts=["a", "a"])
        ),
        "1,025 `choices`": session_pb2.StructuredOutput(
            choices=session_pb2.StructuredOutputChoices(texts=map(str, range(1_025)))
        ),
        "a `json_schema` of 65,537 bytes": session_pb2.StructuredOutput(json_schema=" " * 65_537),
        "a `grammar`, though the model has no stop token": session_pb2.StructuredOutput(grammar='start: "a"'),
    }.items():
        yield title, INVALID, sampled(structured_output=form), "structured_output"
    form = session_pb2.StructuredOutput(regex="a")
    yield "a form and `min_tokens`", INVALID, sampled(structured_output=form, min_tokens=1), "structured_output"
    yield (
        "a form and allowed ids",
        INVALID,
        sampled(structured_output=form, allowed_token_ids=[1]),
        "structured_output",
    )
    yield "`top_k` of 2^32 - 1", OK, sampled(top_k=LARGEST)
    yield "`temperature`, `top_p` and `min_p` of 5e-324", OK, sampled(temperature=5e-324, top_p=5e-324, min_p=5e-324)
    yield "`max_tokens` 0", OK, generate(max_tokens=0)
    yield "`max_tokens` 2^32 - 1", INVALID, generate(max_tokens=LARGEST), "max_tokens"
    yield "`min_tokens` 2^32 - 1", INVALID, sampled(min_tokens=LARGEST), "min_tokens"
    yield "17 stop strings", INVALID, generate(stop=["a"] * 17), "stop"
    yield "500,000 stop strings", INVALID, generate(stop=["a"] * 500_000), "stop"
    yield "an empty stop string", INVALID, generate(stop=[""]), "stop"
    yield "a stop string of 257 characters", INVALID, generate(stop=["a" * 257]), "stop"
    yield "a stop token beyond the vocabulary", INVALID, generate(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"
    yield "1,000,000 stop tokens, all the same", INVALID, generate(stop_token_ids=[1] * 10**6), "stop_token_ids"
    yield "`num_speculative_tokens` 17", INVALID, generate(num_speculative_tokens=17), "num_speculative_tokens"
    yield "`num_speculative_tokens` 2^32 - 1", INVALID, generate(num_speculative_tokens=LARGEST), "num_speculative"
    yield "an unknown rule", INVALID, generate(rejection_sample_method="magic"), "block, token"
    yield "an empty rule", INVALID, generate(rejection_sample_method=""), "block, token"
    rule = generate(rejection_sample_method="\U0001f600" * 10**6)
    yield "a rule with a name of 1,000,000 emoji", INVALID, rule, "block, token"
    yield "a `cache_salt` of 257 characters", INVALID, generate(cache_salt="s" * 257), "cache_salt"
    yield "`num_choices` 0", INVALID, generate(num_choices=0), "num_choices"
    yield "`num_choices` 129", INVALID, generate(num_choices=129), "num_choices"
    yield "`num_choices` 2^32 - 1", INVALID, generate(num_choices=LARGEST), "num_choices"
    yield "an empty list of prompts", INVALID, several([]), "prompts is empty"
    yield "a list with a prompt that is none", INVALID, several([GOOD_PROMPT, gateway_pb2.Prompt()]), "prompt"
    yield "a list with an empty prompt", INVALID, several([GOOD_PROMPT, gateway_pb2.Prompt(text="")]), "empty"
    yield (
        "a list of 2 prompts and 65 choices of each",
        INVALID,
        several([GOOD_PROMPT] * 2, num_choices=65),
        "num_choices",
    )
    yield "a list of 1,000,000 prompts", INVALID, several([gateway_pb2.Prompt()] * 10**6), "prompts"
    long = gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=[1] * 10**6))
    yield "a list with a prompt of 1,000,000 tokens", INVALID, several([GOOD_PROMPT, long]), "token_ids"
    form = session_pb2.SamplingParameters(structured_output=session_pb2.StructuredOutput(regex="a*"))
    yield "`ignore_eos` beside a structured output", INVALID, generate(ignore_eos=True, sampling=form), "ignore_eos"
    yield "`logprobs` 21", INVALID, generate(logprobs=21), "logprobs"
    yield "`logprobs` 2^32 - 1", INVALID, generate(logprobs=LARGEST), "logprobs"
    yield "`logprobs` 20 of a vocabulary of 3", OK, generate(logprobs=20, prompt_logprobs=20)
    yield "`prompt_logprobs` 21", INVALID, generate(prompt_logprobs=21), "prompt_logprobs"
    yield "an unknown `logprobs_mode`", INVALID, generate(logprobs_mode="raw_logits"), "logprobs_mode"
    yield "an empty `logprobs_mode`", INVALID, generate(logprobs_mode=""), "logprobs_mode"
    yield "a resumed text longer than `max_tokens`", INVALID, resumed((0, [1] * 5)), "generated_choices"
    yield "a resumed text of 1,000,000 tokens", INVALID, resumed((0, [1] * 10**6)), "generated_choices"
    yield "a resumed id beyond the vocabulary", INVALID, resumed((0, [LARGEST])), "generated_choices"
    yield "a resumed choice that there is not", INVALID, resumed((1, [1])), "generated_choices"
    yield "a choice that is resumed twice", INVALID, resumed((0, [1]), (0, [1])), "generated_choices"
    yield "1,000,000 resumed choices", INVALID, resumed(*[(0, [])] * 10**6), "generated_choices"
    yield "bytes that are no message", INVALID, generate(bad=GARBAGE), "message"
    text = gateway_pb2.GenerateRequest(text="t1", max_tokens=4).SerializeToString()
    yield "a message that is cut off", INVALID, generate(bad=text[:-3]), "message"
    yield "a prompt that is not UTF-8", INVALID, generate(bad=text.replace(b"t1", NOT_UTF8)), "message"
    salted = gateway_pb2.GenerateRequest(text="t1", cache_salt="zz").SerializeToString()
    yield "a `cache_salt` that is not UTF-8", INVALID, generate(bad=salted.replace(b"zz", NOT_UTF8)), "message"
    yield "a message above `max_message_bytes`", EXHAUSTED, generate(text="x" * (MAX_MESSAGE_BYTES + 1)), "larger"
    yield "1 MB of metadata", EXHAUSTED, generate(metadata=[("x-large", "x" * 10**6)])
    yield "a deadline of 1 ms", LATE, expired
    yield "200 completions cancelled at once", CANCELLED, cancelled


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinity" if value == INFINITY else f"{value:g}"


def _open_target_cases() -> Iterator[tuple[str, str, Attempt] | tuple[str, str, Attempt, str]]:
    def sampling(**parameters: Any) -> Attempt:
        stops = parameters.pop("stop_token_ids", ())
        return open_target(sampling=session_pb2.SamplingParameters(**parameters), stop_token_ids=stops)

    yield "an unknown lease", FAILED, open_target(lease_id=1), "lease"
    yield "no lease", FAILED, open_target(lease_id=0), "lease"
    yield "a session that is open", INVALID, open_target_twice, "open already"
    yield "a session that was closed before", FAILED, open_target_after_close, "closed"
    yield "epoch 2^32 - 1", DONE, open_target(epoch=LARGEST)
    yield "`choice` 2^32 - 1", DONE, open_target(choice=LARGEST)
    yield "`first_round` 2^32 - 1", INVALID, open_target(first_round=LARGEST), "first_round"
    yield "no ids", INVALID, open_target(token_ids=[], prompt_len=0), "prompt"
    yield "as many ids as the context", INVALID, open_target(token_ids=[1] * CONTEXT_LENGTH), "prompt tokens"
    yield "1,000,000 ids", INVALID, open_target(token_ids=[1] * 10**6), "prompt tokens"
    yield "an id beyond the vocabulary", INVALID, open_target(token_ids=[1, VOCAB_SIZE], prompt_len=2), "token id"
    yield "`prompt_len` 0", INVALID, open_target(prompt_len=0), "prompt_len"
    yield "`prompt_len` beyond the ids", INVALID, open_target(prompt_len=LARGEST), "prompt_len"
    yield "`max_len` without room for a token", INVALID, open_target(max_len=len(PROMPT)), "max_len"
    yield "`max_len` beyond the context", INVALID, open_target(max_len=LARGEST), "max_len"
    yield "`max_draft_tokens` 2^32 - 1", INVALID, open_target(max_draft_tokens=LARGEST), "num_speculative_tokens"
    yield "`plain_rounds` 2^32 - 1", DONE, open_target(plain_rounds=LARGEST)
    yield "no `verifying_key`", INVALID, open_target(verifying_key=b""), "key"
    yield "a `verifying_key` of 17 bytes", INVALID, open_target(verifying_key=bytes(17)), "key"
    yield "a `permit_key` of 15 bytes", INVALID, open_target(permit_key=bytes(15)), "key"
    yield "an unknown rule", INVALID, open_target(rejection_sample_method="magic"), "block, token"
    yield "a `cache_salt` of 257 characters", INVALID, open_target(cache_salt="s" * 257), "cache_salt"
    yield "a `traceparent` that names no span", INVALID, open_target(traceparent=NO_SPAN), "traceparent"
    yield "a `temperature` of NaN", INVALID, sampling(temperature=NAN), "temperature"
    yield "a `logit_bias` of NaN", INVALID, sampling(logit_bias={1: NAN}), "logit_bias"
    yield "a bias beyond the vocabulary", INVALID, sampling(logit_bias={LARGEST: 1.0}), "logit_bias"
    yield "an allowed id beyond the vocabulary", INVALID, sampling(allowed_token_ids=[VOCAB_SIZE]), "allowed_token_ids"
    every = range(VOCAB_SIZE)
    yield "every id a stop token, and `min_tokens`", INVALID, sampling(min_tokens=2, stop_token_ids=every), "min_tokens"
    away = sampling(min_tokens=2, stop_token_ids=[1], allowed_token_ids=[1])
    yield "allowed ids that `min_tokens` keeps away", INVALID, away, "min_tokens"
    yield "`logprobs` 21", INVALID, open_target(logprobs=21), "logprobs"
    yield "`prompt_logprobs` 2^32 - 1", INVALID, open_target(prompt_logprobs=LARGEST), "prompt_logprobs"
    yield "an unknown `logprobs_mode`", INVALID, open_target(logprobs_mode="magic"), "logprobs_mode"
    yield "log-probabilities of a vocabulary of 3, 20 of each", DONE, open_target(logprobs=20, prompt_logprobs=20)
    yield "stop tokens beyond the vocabulary", DONE, sampling(min_tokens=2, stop_token_ids=[LARGEST])
    yield "bytes that are no message", INVALID, open_target(bad=GARBAGE), "message"
    request = verifier_pb2.OpenTargetSessionRequest(rejection_sample_method="zz").SerializeToString()
    yield "a rule that is not UTF-8", INVALID, open_target(bad=request.replace(b"zz", NOT_UTF8)), "message"
    yield "a message above `max_message_bytes`", EXHAUSTED, open_target(cache_salt="x" * (MAX_MESSAGE_BYTES + 1))


def _run_target_cases() -> Iterator[tuple[str, str, Attempt] | tuple[str, str, Attempt, str]]:
    def close(session: TargetSide) -> dict[str, Any]:
        return {"close_session": session_pb2.CloseSession(session_id=session.session_id)}

    def close_unknown(session: TargetSide) -> dict[str, Any]:
        return {"close_session": session_pb2.CloseSession(session_id=session.session_id, epoch=LARGEST)}

    yield "a command without content", FAILED, command(lambda _: {}), "without content"
    yield "bytes that are no message", INVALID, raw_command("verifier", GARBAGE), "message"
    yield "a plain run for a round from the future", ends(FAILED), command(lambda s: s.plain_run(round=9))
    yield "a plain run for round 2^32 - 1", ends(FAILED), command(lambda s: s.plain_run(round=LARGEST))
    yield "a plain run for an old round", IGNORED, command(lambda s: s.plain_run(round=0))
    yield "a plain run for another epoch", IGNORED, command(lambda s: s.plain_run(epoch=LARGEST))
    yield "a plain run for another prefix", ends(FAILED), command(lambda s: s.plain_run(prefix_hash=1))
    yield "a plain run for a longer prefix", ends(FAILED), command(lambda s: s.plain_run(prefix_len=LARGEST))
    yield "a plain run of no rounds", ends(INVALID), command(lambda s: s.plain_run(0))
    yield "a plain run of 2^32 - 1 rounds", DONE, command(lambda s: s.plain_run(LARGEST))
    yield "the same plain run twice", IGNORED, command(TargetSide.plain_run, TargetSide.plain_run)
    yield "a plain run for an unknown session", IGNORED, command(lambda s: s.plain_run(session_id=1))
    yield "an unknown session closed, twice", IGNORED, command(close_unknown, close_unknown)
    yield "another stream's session closed", IGNORED, command(close, of_another=True)
    yield "a plain run for another stream's session", IGNORED, command(lambda s: s.plain_run(9), of_another=True)
    yield "20,000 plain runs for unknown sessions", IGNORED, command_flood("verifier", "plain_run")
    yield "20,000 unknown sessions closed", IGNORED, command_flood("verifier", "close_session")
    yield "2,000 streams, opened and dropped", CANCELLED, streams("verifier", "RunTargetSessions")


def _push_cases() -> Iterator[tuple[str, str, Attempt] | tuple[str, str, Attempt, str]]:
    model_size = {"vocab_size": LARGEST, "context_length": LARGEST}
    yield "blocks before the hello", FAILED, push(lambda _: blocks()), "hello"
    yield "the hello twice", FAILED, push(hello(), hello()), "hello"
    yield "a request without content", FAILED, push(lambda _: b""), "hello"
    yield "bytes that are no message", INVALID, push(hello(), lambda _: GARBAGE), "message"
    yield "protocol version 0", FAILED, push(hello(protocol_version=0)), "version"
    yield "protocol version 2^32 - 1", FAILED, push(hello(protocol_version=LARGEST)), "version"
    yield "another fingerprint", FAILED, push(hello(vocabulary_fingerprint=bytes(32))), "vocabulary"
    yield "a fingerprint of 1 MB", FAILED, push(hello(vocabulary_fingerprint=bytes(10**6))), "vocabulary"
    yield "a model name of 1 MB", INVALID, push(hello(name="x" * 10**6)), "name"
    yield "a model name of 1,000 emoji", INVALID, push(hello(name="\U0001f600" * 1000)), "name"
    yield "vocabulary and context of 2^32 - 1", OK, push(hello(**model_size))
    yield "a message above `max_message_bytes`", EXHAUSTED, push(lambda _: b"\x0a" + bytes(MAX_MESSAGE_BYTES))
    yield "20,000 blocks for unknown sessions", OK, block_flood
    yield "2,000 streams, opened and dropped", CANCELLED, streams("verifier", "PushDraftBlocks")
    yield "the same block 100 times", DONE, block(TargetSide.block, times=100)
    yield "a block for an old round", IGNORED, block(fenced(round=0))
    yield "a block for a round from the future", refused("prefix"), block(fenced(round=LARGEST))
    yield "a block for another prefix", refused("prefix"), block(fenced(prefix_hash=1))
    yield "a block for another epoch", IGNORED, block(fenced(epoch=LARGEST))
    yield "a block without a fence", IGNORED, block(lambda s: s.block(fence=None))
    peer = f"{IGNORED}, counted as `peer`"
    yield "a forged permit", peer, block(permitted(0, bytes(KEY_BYTES)))
    yield "a permit of 1 byte", peer, block(permitted(0, b"\0"))
    yield "a permit of 1 MB", peer, block(permitted(LARGEST, bytes(10**6)))
    yield "a block without a permit", peer, block(permitted(None))
    yield "a block of another drafter", peer, block(permitted(None), is_strange=True)
    yield "a token tree", refused("encoding"), block(lambda s: s.block(parent_indices=[-1, 0]))
    yield "encoding 0", refused("encoding"), distributed(0, b"")
    yield "encoding 99", refused("encoding"), distributed(99, b"")
    yield "no distributions", refused("no_distributions"), distributed(session_pb2.DISTRIBUTION_ENCODING_NONE, b"")
    yield "no tokens", refused("length"), block(lambda s: s.block(token_ids=[]))
    yield "5 tokens where 4 are the limit", refused("length"), block(lambda s: s.block(token_ids=[1] * 5))
    yield "1,000,000 tokens", refused("length"), block(lambda s: s.block(token_ids=[1] * 10**6))
    yield "a token beyond the vocabulary", refused("token_id"), block(lambda s: s.block(token_ids=[LARGEST]))
    one_hot = session_pb2.DISTRIBUTION_ENCODING_ONE_HOT
    yield "a vocabulary of 2^32 - 1", refused("encoding"), distributed(one_hot, b"", vocab_size=LARGEST)
    yield "a vocabulary of 0", refused("encoding"), distributed(one_hot, b"", vocab_size=0)
    yield "data where none belong", refused("encoding"), distributed(one_hot, bytes(10**6))
    yield "a dense row with a NaN", refused("weights"), dense(0.5, NAN, 0.5)
    yield "a dense row with an infinity", refused("weights"), dense(0.5, INFINITY, 0.5)
    yield "a dense row with a negative entry", refused("weights"), dense(-0.5, 1.0, 0.5)
    yield "a dense row that sums to 2", refused("weights"), dense(1.0, 0.5, 0.5)
    yield "a dense row that is too short", refused("encoding"), dense(0.5, 0.5)
    yield "a token that its row makes impossible", refused("outside_support"), dense(0.5, 0.0, 0.5)
    half = 2**15
    yield "weights that sum to 65,535", refused("weights"), sparse({1: half, 2: half - 1})
    yield "an id twice", refused("token_id"), sparse([(1, half), (1, half)])
    yield "an id beyond the vocabulary in a row", refused("token_id"), sparse({1: half, VOCAB_SIZE: half})
    yield "a support without the token", refused("outside_support"), sparse({0: half, 2: half})
    yield "a support of 2^32 - 1 tokens", refused("encoding"), sparse({1: half, 2: half}, support_sizes=[LARGEST])
    yield "more wide weights than weights", refused("encoding"), sparse({1: half, 2: half}, wide_sizes=[LARGEST])
    yield "1,000,000 supports", refused("encoding"), sparse({1: half, 2: half}, support_sizes=[2] * 10**6)


def _open_draft_cases() -> Iterator[tuple[str, str, Attempt] | tuple[str, str, Attempt, str]]:
    def sampling(**parameters: Any) -> Attempt:
        return open_draft(sampling=session_pb2.SamplingParameters(**parameters))

    yield "an unknown lease", FAILED, open_draft(lease_id=1), "lease"
    yield "a session that is open", INVALID, open_draft_twice, "open already"
    yield "a session that was closed before", FAILED, open_draft_after_close, "closed"
    yield "epoch 2^32 - 1", OK, open_draft(epoch=LARGEST)
    yield "no ids", INVALID, open_draft(token_ids=[], prompt_len=0), "prompt"
    yield "1,000,000 ids", INVALID, open_draft(token_ids=[1] * 10**6), "max_len"
    yield "ids beyond the drafter's vocabulary", OK, open_draft(token_ids=[1, LARGEST], prompt_len=2)
    yield "`prompt_len` beyond the ids", INVALID, open_draft(prompt_len=LARGEST), "prompt_len"
    yield "`max_len` beyond the context", INVALID, open_draft(max_len=LARGEST), "max_len"
    yield "`max_draft_tokens` 0", INVALID, open_draft(max_draft_tokens=0), "num_speculative_tokens"
    yield "`max_draft_tokens` 2^32 - 1", INVALID, open_draft(max_draft_tokens=LARGEST), "num_speculative_tokens"
    yield "`target_vocab_size` 0", INVALID, open_draft(target_vocab_size=0), "target_vocab_size"
    yield "a `drafting_key` of 15 bytes", INVALID, open_draft(drafting_key=bytes(15)), "key"
    yield "no permit", INVALID, open_draft(permit=None), "permit"
    short = session_pb2.DraftPermit(token=b"\0")
    yield "a permit of 1 byte", INVALID, open_draft(permit=short), "permit"
    yield "an unknown rule", INVALID, open_draft(rejection_sample_method="magic"), "block, token"
    yield "a `cache_salt` of 257 characters", INVALID, open_draft(cache_salt="s" * 257), "cache_salt"
    yield "a `traceparent` that names no span", INVALID, open_draft(traceparent=NO_SPAN), "traceparent"
    yield "a `top_p` of NaN", INVALID, sampling(top_p=NAN), "top_p"
    yield "a `logit_bias` of infinity", INVALID, sampling(logit_bias={1: INFINITY}), "logit_bias"
    yield "no verifier's address", INVALID, open_draft(verifier_address=""), "verifier_address"
    yield "an address that is none", INVALID, open_draft(verifier_address="no\0where\n"), "verifier_address"
    yield "an address of 1 MB", INVALID, open_draft(verifier_address="x" * 10**6 + ":1"), "verifier_address"
    yield "an address where nobody listens", UNAVAILABLE, open_draft(verifier_address="127.0.0.1:1"), "127.0.0.1:1"
    yield "the address of a gateway", UNAVAILABLE, open_draft_elsewhere("gateway")
    yield "the drafter's own address", UNAVAILABLE, open_draft_elsewhere("drafter")
    yield "50 openings cancelled at once", CANCELLED, open_draft_cancelled
    yield "bytes that are no message", INVALID, open_draft(bad=GARBAGE), "message"


def _run_draft_cases() -> Iterator[tuple[str, str, Attempt] | tuple[str, str, Attempt, str]]:
    def close(drafting: DraftSide) -> dict[str, Any]:
        return {"close_session": session_pb2.CloseSession(session_id=drafting.target.session_id)}

    def send_drafted(**changes: int) -> Callable[[DraftSide], dict[str, Any]]:
        def make(drafting: DraftSide) -> dict[str, Any]:
            fields = {"session_id": drafting.target.session_id, "round": 1, **changes}
            return {"send_drafted": drafter_pb2.SendDrafted(**fields)}

        return make

    def asked(num_draft_tokens: int = 2, **changes: Any) -> Callable[[DraftSide], dict[str, Any]]:
        return lambda drafting: drafting.calibration(num_draft_tokens, **changes)

    violation = ends(FAILED)
    yield "a command without content", FAILED, draft_command(lambda _: {}), "without content"
    yield "bytes that are no message", INVALID, raw_command("drafter", GARBAGE), "message"
    yield "a calibration for an unknown session", IGNORED, draft_command(asked(session_id=1))
    yield "a calibration for another epoch", IGNORED, draft_command(asked(epoch=LARGEST))
    yield "a calibration for another prefix", violation, draft_command(asked(prefix_hash=1)), "prefix"
    yield "a calibration for a longer prefix", violation, draft_command(asked(prefix_len=LARGEST)), "prefix"
    yield "a calibration from a wrong base", violation, draft_command(asked(base_len=2)), "known"
    yield "a calibration from base 2^32 - 1", violation, draft_command(asked(base_len=LARGEST, token_ids=[])), "known"
    many = asked(token_ids=[1] * 500_000)
    yield "a calibration with 500,000 tokens", violation, draft_command(many), "prefix"
    yield "a block of 0 tokens asked for", violation, draft_command(asked(0)), "limit"
    yield "a block of 2^32 - 1 tokens asked for", violation, draft_command(asked(LARGEST)), "limit"
    yield "attempt 2^32 - 1", DONE, draft_command(asked(attempt=LARGEST))
    yield "the same calibration twice", DONE, draft_command(asked(), asked())
    yield "`send_drafted` for an unknown session", IGNORED, draft_command(send_drafted(session_id=1))
    yield "`send_drafted` for a block that nobody asked for", IGNORED, draft_command(send_drafted())
    yield "`send_drafted` for round 2^32 - 1", IGNORED, draft_command(send_drafted(round=LARGEST))
    yield "another stream's session closed", IGNORED, draft_command(close, of_another=True)
    yield "a calibration for another stream's session", IGNORED, draft_command(asked(), of_another=True)
    yield "20,000 calibrations for unknown sessions", IGNORED, command_flood("drafter", "calibration")
    yield "20,000 `send_drafted` for unknown sessions", IGNORED, command_flood("drafter", "send_drafted")
    yield "2,000 streams, opened and dropped", CANCELLED, streams("drafter", "RunDraftSessions")


def _other_cases() -> Iterator[Case]:
    unknown_field = b"\x7a\x80\x80\x40" + bytes(2**20)
    for service in ("verifier", "drafter"):
        get_model = (service, "ModelService", "GetModel")
        for what, answer, message in (
            ("bytes that are no message", INVALID, GARBAGE),
            ("a field of 1 MiB that does not exist", OK, unknown_field),
            ("a message above `max_message_bytes`", EXHAUSTED, bytes(MAX_MESSAGE_BYTES + 1)),
        ):
            yield Case(service, "GetModel", what, answer, unary(*get_model, message))
        for method in ("GetVocabulary", "GetTokenizer"):
            yield Case(service, method, "100 calls at once", OK, flood(service, "ModelService", method, 100))
        explode = unary(service, service.capitalize() + "Service", "Explode")
        yield Case(service, "Explode", "a method that does not exist", UNIMPLEMENTED, explode)
    get_server = ("gateway", "GatewayService", "GetServer")
    yield Case("gateway", "GetServer", "bytes that are no message", INVALID, unary(*get_server, GARBAGE))
    unknown = unary(*get_server, unknown_field)
    yield Case("gateway", "GetServer", "a field of 1 MiB that does not exist", INVALID, unknown, "is unknown")
    yield Case("gateway", "GetServer", "500 calls at once", OK, flood(*get_server, 500))
    explode = unary("gateway", "GatewayService", "Explode")
    yield Case("gateway", "Explode", "a method that does not exist", UNIMPLEMENTED, explode)
    elsewhere = unary("gateway", "VerifierService", "OpenTargetSession")
    yield Case("gateway", "OpenTargetSession", "a service that it is not", UNIMPLEMENTED, elsewhere)


def _cases() -> Iterator[Case]:
    for service, call, rows in (
        ("gateway", "Generate", _gateway_cases()),
        ("verifier", "OpenTargetSession", _open_target_cases()),
        ("verifier", "RunTargetSessions", _run_target_cases()),
        ("verifier", "PushDraftBlocks", _push_cases()),
        ("drafter", "OpenDraftSession", _open_draft_cases()),
        ("drafter", "RunDraftSessions", _run_draft_cases()),
    ):
        for what, answer, attempt, *says in rows:
            yield Case(service, call, what, answer, attempt, *says)
    yield from _other_cases()


CASES = tuple(_cases())


# The page

BLOCKS = f"blocks of at most {MAX_DRAFT_TOKENS} tokens ({SESSION_DRAFT_TOKENS} in the sessions that are tried)"
INTRODUCTION = f"""\
# Bad inputs

What the services answer to input that is wrong, hostile or out of order. `tests/served/test_bad_inputs.py` tries
every line of this page on one running stack, while completions run beside: these get their whole text with their
drafter, nothing is left of the sessions, all services go on serving, and none of them logs a traceback.
`python -m tests.bad_inputs --write docs/bad-inputs.md` writes the page.

No answer is `INTERNAL` or `UNKNOWN`. A status ends the call, and of a stream all sessions; what is about one session
ends at most that session:

* *no effect*: the message is dropped and counted, and the session goes on as if it had not come;
* *refused as ...*: the session takes no more blocks from that drafter, and goes on without it (see [wire.md](wire.md));
* *the session fails with ...*: its gateway broke the protocol; it gets a `SessionFailure` with that status;
* *carried out*: there is nothing wrong with it, though it looks like it.

The stack has a vocabulary of {VOCAB_SIZE} tokens, a context of {CONTEXT_LENGTH}, {BLOCKS}, and
a `max_message_bytes` of {MAX_MESSAGE_BYTES // 2**20} MiB. Of more than 1,000 calls that wait to be taken up, gRPC
itself refuses some with `CANCELLED`.
"""


def page() -> str:
    """Returns docs/bad-inputs.md."""
    lines = [INTRODUCTION]
    heading = ""
    for number, case in enumerate(CASES, 1):
        if heading != case.heading:
            heading = case.heading
            lines.append(f"\n## {heading}\n\n| | input | answer |\n|---|---|---|\n")
        lines.append(f"| {number} | {case.what} | {case.shown_answer} |\n")
    return "".join(lines)


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", type=Path, required=True, help="the file")
    parser.parse_args().write.write_text(page())


if __name__ == "__main__":
    main()
