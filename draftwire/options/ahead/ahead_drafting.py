"""Drafts blocks before they are requested, for texts that a drafter's sessions may have next. On the event loop."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from draftwire.drafting.strategy import Draft, DraftRequest, DraftSequence
from draftwire.engine.admission import Room
from draftwire.engine.draft_session import DraftOption, DraftSession, SpareWork, Step, StepResult
from draftwire.engine.leases import SessionKey
from draftwire.errors import UnavailableError
from draftwire.method.rounds import Calibration, DraftBlock, DraftSessionSpec, DraftTimings, Fence
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for
from draftwire.options.ahead.branch_drafter import BranchDrafter, BranchItem, BranchWork, ForkingStrategy
from draftwire.options.ahead.branches import Branch, WantedGuesses
from draftwire.options.ahead.lookahead import Count, Lookahead, NextTexts


class DraftQueue(Protocol):
    """The drafter's scheduler, as this option uses it."""

    sessions: dict[SessionKey, DraftSession]
    dropped: Counter[str]
    room: Room

    @property
    def has_requests(self) -> bool:
        """Whether something that was requested waits for a step. Any thread may ask."""

    def enqueue(self, session: DraftSession) -> None:
        """Has a session take part in a step."""


class AheadDrafting(DraftOption):
    """The texts that sessions may have next, and their blocks."""

    def __init__(
        self,
        strategy: ForkingStrategy,
        sequences: dict[SessionKey, DraftSequence],
        queue: DraftQueue,
        post: Callable[..., object],
        count: Count,
    ) -> None:
        """Starts without texts. For `sequences` see `BranchDrafter`; `post` has the torch thread call a function with
        some arguments.
        """
        self.drafter = BranchDrafter(strategy, sequences, lambda: queue.has_requests)
        take_over, free = partial(post, self.drafter.take_over), partial(post, self.drafter.free)
        self.lookahead = Lookahead(take_over=take_over, free=free, count=count)
        self._queue = queue
        self._texts: dict[SessionKey, NextTexts] = {}

    def num_spare(self, spec: DraftSessionSpec) -> int:
        """Returns how many tokens of the KV cache branches do not share with their session's text."""
        branch_len = BLOCK_SIZE + 2 * (spec.parameters.max_draft_tokens + 1)
        return 0 if spec.ahead is None else spec.ahead.max_branches * blocks_for(branch_len) * BLOCK_SIZE

    def request(self, session: DraftSession, calibration: Calibration, request: DraftRequest) -> DraftRequest:
        """Returns the request for a block, with guesses if it is drafted ahead after it."""
        goes_ahead = session.spec.ahead and session.latest is not None and session.latest.max_rounds_ahead
        return replace(request, guesses=WantedGuesses()) if goes_ahead else request

    def committed(self, session: DraftSession, fence: Fence, new_ids: list[int]) -> None:
        """Keeps the branches that continue what was committed before a round."""
        texts = self._texts.get(session.key)
        if texts is None:
            self._texts[session.key] = NextTexts(session, Branch(fence, new_ids))
            return
        for number in [number for number in texts.num_ahead if number <= fence.round]:
            del texts.num_ahead[number]
        root = texts.root
        found = root.find(fence.round, new_ids)
        if root.fence.round + 1 == fence.round:
            self.lookahead.learn_ending(texts, new_ids)
        if found is root:
            return
        if found is None:
            found = Branch(fence, new_ids)
        elif found.block is not None:
            self.lookahead.adopt(session, found)
        self.lookahead.leave(root, found)
        found.parent = None
        texts.root = found

    def is_drafted(self, session: DraftSession, calibration: Calibration) -> bool:
        """Whether the block that a session is asked for was drafted, or is being drafted: then that is completed."""
        texts = self._texts.get(session.key)
        if texts is None:  # its text was committed before anything was drafted ahead here
            return False
        root = texts.root
        if root.block is not None:
            return True
        if root.in_step and not root.calibration:
            root.calibration = session.calibration = calibration
            session.queued = True
            return True
        return False

    def spare_work(self) -> SpareWork | None:
        """Returns what to draft for texts that sessions may have next."""
        items = [item for session in self._queue.sessions.values() for item in self._items(session)]
        items = items[: self._queue.room.max_sessions]  # rows; more were never tried. The others are next
        for item in items:
            item.branch.in_step = True
        return BranchWork(items, self.drafter) if items else None

    def completed(self, step: Step, result: StepResult) -> list[tuple[DraftSession, DraftBlock]]:
        """Takes note of a step; returns the blocks of branches that are to be sent."""
        items = step.spare.items if isinstance(step.spare, BranchWork) else ()
        num_rows = sum(item.calibration is not None for item in step.items) + sum(not item.reads_on for item in items)
        has_trees = any(item.calibration is not None and item.calibration.tree is not None for item in step.items)
        if result.num_passes and not has_trees:  # a pass over a tree has many rows for one session
            self.lookahead.pass_times.learn(num_rows, result.draft_s / result.num_passes)
        for index, outcome in enumerate(result.outcomes):
            texts = self._texts_of(step.items[index].session)
            is_chain = isinstance(outcome, DraftBlock) and not outcome.parents  # how rounds end tells nothing of trees
            if isinstance(outcome, DraftBlock) and is_chain and texts is not None and texts.root.fence == outcome.fence:
                texts.root.block, texts.root.guesses = outcome.token_ids, result.guesses.get(index, [])
                texts.root.sent_at = self.lookahead.clock()
        sent = []
        timings = DraftTimings(int(result.calibration_s * 1e6), int(result.draft_s * 1e6), num_rows)
        for item in items:
            item.branch.num_passes += item.num_passes
            sent += self._end(item, timings)
        return sent

    def abandoned(self, step: Step) -> None:
        """Forgets a step that failed. Its branches are not tried again: nobody who asked for them would be failed."""
        for item in step.spare.items if isinstance(step.spare, BranchWork) else ():
            item.draft = UnavailableError("the step failed")
            self._end(item, DraftTimings())

    def closed(self, session: DraftSession) -> None:
        """Forgets a session and its branches."""
        texts = self._texts.pop(session.key, None)
        if texts is not None:
            self.lookahead.leave(texts.root)
            texts.root.is_left = texts.root.in_step  # the engine closes its sequence with the session

    def _texts_of(self, session: DraftSession) -> NextTexts | None:
        """Returns the texts of a session; None if there are none, or if it was closed."""
        texts = self._texts.get(session.key)
        return texts if texts is not None and texts.session is session else None

    def _items(self, session: DraftSession) -> list[BranchItem]:
        """Returns what to draft for texts that a session may have next."""
        texts = self._texts_of(session)
        if texts is None or session.queued or session.last_asked < session.last_calibrated:
            return []
        node = texts.root
        last_round = session.last_calibrated + texts.max_rounds_ahead
        while node.block is not None and node.fence.round < last_round:
            if node.next_guesses is None:
                return [BranchItem(session, node, None)]
            if not node.is_expanded and texts.num_left > 0:
                node.is_expanded = True
                self.lookahead.expand(texts, node, len(self._queue.sessions) - 1)
            if waiting := [child for child in node.children if child.block is None]:
                return [BranchItem(session, child, node) for child in waiting]
            if not node.children:
                return []
            node = node.children[0]
        return []

    def _end(self, item: BranchItem, timings: DraftTimings) -> list[tuple[DraftSession, DraftBlock]]:
        """Ends a branch's part in a step, and returns its block if that is to be sent."""
        session, branch, draft = item.session, item.branch, item.draft
        texts = self._texts_of(session)
        branch.in_step = False
        calibration, branch.calibration = branch.calibration, None
        if branch.is_left:
            self.lookahead.abandon(texts, branch)
            return []
        if item.reads_on:
            branch.next_guesses = draft.guesses[0] if isinstance(draft, Draft) else []
            return []
        if not isinstance(draft, Draft):
            self.lookahead.abandon(texts, branch)
            if branch.parent is not None:
                branch.parent.children.remove(branch)
                # One that was cut short is chosen again; one that cannot be drafted for never could.
                branch.parent.is_expanded = draft is not None or bool(branch.parent.children)
            if calibration is not None:
                self._queue.enqueue(session)
            return []
        branch.block, branch.guesses = draft.token_ids, draft.guesses
        block = DraftBlock(
            branch.fence,
            draft.token_ids,
            draft.distributions,
            timings=timings,
            is_ahead=True,
            confidence_buckets=draft.confidence_buckets,
        )
        if branch.parent is None:  # it came true meanwhile, whether its block was asked for or not
            self.lookahead.adopt(session, branch)
        if calibration is not None:
            if session.calibration is calibration:
                session.calibration, session.queued = None, False
            else:
                self._queue.enqueue(session)
        return [(session, block)]
