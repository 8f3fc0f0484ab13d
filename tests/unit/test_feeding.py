"""Features that a verifier sends to a drafter with a head: of which tokens, to whom, and what it keeps for that."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from session_specs import target_spec
from structlog.testing import capture_logs
from tiny_heads import EAGLE3, MEDUSA, save_tiny_head
from tiny_models import save_spelling_model

from draftwire.engine.target_session import TargetSession
from draftwire.errors import InvalidRequestError, ProtocolViolationError
from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import Permit, PlainRun
from draftwire.models.description import FEATURES
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.sequence_model import FeatureSpan
from draftwire.options.heads import feature_messages
from draftwire.options.heads.feature_encoding import decode_rows, encode_rows
from draftwire.options.heads.feature_format import FeatureEncoding
from draftwire.options.heads.features import FeatureRequest, SessionFeatures
from draftwire.options.heads.head_loading import load_fusion
from draftwire.runtime import messages
from draftwire.runtime.interceptor import ServiceGate
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc
from draftwire_verifier.config import HeadSettings, VerifierConfig
from draftwire_verifier.core import VerifierCore
from draftwire_verifier.drafter_peers import MAX_TOLD, DrafterStream
from draftwire_verifier.drafters import Drafter, Greeting
from draftwire_verifier.feature_feeds import FeatureFeeds, encoded_features
from draftwire_verifier.server import VerifierServicer

TOKENS = ["a", "b", "ab", "c", "<e>"]
PROMPT = [(3 * place) % 4 for place in range(3 * BLOCK_SIZE + 18)]
"""What is read beside three blocks from the prefix cache is enough for the same kernels as a cold prompt's."""
KEY = bytes(range(KEY_BYTES))
"""Of the session's permits."""
SIZE = 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_spelling_model(tmp_path_factory.mktemp("target"), TOKENS, 4, seed=1, context_length=256)


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_head(tmp_path_factory.mktemp("heads") / EAGLE3, target)


def config_of(target: Path, heads: HeadSettings) -> VerifierConfig:
    return VerifierConfig(
        ModelSettings(str(target), threads=1), engine=EngineSettings(kv_cache_tokens=32 * BLOCK_SIZE), heads=heads
    )


@pytest.fixture
async def core(target: Path, head: Path) -> AsyncIterator[VerifierCore]:
    core = VerifierCore(config_of(target, HeadSettings(feature_head=str(head))))
    await core.start()
    yield core
    core.stop()


def feeds_of(core: VerifierCore) -> FeatureFeeds:
    assert core.feeds is not None, "features are kept"
    return core.feeds


def is_due(core: VerifierCore, session: TargetSession) -> bool:
    feed = feeds_of(core).feed_of(session)
    assert feed is not None, "it was asked for"
    return feed.is_due


def open_stream(core: VerifierCore, encoding: FeatureEncoding = FeatureEncoding.FLOAT32) -> DrafterStream:
    drafter = core.peers.welcome(Greeting("small", "host", 1), core.description, core.peers.features_of)
    return open_again(core, drafter, encoding)


def open_again(core: VerifierCore, drafter: Drafter, encoding: FeatureEncoding | None) -> DrafterStream:
    stream = core.peers.open_stream(drafter, replace(core.description, capabilities=frozenset()), encoding)
    feeds_of(core).resume(stream)
    return stream


def open_session(core: VerifierCore, session_id: int = 1, **changes: Any) -> TargetSession:
    lease_id, _ = core.open_lease()
    given = {
        "token_ids": PROMPT,
        "plain_rounds": 1,
        "max_len": len(PROMPT) + 70,
        "permit_key": KEY,
        "stop_token_ids": frozenset(),
    }
    core.open_session(target_spec(session_id=session_id, **given | changes), lease_id)
    return core._scheduler.sessions[session_id, 0]


def advance(core: VerifierCore) -> int:
    """Runs steps until nothing is left to do, and returns how many tokens the target has read."""
    num_tokens = 0
    while (step := core._scheduler.next_step()) is not None:
        result = core._engine.step(step)
        num_tokens += result.num_tokens
        core._complete(step, result)
    return num_tokens


def ask(core: VerifierCore, stream: DrafterStream, number: int = 0, **changes: Any) -> None:
    permit = Permit.make(KEY, number, stream.drafter.id)
    feeds_of(core).request(stream, [FeatureRequest(**{"session_id": 1, "epoch": 0, "permit": permit, **changes})])


