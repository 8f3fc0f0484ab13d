"""Attacks of drafters that lie about who they are: under fresh names, and under another drafter's.

The lie: two tokens are declared alike, and the one that the target takes for certain is sent. Each is accepted.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import grpc

from draftwire.client import Client
from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import CommittedTokens, Fence, Permit
from draftwire.runtime.messages import fence_to_proto, permit_to_proto
from draftwire.v1 import drafter_pb2_grpc, model_pb2, model_pb2_grpc, session_pb2, verifier_pb2
from draftwire.v1 import verifier_pb2_grpc as verifier_grpc
from tests.attacks.victim import Figures, Victim, attack, judged
from tests.bad_inputs import Stream

PROMPT = [5, 6, 7, 8]
SENT, DECLARED = 11, 12
"""The token that is sent each time, and the one that is declared beside it."""
BLOCK = 16
ROUNDS = 3
"""Of each fresh identity: too few for an audit of it alone."""
MAX_LIES = 1024
"""The audit finds a drafter that tells these lies in fewer tokens."""


class LyingSession:
    """A session that an attacker opens as its own gateway, and whose blocks it drafts. A context manager by `lying`."""

    def __init__(self, channel: grpc.Channel, instance_id: int) -> None:
        stub = verifier_grpc.VerifierServiceStub(channel)
        self._model = model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest()).model
        self._events, self._blocks = Stream(stub.RunTargetSessions), Stream(stub.PushDraftBlocks)
        (lease,) = self._events.next().events
        sampling = session_pb2.SamplingParameters(logit_bias={SENT: 100.0})
        rule = session_pb2.VerificationRule(name="block", is_lossless=True, needs_draft_probs=True)
        parameters = session_pb2.SessionParameters(
            prompt_len=len(PROMPT), sampling=sampling, rule=rule, max_draft_tokens=BLOCK
        )
        self._key, self.session_id, self.round = secrets.token_bytes(KEY_BYTES), secrets.randbits(64), 1
        opening = verifier_pb2.OpenTargetSessionRequest(
            lease_id=lease.lease.lease_id,
            session_id=self.session_id,
            token_ids=PROMPT,
            verifying_key=secrets.token_bytes(KEY_BYTES),
            permit_key=self._key,
            plain_rounds=1,
            max_len=2000,
            parameters=parameters,
        )
        stub.OpenTargetSession(opening)
        (first,) = self._events.next().events
        self._committed = CommittedTokens([*PROMPT, *first.verdict.token_ids])
        hello = verifier_pb2.DrafterHello(model=self._model, instance_id=instance_id)
        self._blocks.send(verifier_pb2.PushDraftBlocksRequest(hello=hello))
        self._blocks.next()

    def lie(self) -> int | None:
        """Sends a block of lies; returns how many of them were accepted, None if no more are wanted."""
        fence = Fence(self.session_id, 0, self.round, len(self._committed), self._committed.hash)
        width = ((self._model.vocab_size - 1).bit_length() + 7) // 8
        ids = b"".join(token.to_bytes(width, "little") for token in (SENT, DECLARED)) * BLOCK
        stated = session_pb2.DraftDistributions(
            encoding=session_pb2.DISTRIBUTION_ENCODING_SPARSE_UINT16,
            vocab_size=self._model.vocab_size,
            data=ids + b"\xff" * 2 * BLOCK + b"\x7f" * 2 * BLOCK,
            support_sizes=[2] * BLOCK,
            wide_sizes=[2] * BLOCK,
        )
        permit = permit_to_proto(Permit.make(self._key, 0))
        block = session_pb2.DraftBlock(
            fence=fence_to_proto(fence), token_ids=[SENT] * BLOCK, distributions=stated, permit=permit
        )
        self._blocks.send(verifier_pb2.PushDraftBlocksRequest(blocks=verifier_pb2.DraftBlocks(blocks=[block])))
        events = getattr(self._events.next(), "events", ())
        verdicts = [event.verdict for event in events if event.HasField("verdict")]
        if not verdicts or any(event.HasField("refusal") for event in events):
            return None
        self._committed.append(list(verdicts[0].token_ids))
        self.round += 1
        return int(verdicts[0].num_accepted_tokens)

    def close(self) -> None:
        self._blocks.close()
        self._events.close()


@contextmanager
def lying(channel: grpc.Channel, instance_id: int) -> Iterator[LyingSession]:
    """Opens a session to lie in."""
    with closing(LyingSession(channel, instance_id)) as session:
        yield session


@attack("drafter")
def fresh_identities(victim: Victim) -> Figures:
    """Forty drafters, each of which lies for a few rounds and leaves before it is found out."""
    accepted, sent, num_refused = 0, 0, 0
    with grpc.insecure_channel(victim.verifier) as channel:
        for _ in range(40):
            with lying(channel, secrets.randbits(64)) as session:
                for _ in range(ROUNDS):
                    taken = session.lie()
                    sent += BLOCK
                    num_refused += taken is None
                    if taken is None:
                        break
                    accepted += taken
    figures = {"lies_sent": sent, "lies_accepted": accepted, "identities_refused": num_refused}
    return judged(figures, {"many lies were accepted": accepted > MAX_LIES})


@attack("drafter")
def another_drafters_name(victim: Victim) -> Figures:
    """Lies under the name of the honest drafter, which tells it to whoever opens a lease, until it is turned away."""
    with grpc.insecure_channel(victim.drafter) as channel:
        leases = Stream(drafter_pb2_grpc.DrafterServiceStub(channel).RunDraftSessions)
        (event,) = leases.next().events
        leases.close()
    accepted, until = 0, time.monotonic() + max(victim.seconds, 5.0)
    with grpc.insecure_channel(victim.verifier) as channel, lying(channel, event.lease.instance_id) as session:
        while (taken := session.lie()) is not None and time.monotonic() < until and session.round < 100:
            accepted += taken
    with Client(victim.gateway) as client:
        drafts = [client.generate("import os", max_tokens=40, seed=seed).statistics.num_drafts for seed in range(5)]
    return judged(
        {"lies_accepted": accepted, "honest_drafts": sum(drafts)},
        {"the liar is believed": taken is not None, "the honest drafter is not": min(drafts) == 0},
    )
