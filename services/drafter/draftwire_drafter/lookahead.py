"""Drafts before they are requested, for texts that sessions may have next. Pure."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from draftwire.method.rounds import Fence
from draftwire_drafter.ahead import Branch, Endings
from draftwire_drafter.branching import TRIAL_EVERY, PassTimes, num_worthwhile
from draftwire_drafter.draft_session import DraftSession

OUTCOME_WEIGHT = 1 / 8
"""Weight of the latest round in the moving average of how long it takes until a round's end is known."""
BRANCH_OUTCOMES = ("hit", "missed", "abandoned")
"""Outcomes of a branch: its text came true; another did; there was no time or no room for its block."""


@dataclass(kw_only=True, slots=True)
class Lookahead:
    """The branches of all sessions: which are chosen, and what became of them. Changed by the scheduler only."""

    endings: Endings = field(default_factory=Endings)
    """How rounds have ended so far."""
    pass_times: PassTimes = field(default_factory=PassTimes)
    """Times of passes so far."""
    clock: Callable[[], float] = time.perf_counter
    adopted: list[Branch] = field(default_factory=list)
    """Branches that have become the texts of their sessions, for the engine, which takes them out."""
    left: list[Branch] = field(default_factory=list)
    """Branches that will not, for the engine, which takes them out."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Branches by what became of them, one of `BRANCH_OUTCOMES`."""
    passes: Counter[str] = field(default_factory=Counter)
    """Forward passes for them, by the same, one for each branch of a batch."""
    _num_choices: int = 0
    """How often it was chosen for how many texts to draft."""

    def learn_ending(self, session: DraftSession, root: Branch, new_ids: list[int]) -> None:
        """Learns how the round of a session's text has ended, and how long that took."""
        if session.spec.parameters.shares_text:
            self.endings.learn(root, new_ids)
        if root.sent_at is not None:
            took_s = self.clock() - root.sent_at
            known_s = took_s if session.outcome_s is None else session.outcome_s
            session.outcome_s = known_s + OUTCOME_WEIGHT * (took_s - known_s)

    def adopt(self, session: DraftSession, branch: Branch) -> None:
        """Makes a branch's sequence the session's own: it has read what it was drafted from."""
        session.num_known = branch.fence.prefix_len
        session.num_unread = 1 + len(session.committed) - session.num_known
        self._settle(branch, "hit")
        self.adopted.append(branch)

    def leave(self, root: Branch, kept: Branch | None = None) -> None:
        """Drops the branches of a text, except one and those that continue it."""
        family = set() if kept is None else set(kept.family())
        for branch in root.family():
            if branch not in family and branch is not root:
                branch.is_left = True
                if branch.block is not None:
                    self._settle(branch, "missed")
                if not branch.in_step:  # else it ends there
                    self.left.append(branch)

    def _settle(self, branch: Branch, outcome: str) -> None:
        """Counts what became of a branch."""
        self.outcomes[outcome] += 1
        self.passes[outcome] += branch.num_passes
        branch.num_passes = 0

    def abandon(self, session: DraftSession, branch: Branch) -> None:
        """Drops a branch whose step has ended, and whose block is not sent, or was sent for a text that did not come
        true.
        """
        self.left.append(branch)
        if branch.block is not None:  # it was counted, but for what was read since
            self.passes["missed"] += branch.num_passes
            return
        self._settle(branch, "abandoned")
        if session.num_ahead[branch.fence.round]:  # else the round has begun
            session.num_ahead[branch.fence.round] -= 1

    def expand(self, session: DraftSession, node: Branch, num_beside: int) -> None:
        """Chooses the texts that a text may become, those that are worthwhile.

        Args:
            session: whose text it is.
            node: the text, whose block was drafted.
            num_beside: other sessions, which have a row or more in each pass.
        """
        block = node.block or []
        stops = session.spec.parameters.stop_token_ids
        path = _path_to(node)
        likeliest = self.endings.likeliest(node, session.num_branches_left)
        for ending in likeliest[: self._num_worthwhile(session, [ending.chance for ending in likeliest], num_beside)]:
            added = [*block[: ending.num_kept], ending.token_id]
            prefix_len = node.fence.prefix_len + len(added)
            length = session.length_at(prefix_len)
            if length < 1 or not stops.isdisjoint(added):
                continue
            prefix_hash = session.committed.hash_with([*path, *added])
            fence = Fence(*session.key, node.fence.round + 1, prefix_len, prefix_hash)
            node.children.append(Branch(fence, added, node, ending.num_kept, length))
            session.num_ahead[fence.round] += 1

    def _num_worthwhile(self, session: DraftSession, chances: list[float], num_beside: int) -> int:
        """Returns for how many of the likeliest texts to draft; for all as long as nothing was measured."""
        times = self.pass_times.known
        if times is None or session.outcome_s is None or not chances:
            return len(chances)
        count = num_worthwhile(chances, session.num_draft_tokens, times, session.outcome_s, num_beside)
        self._num_choices += 1
        return 2 * count if self._num_choices % TRIAL_EVERY == 0 else count


def _path_to(branch: Branch) -> list[int]:
    """Returns the tokens by which a branch's text is longer than the committed one."""
    path: list[int] = []
    while branch.parent is not None:
        path = [*branch.added, *path]
        branch = branch.parent
    return path
