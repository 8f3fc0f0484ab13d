"""Drafts that are made when a step begins, beside the target, for all sessions of the step at once: what those of a
head and of a language model share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from typing_extensions import override

from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.engine.leases import SessionKey
from draftwire.engine.target_session import NO_DRAFTER, DraftOrder, LocalSource, OrderedBlocks, TargetSession
from draftwire.errors import DraftwireError
from draftwire.method.encoding import Claim, decode_one
from draftwire.method.keys import DrawKey, local_drafting_key
from draftwire.method.quantization import Quantization
from draftwire.method.round_parts import GuessPart, WatchedGuess
from draftwire.method.rounds import DraftTimings, ReceivedBlock, TargetSessionSpec, Verdict

LOCAL_QUANTIZATION = Quantization(mass=0.99, max_support=512)
"""Quantization of drafts that are made in the verifier: they travel nowhere, and the mass that is left out costs
acceptance."""


@dataclass(slots=True, eq=False, kw_only=True)
class OrderedSource(LocalSource):
    """Orders blocks for one session. The round in which the prompt is read has none."""

    is_trusted: Callable[[], bool]
    """Whether its drafts are used: not once the audit has found that it draws otherwise than it declares."""

    @classmethod
    def open(cls, name: str, is_trusted: Callable[[], bool], _: TargetSessionSpec, strategy: str) -> Self | None:
        """Starts, if its strategy is meant; see `OpenSource`. The first arguments are of the verifier."""
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
        """Adds that there was nothing, if the session has it watched. What would have been drafted in other rounds is
        not known: that costs what drafting costs.
        """
        verdict = super(OrderedSource, self).report(session, verdict, block, has_failed=has_failed)
        watched = session.spec.watched
        if not has_failed or watched is None or watched.strategy != self.strategy:
            return verdict
        return replace(verdict, guess=GuessPart(watched=WatchedGuess(has_guess=False)))


def request_of(order: DraftOrder, vocab_size: int) -> DraftRequest:
    """Returns what an order asks of a strategy that draws for a target with so many tokens."""
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


def ordered_blocks(
    orders: Mapping[SessionKey, DraftOrder],
    drafts: Mapping[SessionKey, Draft | DraftwireError | None],
    timings: DraftTimings,
    vocab_size: int,
) -> OrderedBlocks:
    """Returns drafts as blocks of a step.

    Args:
        orders: by session.
        drafts: of some of them; None where the text is still read.
        timings: of all.
        vocab_size: of the target.
    """
    blocks = {
        key: _block(orders[key], draft, timings, vocab_size) if isinstance(draft, Draft) else None
        for key, draft in drafts.items()
        if draft is not None
    }
    return OrderedBlocks(blocks, timings.draft_us / 1e6)


def _block(order: DraftOrder, draft: Draft, timings: DraftTimings, vocab_size: int) -> ReceivedBlock:
    """Returns a draft as blocks of drafters are received: the rule reads the numbers that were drawn from."""
    return ReceivedBlock(
        order.session.fence,
        draft.token_ids,
        decode_one(Claim(draft.token_ids, draft.distributions), vocab_size),
        order.session.rule.needs_draft_probs,
        NO_DRAFTER,
        timings=timings,
        local_strategy=order.strategy,
    )
