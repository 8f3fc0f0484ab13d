"""The engine of the drafter: runs the drafting strategy, on the torch thread."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from draftwire.drafting.strategy import (
    Draft,
    Drafting,
    DraftingStrategy,
    DraftRequest,
    DraftSequence,
    FedStrategy,
    ForkingStrategy,
    TreeStrategy,
    never,
)
from draftwire.engine.leases import SessionKey
from draftwire.engine.prefill import LARGEST_CHUNK
from draftwire.engine.step_engine import StepEngine
from draftwire.errors import DraftwireError, NoRoomError
from draftwire.method.draw_key import DrawKey
from draftwire.method.features import FeatureNeed, SessionFeatures
from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import DraftBlock, DraftTimings, DraftTree
from draftwire.requests.parameters import SamplingParams
from draftwire_drafter.ahead import GUESSES, Branch
from draftwire_drafter.draft_session import DraftSession
from draftwire_drafter.scheduler import AheadItem, AheadOutcome, DraftOutcome, Step, StepItem, StepResult
from draftwire_drafter.session_trees import tree_request


class DraftEngine(StepEngine[Step, StepResult]):
    """A drafting strategy with one sequence per session."""

    def __init__(self, strategy: DraftingStrategy) -> None:
        """Starts without sessions; `strategy` is loaded."""
        self.strategy = strategy
        self._forking = strategy if isinstance(strategy, ForkingStrategy) and strategy.can_fork else None
        self._fed = strategy if isinstance(strategy, FedStrategy) else None
        self._sequences: dict[SessionKey, DraftSequence] = {}
        self._branches: dict[Branch, DraftSequence] = {}
        self.has_requests: Callable[[], bool] = never
        """Whether something that was requested waits: then what nobody asked for ends."""

    @property
    def drafts_trees(self) -> bool:
        """Whether it can draft token trees."""
        return isinstance(self.strategy, TreeStrategy)

    @property
    def drafts_ahead(self) -> bool:
        """Whether it can draft for several texts that a session may have next."""
        return self._forking is not None

    @property
    def need(self) -> FeatureNeed | None:
        """The features that it has to be fed with; None if it needs none."""
        return None if self._fed is None else self._fed.need

    def feed(self, key: SessionKey, features: SessionFeatures) -> None:
        """Adds features to a session's sequence, unless it was closed meanwhile."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            assert self._fed is not None, "only asked of engines with a need"
            self._fed.feed(sequence, features)

    def _time_prompt(self, num_tokens: int) -> tuple[int, float]:
        request = DraftRequest(2, SamplingParams(), DrawKey(bytes(KEY_BYTES), 0, 0), vocab_size=2**31)
        sequence = self.strategy.open([0] * min(num_tokens, self.strategy.context_length - 2))
        if self._fed is not None:
            self._fed.rehearse(sequence)
        done = self.strategy.step([Drafting(sequence, request)])
        sequence.close()
        return done.num_read, done.calibration_s

    def run_largest(self, num_sessions: int, num_draft_tokens: int, num_tree_nodes: int = 0) -> None:
        """Runs a step as large as any: a block or a tree for every session, beside a prompt.

        Args:
            num_sessions: most sessions.
            num_draft_tokens: of each block, and of a path of each tree.
            num_tree_nodes: of each tree; 0 if there are none.
        """
        key, context_length = DrawKey(bytes(KEY_BYTES), 0, 0), self.strategy.context_length
        sampling = SamplingParams(temperature=1.0, top_p=0.95)
        request = DraftRequest(min(num_draft_tokens, context_length - 1), sampling, key, vocab_size=2**31)
        if num_tree_nodes:
            request = tree_request(replace(request, is_coupled=True, needs_probs=False), DraftTree(num_tree_nodes))
        draftings = [Drafting(self.strategy.open([0]), request) for _ in range(num_sessions)]
        draftings.append(Drafting(self.strategy.open([0] * min(LARGEST_CHUNK, context_length)), None, LARGEST_CHUNK))
        self.strategy.step(draftings)
        for drafting in draftings:
            drafting.sequence.close()

    def step(self, step: Step) -> StepResult:
        """Runs a step: prefill, calibration to the committed tokens, drafting of blocks; or drafting ahead."""
        if step.ahead:
            return self._draft_ahead(step.ahead)
        started = time.perf_counter()
        draftings = [self._drafting(item) for item in step.items]
        prepared_s = time.perf_counter() - started
        done = self.strategy.step(draftings)
        timings = DraftTimings(int((prepared_s + done.calibration_s) * 1e6), int(done.draft_s * 1e6))
        return StepResult(
            outcomes=[_outcome(item, draft, timings) for item, draft in zip(step.items, done.drafts, strict=True)],
            num_unread=[drafting.sequence.num_unread for drafting in draftings],
            num_reused=[drafting.sequence.num_reused for drafting in draftings],
            num_read=done.num_read,
            calibration_s=done.calibration_s,
            draft_s=done.draft_s,
            num_passes=done.num_passes,
            guesses={index: draft.guesses for index, draft in enumerate(done.drafts) if isinstance(draft, Draft)},
        )

    def _draft_ahead(self, items: Sequence[AheadItem]) -> StepResult:
        """Drafts for texts that sessions may have next. A branch for which there is no room is left out."""
        draftings = {index: self._drafting_ahead(item) for index, item in enumerate(items)}
        possible = {index: drafting for index, drafting in draftings.items() if drafting is not None}
        done = self.strategy.step(list(possible.values()))
        timings = DraftTimings(int(done.calibration_s * 1e6), int(done.draft_s * 1e6))
        outcomes: list[AheadOutcome] = [NoRoomError("the KV cache is full")] * len(items)
        passes = [0] * len(items)
        for index, draft in zip(possible, done.drafts, strict=True):
            passes[index] = max(1, len(draft.token_ids)) if isinstance(draft, Draft) else 1
            outcomes[index] = draft if _stands(draft, items[index].branch) else None
        return StepResult(
            outcomes=[],
            num_unread=[],
            num_reused=[],
            num_read=done.num_read,
            calibration_s=done.calibration_s,
            draft_s=done.draft_s,
            num_passes=done.num_passes,
            ahead=outcomes,
            ahead_passes=passes,
            timings=timings,
        )

    def _drafting_ahead(self, item: AheadItem) -> Drafting | None:
        session, branch, parent = item.session, item.branch, item.parent
        if parent is None:
            sequence = self._sequence_of(branch, session)
            sequence.calibrate(branch.fence.prefix_len, branch.block or [])
            return Drafting(sequence, self._request(session, branch.fence.round, 0))
        assert self._forking is not None, "drafters that cannot fork are not asked to draft ahead"
        base_len = parent.fence.prefix_len + branch.num_kept
        try:
            fork = self._forking.fork(self._sequence_of(parent, session), base_len, branch.added[branch.num_kept :])
        except NoRoomError:
            return None
        self._branches[branch] = fork
        request = self._request(session, branch.fence.round, branch.num_draft_tokens)
        return Drafting(fork, replace(request, is_cut=partial(self._is_cut, session, branch)))

    def _is_cut(self, session: DraftSession, branch: Branch) -> bool:
        """Whether the block of a branch ends: it is not wanted any more, or others are; see `Branch.calibration`."""
        if branch.calibration is not None:
            return session.cut_at == branch.fence.round
        return branch.is_left or self.has_requests()

    def _sequence_of(self, branch: Branch, session: DraftSession) -> DraftSequence:
        return self._branches.get(branch) or self._sequences[session.key]

    def adopt(self, key: SessionKey, branch: Branch) -> None:
        """Makes the sequence of a branch its session's."""
        sequence = self._branches.pop(branch)
        if key in self._sequences:
            self._sequences.pop(key).close()
            self._sequences[key] = sequence
        else:  # the session was closed meanwhile
            sequence.close()

    def leave(self, branch: Branch) -> None:
        """Frees the sequence of a branch, if it has one."""
        sequence = self._branches.pop(branch, None)
        if sequence is not None:
            sequence.close()

    def forget(self, key: SessionKey) -> None:
        """Frees a session's sequence."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            sequence.close()

    def _drafting(self, item: StepItem) -> Drafting:
        session, calibration, parameters = item.session, item.calibration, item.session.spec.parameters
        sequence = self._sequences.get(session.key)
        if sequence is None:
            sequence = self.strategy.open(
                session.spec.token_ids, parameters.cache_salt, shares_text=parameters.shares_text
            )
            self._sequences[session.key] = sequence
        if item.token_ids or calibration is not None:
            sequence.calibrate(item.base_len, item.token_ids)
        if calibration is None:
            return Drafting(sequence, None, item.max_read)
        asked = calibration.fence.round
        request = self._request(session, asked, calibration.num_draft_tokens)
        request = replace(request, num_guesses=session.num_guesses, is_cut=lambda: session.cut_at == asked)
        if calibration.tree is not None:
            can_draw = isinstance(self.strategy, TreeStrategy) and self.strategy.draws_trees
            request = tree_request(request, calibration.tree, can_draw=can_draw)
        return Drafting(sequence, request, item.max_read)

    def _request(self, session: DraftSession, number: int, num_tokens: int) -> DraftRequest:
        """Returns the request for a block of a round, with guesses, which nothing cuts."""
        spec, parameters = session.spec, session.spec.parameters
        return DraftRequest(
            num_tokens,
            parameters.sampling,
            DrawKey(spec.drafting_key, parameters.choice, number),
            spec.target_vocab_size,
            is_coupled=parameters.rule.is_coupled,
            needs_probs=parameters.rule.needs_draft_probs,
            prompt_len=parameters.prompt_len,
            stop_token_ids=parameters.stop_token_ids,
            automaton=session.automaton,
            num_guesses=GUESSES,
        )


def _stands(draft: Draft | DraftwireError | None, branch: Branch) -> bool:
    """Whether the outcome of a branch is final. A block that time has cut short is not: it is drafted anew if it is
    requested; but one that is requested while it is drafted is sent as it is.
    """
    return not isinstance(draft, Draft) or draft.is_whole or branch.calibration is not None


def _outcome(item: StepItem, draft: Draft | DraftwireError | None, timings: DraftTimings) -> DraftOutcome:
    if item.calibration is None or not isinstance(draft, Draft):
        return draft if isinstance(draft, DraftwireError) else None
    return DraftBlock(item.calibration.fence, draft.token_ids, draft.distributions, timings, parents=draft.parents)
