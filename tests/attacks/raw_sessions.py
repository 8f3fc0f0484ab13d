"""Sessions of an attacker who is gateway and drafter at once: what it sends is made by hand, with the real permits."""

import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import CommittedTokens, Fence, Permit
from draftwire.runtime.messages import fence_to_proto, permit_to_proto
from draftwire.v1 import model_pb2, model_pb2_grpc, session_pb2, verifier_pb2
from draftwire.v1 import verifier_pb2_grpc as verifier_grpc
from tests.bad_inputs import Answer, Stream

UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
PROMPT = [5, 6, 7, 8]
SENT = 11
"""The token that the target takes for certain in these sessions: a block of it is honest, and is accepted."""
BLOCK = 4
MAX_LEN = 256
SECONDS = 10.0


@dataclass(slots=True)
class RawSession:
    """A session on the verifier whose round 0 is decided."""

    lease: "RawLease"
    session_id: int
    permit_key: bytes
    committed: CommittedTokens
    round: int = 1

    @property
    def fence(self) -> Fence:
        return Fence(self.session_id, 0, self.round, len(self.committed), self.committed.hash)

    def permit(self, number: int = 0, drafter_id: int | None = None) -> session_pb2.DraftPermit:
        return permit_to_proto(Permit.make(self.permit_key, number, drafter_id))

    def block(self, **changes: Any) -> session_pb2.DraftBlock:
        """Returns an honest block, but for some fields."""
        fields = {
            "fence": fence_to_proto(self.fence),
            "token_ids": [SENT] * BLOCK,
            "distributions": session_pb2.DraftDistributions(
                encoding=session_pb2.DISTRIBUTION_ENCODING_ONE_HOT, vocab_size=self.lease.model.vocab_size
            ),
            "permit": self.permit(),
        }
        return session_pb2.DraftBlock(**{**fields, **changes})

    def run_plain(self, num_rounds: int = 1, fence: Fence | None = None) -> None:
        run = verifier_pb2.PlainRun(fence=fence_to_proto(fence or self.fence), num_rounds=num_rounds)
        self.lease.command(plain_run=run)

    def commit(self, verdict: session_pb2.Verdict) -> None:
        """Follows a verdict.

        Raises:
            ValueError: it is not of the round that is open.
        """
        if (verdict.fence.round, verdict.fence.prefix_hash) != (self.round, self.committed.hash):
            raise ValueError(f"a verdict of round {verdict.fence.round} in round {self.round}")
        self.committed.append(list(verdict.token_ids))
        self.round += 1


@dataclass(slots=True)
class RawLease:
    """A gateway's stream to the verifier."""

    stub: verifier_grpc.VerifierServiceStub
    model: model_pb2.ModelDescription
    stream: Stream
    lease_id: int
    waiting: list[verifier_pb2.TargetEvent] = field(default_factory=list)

    def command(self, **command: Any) -> None:
        self.stream.send(verifier_pb2.RunTargetSessionsRequest(commands=[verifier_pb2.TargetCommand(**command)]))

    def request(self, **changes: Any) -> verifier_pb2.OpenTargetSessionRequest:
        """Returns a good request to open a session, but for some fields."""
        rule = session_pb2.VerificationRule(name="block", is_lossless=True, needs_draft_probs=True)
        parameters = session_pb2.SessionParameters(
            prompt_len=len(PROMPT),
            sampling=session_pb2.SamplingParameters(logit_bias={SENT: 100.0}),
            rule=rule,
            max_draft_tokens=BLOCK,
        )
        fields = {
            "lease_id": self.lease_id,
            "session_id": secrets.randbits(64),
            "token_ids": PROMPT,
            "verifying_key": secrets.token_bytes(KEY_BYTES),
            "permit_key": secrets.token_bytes(KEY_BYTES),
            "plain_rounds": 1,
            "max_len": MAX_LEN,
            "parameters": parameters,
        }
        return verifier_pb2.OpenTargetSessionRequest(**{**fields, **changes})

    def open(self, **changes: Any) -> RawSession:
        """Opens a session, and follows its first round.

        Raises:
            grpc.RpcError: it is refused.
        """
        request = self.request(**changes)
        self.stub.OpenTargetSession(request, timeout=SECONDS)
        session = RawSession(self, request.session_id, request.permit_key, CommittedTokens(request.token_ids), 0)
        event = self.event_of(session)
        assert event is not None, "an open session has its first verdict"
        session.commit(event.verdict)
        return session

    def close(self, session: RawSession) -> None:
        self.command(close_session=session_pb2.CloseSession(session_id=session.session_id))

    def event_of(self, session: RawSession, seconds: float = SECONDS) -> verifier_pb2.TargetEvent | None:
        """Returns the next event of a session, and forgets those of others before it; None if none comes in time."""
        while True:
            while self.waiting:
                event = self.waiting.pop(0)
                if session.session_id in _sessions_of(event):
                    return event
            response = self.stream.next(seconds)
            if isinstance(response, Answer):
                return None
            self.waiting += response.events


def _sessions_of(event: verifier_pb2.TargetEvent) -> set[int]:
    of_kind = getattr(event, event.WhichOneof("event"))
    return {of_kind.fence.session_id if event.HasField("verdict") else getattr(of_kind, "session_id", 0)}


@contextmanager
def raw_lease(channel: grpc.Channel) -> Iterator[RawLease]:
    """Opens a gateway's stream to the verifier."""
    stub = verifier_grpc.VerifierServiceStub(channel)
    model = model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=SECONDS).model
    with closing(Stream(stub.RunTargetSessions)) as stream:
        (event,) = stream.next().events
        yield RawLease(stub, model, stream, event.lease.lease_id)


@contextmanager
def kept_streams(address: str, method: str, count: int, first: bytes | None = None) -> Iterator[list[Any]]:
    """Opens streams on ten connections, and keeps them within the block.

    Args:
        address: of the service.
        method: full name.
        count: of the streams.
        first: message that each sends; None sends nothing.
    """
    ended = threading.Event()

    def requests() -> Iterator[bytes]:
        if first is not None:
            yield first
        ended.wait()

    with ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(address, UNLIMITED)) for _ in range(10)]
        calls = [channels[number % 10].stream_stream(method)(requests()) for number in range(count)]
        try:
            yield calls
        finally:
            ended.set()
            for call in calls:
                call.cancel()


@dataclass(slots=True)
class RawDrafter:
    """A drafter's stream to the verifier."""

    stream: Stream
    drafter_id: int

    def push(self, *blocks: session_pb2.DraftBlock) -> None:
        self.stream.send(verifier_pb2.PushDraftBlocksRequest(blocks=verifier_pb2.DraftBlocks(blocks=blocks)))


@contextmanager
def raw_drafter(channel: grpc.Channel, features: verifier_pb2.FeatureSource | None = None) -> Iterator[RawDrafter]:
    """Opens a drafter's stream to the verifier.

    Args:
        channel: to the verifier.
        features: those that it says it needs; None if it needs none.
    """
    model = model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=SECONDS).model
    with closing(Stream(verifier_grpc.VerifierServiceStub(channel).PushDraftBlocks)) as stream:
        hello = verifier_pb2.DrafterHello(model=model, instance_id=secrets.randbits(64), features=features)
        stream.send(verifier_pb2.PushDraftBlocksRequest(hello=hello))
        yield RawDrafter(stream, stream.next().identity.drafter_id)
