"""Drafts of a language model in the verifier's process, on the torch thread, for all sessions of a step at once."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
import torch

from draftwire.drafting.language_model import PROMPT_TOKENS
from draftwire.drafting.strategy import Drafting, DraftingStrategy, DraftRequest, DraftSequence
from draftwire.engine.leases import SessionKey
from draftwire.engine.prefill import LARGEST_CHUNK
from draftwire.engine.step_drafts import ordered_blocks, request_of
from draftwire.engine.target_session import DraftOrder, OrderedBlocks, TargetSession
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.rounds import DraftTimings
from draftwire.models.kv_cache import CachedSequence
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE

MOST_FAILURES, FAILURES_S = 3, 60.0
"""After so many failures within so many seconds nothing is drafted any more."""

log = structlog.get_logger()


@dataclass(slots=True)
class KnownText:
    """A session's text, as far as the model knows it."""

    sequence: DraftSequence
    num_committed: int
    """Committed tokens that it was told of."""


class ModelDrafts:
    """A `StepDrafter`: a language model with one sequence per session that it has drafted for.

    Attributes:
        is_off: whether it has failed too often.
    """

    def __init__(
        self,
        drafter: DraftingStrategy,
        vocab_size: int,
        threads: tuple[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts without sequences.

        Args:
            drafter: what draws.
            vocab_size: of the target.
            threads: of torch for this model and for the target, if they differ.
            clock: in seconds.
        """
        self._drafter, self._vocab_size, self._threads, self._clock = drafter, vocab_size, threads, clock
        self._known: dict[SessionKey, KnownText] = {}
        self._failed_at: deque[float] = deque(maxlen=MOST_FAILURES)
        self.is_off = False

    def draft(self, orders: Sequence[DraftOrder], targets: Mapping[SessionKey, CachedSequence]) -> OrderedBlocks:
        """Drafts for sessions whose text fits its context. Long texts are read in several steps, beside which rounds
        are plain.
        """
        started = time.perf_counter()
        asked = {} if self.is_off else {one.session.key: one for one in orders if self._has_room(one)}
        if not asked:
            return OrderedBlocks()
        try:
            draftings = self._draftings(asked)
            with self._own_threads():
                drafts = self._drafter.step(list(draftings.values())).drafts
        except Exception:  # of the device, say: the target's own pass shows what is lost
            self._note_failure(asked)
            return OrderedBlocks(dict.fromkeys(asked), time.perf_counter() - started)
        draft_us = int((time.perf_counter() - started) * 1e6)
        timings = DraftTimings(draft_us=draft_us, num_drafted_sessions=len(draftings))
        return ordered_blocks(asked, dict(zip(draftings, drafts, strict=True)), timings, self._vocab_size)

    def rehearse(self, targets: Sequence[CachedSequence], num_tokens: int, context_length: int) -> None:
        """Drafts for all sequences at once, as if their tokens were all 0, and forgets that; see `StepDrafter`."""
        sampling, key = SamplingParams(temperature=1.0, top_p=0.95), DrawKey(bytes(KEY_BYTES), 0, 0)
        request = DraftRequest(num_tokens, sampling, key, self._vocab_size)
        room = min(context_length, self._drafter.context_length) - num_tokens
        texts = [[0] * (min(target.length, room - 1) + 1) for target in targets]
        draftings = [Drafting(self._drafter.open(text, ALONE), request) for text in texts]
        with self._own_threads():
            self._drafter.step(draftings)
        for drafting in draftings:
            drafting.sequence.close()

    def forget(self, key: SessionKey) -> None:
        """Frees a session's sequence, if it has one."""
        known = self._known.pop(key, None)
        if known is not None:
            known.sequence.close()

    def _draftings(self, asked: Mapping[SessionKey, DraftOrder]) -> dict[SessionKey, Drafting]:
        """Returns the parts of a step. All texts together have `LARGEST_CHUNK` tokens of it, beside what rounds commit:
        those that have to wait have none.
        """
        draftings, left = {}, LARGEST_CHUNK
        for key, order in asked.items():
            sequence = self._text_of(order.session)
            num_read, limit = sequence.num_unread, None
            if num_read > PROMPT_TOKENS:
                num_read = limit = min(num_read, left)
                left -= num_read
            if num_read:
                draftings[key] = Drafting(sequence, request_of(order, self._vocab_size), limit)
        return draftings

    def _has_room(self, order: DraftOrder) -> bool:
        return len(order.session.committed) + order.num_draft_tokens < self._drafter.context_length

    def _text_of(self, session: TargetSession) -> DraftSequence:
        """Returns a session's sequence, which knows what is committed."""
        ids, known = session.committed.ids, self._known.get(session.key)
        if known is None:
            known = self._known[session.key] = KnownText(self._drafter.open(list(ids), session.spec.parameters), 0)
        known.sequence.calibrate(known.num_committed, list(ids[known.num_committed :]))  # the last token is read again
        known.num_committed = len(ids)
        return known.sequence

    def _note_failure(self, keys: Mapping[SessionKey, DraftOrder]) -> None:
        log.exception("verifier.draft_model_failed", num_sessions=len(keys))
        for key in keys:
            self.forget(key)
        now = self._clock()
        self._failed_at.append(now)
        if len(self._failed_at) == MOST_FAILURES and now - self._failed_at[0] < FAILURES_S:
            self.is_off = True
            log.error("verifier.draft_model_off", failures=MOST_FAILURES, seconds=FAILURES_S)

    @contextmanager
    def _own_threads(self) -> Iterator[None]:
        if self._threads is None:
            yield
            return
        own, targets = self._threads
        torch.set_num_threads(own)
        try:
            yield
        finally:
            torch.set_num_threads(targets)
