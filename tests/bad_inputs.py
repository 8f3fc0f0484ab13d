"""Bad inputs of every kind, each with the answer that it has to get, and the page that lists them.

    python -m tests.bad_inputs --write tests/bad-inputs.md

`CASES` is the table; `Stage` is what its inputs are tried on: one running stack, to which it plays a user, a gateway
and a drafter, good ones but for the one bad input. A `Request` needs no stack: its edge refuses it alone.
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

from draftwire.cli.local_stack import LocalStack
from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import CommittedTokens, Fence, Permit
from draftwire.runtime.messages import fence_to_proto, permit_to_proto
from draftwire.v1 import drafter_pb2, gateway_pb2, model_pb2, session_pb2, verifier_pb2
from tests.observing import wait_until

VOCAB_SIZE = 3
CONTEXT_LENGTH = 96
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
NUM_STREAMS = 1_000
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

    def ended(self) -> Answer:
        """Says that no more is sent, and returns how the call ends."""
        self._outgoing.put(None)
        while not isinstance(answer := self.next(), Answer):
            pass
        return answer

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
        others = {name: changes.pop(name, None) for name in ("tree", "stop_below")}
        fence = fence_to_proto(replace(target.fence, **changes))
        return {
            "calibration": drafter_pb2.Calibration(
                fence=fence, base_len=base_len, token_ids=token_ids, num_draft_tokens=num_draft_tokens, **others
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

    @property
    def completing(self) -> Any:
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

    def opening(self, service: str, **fields: Any) -> Answer:
        request, name = OPENINGS[service]
        call = self.unary(service, f"{service.capitalize()}Service", name)
        return answer_to(lambda: call(request(**fields), timeout=SECONDS))

    def generate(self, request: gateway_pb2.GenerateRequest) -> Answer:
        """Answers a `Request`, as the next three do."""
        return answer_to(lambda: self.completing(request, timeout=SECONDS))

    def open_target(self, changes: Mapping[str, Any]) -> Answer:
        with self.target_stream() as (stream, lease_id):
            answer = self.opening("verifier", **target_fields(lease_id, **changes))
            return answer if answer.kind != OK else _first_of(stream)

    def open_draft(self, changes: Mapping[str, Any]) -> Answer:
        with self.draft_stream() as (_, lease_id):
            return self.opening("drafter", **draft_fields(self.addresses["verifier"], lease_id, **changes))

    def offer(self, make: "MakeBlock") -> Answer:
        with self.target_side() as session, self.push_stream() as stream:
            stream.send(self.hello())
            stream.next()
            return after_block(self, session, stream, lambda: stream.send(blocks(make(session))))

    @contextmanager
    def target_side(self) -> Iterator[TargetSide]:
        with self.target_stream() as (stream, lease_id):
            fields = target_fields(lease_id)
            assert self.opening("verifier", **fields).kind == OK
            session = TargetSide(
                stream, lease_id, fields["session_id"], fields["permit_key"], CommittedTokens(fields["token_ids"])
            )
            (event,) = stream.next().events
            session.committed.append(list(event.verdict.token_ids))
            yield session

    @contextmanager
    def draft_side(self) -> Iterator[DraftSide]:
        with self.target_side() as target, self.draft_stream(target.stream.events) as (stream, lease_id):
            fields = draft_fields(self.addresses["verifier"], lease_id, target)
            assert self.opening("drafter", **fields).kind == OK
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
        "verifying_key": secrets.token_bytes(KEY_BYTES),
        "permit_key": secrets.token_bytes(KEY_BYTES),
        "plain_rounds": 1,
        "max_len": MAX_LEN,
        **_with_parameters(changes),
    }


def _with_parameters(changes: dict[str, Any]) -> dict[str, Any]:
    """Puts what both services are told in a message of its own; a rule is said by its name."""
    names = session_pb2.SessionParameters.DESCRIPTOR.fields_by_name
    shared = {"prompt_len": len(PROMPT), "max_draft_tokens": SESSION_DRAFT_TOKENS, "rule": "block"}
    shared |= {name: value for name, value in changes.items() if name in names}
    shared["rule"] = session_pb2.VerificationRule(name=shared["rule"], is_lossless=True, needs_draft_probs=True)
    others = {name: value for name, value in changes.items() if name not in names}
    return {**others, "parameters": session_pb2.SessionParameters(**shared)}


def draft_fields(address: str, own_lease_id: int, target: TargetSide | None = None, **changes: Any) -> dict[str, Any]:
    """Returns a good opening of a session on the drafter, or one that differs from it."""
    permit_key = target.permit_key if target is not None else secrets.token_bytes(KEY_BYTES)
    return {
        "lease_id": own_lease_id,
        "session_id": target.session_id if target is not None else secrets.randbits(64),
        "token_ids": PROMPT,
        "drafting_key": secrets.token_bytes(KEY_BYTES),
        "verifier_address": address,
        "target_vocab_size": VOCAB_SIZE,
        "max_len": MAX_LEN,
        "permit": permit_to_proto(Permit.make(permit_key, 0)),
        **_with_parameters(changes),
    }


# Ways to try an input. Each returns what tries it on a stage.

Attempt = Callable[[Stage], Answer]
MakeBlock = Callable[[TargetSide], session_pb2.DraftBlock]

OPENINGS: Mapping[str, tuple[Any, str]] = {
    "verifier": (verifier_pb2.OpenTargetSessionRequest, "OpenTargetSession"),
    "drafter": (drafter_pb2.OpenDraftSessionRequest, "OpenDraftSession"),
}
OPEN_TARGET, OPEN_DRAFT = ((service, f"{service.capitalize()}Service", name) for service, (_, name) in OPENINGS.items())
EVERY_ID = range(VOCAB_SIZE)


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request; those that are sampling parameters stand in a message of their own."""
    names = session_pb2.SamplingParameters.DESCRIPTOR.fields_by_name
    sampling = {name: value for name, value in given.items() if name in names}
    others = {name: value for name, value in given.items() if name not in names}
    return others | ({"sampling": session_pb2.SamplingParameters(**sampling)} if sampling else {})


def generate(**fields: Any) -> "Request":
    """A completion with some other fields or sampling parameters."""
    good = {"token_ids": GOOD_PROMPT.token_ids, "max_tokens": 4}
    return Request("generate", lambda: gateway_pb2.GenerateRequest(**(good | _fields(fields))))


def generate_bytes(message: bytes, metadata: Sequence[tuple[str, str]] = ()) -> Attempt:
    return lambda stage: answer_to(lambda: stage.completing(message, timeout=SECONDS, metadata=metadata))


def prompt_ids(ids: Sequence[int]) -> Attempt:
    return generate(token_ids=gateway_pb2.TokenIds(ids=ids))