async def sent(core: VerifierCore, stream: DrafterStream) -> dict[int, torch.Tensor]:
    """Does what the writer of a stream does until nothing is due; returns the rows by position."""
    rows: dict[int, torch.Tensor] = {}
    while stream.outbox._items:
        keys = await asyncio.wait_for(stream.outbox.take_all(), 5.0)
        for features in await feeds_of(core).take(stream, keys):  # type: ignore[arg-type]
            assert stream.encoding is not None
            part = decode_rows(features.rows, features.scales, features.num_positions, stream.encoding)
            assert not rows or features.first_position == max(rows) + 1, "in order, none twice"
            rows |= dict(enumerate(part, features.first_position))
    return rows


def kept(core: VerifierCore, session: TargetSession, start: int, stop: int) -> list[torch.Tensor]:
    sequence = core._engine.sequences[session.key]  # type: ignore[attr-defined]
    return list(core._engine.model.features([FeatureSpan(sequence, start, stop)]))  # type: ignore[attr-defined]


async def test_features_are_sent_as_the_target_reads_and_as_far_as_requested(core: VerifierCore) -> None:
    assert FEATURES in core.description.capabilities
    assert core.description.local_strategies == ("suffix", "lookup"), "it does not draft itself"
    stream, session = open_stream(core), open_session(core)
    ask(core, stream, limit=len(PROMPT) + 3, first_position=10)
    assert await sent(core, stream) == {}, "nothing was read yet"
    advance(core)
    rows = await sent(core, stream)
    assert list(rows) == list(range(10, len(PROMPT))), "of all committed tokens but the last"
    assert all(map(torch.equal, rows.values(), kept(core, session, 10, len(PROMPT))))
    core.run_plain(PlainRun(session.fence, 6))
    advance(core)
    assert list(await sent(core, stream)) == list(range(len(PROMPT), len(PROMPT) + 3)), "and no further"
    ask(core, stream, limit=10**6)
    assert list(await sent(core, stream)) == list(range(len(PROMPT) + 3, len(PROMPT) + 6))
    ask(core, stream, limit=50, first_position=40)
    rows = await sent(core, stream)
    assert list(rows) == list(range(40, 50)), "once more"
    assert all(map(torch.equal, rows.values(), kept(core, session, 40, 50)))


