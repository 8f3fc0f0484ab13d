"""Features that drafters with heads are sent, as far as the target has read and they have asked.

Features are taken out of the target's cache when a stream has room for them, a message at a time: nothing is kept for a
drafter that reads slowly, and one that is new gets what an earlier one got, without another pass of the target.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from draftwire.engine.leases import SessionKey
from draftwire.engine.step_engine import StepEngine
from draftwire.engine.target_session import Step, StepResult, TargetSession
from draftwire.engine.torch_thread import TorchThread
from draftwire.errors import UnavailableError
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.sequence_model import FeatureSpan
from draftwire.options.heads.feature_encoding import encode_rows
from draftwire.options.heads.feature_format import FeatureEncoding
from draftwire.options.heads.features import FeatureRequest, SessionFeatures
from draftwire.options.heads.taps import FeatureModel
from draftwire.runtime.settings import LEAST_MESSAGE_BYTES
from draftwire_verifier.drafter_peers import DrafterPeers, DrafterStream
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.scheduler import Scheduler
from draftwire_verifier.target_loader import LoadedEngine

log = structlog.get_logger()

MOST_BYTES = LEAST_MESSAGE_BYTES // 2
"""Size of the features that are read at once, and so of those in one message, unless a single token has more."""


@dataclass(slots=True)
class Feed:
    """The features that a session's drafter has asked for."""

    permit_number: int
    """The one under which it asked: the feed ends with it."""
    next_position: int
    """The first one that was not sent."""
    limit: int
    """Behind the last one that was asked for."""
    is_due: bool = False
    """Whether the drafter's stream is to send some."""