def several(prompts: Sequence[gateway_pb2.Prompt], **fields: Any) -> Attempt:
    return generate(token_ids=None, prompts=gateway_pb2.PromptList(prompts=prompts), **fields)


def resumed(*came: tuple[int, Sequence[int]]) -> Attempt:
    """A completion of which something came: of each of some choices these ids."""

    def make() -> gateway_pb2.GenerateRequest:
        choices = [gateway_pb2.GeneratedChoice(choice=choice, token_ids=ids) for choice, ids in came]
        return gateway_pb2.GenerateRequest(token_ids=GOOD_PROMPT.token_ids, max_tokens=4, generated_choices=choices)

    return Request("generate", make)


def chat(messages: Sequence[gateway_pb2.ChatMessage], tools: Sequence[gateway_pb2.Tool] = ()) -> Attempt:
    return generate(token_ids=None, chat=gateway_pb2.ChatPrompt(messages=messages, tools=tools))


def expired(stage: Stage) -> Answer:
    return answer_to(lambda: stage.completing(gateway_pb2.GenerateRequest(text="t1"), timeout=1e-3))


def cancelled(stage: Stage) -> Answer:
    """Two hundred completions, each cancelled as soon as it was sent.

    There is room for 64: some may be refused before their cancellation comes, and a few may be over by then.
    """
    request = gateway_pb2.GenerateRequest(text="t1 t2", num_speculative_tokens=4)
    calls = [stage.completing(request, timeout=SECONDS) for _ in range(200)]
    for call in calls:
        call.cancel()
    answers = {answer_to(lambda call=call: call).kind for call in calls}
    return Answer(CANCELLED if {CANCELLED} <= answers <= {CANCELLED, EXHAUSTED, OK} else str(sorted(answers)))


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
    """A thousand streams, opened together and dropped; some of so many gRPC itself refuses, with the same status, and
    some make room for others before.
    """

    async def run(address: str) -> Answer:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = channel.stream_stream(f"/draftwire.v1.{service.capitalize()}Service/{method}")
            calls = [stub(timeout=SECONDS) for _ in range(NUM_STREAMS)]
            if method.startswith("Run"):
                await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)  # the leases
            for call in calls:
                call.cancel()
            codes = {(await call.code()).name for call in calls}
            return Answer(CANCELLED if {CANCELLED} <= codes <= {CANCELLED, EXHAUSTED} else str(sorted(codes)))

    return lambda stage: stage.wait_for(run(stage.addresses[service]))


def open_target(**changes: Any) -> "Request":
    """An opening of a session on the verifier; one that is answered well has to get its first verdict."""
    return Request("open_target", lambda: _fields(changes))


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


def opened_twice(service: str) -> Attempt:
    def attempt(stage: Stage) -> Answer:
        leased = stage.target_stream() if service == "verifier" else stage.draft_stream()
        with leased as (_, lease_id):
            verifier = stage.addresses["verifier"]
            fields = target_fields(lease_id) if service == "verifier" else draft_fields(verifier, lease_id)
            assert stage.opening(service, **fields).kind == OK
            return stage.opening(service, **fields)

    return attempt


def open_target_after_close(stage: Stage) -> Answer:
    with stage.target_side() as session:
        other = target_fields(session.lease_id)
        session.command(close_session=session_pb2.CloseSession(session_id=other["session_id"]))
        session.command(**session.plain_run())
        session.stream.next()
        return stage.opening("verifier", **other)


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
    """All that a drafter says on a stream of its own; the answer is how the stream ends."""

    def attempt(stage: Stage) -> Answer:
        with stage.push_stream() as stream:
            for request in requests:
                stream.send(request(stage))
            return stream.ended()

    return attempt


def hello(**changes: Any) -> Callable[[Stage], Any]:
    return lambda stage: stage.hello(**changes)


def shown(token: bytes) -> Callable[[Stage], Any]:
    """A hello with an identity."""

    def make(stage: Stage) -> verifier_pb2.PushDraftBlocksRequest:
        request = stage.hello()
        request.hello.identity.CopyFrom(verifier_pb2.DrafterIdentity(drafter_id=1, token=token))
        return request

    return make


def blocks(*given: session_pb2.DraftBlock) -> verifier_pb2.PushDraftBlocksRequest:
    return verifier_pb2.PushDraftBlocksRequest(blocks=verifier_pb2.DraftBlocks(blocks=given))


def block(make: "MakeBlock") -> "Request":
    """A block for a session in its round 1, then a good one."""
    return Request("offer", lambda: make)


def same_block(times: int) -> Attempt:
    """A good block, so often in one message."""

    def attempt(stage: Stage) -> Answer:
        with stage.target_side() as session, stage.push_stream() as stream:
            stream.send(stage.hello())
            return after_block(stage, session, stream, lambda: stream.send(blocks(*[session.block()] * times)))

    return attempt


def strange_block(stage: Stage) -> Answer:
    """A block without a permit, where another drafter has a part in the session."""
    with stage.target_side() as session, stage.push_stream() as stream, stage.push_stream() as own:
        for one in (stream, own):
            one.send(stage.hello())
            one.next()
        # Its drafter shows its permit with a block that is stale.
        first = fence_to_proto(replace(session.fence, round=0))
        _send_alone(stage.dropped, own, blocks(session.block(fence=first)))
        bad = blocks(session.block(permit=None))
        return after_block(stage, session, own, lambda: _send_alone(stage.refusals, stream, bad))


def after_block(stage: Stage, session: TargetSide, stream: Stream, send: Callable[[], None]) -> Answer:
    """Sends what is tried and then, on the stream, a good block; returns what became of the first."""
    before = stage.refusals()
    send()
    stream.send(blocks(session.block(token_ids=[2], calibration_duration_us=77)))
    response = session.stream.next(3.0)
    if isinstance(response, Answer):
        return response
    event = response.events[0]
    violations = [name for name, count in stage.refusals().items() if count != before.get(name, 0.0)]
    if event.WhichOneof("event") == "refusal":
        session.command(**session.plain_run())
        assert session.stream.next().events[0].WhichOneof("event") == "verdict", "the session goes on"
        return Answer(refused(", ".join(violations)), event.refusal.message)
    if event.WhichOneof("event") == "verdict" and event.verdict.calibration_duration_us == 77:
        return Answer(f"{IGNORED}, counted as `{violations[0]}`" if violations else IGNORED)
    return _became(event)


def _send_alone(counts: Callable[[], dict[str, float]], stream: Stream, message: Any) -> None:
    """Sends what is counted when it arrives, and waits for that: streams do not wait for each other."""
    before = counts()
    stream.send(message)
    wait_until(lambda: counts() != before, "what was sent is counted", SECONDS)


