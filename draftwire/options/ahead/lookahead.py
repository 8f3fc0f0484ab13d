"""Texts that sessions may have next: which are drafted for, and what became of them. Pure."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from draftwire.engine.draft_session import DraftSession
from draftwire.method.rounds import Fence
from draftwire.options.ahead.branches import Branch, Endings
from draftwire.options.ahead.branching import TRIAL_EVERY, PassTimes, num_worthwhile

OUTCOME_WEIGHT = 1 / 8
"""Weight of the latest round in the moving average of how long it takes until a round's end is known."""

Count = Callable[[str, int, int], None]
"""Counts branches and their forward passes, one for each branch of a batch, by what became of them: "hit" came true,
"missed" did not, "abandoned" had no time or no room for its block."""


@dataclass(slots=True, eq=False)
class NextTexts:
    """The possible continuations of a session."""

    session: DraftSession
    root: Branch
    """The committed text, and the texts that it may become."""
    outcome_s: float | None = None
    """Usual time from sending a block until it is known how its round ended, seconds; None before any round."""
    num_ahead: Counter[int] = field(default_factory=Counter)
    """Number of blocks that the verifier holds or may come to hold, by coming round, whatever became of their texts."""

    @property
    def max_rounds_ahead(self) -> int:
        """Rounds ahead of the latest calibration; without branches a drafter begins rounds on their outcomes alone."""
        latest = self.session.latest
        return 0 if latest is None or self.session.spec.ahead is None else latest.max_rounds_ahead

    @property
    def num_left(self) -> int:
        """Texts for which to draft ahead now at most: a share of all for each round, as far as the verifier holds their
        blocks. It would drop others, and nobody would send them again.
        """
        limits = self.session.spec.ahead
        if limits is None:
            return 0
        share = limits.max_branches // max(1, self.max_rounds_ahead)
        return min(share, (limits.max_held_blocks or limits.max_branches) - self.num_ahead.total())


@dataclass(kw_only=True, slots=True)
class Lookahead:
    """The branches of all sessions: which are chosen, and what became of them. Changed by the scheduler only."""

    take_over: Callable[[Branch], object]
    """Makes the sequence of a branch its session's."""
    free: Callable[[Branch], object]
    """Frees the sequence of a branch, if it has one."""
    count: Count
    endings: Endings = field(default_factory=Endings)
    """How rounds have ended so far."""
    pass_times: PassTimes = field(default_factory=PassTimes)
    """Times of passes so far."""
    clock: Callable[[], float] = time.perf_counter
    _num_choices: int = 0
    """How often it was chosen for how many texts to draft."""

    def learn_ending(self, texts: NextTexts, new_ids: list[int]) -> None:
        """Learns how the round of a session's text has ended, and how long that took."""
        if texts.session.spec.parameters.shares_text:
            self.endings.learn(texts.root, new_ids)
        if texts.root.sent_at is not None:
            took_s = self.clock() - texts.root.sent_at
            known_s = took_s if texts.outcome_s is None else texts.outcome_s
            texts.outcome_s = known_s + OUTCOME_WEIGHT * (took_s - known_s)

    def adopt(self, session: DraftSession, branch: Branch) -> None:
        """Makes a branch's sequence the session's own: it has read what it was drafted from."""
        session.num_known = branch.fence.prefix_len
        session.num_unread = 1 + len(session.committed) - session.num_known
        self._settle(branch, "hit")
        self.take_over(branch)

    def leave(self, root: Branch, kept: Branch | None = None) -> None:
        """Drops the branches of a text, except one and those that continue it."""
        family = set() if kept is None else set(kept.family())
        for branch in root.family():
            if branch not in family and branch is not root:
                branch.is_left = True
                if branch.block is not None:
                    self._settle(branch, "missed")
                if not branch.in_step:  # else it ends there
                    self.free(branch)

    def _settle(self, branch: Branch, outcome: str) -> None:
        """Counts what became of a branch."""
        self.count(outcome, 1, branch.num_passes)
        branch.num_passes = 0

    def abandon(self, texts: NextTexts | None, branch: Branch) -> None:
        """Drops a branch whose step has ended, and whose block is not sent, or was sent for a text that did not come
        true. The texts are None if its session was closed.
        """
        self.free(branch)
        if branch.block is not None:  # it was counted, but for what was read since
            self.count("missed", 0, branch.num_passes)
            return
        self._settle(branch, "abandoned")
        if texts is not None and texts.num_ahead[branch.fence.round]:  # else the round has begun
            texts.num_ahead[branch.fence.round] -= 1

    def expand(self, texts: NextTexts, node: Branch, num_beside: int) -> None:
        """Chooses the worthwhile ones of the texts that a text may become, whose block was drafted. So many other
        sessions have a row or more in each pass.
        """
        session, block = texts.session, node.block or []
        stop_below = None if session.latest is None else session.latest.stop_below
        stops = session.spec.parameters.stop_token_ids
        path = _path_to(node)
        likeliest = self.endings.likeliest(node, texts.num_left)
        for ending in likeliest[: self._num_worthwhile(texts, [ending.chance for ending in likeliest], num_beside)]:
            added = [*block[: ending.num_kept], ending.token_id]
            prefix_len = node.fence.prefix_len + len(added)
            length = session.length_at(prefix_len)
            if length < 1 or not stops.isdisjoint(added):
                continue
            prefix_hash = session.committed.hash_with([*path, *added])
            fence = Fence(*session.key, node.fence.round + 1, prefix_len, prefix_hash)
            node.children.append(Branch(fence, added, node, ending.num_kept, length, stop_below))
            texts.num_ahead[fence.round] += 1

    def _num_worthwhile(self, texts: NextTexts, chances: list[float], num_beside: int) -> int:
        """Returns for how many of the likeliest texts to draft; for all as long as nothing was measured."""
        times = self.pass_times.known
        latest = texts.session.latest
        if times is None or texts.outcome_s is None or latest is None or not chances:
            return len(chances)
        count = num_worthwhile(chances, latest.num_draft_tokens, times, texts.outcome_s, num_beside)
        self._num_choices += 1
        return 2 * count if self._num_choices % TRIAL_EVERY == 0 else count


def _path_to(branch: Branch) -> list[int]:
    """Returns the tokens by which a branch's text is longer than the committed one."""
    path: list[int] = []
    while branch.parent is not None:
        path = [*branch.added, *path]
        branch = branch.parent
    return path
