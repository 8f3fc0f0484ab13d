"""Drafts for branches with forks of their sessions' sequences, on the torch thread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from draftwire.drafting.strategy import Draft, Drafting, DraftingStrategy, DraftSequence
from draftwire.engine.draft_session import DraftSession, StepResult
from draftwire.engine.leases import SessionKey
from draftwire.errors import DraftwireError, NoRoomError
from draftwire.method.confidence import stop_in
from draftwire.options.ahead.branches import Branch, WantedGuesses

BranchOutcome = Draft | DraftwireError | None
"""Outcome of a branch's part in a step: a block, an error if it cannot be drafted for, or None if it was cut short."""


@runtime_checkable
class ForkingStrategy(DraftingStrategy, Protocol):
    """A strategy that can draft for several texts that a session may have next."""

    @property
    def can_fork(self) -> bool:
        """Whether it can with the model that it has."""

    def fork(self, sequence: Any, base_len: int, token_ids: list[int]) -> DraftSequence:
        """Returns another sequence, whose committed tokens are the first `base_len` of a sequence of this strategy,
        committed or drafted, and then `token_ids`.

        Args:
            sequence: is not changed.
            base_len: at least its committed tokens.
            token_ids: at least one.

        Raises:
            NoRoomError: the KV cache is full.
        """


@dataclass(slots=True)
class BranchItem:
    """One branch's part in a step that nobody asked for yet."""

    session: DraftSession
    branch: Branch
    parent: Branch | None
    """The text that it continues, to draft its block. None reads the last token of its block, to guess the next one."""
    draft: BranchOutcome = None
    num_passes: int = 0
    """Forward passes in which it took part."""

    @property
    def reads_on(self) -> bool:
        """Whether nothing is drafted."""
        return self.parent is None


@dataclass(frozen=True, slots=True)
class BranchWork:
    """The `SpareWork` of drafting ahead."""

    items: Sequence[BranchItem]
    drafter: "BranchDrafter"

    @property
    def num_sessions(self) -> int:
        """Number of sessions whose branches they are."""
        return len({item.session.key for item in self.items})

    def run(self) -> StepResult:
        """Drafts for them."""
        return self.drafter.draft(self.items)


class BranchDrafter:
    """A strategy with a sequence for each branch that it has drafted for."""

    def __init__(
        self,
        strategy: ForkingStrategy,
        sequences: dict[SessionKey, DraftSequence],
        has_requests: Callable[[], bool],
    ) -> None:
        """Starts without branches.

        Args:
            strategy: can fork.
            sequences: the strategy's, of all sessions: changed where a branch comes true.
            has_requests: whether something that was requested waits: then what nobody asked for ends.
        """
        self._strategy, self._sequences, self._has_requests = strategy, sequences, has_requests
        self.branches: dict[Branch, DraftSequence] = {}

    def draft(self, items: Sequence[BranchItem]) -> StepResult:
        """Drafts for texts that sessions may have next, and says in the items what came of it."""
        draftings = [self._drafting(item) for item in items]
        done = self._strategy.step([drafting for drafting in draftings if drafting is not None])
        drafts = iter(done.drafts)
        for item, drafting in zip(items, draftings, strict=True):
            if drafting is None:
                item.draft = NoRoomError("the KV cache is full")
                continue
            draft = next(drafts)
            item.num_passes = max(1, len(draft.token_ids)) if isinstance(draft, Draft) else 1
            item.draft = draft if _stands(draft, item.branch) else None
        return StepResult([], [], [], done.num_read, done.calibration_s, done.draft_s, done.num_passes)

    def take_over(self, branch: Branch) -> None:
        """Makes the sequence of a branch its session's."""
        key, sequence = (branch.fence.session_id, branch.fence.epoch), self.branches.pop(branch)
        if key in self._sequences:
            self._sequences.pop(key).close()
            self._sequences[key] = sequence
        else:  # the session was closed meanwhile
            sequence.close()

    def free(self, branch: Branch) -> None:
        """Frees the sequence of a branch, if it has one."""
        sequence = self.branches.pop(branch, None)
        if sequence is not None:
            sequence.close()

    def _drafting(self, item: BranchItem) -> Drafting | None:
        session, branch, parent = item.session, item.branch, item.parent
        if parent is None:
            sequence = self._sequence_of(branch, session)
            sequence.calibrate(branch.fence.prefix_len, branch.block or [])
            reading = session.request(branch.fence.round, 0)
            return Drafting(sequence, replace(reading, guesses=WantedGuesses()))
        base_len = parent.fence.prefix_len + branch.num_kept
        try:
            fork = self._strategy.fork(self._sequence_of(parent, session), base_len, branch.added[branch.num_kept :])
        except NoRoomError:
            return None
        self.branches[branch] = fork
        request = session.request(branch.fence.round, branch.num_draft_tokens)
        stop, is_cut = stop_in(branch.fence.round, branch.stop_below), partial(self._is_cut, session, branch)
        return Drafting(fork, replace(request, guesses=WantedGuesses(), stop_below=stop, is_cut=is_cut))

    def _is_cut(self, session: DraftSession, branch: Branch) -> bool:
        """Whether the block of a branch ends: it is not wanted any more, or others are; see `Branch.calibration`."""
        if branch.calibration is not None:
            return session.cut_at == branch.fence.round
        return branch.is_left or self._has_requests()

    def _sequence_of(self, branch: Branch, session: DraftSession) -> DraftSequence:
        return self.branches.get(branch) or self._sequences[session.key]


def _stands(draft: Draft | DraftwireError | None, branch: Branch) -> bool:
    """Whether the outcome of a branch is final. A block that time has cut short is not: it is drafted anew if it is
    requested; but one that is requested while it is drafted is sent as it is.
    """
    return not isinstance(draft, Draft) or draft.is_whole or branch.calibration is not None