class FeatureFeeds:
    """The feeds of all sessions. Used on the event loop."""

    def __init__(self, loaded: LoadedEngine, thread: TorchThread, scheduler: Scheduler, peers: DrafterPeers) -> None:
        assert loaded.head is not None, "whose features are kept"
        peers.features_of = loaded.head.fingerprint
        self._size = loaded.head.feature_size
        self._engine = loaded.engine
        self._thread = thread
        self._scheduler = scheduler
        self._peers = peers
        self._feeds: dict[SessionKey, Feed] = {}

    def feed_of(self, session: TargetSession) -> Feed | None:
        """Returns the feed of a session's drafter; None if it needs no features, or has not asked yet."""
        feed = self._feeds.get(session.key)
        has_drafter = session.drafter_id is not None
        return feed if has_drafter and feed is not None and feed.permit_number == session.permit_number else None

    def request(self, stream: DrafterStream, requests: Iterable[FeatureRequest]) -> None:
        """Takes requests of a drafter. Those without a permit, or for sessions that are not here, are dropped. One in
        quarantine is refused: a request may be the first that its session hears of it.
        """
        drafter = stream.drafter
        for request in requests:
            session = self._scheduler.admit((request.session_id, request.epoch), request.permit, drafter.id)
            if session is None or self._peers.refuses(session, drafter):
                continue
            feed, limit = self.feed_of(session), min(request.limit, session.spec.max_len)
            if request.first_position is not None:
                is_due = feed is not None and feed.is_due
                feed = Feed(session.permit_number, request.first_position, limit, is_due)
                self._feeds[session.key] = feed
            elif feed is not None:
                feed.limit = limit
            self.offer(session)

    def offer(self, session: TargetSession) -> None:
        """Has features sent that a session's drafter has asked for and the target has read, if there are any."""
        feed = self.feed_of(session)
        stream = None if feed is None else self._peers.streams.get(session.drafter_id)
        if feed is None or stream is None or stream.encoding is None or feed.is_due or not _num_feedable(session, feed):
            return
        with suppress(UnavailableError):  # it reads too slowly: the next round offers them again
            stream.outbox.put(session.key)
            feed.is_due = True

    def observe(self, step: Step) -> None:
        """Offers what a step has read."""
        for item in step.items:
            self.offer(item.session)

    def resume(self, stream: DrafterStream) -> None:
        """Offers a drafter's new stream what was due on an earlier one."""
        for session in self._scheduler.sessions.values():
            feed = self.feed_of(session)
            if feed is not None and session.drafter_id == stream.drafter.id:
                feed.is_due = False
                self.offer(session)

    async def take(self, stream: DrafterStream, keys: Iterable[SessionKey]) -> list[SessionFeatures]:
        """Returns the next features of sessions that are to be sent, together as many as fit into a message; none of
        sessions that have none any more. What is left is offered again, behind what waits. They are read when the
        stream has room for them, in one call to the engine, which may wait for a step: nothing is kept for a drafter.
        """
        assert stream.encoding is not None, "features are offered to streams that want them"
        parts: list[tuple[TargetSession, Feed, FeatureSpan[SessionKey]]] = []
        num_left = max(1, MOST_BYTES // (stream.encoding.row_bytes(self._size) + stream.encoding.scale_bytes))
        for key in keys:
            session = self._scheduler.sessions.get(key)
            feed = None if session is None else self.feed_of(session)
            if session is None or feed is None or session.drafter_id != stream.drafter.id:
                continue
            feed.is_due = False
            count, start = min(_num_feedable(session, feed), num_left), feed.next_position
            if count:
                parts.append((session, feed, FeatureSpan(key, start, start + count)))
                num_left -= count
            else:
                self.offer(session)
        if not parts:
            return []
        try:
            taken = await self._thread.run(
                encoded_features, self._engine, [part for _, _, part in parts], stream.encoding
            )
        except Exception:
            log.exception("verifier.features_failed", num_sessions=len(parts))
            return []
        found: list[SessionFeatures] = []
        for (session, feed, part), encoded in zip(parts, taken, strict=True):
            if (
                encoded is None or self.feed_of(session) is not feed or feed.next_position != part.start
            ):  # closed, or anew
                continue
            feed.next_position = part.stop
            self.offer(session)
            self._peers.metrics.feature_bytes.inc(sum(map(len, encoded)))
            found.append(SessionFeatures(*part.sequence, part.start, part.stop - part.start, *encoded))
        return found

    def close(self, key: SessionKey) -> None:
        """Forgets a session."""
        self._feeds.pop(key, None)


def _num_feedable(session: TargetSession, feed: Feed) -> int:
    """Returns of how many tokens features were asked for, that the target has read, and that were not sent."""
    return max(0, min(feed.limit, len(session.committed) - session.num_unread) - feed.next_position)


def encoded_features(
    engine: StepEngine[Step, StepResult], parts: Sequence[FeatureSpan[SessionKey]], encoding: FeatureEncoding
) -> list[tuple[bytes, bytes] | None]:
    """Returns the encoded features of each part, and their scales; None for a session that was closed meanwhile. Runs
    on the torch thread.
    """
    assert isinstance(engine, TargetEngine), "the only engine that keeps features"
    spans: dict[int, FeatureSpan[CachedSequence]] = {}
    for index, part in enumerate(parts):
        sequence = engine.sequences.get(part.sequence)
        if sequence is not None and sequence.length >= part.stop:
            spans[index] = FeatureSpan(sequence, part.start, part.stop)
    taken: list[tuple[bytes, bytes] | None] = [None] * len(parts)
    if not spans:
        return taken
    assert isinstance(engine.model, FeatureModel), "features are asked for where they are kept"
    features = engine.model.features(list(spans.values()))
    rows, scales = encode_rows(features, encoding)
    row_bytes, scale_bytes, row = encoding.row_bytes(features.shape[-1]), encoding.scale_bytes, 0
    for index, span in spans.items():
        stop = row + span.stop - span.start
        taken[index] = rows[row * row_bytes : stop * row_bytes], scales[row * scale_bytes : stop * scale_bytes]
        row = stop
    return taken
