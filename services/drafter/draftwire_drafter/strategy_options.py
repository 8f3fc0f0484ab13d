"""The options of a drafter's sessions: what its strategy can do beside drafting chains."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from draftwire.engine.draft_session import DraftOption
from draftwire.models.description import (
    CONFIDENCE,
    DRAFT_AHEAD,
    DRAFTS_ON_OUTCOMES,
    FLUSH_REPLIES,
    ISSUED_IDENTITIES,
    NEEDS_FEATURES,
    PARTIAL_BLOCKS,
)
from draftwire.options.confidence.session_confidence import SessionConfidence
from draftwire.options.heads.feature_feeding import FeatureFeeding, FedStrategy
from draftwire.options.trees.session_trees import SessionTrees, TreeStrategy
from draftwire.runtime.settings import require
from draftwire_drafter.engine import DraftEngine
from draftwire_drafter.scheduler import Scheduler

if TYPE_CHECKING:
    from draftwire.options.ahead.ahead_drafting import AheadDrafting


class StrategyOptions:
    """The options of the sessions that one strategy drafts for."""

    def __init__(self) -> None:
        """Starts without any: the strategy is not loaded yet."""
        self.added: list[DraftOption] = []
        """All of them, for the scheduler and the engine. One may be added while sessions are open."""
        self.feeding: FeatureFeeding | None = None
        """Feeds the strategy with features; None if it needs none."""
        self.ahead: AheadDrafting | None = None
        """Drafts ahead; None before a session asks for it."""
        self._engine: DraftEngine | None = None

    def add(self, engine: DraftEngine, max_tree_nodes: int) -> frozenset[str]:
        """Adds those of a loaded strategy, and returns the drafter's capabilities.

        Raises:
            InvalidRequestError: `max_tree_nodes` asks for token trees, which it does not draft.
        """
        self._engine, strategy = engine, engine.strategy
        can_do = isinstance(strategy, TreeStrategy) or max_tree_nodes == 0
        require(can_do, "max_tree_nodes: the drafter's strategy drafts no token trees")
        can_draw = isinstance(strategy, TreeStrategy) and strategy.draws_trees
        is_known = getattr(strategy, "reports_confidence", False)
        self.added += [SessionTrees(max_tree_nodes, can_draw=can_draw), SessionConfidence(is_known=is_known)]
        capabilities = {DRAFTS_ON_OUTCOMES, FLUSH_REPLIES, ISSUED_IDENTITIES, PARTIAL_BLOCKS}
        if getattr(strategy, "can_fork", False):
            capabilities.add(DRAFT_AHEAD)
        if is_known:
            capabilities.add(CONFIDENCE)
        if isinstance(strategy, FedStrategy):
            self.feeding = FeatureFeeding(strategy, engine.sequences)
            self.added.append(self.feeding)
            capabilities.add(NEEDS_FEATURES)
        return frozenset(capabilities)

    def draft_ahead(
        self, scheduler: Scheduler, post: Callable[..., object], count: Callable[[str, int, int], None]
    ) -> None:
        """Adds drafting ahead, when the first session asks for it, if the strategy can; arguments as for
        `AheadDrafting`.
        """
        assert self._engine is not None, "sessions are opened once the strategy is loaded"
        strategy = self._engine.strategy
        if self.ahead is not None or not getattr(strategy, "can_fork", False):
            return
        from draftwire.options.ahead.ahead_drafting import AheadDrafting
        from draftwire.options.ahead.branch_drafter import ForkingStrategy

        assert isinstance(strategy, ForkingStrategy), "it says that it can fork"
        self.ahead = AheadDrafting(strategy, self._engine.sequences, scheduler, post, count)
        self.added.append(self.ahead)
