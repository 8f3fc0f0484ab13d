"""Drafts of the verifier's own head, made beside the target, on the torch thread, for all sessions of a step at once.

Unlike text drafters, a head needs the target's hidden states and its device: so its blocks are made when a step begins,
not when a session is queued.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import structlog
from typing_extensions import override

from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.engine.leases import SessionKey
from draftwire.engine.target_session import NO_DRAFTER, DraftOrder, LocalSource, OrderedBlocks, TargetSession
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.keys import KEY_BYTES, DrawKey, local_drafting_key
from draftwire.method.round_parts import GuessPart, WatchedGuess
from draftwire.method.rounds import DraftTimings, ReceivedBlock, TargetSessionSpec, Verdict
from draftwire.models.kv_cache import CachedSequence
from draftwire.options.heads.head_drafter import HeadDrafter, HeadDrafting, HeadSequence
from draftwire.requests.parameters import SamplingParams

log = structlog.get_logger()


@dataclass(slots=True, eq=False, kw_only=True)
class HeadSource(LocalSource):
    """Orders blocks of the head for one session. The round in which the prompt is read has none: there are no hidden
    states to draft from yet.
    """

    is_trusted: Callable[[], bool]
    """Whether its drafts are used: not once the audit has found that it draws otherwise than it declares."""

    @classmethod
    def open(cls, name: str, is_trusted: Callable[[], bool], _: TargetSessionSpec, strategy: str) -> Self | None:
        """Starts, if the head is meant; see `OpenSource`. The first arguments are of the verifier."""
        return cls(strategy, is_trusted=is_trusted) if strategy == name else None

    @override
    def may_draft(self) -> bool:
        return self.is_trusted()

    @override
    def order(self, session: TargetSession) -> DraftOrder | None:
        room = session.spec.max_len - len(session.committed) - 1
        num_tokens = min(self.num_draft_tokens, room)
        return DraftOrder(session, self.strategy, num_tokens) if num_tokens > 0 and self.is_trusted() else None

    @override
    def report(
        self, session: TargetSession, verdict: Verdict, block: ReceivedBlock | None, *, has_failed: bool
    ) -> Verdict:
        """Adds that the head had nothing, if the session has it watched. What it would have drafted in other rounds is
        not known: that costs what drafting costs.
        """
        verdict = super(HeadSource, self).report(session, verdict, block, has_failed=has_failed)
        watched = session.spec.watched
        if not has_failed or watched is None or watched.strategy != self.strategy:
            return verdict
        return replace(verdict, guess=GuessPart(watched=WatchedGuess(has_guess=False)))


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
                draftings[key] = HeadDrafting(sequence, target, committed, _request(order, self._vocab_size))
        if not draftings:
            return OrderedBlocks()
        try:
            drafts = self._drafter.draft(list(draftings.values()))
        except Exception:  # of the device, say: the target's own pass shows what is lost
            log.exception("verifier.head_failed", num_sessions=len(draftings))
            for key in draftings:
                self.forget(key)
            return OrderedBlocks(dict.fromkeys(draftings), time.perf_counter() - started)
        seconds = time.perf_counter() - started
        timings = DraftTimings(draft_us=int(seconds * 1e6))
        by_session = {order.session.key: order for order in orders}
        blocks = {
            key: self._block(by_session[key], draft, timings) if isinstance(draft, Draft) else None
            for key, draft in zip(draftings, drafts, strict=True)
            if draft is not None  # it still reads the text
        }
        return OrderedBlocks(blocks, seconds)

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

    def _block(self, order: DraftOrder, draft: Draft, timings: DraftTimings) -> ReceivedBlock:
        """Returns a draft as blocks of drafters are received: the rule reads the numbers that were drawn from."""
        return ReceivedBlock(
            order.session.fence,
            draft.token_ids,
            decode_one(Claim(draft.token_ids, draft.distributions), self._vocab_size),
            order.session.rule.needs_draft_probs,
            NO_DRAFTER,
            timings=timings,
            local_strategy=order.strategy,
        )


def _request(order: DraftOrder, vocab_size: int) -> DraftRequest:
    session, spec, parameters = order.session, order.session.spec, order.session.spec.parameters
    is_coupled = session.rule.is_coupled
    key = spec.verifying_key if is_coupled else local_drafting_key(spec.verifying_key)
    return DraftRequest(
        order.num_draft_tokens,
        parameters.sampling,
        DrawKey(key, parameters.choice, session.round),
        vocab_size,
        is_coupled=is_coupled,
        needs_probs=session.rule.needs_draft_probs,
        prompt_len=parameters.prompt_len,
        stop_token_ids=parameters.stop_token_ids,
        automaton=session.automaton,
    )
