"""Drafts of the verifier's own head, made beside the target, on the torch thread, for all sessions of a step at once.

Unlike text drafters, a head needs the target's hidden states and its device: so its blocks are made when a step begins,
not when a session is queued.
"""

import time
from collections.abc import Mapping, Sequence

import structlog

from draftwire.drafting.strategy import DraftRequest
from draftwire.engine.leases import SessionKey
from draftwire.engine.step_drafts import ordered_blocks, request_of
from draftwire.engine.target_session import DraftOrder, OrderedBlocks
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.method.rounds import DraftTimings
from draftwire.models.kv_cache import CachedSequence
from draftwire.options.heads.head_drafter import HeadDrafter, HeadDrafting, HeadSequence
from draftwire.requests.parameters import SamplingParams

log = structlog.get_logger()


class HeadDrafts:
    """A `StepDrafter`: a head with one sequence per session that it has drafted for."""

    def __init__(self, drafter: HeadDrafter[CachedSequence], vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._sequences: dict[SessionKey, HeadSequence] = {}

    def draft(self, orders: Sequence[DraftOrder], targets: Mapping[SessionKey, CachedSequence]) -> OrderedBlocks:
        """Drafts for the sessions whose committed tokens but the last are in the target's cache."""
        started = time.perf_counter()
        draftings: dict[SessionKey, HeadDrafting[CachedSequence]] = {}
        for order in orders:
            key, committed = order.session.key, order.session.committed.ids
            target = targets.get(key)
            if target is not None and target.length == len(committed) - 1 > 0:
                sequence = self._sequences.get(key)
                if sequence is None:
                    sequence = self._sequences[key] = self._drafter.open()
                draftings[key] = HeadDrafting(sequence, target, committed, request_of(order, self._vocab_size))
        if not draftings:
            return OrderedBlocks()
        try:
            drafts = self._drafter.draft(list(draftings.values()))
        except Exception:  # of the device, say: the target's own pass shows what is lost
            log.exception("verifier.head_failed", num_sessions=len(draftings))
            for key in draftings:
                self.forget(key)
            return OrderedBlocks(dict.fromkeys(draftings), time.perf_counter() - started)
        timings = DraftTimings(draft_us=int((time.perf_counter() - started) * 1e6))
        by_session = {order.session.key: order for order in orders}
        return ordered_blocks(by_session, dict(zip(draftings, drafts, strict=True)), timings, self._vocab_size)

    def rehearse(self, targets: Sequence[CachedSequence], num_tokens: int, context_length: int) -> None:
        """Drafts for all sequences at once, as if their tokens were all 0, and forgets that; see `StepDrafter`."""
        sampling, key = SamplingParams(temperature=1.0, top_p=0.95), DrawKey(bytes(KEY_BYTES), 0, 0)
        request = DraftRequest(num_tokens, sampling, key, self._vocab_size)
        room = context_length - num_tokens
        draftings = [
            HeadDrafting(self._drafter.open(), target, [0] * (min(target.length, room) + 1), request)
            for target in targets
        ]
        self._drafter.draft(draftings)
        for drafting in draftings:
            self._drafter.close(drafting.sequence)

    def forget(self, key: SessionKey) -> None:
        """Frees a session's sequence, if it has one."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._drafter.close(sequence)
