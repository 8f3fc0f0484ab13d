"""Drafts of the verifier's own head, made beside the target, on the torch thread, for all sessions of a step at once.

Unlike text drafters, a head needs the target's hidden states and its device: so its blocks are made when a step begins,
not when a session is queued.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from draftwire.drafting.heads.head_drafter import HeadDrafter, HeadDrafting, HeadSequence
from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.engine.leases import SessionKey
from draftwire.method.draw_key import DrawKey
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.keys import KEY_BYTES, local_drafting_key
from draftwire.method.rounds import DraftTimings, ReceivedBlock
from draftwire.models.kv_cache import CachedSequence
from draftwire.requests.parameters import SamplingParams
from draftwire_verifier.local_drafts import NO_DRAFTER
from draftwire_verifier.scheduler import StepItem, TargetSession

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HeadStep:
    """Drafts of a head for a step. Sequences hold one entry for each item."""

    blocks: Sequence[ReceivedBlock | None] = ()
    """None where there is none."""
    has_failed: Sequence[bool] = ()
    """Whether a block was to be there: not where the head, or the target, still reads the text."""
    seconds: float = 0.0
    """How long it took."""


class HeadDrafts:
    """A head with one sequence per session that it has drafted for."""

    def __init__(self, drafter: HeadDrafter[CachedSequence], vocab_size: int) -> None:
        """Starts without sessions.

        Args:
            drafter: the head beside the target's features.
            vocab_size: of the target.
        """
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._sequences: dict[SessionKey, HeadSequence] = {}

    def draft(self, items: Sequence[StepItem], targets: Mapping[SessionKey, CachedSequence]) -> HeadStep:
        """Drafts for the sessions of a step that are to be drafted for and whose committed tokens but the last are in
        the target's cache. A round for which the head has nothing, or in which it fails, is decided without a draft.

        Args:
            items: of the step.
            targets: sequences of the sessions in the target's cache.
        """
        started = time.perf_counter()
        blocks: list[ReceivedBlock | None] = [None] * len(items)
        has_failed = [False] * len(items)
        draftings: dict[int, HeadDrafting[CachedSequence]] = {}
        for index, item in enumerate(items):
            target, committed = targets.get(item.session.key), item.session.committed.ids
            if item.num_head_tokens and target is not None and target.length == len(committed) - 1 > 0:
                sequence = self._sequences.get(item.session.key)
                if sequence is None:
                    sequence = self._sequences[item.session.key] = self._drafter.open()
                draftings[index] = HeadDrafting(sequence, target, committed, _request(item, self._vocab_size))
        if not draftings:
            return HeadStep(blocks, has_failed)
        try:
            drafts = self._drafter.draft(list(draftings.values()))
        except (
            Exception
        ):  # of the device, say: rounds go on without drafts, and the target's own pass shows what is lost
            log.exception("verifier.head_failed", num_sessions=len(draftings))
            for index in draftings:
                has_failed[index] = True
                self.forget(items[index].session.key)
            return HeadStep(blocks, has_failed, time.perf_counter() - started)
        seconds = time.perf_counter() - started
        timings = DraftTimings(draft_us=int(seconds * 1e6))
        for index, draft in zip(draftings, drafts, strict=True):
            if isinstance(draft, Draft):
                blocks[index] = self._block(items[index].session, draft, timings)
            has_failed[index] = draft is not None and blocks[index] is None
        return HeadStep(blocks, has_failed, seconds)

    def rehearse(self, targets: Sequence[CachedSequence], num_tokens: int, context_length: int) -> None:
        """Drafts for all sequences at once, as if their tokens were all 0, and forgets that.

        Args:
            targets: in the target's cache, which has read at least one token of each.
            num_tokens: of each block; fewer than the context.
            context_length: in tokens: blocks end before it.
        """
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

    def _block(self, session: TargetSession, draft: Draft, timings: DraftTimings) -> ReceivedBlock:
        """Returns a draft as blocks of drafters are received: the rule reads the numbers that were drawn from."""
        return ReceivedBlock(
            session.fence,
            draft.token_ids,
            decode_one(Claim(draft.token_ids, draft.distributions), self._vocab_size),
            session.rule.needs_draft_probs,
            NO_DRAFTER,
            timings=timings,
            local_strategy=self._drafter.head.config.kind.value,
        )


def _request(item: StepItem, vocab_size: int) -> DraftRequest:
    session, spec, parameters = item.session, item.session.spec, item.session.spec.parameters
    is_coupled = session.rule.is_coupled
    key = spec.verifying_key if is_coupled else local_drafting_key(spec.verifying_key)
    return DraftRequest(
        item.num_head_tokens,
        parameters.sampling,
        DrawKey(key, parameters.choice, session.round),
        vocab_size,
        is_coupled=is_coupled,
        needs_probs=session.rule.needs_draft_probs,
        prompt_len=parameters.prompt_len,
        stop_token_ids=parameters.stop_token_ids,
        automaton=session.automaton,
    )