async def test_long_texts_are_sent_in_parts(core: VerifierCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwire_verifier.feature_feeds.MOST_BYTES", 7 * SIZE * 4)
    stream, session = open_stream(core), open_session(core)
    advance(core)
    ask(core, stream, limit=999, first_position=0)
    (features,) = await feeds_of(core).take(stream, [session.key])
    assert (features.first_position, features.num_positions) == (0, 7)
    assert list(await sent(core, stream)) == list(range(7, len(PROMPT)))


async def test_prompt_from_the_prefix_cache_has_the_features_of_a_cold_one(core: VerifierCore) -> None:
    both = []
    for number in (1, 2):
        stream, session = open_stream(core), open_session(core, number)
        advance(core)
        assert (session.num_reused == 3 * BLOCK_SIZE) is (number == 2)
        permit = Permit.make(KEY, 0, stream.drafter.id)
        feeds_of(core).request(stream, [FeatureRequest(number, 0, permit, 999, 0)])
        both.append(await sent(core, stream))
    cold, warm = both
    assert list(cold) == list(warm) == list(range(len(PROMPT)))
    assert all(torch.equal(cold[place], warm[place]) for place in range(3 * BLOCK_SIZE))
    torch.testing.assert_close(torch.stack([*cold.values()]), torch.stack([*warm.values()]))  # others were read anew


async def test_features_due_on_a_broken_stream_are_sent_on_the_next(core: VerifierCore) -> None:
    first, session = open_stream(core), open_session(core)
    advance(core)
    ask(core, first, limit=999, first_position=0)
    assert is_due(core, session)
    core.peers.end_stream(first)
    again = open_again(core, first.drafter, first.encoding)
    assert list(await sent(core, again)) == list(range(len(PROMPT)))


async def test_another_drafter_gets_all_of_them_without_a_pass_of_the_target(core: VerifierCore) -> None:
    first, second, session = open_stream(core), open_stream(core), open_session(core)
    advance(core)
    ask(core, first, limit=999, first_position=0)
    before = await sent(core, first)
    core.peers.end_stream(first)
    ask(core, second, number=1, limit=999, first_position=0)
    assert advance(core) == 0
    after = await sent(core, second)
    assert session.drafter_id == second.drafter.id
    assert all(map(torch.equal, before.values(), after.values()))
    assert len(before) == len(after) > 0
    ask(core, first, limit=999, first_position=0)
    core.run_plain(PlainRun(session.fence, 1))
    advance(core)
    assert not first.outbox._items, "the permit of the one before is worth nothing any more"
    assert len(await sent(core, second)) == 1


async def test_nobody_without_a_permit_gets_features(core: VerifierCore) -> None:
    """They are the prompt in another form."""
    stream, other, session = open_stream(core), open_stream(core), open_session(core)
    advance(core)
    named = Permit.make(KEY, 0, other.drafter.id)
    for request in (
        FeatureRequest(1, 0, Permit(0, bytes(KEY_BYTES)), 999, 0),
        FeatureRequest(1, 0, named, 999, 0),
        FeatureRequest(2, 0, Permit.make(KEY, 0, stream.drafter.id), 999, 0),
        FeatureRequest(1, 0, Permit.make(KEY, 0, stream.drafter.id), 999),
    ):
        feeds_of(core).request(stream, [request])
        assert await sent(core, stream) == {}
    ask(core, stream, limit=999, first_position=0)
    core._scheduler.end_speculation(session)
    assert await sent(core, stream) == {}, "it was refused meanwhile"
    ask(core, stream, limit=999, first_position=0)
    assert await sent(core, stream) == {}


async def test_quarantined_drafter_is_refused_features_once_in_a_session(
    core: VerifierCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway would wait for its blocks: it never sends one."""
    stream, session = open_stream(core), open_session(core)
    advance(core)
    events: list[Any] = []
    monkeypatch.setattr(core.peers, "_refuse", lambda lease_id, event: events.append(event))
    monkeypatch.setattr(stream.drafter.audit, "alarm", SimpleNamespace(message="2 of 3"))
    for _ in range(3):
        ask(core, stream, limit=999, first_position=0)
    assert feeds_of(core).feed_of(session) is None
    assert await sent(core, stream) == {}
    (refused,) = events
    assert (refused.session_id, refused.permit_number, refused.quarantined_drafter_id) == (1, 0, stream.drafter.id)
    assert refused.reason.endswith("2 of 3")


@pytest.mark.parametrize("encoding", FeatureEncoding)
async def test_features_of_many_sessions_are_taken_together(
    core: VerifierCore, monkeypatch: pytest.MonkeyPatch, encoding: FeatureEncoding
) -> None:
    """A call may wait for a whole step of the target: as many sessions as fit into a message share one."""
    stream, row_bytes = open_stream(core, encoding), encoding.row_bytes(SIZE) + encoding.scale_bytes
    sessions = [open_session(core, number, max_len=len(PROMPT) + 8) for number in range(1, 7)]
    advance(core)
    for session in sessions:
        permit = Permit.make(KEY, 0, stream.drafter.id)
        feeds_of(core).request(stream, [FeatureRequest(*session.key, permit, 999, len(PROMPT) - 3)])
    monkeypatch.setattr("draftwire_verifier.feature_feeds.MOST_BYTES", 10 * row_bytes)
    sizes = []

    def features(engine: Any, parts: list[FeatureSpan[Any]], encoding: FeatureEncoding) -> Any:
        sizes.append([part.stop - part.start for part in parts])
        return encoded_features(engine, parts, encoding)

    monkeypatch.setattr("draftwire_verifier.feature_feeds.encoded_features", features)
    parts: list[SessionFeatures] = []
    while stream.outbox._items:
        parts += await feeds_of(core).take(stream, await stream.outbox.take_all())  # type: ignore[arg-type]
    assert sizes == [[3, 3, 3, 1], [3, 3, 2]]
    for session in sessions:
        found = [part for part in parts if part.session_id == session.key[0]]
        rows = [row for part in found for row in decode_rows(part.rows, part.scales, part.num_positions, encoding)]
        exact = torch.stack(kept(core, session, len(PROMPT) - 3, len(PROMPT)))
        expected = decode_rows(*encode_rows(exact, encoding), 3, encoding)
        assert torch.equal(torch.stack(rows), expected)


async def test_nothing_is_kept_for_a_drafter_that_reads_slowly(core: VerifierCore) -> None:
    """A session is due once, whatever is read meanwhile, and its features are in the target's cache."""
    stream, session = open_stream(core), open_session(core)
    advance(core)
    for number in range(40):
        ask(core, stream, limit=999, first_position=number % 3)
        core.run_plain(PlainRun(session.fence, 1))
        advance(core)
    assert stream.outbox._items == [session.key]
    assert list(await sent(core, stream)) == list(range(0, len(session.committed) - 1))
    for key in range(MAX_TOLD):
        stream.outbox.put((key, 0))
    ask(core, stream, limit=999, first_position=0)
    assert not is_due(core, session), "there is no room: it is offered again"
    stream.outbox._items.clear()
    feeds_of(core).offer(session)
    assert stream.outbox._items == [session.key]


async def test_session_that_closes_or_restarts_while_rows_are_read_sends_none(core: VerifierCore) -> None:
    stream, session = open_stream(core), open_session(core)
    advance(core)
    ask(core, stream, limit=999, first_position=0)
    taking = asyncio.create_task(feeds_of(core).take(stream, [session.key]))
    await asyncio.sleep(0)
    ask(core, stream, limit=999, first_position=20)
    assert await taking == []
    assert min(await sent(core, stream)) == 20
    ask(core, stream, limit=999, first_position=0)
    core.close_session(*session.key)
    assert await sent(core, stream) == {}


async def test_stream_whose_writer_fails_ends_with_a_status_and_is_logged(
    core: VerifierCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafter would otherwise wait for features and outcomes for ever."""

    def refuse(_features: SessionFeatures) -> None:
        raise RuntimeError("cannot be encoded")

    monkeypatch.setattr(feature_messages, "features_to_proto", refuse)
    open_session(core)
    advance(core)
    gate = ServiceGate()
    gate.refusal = ""
    server = grpc.aio.server(interceptors=[gate])
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(core), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    source = feature_messages.feature_source_to_proto(core.peers.features_of, FeatureEncoding.FLOAT32)
    hello = verifier_pb2.DrafterHello(model=messages.model_to_proto(core.description), instance_id=1, features=source)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(10.0):
        call = verifier_pb2_grpc.VerifierServiceStub(channel).PushDraftBlocks()
        await call.write(verifier_pb2.PushDraftBlocksRequest(hello=hello))
        welcome = await call.read()
        assert isinstance(welcome, verifier_pb2.PushDraftBlocksResponse), "the stream goes on"
        permit = Permit.make(KEY, 0, welcome.identity.drafter_id)
        request = feature_messages.feature_request_to_proto(FeatureRequest(1, 0, permit, 999, 0))
        with capture_logs() as lines:
            await call.write(verifier_pb2.PushDraftBlocksRequest(feature_requests={"requests": [request]}))
            assert await call.code() is grpc.StatusCode.INTERNAL
    await server.stop(grace=None)
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["rpc.method_failed"]
    drafter = core.drafters.get(welcome.identity.drafter_id)
    assert drafter is not None
    assert drafter.num_streams == 0
    assert not core.peers.streams


async def test_verifier_with_a_head_of_its_own_sends_its_features_too(target: Path, head: Path) -> None:
    core = VerifierCore(config_of(target, HeadSettings(draft_head=str(head))))
    await core.start()
    assert core.description.local_strategies[0] == EAGLE3
    assert FEATURES in core.description.capabilities
    stream = open_stream(core, FeatureEncoding.FLOAT8)
    open_session(core)
    advance(core)
    ask(core, stream, limit=999, first_position=0)
    assert len(await sent(core, stream)) == len(PROMPT)
    assert core.metrics.registry.get_sample_value("draftwire:feature_bytes_total") == len(PROMPT) * (SIZE + 4)
    core.stop()


async def test_drafter_with_another_head_is_refused_in_words(
    core: VerifierCore, target: Path, head: Path, tmp_path: Path
) -> None:
    other = load_fusion(save_tiny_head(tmp_path / "other", target, seed=1), target)
    assert load_fusion(head, target).fingerprint == core.peers.features_of != other.fingerprint
    with pytest.raises(ProtocolViolationError, match="no features are kept here for the head of drafter"):
        core.peers.welcome(Greeting("small", "host", 1), core.description, other.fingerprint)
    medusa = [load_fusion(save_tiny_head(tmp_path / str(seed), target, MEDUSA, seed), target) for seed in (0, 1)]
    assert medusa[0].fingerprint == medusa[1].fingerprint, "both read the target's own last states"


def test_settings_of_heads_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="set draft_head or feature_head"):
        HeadSettings("a", "b")
    with pytest.raises(InvalidRequestError, match="feature_head needs the hidden states"):
        VerifierConfig(ModelSettings("x", engine="vllm"), heads=HeadSettings(feature_head="y"))
