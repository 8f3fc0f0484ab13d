"""What a drafter's settings give its strategy."""

from draftwire.engine.model_loading import limited, load_draft_model, refuse_settings_of_weights
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.method.quantization import Quantization
from draftwire.models.cached_model import DraftModel
from draftwire.models.loading import ModelCard
from draftwire.runtime.settings import require
from draftwire_drafter.config import DrafterConfig


class ConfiguredContext:
    """See `draftwire.drafting.strategies.StrategyContext`. Used on the torch thread."""

    def __init__(self, config: DrafterConfig, group: GroupGuard) -> None:
        """Takes what is set, and the processes that share the model."""
        self._config = config
        self._group = group

    @property
    def model(self) -> str:
        """What the option `model` says."""
        return self._config.loading.model

    @property
    def quantization(self) -> Quantization:
        """What is made of distributions before tokens are drawn from them."""
        return self._config.drafts.quantization

    @property
    def calibrates(self) -> bool:
        """Whether what was drafted approximately is computed again."""
        return self._config.layers.bonus_calibration

    def limited(self, card: ModelCard) -> ModelCard:
        """Shortens the context to what the KV cache can hold of one session."""
        return limited(card, self._config.engine)

    def load_language_model(self) -> tuple[ModelCard, DraftModel]:
        """Loads the weights: all of them, or this rank's share, once the other ranks have theirs."""
        config, place = self._config, self._group.place
        if place.size == 1:
            return load_draft_model(config.loading, config.engine, config.layers)
        from draftwire.engine.ranks.group_model import GroupModel, load_draft_rank

        rank = load_draft_rank(RankConfig.of(config, place))
        model = GroupModel(rank, "drafter")
        self._group.take(model)
        return rank.card, model

    def require_no_weights(self, what: str) -> None:
        """Refuses settings that would have no effect without weights."""
        require(not self._config.layers.is_parallel, f"{what} has no layers that could run at the same time")
        refuse_settings_of_weights(self._config.loading, what)