def distributed(encoding: int, data: bytes, tokens: Sequence[int] = (1,), **sizes: Any) -> "Request":
    """A block with other distributions."""

    def make(session: TargetSide) -> session_pb2.DraftBlock:
        fields = {"encoding": encoding, "vocab_size": VOCAB_SIZE, "data": data, **sizes}
        return session.block(token_ids=tokens, distributions=session_pb2.DraftDistributions(**fields))

    return block(make)


def sparse(weights: Mapping[int, int] | Sequence[tuple[int, int]], **changes: Any) -> "Request":
    """A block of one token, 1, with a sparse distribution of token ids and weights."""
    pairs = list(weights.items()) if isinstance(weights, Mapping) else list(weights)
    less = [weight - 1 for _, weight in pairs]
    data = bytes([token for token, _ in pairs]) + bytes([value % 256 for value in less])
    data += bytes([value // 256 for value in less])
    sizes = {"support_sizes": [len(pairs)], "wide_sizes": [len(pairs)], **changes}
    return distributed(session_pb2.DISTRIBUTION_ENCODING_SPARSE_UINT16, data, **sizes)


def dense(*row: float) -> "Request":
    """A block of one token, 1, with a dense distribution."""
    return distributed(session_pb2.DISTRIBUTION_ENCODING_DENSE_FLOAT32, struct.pack(f"<{len(row)}f", *row))


def fenced(**changes: int) -> "MakeBlock":
    return lambda session: session.block(fence=fence_to_proto(replace(session.fence, **changes)))


def permitted(number: int | None, token: bytes | None = None) -> "MakeBlock":
    """A block with another permit; genuine where no token is given, absent without a number."""

    def make(session: TargetSide) -> session_pb2.DraftBlock:
        if number is None:
            return session.block(permit=None)
        genuine = Permit.make(session.permit_key, number)
        return session.block(permit=permit_to_proto(replace(genuine, token=token or genuine.token)))

    return make


def many_blocks(count: int) -> Attempt:
    """Blocks for sessions that do not exist, in one message."""

    def run(stage: Stage) -> Answer:
        with stage.target_side() as session:
            many = blocks(*[session.block(fence=session_pb2.Fence(session_id=1))] * count)
        return push(hello(), lambda _: many)(stage)

    return run


def open_draft(**changes: Any) -> "Request":
    """An opening of a session on the drafter."""
    return Request("open_draft", lambda: _fields(changes))


def open_draft_after_close(stage: Stage) -> Answer:
    with stage.draft_side() as drafting:
        other = draft_fields(stage.addresses["verifier"], drafting.lease_id)
        drafting.command(close_session=session_pb2.CloseSession(session_id=other["session_id"]))
        drafting.command(**drafting.calibration())
        drafting.target.stream.next()
        return stage.opening("drafter", **other)


def open_draft_elsewhere(service: str) -> Attempt:
    """An opening whose verifier is another service."""
    return lambda stage: stage.open_draft({"verifier_address": stage.addresses[service]})


def open_draft_cancelled(stage: Stage) -> Answer:
    """Fifty openings, each cancelled as soon as it was sent, whose verifier is not there."""
    with stage.draft_stream() as (_, lease_id):
        call = stage.unary(*OPEN_DRAFT)
        running = []
        for number in range(50):
            fields = draft_fields(f"127.0.0.1:{number + 1}", lease_id)
            running.append(call.future(drafter_pb2.OpenDraftSessionRequest(**fields), timeout=SECONDS))
        time.sleep(0.02)
        for one in running:
            one.cancel()
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
class Request:
    """What one edge answers alone. Tried on a `Stage`, or on the edge without servers: see `test_refusals.py`."""

    method: str
    make: Callable[[], Any]
    """Makes its content, of which there may be megabytes."""

    def __call__(self, place: Any) -> Answer:
        answer: Answer = getattr(place, self.method)(self.make())
        return answer


Row = tuple[str, str, Attempt] | tuple[str, str, Attempt, str]


@dataclass(frozen=True, slots=True, eq=False)
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
    def is_request(self) -> bool:
        """Whether an edge refuses it alone, so that it can be tried without servers."""
        return isinstance(self.attempt, Request) and (self.answer in (INVALID, FAILED) or "refused" in self.answer)

    @property
    def shown_answer(self) -> str:
        return f"`{self.answer}`" if self.answer in STATUSES else self.answer


def _gateway_rows() -> list[Row]:
    user, no_message = gateway_pb2.ChatMessage(role="user", content="hello"), gateway_pb2.ChatMessage()
    called = gateway_pb2.ChatMessage(role="assistant", tool_calls=[gateway_pb2.ToolCall(name="t")] * 4097)
    long_tool = gateway_pb2.Tool(name="t", parameters="x" * 10**6)
    long_message = gateway_pb2.ChatMessage(role="user", content="x" * 3_999_997)
    long_prompt = gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=[1] * 10**6))
    unknown_message = gateway_pb2.ChatMessage.FromString(UNKNOWN_FIELD)
    text = gateway_pb2.GenerateRequest(text="t1", max_tokens=4).SerializeToString()
    unknown = gateway_pb2.GenerateRequest.FromString(text + UNKNOWN_FIELD)
    salted = gateway_pb2.GenerateRequest(text="t1", cache_salt="zz").SerializeToString()
    form = session_pb2.StructuredOutput
    choices = session_pb2.StructuredOutputChoices
    regex = form(regex="a")
    bounds = {
        "temperature": (NAN, INFINITY, -0.1, 100.5),
        "top_p": (NAN, INFINITY, 0.0, 1.5),
        "min_p": (NAN, INFINITY, -0.1, 1.5),
        "repetition_penalty": (NAN, INFINITY, 0.0, 101.0),
        "presence_penalty": (NAN, INFINITY, -2.5, 2.5),
        "frequency_penalty": (NAN, -INFINITY, -2.5, 2.5),
    }
    forms = {
        "`structured_output` without a form": form(),
        "an empty `regex`": form(regex=""),
        "no `choices`": form(choices=choices()),
        "a choice that comes twice": form(choices=choices(texts=["a", "a"])),
        "1,025 `choices`": form(choices=choices(texts=map(str, range(1_025)))),
        "a `json_schema` of 65,537 bytes": form(json_schema=" " * 65_537),
        "a `grammar`, though the model has no stop token": form(grammar='start: "a"'),
    }
    return [
        ("no prompt at all", INVALID, generate(token_ids=None, max_tokens=None), "prompt"),
        ("empty text", INVALID, generate(token_ids=None, text=""), "prompt is empty"),
        ("empty list of ids", INVALID, prompt_ids([]), "prompt is empty"),
        ("a prompt as long as the context", INVALID, prompt_ids([1] * CONTEXT_LENGTH), "context"),
        ("a prompt of 1,000,000 tokens", INVALID, prompt_ids([1] * 10**6), "token_ids"),
        ("a text of 4,000,001 characters", INVALID, generate(token_ids=None, text="x" * 4_000_001), "characters"),
        ("a text as long as the context", INVALID, generate(token_ids=None, text="t1 " * CONTEXT_LENGTH), "context"),
        ("an id that is the vocabulary's size", INVALID, prompt_ids([1, VOCAB_SIZE]), "token ids"),
        ("an id of 2^32 - 1", INVALID, prompt_ids([LARGEST]), "token ids"),
        ("a chat without messages", INVALID, chat([]), "prompt is empty"),
        ("a chat, though the model has no template", INVALID, chat([gateway_pb2.ChatMessage(role="user")]), "template"),
        ("a chat of 200,000 empty messages", INVALID, chat([no_message] * 200_000), "messages"),
        ("a chat of 4,097 messages", INVALID, chat([no_message] * 4097), "messages takes at most 4096"),
        ("a chat with 4,097 tool calls", INVALID, chat([user, called]), "tool_calls"),
        ("a chat with 1,025 tools", INVALID, chat([user], tools=[gateway_pb2.Tool(name="t")] * 1025), "tools"),
        ("a chat with a tool of 1,000,001 characters", INVALID, chat([user], tools=[long_tool]), "tools"),
        ("a chat of 4,000,001 characters", INVALID, chat([long_message]), "characters"),
        (
            "a field that does not exist",
            INVALID,
            Request("generate", lambda: unknown),
            "field 16383 of GenerateRequest",
        ),
        (
            "a sampling parameter that does not exist",
            INVALID,
            generate(sampling=session_pb2.SamplingParameters.FromString(UNKNOWN_FIELD)),
            "SamplingParameters",
        ),
        ("a chat message with a field that does not exist", INVALID, chat([unknown_message]), "ChatMessage"),
        *(
            (f"`{name}` {_number(value)}", INVALID, generate(**{name: value}), name)
            for name, values in bounds.items()
            for value in values
        ),
        *(
            (f"a `logit_bias` of {_number(value)}", INVALID, generate(logit_bias={1: value}), "logit_bias")
            for value in (NAN, INFINITY, -100.5)
        ),
        ("`logit_bias` of an id beyond the vocabulary", INVALID, generate(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        ("`logit_bias` of 50,000 ids", INVALID, generate(logit_bias=dict.fromkeys(range(50_000), 1.0)), "logit_bias"),
        ("an allowed id beyond the vocabulary", INVALID, generate(allowed_token_ids=[1, LARGEST]), "allowed_token_ids"),
        ("1,000,000 allowed ids", INVALID, generate(allowed_token_ids=[1] * 10**6), "allowed_token_ids"),
        (
            "allowed ids that `min_tokens` keeps away",
            INVALID,
            generate(allowed_token_ids=[1], min_tokens=2, stop_token_ids=[1]),
            "min_tokens",
        ),
        (
            "every id a stop token, and `min_tokens`",
            INVALID,
            generate(min_tokens=2, stop_token_ids=EVERY_ID),
            "min_tokens",
        ),
        *((title, INVALID, generate(structured_output=bad), "structured_output") for title, bad in forms.items()),
        ("a form and `min_tokens`", INVALID, generate(structured_output=regex, min_tokens=1), "structured_output"),
        (
            "a form and allowed ids",
            INVALID,
            generate(structured_output=regex, allowed_token_ids=[1]),
            "structured_output",
        ),
        ("`top_k` of 2^32 - 1", OK, generate(top_k=LARGEST)),
        ("`temperature`, `top_p` and `min_p` of 5e-324", OK, generate(temperature=5e-324, top_p=5e-324, min_p=5e-324)),
        ("`max_tokens` 0", OK, generate(max_tokens=0)),
        ("`max_tokens` 2^32 - 1", INVALID, generate(max_tokens=LARGEST), "max_tokens"),
        ("`min_tokens` 2^32 - 1", INVALID, generate(min_tokens=LARGEST), "min_tokens"),
        ("17 stop strings", INVALID, generate(stop=["a"] * 17), "stop"),
        ("200,000 stop strings", INVALID, generate(stop=["a"] * 200_000), "stop"),
        ("an empty stop string", INVALID, generate(stop=[""]), "stop"),
        ("a stop string of 257 characters", INVALID, generate(stop=["a" * 257]), "stop"),
        ("a stop token beyond the vocabulary", INVALID, generate(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
        ("1,000,000 stop tokens, all the same", INVALID, generate(stop_token_ids=[1] * 10**6), "stop_token_ids"),
        ("`num_speculative_tokens` 17", INVALID, generate(num_speculative_tokens=17), "num_speculative_tokens"),
        ("`num_speculative_tokens` 2^32 - 1", INVALID, generate(num_speculative_tokens=LARGEST), "num_speculative"),
        ("`num_draft_nodes` 65", INVALID, generate(num_draft_nodes=65), "num_draft_nodes"),
        ("`num_draft_nodes` 2^32 - 1", INVALID, generate(num_draft_nodes=LARGEST), "num_draft_nodes"),
        ("`stop_below` 2", INVALID, generate(stop_below=2.0), "stop_below must be in 0..1"),
        ("`stop_below` NaN", INVALID, generate(stop_below=NAN), "stop_below must be in 0..1"),
        ("an unknown rule", INVALID, generate(rejection_sample_method="magic"), "block, token"),
        ("an empty rule", INVALID, generate(rejection_sample_method=""), "block, token"),
        (
            "a rule with a name of 1,000,000 emoji",
            INVALID,
            generate(rejection_sample_method="\U0001f600" * 10**6),
            "block, token",
        ),
        ("a `cache_salt` of 257 characters", INVALID, generate(cache_salt="s" * 257), "cache_salt"),
        ("`num_choices` 0", INVALID, generate(num_choices=0), "num_choices"),
        ("`num_choices` 129", INVALID, generate(num_choices=129), "num_choices"),
        ("`num_choices` 2^32 - 1", INVALID, generate(num_choices=LARGEST), "num_choices"),
        ("an empty list of prompts", INVALID, several([]), "prompts is empty"),
        ("a list with a prompt that is none", INVALID, several([GOOD_PROMPT, gateway_pb2.Prompt()]), "prompt"),
        ("a list with an empty prompt", INVALID, several([GOOD_PROMPT, gateway_pb2.Prompt(text="")]), "empty"),
        (
            "a list of 2 prompts and 65 choices of each",
            INVALID,
            several([GOOD_PROMPT] * 2, num_choices=65),
            "num_choices",
        ),
        ("a list of 100,000 prompts", INVALID, several([gateway_pb2.Prompt()] * 100_000), "prompts"),
        ("a list with a prompt of 1,000,000 tokens", INVALID, several([GOOD_PROMPT, long_prompt]), "token_ids"),
        (
            "`ignore_eos` beside a structured output",
            INVALID,
            generate(ignore_eos=True, structured_output=form(regex="a*")),
            "ignore_eos",
        ),
        ("`logprobs` 21", INVALID, generate(logprobs=21), "logprobs"),
        ("`logprobs` 2^32 - 1", INVALID, generate(logprobs=LARGEST), "logprobs"),
        ("`logprobs` 20 of a vocabulary of 3", OK, generate(logprobs=20, prompt_logprobs=20)),
        ("`prompt_logprobs` 21", INVALID, generate(prompt_logprobs=21), "prompt_logprobs"),
        ("an unknown `logprobs_mode`", INVALID, generate(logprobs_mode="raw_logits"), "logprobs_mode"),
        ("an empty `logprobs_mode`", INVALID, generate(logprobs_mode=""), "logprobs_mode"),
        ("a resumed text longer than `max_tokens`", INVALID, resumed((0, [1] * 5)), "generated_choices"),
        ("a resumed text of 1,000,000 tokens", INVALID, resumed((0, [1] * 10**6)), "generated_choices"),
        ("a resumed id beyond the vocabulary", INVALID, resumed((0, [LARGEST])), "generated_choices"),
        ("a resumed choice that there is not", INVALID, resumed((1, [1])), "generated_choices"),
        ("a choice that is resumed twice", INVALID, resumed((0, [1]), (0, [1])), "generated_choices"),
        ("100,000 resumed choices", INVALID, resumed(*[(0, [])] * 100_000), "generated_choices"),
        ("1,000,000 resumed choices", INVALID, generate_bytes(b"\xb2\x01\x00" * 10**6), "fields"),
        ("bytes that are no message", INVALID, generate_bytes(GARBAGE), "message"),
        ("a message that is cut off", INVALID, generate_bytes(text[:-3]), "message"),
        ("a prompt that is not UTF-8", INVALID, generate_bytes(text.replace(b"t1", NOT_UTF8)), "message"),
        ("a `cache_salt` that is not UTF-8", INVALID, generate_bytes(salted.replace(b"zz", NOT_UTF8)), "message"),
        ("a message above `max_message_bytes`", EXHAUSTED, generate(text="x" * (MAX_MESSAGE_BYTES + 1)), "larger"),
        ("1 MB of metadata", EXHAUSTED, generate_bytes(text, [("x-large", "x" * 10**6)])),
        ("a deadline of 1 ms", LATE, expired),
        ("200 completions cancelled at once", CANCELLED, cancelled),
    ]


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinity" if value == INFINITY else f"{value:g}"


def _open_target_rows() -> list[Row]:
    away = {"min_tokens": 2, "stop_token_ids": [1], "allowed_token_ids": [1]}
    salted = session_pb2.SessionParameters(cache_salt="zz")
    opening = verifier_pb2.OpenTargetSessionRequest(parameters=salted).SerializeToString()
    return [
        ("an unknown lease", FAILED, open_target(lease_id=1), "lease"),
        ("no lease", FAILED, open_target(lease_id=0), "lease"),
        ("a session that is open", INVALID, opened_twice("verifier"), "open already"),
        ("a session that was closed before", FAILED, open_target_after_close, "closed"),
        ("epoch 2^32 - 1", DONE, open_target(epoch=LARGEST)),
        ("`choice` 2^32 - 1", DONE, open_target(choice=LARGEST)),
        ("`first_round` 2^32 - 1", INVALID, open_target(first_round=LARGEST), "first_round"),
        ("no ids", INVALID, open_target(token_ids=[], prompt_len=0), "prompt"),
        ("as many ids as the context", INVALID, open_target(token_ids=[1] * CONTEXT_LENGTH), "prompt tokens"),
        ("1,000,000 ids", INVALID, open_target(token_ids=[1] * 10**6), "prompt tokens"),
        ("an id beyond the vocabulary", INVALID, open_target(token_ids=[1, VOCAB_SIZE], prompt_len=2), "token id"),
        ("`prompt_len` 0", INVALID, open_target(prompt_len=0), "prompt_len"),
        ("`prompt_len` beyond the ids", INVALID, open_target(prompt_len=LARGEST), "prompt_len"),
        ("`max_len` without room for a token", INVALID, open_target(max_len=len(PROMPT)), "max_len"),
        ("`max_len` beyond the context", INVALID, open_target(max_len=LARGEST), "max_len"),
        ("`max_draft_tokens` 2^32 - 1", INVALID, open_target(max_draft_tokens=LARGEST), "num_speculative_tokens"),
        ("`max_tree_nodes` where there are no trees", INVALID, open_target(max_tree_nodes=1), "num_draft_nodes"),
        ("`max_tree_nodes` 2^32 - 1", INVALID, open_target(max_tree_nodes=LARGEST), "max_tree_nodes"),
        ("`plain_rounds` 2^32 - 1", DONE, open_target(plain_rounds=LARGEST)),
        ("no `verifying_key`", INVALID, open_target(verifying_key=b""), "key"),
        ("a `verifying_key` of 17 bytes", INVALID, open_target(verifying_key=bytes(17)), "key"),
        ("a `permit_key` of 15 bytes", INVALID, open_target(permit_key=bytes(15)), "key"),
        ("an unknown rule", INVALID, open_target(rule="magic"), "block, token"),
        ("a `cache_salt` of 257 characters", INVALID, open_target(cache_salt="s" * 257), "cache_salt"),
        ("a `traceparent` that names no span", INVALID, open_target(traceparent=NO_SPAN), "traceparent"),
        ("a `temperature` of NaN", INVALID, open_target(temperature=NAN), "temperature"),
        ("a `logit_bias` of NaN", INVALID, open_target(logit_bias={1: NAN}), "logit_bias"),
        ("a bias beyond the vocabulary", INVALID, open_target(logit_bias={LARGEST: 1.0}), "logit_bias"),
        (
            "an allowed id beyond the vocabulary",
            INVALID,
            open_target(allowed_token_ids=[VOCAB_SIZE]),
            "allowed_token_ids",
        ),
        (
            "every id a stop token, and `min_tokens`",
            INVALID,
            open_target(min_tokens=2, stop_token_ids=EVERY_ID),
            "min_tokens",
        ),
        ("allowed ids that `min_tokens` keeps away", INVALID, open_target(**away), "min_tokens"),
        ("`logprobs` 21", INVALID, open_target(logprobs=21), "logprobs"),
        ("`prompt_logprobs` 2^32 - 1", INVALID, open_target(prompt_logprobs=LARGEST), "prompt_logprobs"),
        ("an unknown `logprobs_mode`", INVALID, open_target(logprobs_mode="magic"), "logprobs_mode"),
        ("log-probabilities of a vocabulary of 3, 20 of each", DONE, open_target(logprobs=20, prompt_logprobs=20)),
        ("stop tokens beyond the vocabulary", DONE, open_target(min_tokens=2, stop_token_ids=[LARGEST])),
        ("bytes that are no message", INVALID, unary(*OPEN_TARGET, GARBAGE), "message"),
        ("a rule that is not UTF-8", INVALID, unary(*OPEN_TARGET, opening.replace(b"zz", NOT_UTF8)), "message"),
        ("a message above `max_message_bytes`", EXHAUSTED, open_target(cache_salt="x" * (MAX_MESSAGE_BYTES + 1))),
    ]


def _run_target_rows() -> list[Row]:
    def close(session: TargetSide) -> dict[str, Any]:
        return {"close_session": session_pb2.CloseSession(session_id=session.session_id)}

    def close_unknown(session: TargetSide) -> dict[str, Any]:
        return {"close_session": session_pb2.CloseSession(session_id=session.session_id, epoch=LARGEST)}

    return [
        ("a command without content", FAILED, command(lambda _: {}), "without content"),
        ("bytes that are no message", INVALID, raw_command("verifier", GARBAGE), "message"),
        ("a plain run for a round from the future", ends(FAILED), command(lambda s: s.plain_run(round=9))),
        ("a plain run for round 2^32 - 1", ends(FAILED), command(lambda s: s.plain_run(round=LARGEST))),
        ("a plain run for an old round", IGNORED, command(lambda s: s.plain_run(round=0))),
        ("a plain run for another epoch", IGNORED, command(lambda s: s.plain_run(epoch=LARGEST))),
        ("a plain run for another prefix", ends(FAILED), command(lambda s: s.plain_run(prefix_hash=1))),
        ("a plain run for a longer prefix", ends(FAILED), command(lambda s: s.plain_run(prefix_len=LARGEST))),
        ("a plain run of no rounds", ends(INVALID), command(lambda s: s.plain_run(0))),
        ("a plain run of 2^32 - 1 rounds", DONE, command(lambda s: s.plain_run(LARGEST))),
        ("the same plain run twice", IGNORED, command(TargetSide.plain_run, TargetSide.plain_run)),
        ("a plain run for an unknown session", IGNORED, command(lambda s: s.plain_run(session_id=1))),
        ("an unknown session closed, twice", IGNORED, command(close_unknown, close_unknown)),
        ("another stream's session closed", IGNORED, command(close, of_another=True)),
        ("a plain run for another stream's session", IGNORED, command(lambda s: s.plain_run(9), of_another=True)),
        ("20,000 plain runs for unknown sessions", IGNORED, command_flood("verifier", "plain_run")),
        ("20,000 unknown sessions closed", IGNORED, command_flood("verifier", "close_session")),
        ("1,000 streams, opened and dropped", CANCELLED, streams("verifier", "RunTargetSessions")),
    ]


def _push_rows() -> list[Row]:
    model_size = {"vocab_size": LARGEST, "context_length": LARGEST}
    peer = f"{IGNORED}, counted as `peer`"
    one_hot = session_pb2.DISTRIBUTION_ENCODING_ONE_HOT
    half = 2**15
    return [
        ("blocks before the hello", FAILED, push(lambda _: blocks()), "hello"),
        ("the hello twice", FAILED, push(hello(), hello()), "hello"),
        ("a request without content", FAILED, push(lambda _: b""), "hello"),
        ("bytes that are no message", INVALID, push(hello(), lambda _: GARBAGE), "message"),
        ("protocol version 0", FAILED, push(hello(protocol_version=0)), "version"),
        (
            "protocol versions from 11 on",
            FAILED,
            push(hello(protocol_version=LARGEST, oldest_protocol_version=11)),
            "version",
        ),
        ("another fingerprint", FAILED, push(hello(vocabulary_fingerprint=bytes(32))), "vocabulary"),
        ("a fingerprint of 1 MB", FAILED, push(hello(vocabulary_fingerprint=bytes(10**6))), "vocabulary"),
        ("an identity of 1 byte", INVALID, push(shown(b"\0")), "16 bytes"),
        ("an identity that nobody gave", OK, push(shown(bytes(KEY_BYTES)))),
        ("a model name of 1 MB", INVALID, push(hello(name="x" * 10**6)), "name"),
        ("a model name of 1,000 emoji", INVALID, push(hello(name="\U0001f600" * 1000)), "name"),
        ("vocabulary and context of 2^32 - 1", OK, push(hello(**model_size))),
        ("a message above `max_message_bytes`", EXHAUSTED, push(lambda _: b"\x0a" + bytes(MAX_MESSAGE_BYTES))),
        ("256 blocks for unknown sessions", OK, many_blocks(256)),
        ("20,000 blocks for unknown sessions", FAILED, many_blocks(20_000), "256 blocks"),
        ("1,000 streams, opened and dropped", CANCELLED, streams("verifier", "PushDraftBlocks")),
        ("the same block 100 times", DONE, same_block(100)),
        ("a block for an old round", IGNORED, block(fenced(round=0))),
        ("a block for a round from the future", refused("prefix"), block(fenced(round=LARGEST))),
        ("a block for another prefix", refused("prefix"), block(fenced(prefix_hash=1))),
        ("a block for another epoch", IGNORED, block(fenced(epoch=LARGEST))),
        ("a block without a fence", IGNORED, block(lambda s: s.block(fence=None))),
        ("a forged permit", peer, block(permitted(0, bytes(KEY_BYTES)))),
        ("a permit of 1 byte", peer, block(permitted(0, b"\0"))),
        ("a permit of 1 MB", peer, block(permitted(LARGEST, bytes(10**6)))),
        ("a block without a permit", peer, block(permitted(None))),
        ("a block of another drafter", peer, strange_block),
        ("a token tree", refused("encoding"), block(lambda s: s.block(parent_indices=[-1, 0]))),
        ("encoding 0", refused("encoding"), distributed(0, b"")),
        ("encoding 99", refused("encoding"), distributed(99, b"")),
        ("no distributions", refused("no_distributions"), distributed(session_pb2.DISTRIBUTION_ENCODING_NONE, b"")),
        ("no tokens", refused("length"), block(lambda s: s.block(token_ids=[]))),
        ("5 tokens where 4 are the limit", refused("length"), block(lambda s: s.block(token_ids=[1] * 5))),
        ("1,000,000 tokens", refused("length"), block(lambda s: s.block(token_ids=[1] * 10**6))),
        ("a token beyond the vocabulary", refused("token_id"), block(lambda s: s.block(token_ids=[LARGEST]))),
        ("a vocabulary of 2^32 - 1", refused("encoding"), distributed(one_hot, b"", vocab_size=LARGEST)),
        ("a vocabulary of 0", refused("encoding"), distributed(one_hot, b"", vocab_size=0)),
        ("data where none belong", refused("encoding"), distributed(one_hot, bytes(10**6))),
        ("a dense row with a NaN", refused("weights"), dense(0.5, NAN, 0.5)),
        ("a dense row with an infinity", refused("weights"), dense(0.5, INFINITY, 0.5)),
        ("a dense row with a negative entry", refused("weights"), dense(-0.5, 1.0, 0.5)),
        ("a dense row that sums to 2", refused("weights"), dense(1.0, 0.5, 0.5)),
        ("a dense row that is too short", refused("encoding"), dense(0.5, 0.5)),
        ("a token that its row makes impossible", refused("outside_support"), dense(0.5, 0.0, 0.5)),
        ("weights that sum to 65,535", refused("weights"), sparse({1: half, 2: half - 1})),
        ("an id twice", refused("token_id"), sparse([(1, half), (1, half)])),
        ("an id beyond the vocabulary in a row", refused("token_id"), sparse({1: half, VOCAB_SIZE: half})),
        ("a support without the token", refused("outside_support"), sparse({0: half, 2: half})),
        ("a support of 2^32 - 1 tokens", refused("encoding"), sparse({1: half, 2: half}, support_sizes=[LARGEST])),
        ("more wide weights than weights", refused("encoding"), sparse({1: half, 2: half}, wide_sizes=[LARGEST])),
        ("1,000,000 supports", refused("encoding"), sparse({1: half, 2: half}, support_sizes=[2] * 10**6)),
    ]


def _open_draft_rows() -> list[Row]:
    return [
        ("an unknown lease", FAILED, open_draft(lease_id=1), "lease"),
        ("a session that is open", INVALID, opened_twice("drafter"), "open already"),
        ("a session that was closed before", FAILED, open_draft_after_close, "closed"),
        ("epoch 2^32 - 1", OK, open_draft(epoch=LARGEST)),
        ("no ids", INVALID, open_draft(token_ids=[], prompt_len=0), "prompt"),
        ("1,000,000 ids", INVALID, open_draft(token_ids=[1] * 10**6), "max_len"),
        ("ids beyond the drafter's vocabulary", OK, open_draft(token_ids=[1, LARGEST], prompt_len=2)),
        ("`prompt_len` beyond the ids", INVALID, open_draft(prompt_len=LARGEST), "prompt_len"),
        ("`max_len` beyond the context", INVALID, open_draft(max_len=LARGEST), "max_len"),
        ("`max_draft_tokens` 0", INVALID, open_draft(max_draft_tokens=0), "num_speculative_tokens"),
        ("`max_draft_tokens` 2^32 - 1", INVALID, open_draft(max_draft_tokens=LARGEST), "num_speculative_tokens"),
        ("`max_tree_nodes` where there are no trees", INVALID, open_draft(max_tree_nodes=1), "num_draft_nodes"),
        ("`max_tree_nodes` 2^32 - 1", INVALID, open_draft(max_tree_nodes=LARGEST), "max_tree_nodes"),
        ("`target_vocab_size` 0", INVALID, open_draft(target_vocab_size=0), "target_vocab_size"),
        ("a `drafting_key` of 15 bytes", INVALID, open_draft(drafting_key=bytes(15)), "key"),
        ("no permit, which may come with the first calibration", OK, open_draft(permit=None)),
        ("a permit of 1 byte", INVALID, open_draft(permit=session_pb2.DraftPermit(token=b"\0")), "permit"),
        ("a rule of another server", OK, open_draft(rule="magic")),
        ("a rule without a name", INVALID, open_draft(rule=""), "rejection_sample_method"),
        ("a `cache_salt` of 257 characters", INVALID, open_draft(cache_salt="s" * 257), "cache_salt"),
        ("a `traceparent` that names no span", INVALID, open_draft(traceparent=NO_SPAN), "traceparent"),
        ("a `top_p` of NaN", INVALID, open_draft(top_p=NAN), "top_p"),
        ("a `logit_bias` of infinity", INVALID, open_draft(logit_bias={1: INFINITY}), "logit_bias"),
        ("no verifier's address", INVALID, open_draft(verifier_address=""), "verifier_address"),
        ("an address that is none", INVALID, open_draft(verifier_address="no\0where\n"), "verifier_address"),
        ("an address of 1 MB", INVALID, open_draft(verifier_address="x" * 10**6 + ":1"), "verifier_address"),
        ("an address where nobody listens", UNAVAILABLE, open_draft(verifier_address="127.0.0.1:1"), "127.0.0.1:1"),
        ("the address of a gateway", UNAVAILABLE, open_draft_elsewhere("gateway")),
        ("the drafter's own address", UNAVAILABLE, open_draft_elsewhere("drafter")),
        ("50 openings cancelled at once", CANCELLED, open_draft_cancelled),
        ("bytes that are no message", INVALID, unary(*OPEN_DRAFT, GARBAGE), "message"),
    ]


def _run_draft_rows() -> list[Row]:
    def close(drafting: DraftSide) -> dict[str, Any]:
        return {"close_session": session_pb2.CloseSession(session_id=drafting.target.session_id)}

    def send_drafted(**changes: int) -> Callable[[DraftSide], dict[str, Any]]:
        def make(drafting: DraftSide) -> dict[str, Any]:
            fields = {"session_id": drafting.target.session_id, "round": 1, **changes}
            return {"send_drafted": drafter_pb2.SendDrafted(**fields)}

        return make

    def asked(num_draft_tokens: int = 2, **changes: Any) -> Callable[[DraftSide], dict[str, Any]]:
        return lambda drafting: drafting.calibration(num_draft_tokens, **changes)

    def tree(num_nodes: int) -> Callable[[DraftSide], dict[str, Any]]:
        return asked(tree=drafter_pb2.DraftTree(num_nodes=num_nodes))

    violation = ends(FAILED)
    many = asked(token_ids=[1] * 500_000)
    return [
        ("a command without content", FAILED, draft_command(lambda _: {}), "without content"),
        ("bytes that are no message", INVALID, raw_command("drafter", GARBAGE), "message"),
        ("a calibration for an unknown session", IGNORED, draft_command(asked(session_id=1))),
        ("a calibration for another epoch", IGNORED, draft_command(asked(epoch=LARGEST))),
        ("a calibration for another prefix", violation, draft_command(asked(prefix_hash=1)), "prefix"),
        ("a calibration for a longer prefix", violation, draft_command(asked(prefix_len=LARGEST)), "prefix"),
        ("a calibration from a wrong base", violation, draft_command(asked(base_len=2)), "known"),
        ("a calibration from base 2^32 - 1", violation, draft_command(asked(base_len=LARGEST, token_ids=[])), "known"),
        ("a calibration with 500,000 tokens", violation, draft_command(many), "prefix"),
        ("a block of 0 tokens asked for", violation, draft_command(asked(0)), "limit"),
        ("a block of 2^32 - 1 tokens asked for", violation, draft_command(asked(LARGEST)), "limit"),
        ("a token tree asked for where there are none", violation, draft_command(tree(1)), "limit"),
        ("a token tree of 2^32 - 1 tokens asked for", INVALID, draft_command(tree(LARGEST)), "64 tokens"),
        ("a `stop_below` of NaN asked for", INVALID, draft_command(asked(stop_below=NAN)), "stop_below"),
        ("a `stop_below` of 2 asked for", INVALID, draft_command(asked(stop_below=2.0)), "stop_below"),
        ("the same calibration twice", DONE, draft_command(asked(), asked())),
        ("`send_drafted` for an unknown session", IGNORED, draft_command(send_drafted(session_id=1))),
        ("`send_drafted` for a block that nobody asked for", IGNORED, draft_command(send_drafted())),
        ("`send_drafted` for round 2^32 - 1", IGNORED, draft_command(send_drafted(round=LARGEST))),
        ("another stream's session closed", IGNORED, draft_command(close, of_another=True)),
        ("a calibration for another stream's session", IGNORED, draft_command(asked(), of_another=True)),
        ("20,000 calibrations for unknown sessions", IGNORED, command_flood("drafter", "calibration")),
        ("20,000 `send_drafted` for unknown sessions", IGNORED, command_flood("drafter", "send_drafted")),
        ("1,000 streams, opened and dropped", CANCELLED, streams("drafter", "RunDraftSessions")),
    ]


def _other_cases() -> list[Case]:
    unknown_field = b"\x7a\x80\x80\x40" + bytes(2**20)
    models = {service: (service, "ModelService") for service in ("verifier", "drafter")}
    get_server = ("gateway", "GatewayService", "GetServer")
    elsewhere = ("gateway", "VerifierService", "OpenTargetSession")
    messages = (
        ("bytes that are no message", INVALID, GARBAGE),
        ("a field of 1 MiB that does not exist", OK, unknown_field),
        ("a message above `max_message_bytes`", EXHAUSTED, bytes(MAX_MESSAGE_BYTES + 1)),
    )
    return [
        *(
            Case(service, "GetModel", what, answer, unary(*models[service], "GetModel", message))
            for service in models
            for what, answer, message in messages
        ),
        *(
            Case(service, method, "100 calls at once", OK, flood(*models[service], method, 100))
            for service in models
            for method in ("GetVocabulary", "GetTokenizer")
        ),
        Case("gateway", "GetServer", "bytes that are no message", INVALID, unary(*get_server, GARBAGE)),
        Case(
            "gateway",
            "GetServer",
            "a field of 1 MiB that does not exist",
            INVALID,
            unary(*get_server, unknown_field),
            "is unknown",
        ),
        Case("gateway", "GetServer", "500 calls at once", OK, flood(*get_server, 500)),
        *(
            Case(
                service,
                "Explode",
                "a method that does not exist",
                UNIMPLEMENTED,
                unary(service, f"{service.capitalize()}Service", "Explode"),
            )
            for service in ("verifier", "drafter", "gateway")
        ),
        Case("gateway", "OpenTargetSession", "a service that it is not", UNIMPLEMENTED, unary(*elsewhere)),
    ]


TABLES: dict[tuple[str, str], list[Row]] = {
    ("gateway", "Generate"): _gateway_rows(),
    ("verifier", "OpenTargetSession"): _open_target_rows(),
    ("verifier", "RunTargetSessions"): _run_target_rows(),
    ("verifier", "PushDraftBlocks"): _push_rows(),
    ("drafter", "OpenDraftSession"): _open_draft_rows(),
    ("drafter", "RunDraftSessions"): _run_draft_rows(),
}
CASES = (
    *(Case(*where, *row) for where, rows in TABLES.items() for row in rows),
    *_other_cases(),
)
REQUESTS = [case for case in CASES if case.is_request]
_FIRST = {(case.service, case.call, case.answer): case for case in reversed(REQUESTS)}
SERVED = [case for case in CASES if not case.is_request or case in _FIRST.values()]
"""What real servers are tried with in every run: all but requests, and of these one for each answer of each call."""


def wrong_answers(cases: Sequence[Case], place: Any) -> dict[str, Answer]:
    """Tries inputs on a `Stage` or its like, and returns the answers that are not as documented."""
    answers = {case: case.attempt(place) for case in cases}
    return {
        case.title: answer
        for case, answer in answers.items()
        if answer.kind != case.answer or case.says not in answer.message
    }


# The page

BLOCKS = f"blocks of at most {MAX_DRAFT_TOKENS} tokens ({SESSION_DRAFT_TOKENS} in the sessions that are tried)"
INTRODUCTION = f"""\
# Bad inputs

What the services were tried with that is wrong, hostile or out of order, and what they have to answer. Every line is
tried in `make test`: on one running stack (`tests/served/test_bad_inputs.py`), while completions run beside: these get
their whole text with their drafter, nothing is left of the sessions, all services go on serving, and none of them logs
a traceback; or, what an edge refuses alone, at that edge without servers (`tests/contract/test_refusals.py`).
`make test-slow` tries all of them on the stack. `python -m tests.bad_inputs --write tests/bad-inputs.md` writes the
page.

No answer is `INTERNAL` or `UNKNOWN`. A status ends the call, and of a stream all sessions; what is about one session
ends at most that session:

* *no effect*: the message is dropped and counted, and the session goes on as if it had not come;
* *refused as ...*: the session takes no more blocks from that drafter, and goes on without it (see
  [wire.md](../docs/wire.md));
* *the session fails with ...*: its gateway broke the protocol; it gets a `SessionFailure` with that status;
* *carried out*: there is nothing wrong with it, though it looks like it.

The stack has a vocabulary of {VOCAB_SIZE} tokens, a context of {CONTEXT_LENGTH}, {BLOCKS}, and
a `max_message_bytes` of {MAX_MESSAGE_BYTES // 2**20} MiB. Of more than 1,000 calls that wait to be taken up, gRPC
itself refuses some with `CANCELLED`.
"""


PAGE = Path(__file__).with_name("bad-inputs.md")


def page() -> str:
    """Returns tests/bad-inputs.md."""
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
