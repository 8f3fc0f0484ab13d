"""Drafts of the verifier by itself, where no drafter drafts: by its head, by its draft model, or from text."""

from dataclasses import replace

from typing_extensions import override

from draftwire.method.rounds import LocalDraft, TargetSessionSpec
from draftwire.models.description import ModelDescription
from draftwire.options.draft_model.draft_model_name import DRAFT_MODEL
from draftwire.options.heads.head_names import HEAD_NAMES
from draftwire.options.model_free.names import JOINT, TEXT_DRAFTER_NAMES, parts_of
from draftwire_gateway.session.generation import Generation
from draftwire_gateway.session.policy import Policy
from draftwire_gateway.session.round_times import WhyPlain
from draftwire_gateway.session.session_option import RunRequest, SessionOption
from draftwire_gateway.session.session_state import SessionState


class LocalDrafting(SessionOption):
    """Has the verifier draft by itself, if it can and that pays, and report what it would have drafted in other rounds
    where that is chosen by it.
    """

    def __init__(self, session: SessionState) -> None:
        super().__init__(session)
        self._draft: LocalDraft | None = None
        """Drafts that the session's verifier may make by itself; None if it does not."""

    @override
    def join(self, target: ModelDescription) -> None:
        self._draft = local_draft(self._session.generation, target)

    @override
    def target_spec(self, spec: TargetSessionSpec, target: ModelDescription) -> TargetSessionSpec:
        generation = self._session.generation
        return replace(spec, watched=local_draft(generation, target)) if generation.adapts_length else spec

    @override
    def accepts(self, drafter: ModelDescription, target: ModelDescription) -> bool:
        """Not those that do what the verifier can do by itself."""
        possible = _possible(self._session.generation, target)
        return not all(part in possible for part in parts_of(drafter.name))

    @override
    def run(self, request: RunRequest, policy: Policy) -> RunRequest:
        most_tokens = min(self._session.generation.num_speculative_tokens, self._session.num_left - 1)
        if self._draft is None or most_tokens < 1:
            return request
        why, num_rounds = request.why, request.num_rounds
        if why is not WhyPlain.DOES_NOT_PAY:  # then they are chosen by that already
            num_rounds = policy.num_rounds(num_rounds)
        length = policy.next_own_length(self._session.round, most_tokens)
        if length < 1:
            return RunRequest(WhyPlain.DOES_NOT_PAY if why is WhyPlain.NO_DRAFTER else why, num_rounds)
        return RunRequest(WhyPlain.NO_GUESS, num_rounds, replace(self._draft, num_draft_tokens=length))


def local_strategy(generation: Generation, target: ModelDescription) -> str:
    """Returns by what a verifier may draft by itself: by its head, its draft model or a source of its owner's if it has
    one, else by the longest match of what guesses tokens from tokens; empty if by nothing.
    """
    possible = _possible(generation, target)
    return next((name for name in possible if name not in TEXT_DRAFTER_NAMES), JOINT.join(possible))


def local_draft(generation: Generation, target: ModelDescription) -> LocalDraft | None:
    """Returns what a verifier may draft by itself; None if nothing."""
    strategy, most = local_strategy(generation, target), generation.num_speculative_tokens
    others = [name for name in _possible(generation, target) if name in TEXT_DRAFTER_NAMES]
    if strategy in (*HEAD_NAMES, DRAFT_MODEL):  # which may be found not to draw from what it says
        return LocalDraft(strategy, most, JOINT.join(others))
    return LocalDraft(strategy, most) if strategy else None


def _possible(generation: Generation, target: ModelDescription) -> list[str]:
    """Returns the strategies of a verifier that the generation allows."""
    return [strategy for strategy in generation.local_strategies if strategy in target.local_strategies]
