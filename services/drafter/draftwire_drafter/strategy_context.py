"""Settings and model loading for a drafting strategy. Torch is imported where weights are loaded, and not before."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftwire.drafting.model_free.names import RETRIEVAL, SUFFIX
from draftwire.drafting.model_free.registry import TextDrafters
from draftwire.engine.model_settings import limited, refuse_settings_of_weights
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.method.quantization import Quantization
from draftwire.models.card import ModelCard, load_card
from draftwire.models.script import Script, is_scripted
from draftwire.runtime.settings import require
from draftwire_drafter.config import DrafterConfig

if TYPE_CHECKING:
    from draftwire.models.cached_model import DraftModel


class ConfiguredContext:
    """`draftwire.drafting.strategies.StrategyContext` from a drafter's settings. Used on the torch thread."""

    def __init__(self, config: DrafterConfig, group: GroupGuard) -> None:
        """Takes the drafter's settings and the ranks that share its model."""
        self._config = config
        self._group = group

    @property
    def model(self) -> str:
        """Value of the option `model`."""
        return self._config.loading.model

    @property
    def quantization(self) -> Quantization:
        """Truncation and encoding of distributions, applied before tokens are drawn from them."""
        return self._config.drafts.quantization

    @property
    def calibrates(self) -> bool:
        """Whether tokens that were drafted approximately are computed again, exactly."""
        return self._config.layers.bonus_calibration

    def limited(self, card: ModelCard) -> ModelCard:
        """Returns the card with the context length limited to the capacity of the KV cache."""
        return limited(card, self._config.engine)

    def load_card(self) -> ModelCard:
        """Loads tokenizer and configuration, without weights."""
        if is_scripted(self.model):
            return Script.parse(self.model).card()
        return load_card(self.model, self._config.loading.revision)

    def load_language_model(self) -> "tuple[ModelCard, DraftModel]":
        """Loads the weights: all of them, or this rank's share, together with the other ranks."""
        config, place = self._config, self._group.place
        if place.size == 1:
            from draftwire.engine.model_loading import load_draft_model

            return load_draft_model(config.loading, config.engine, config.layers)
        from draftwire.engine.ranks.group_model import GroupModel, load_draft_rank

        rank = load_draft_rank(RankConfig.of(config, place))
        model = GroupModel(rank, "drafter")
        self._group.take(model)
        return rank.card, model

    def require_no_weights(self, what: str) -> None:
        """Refuses settings that have no effect without weights; `what` names the kind of model."""
        require(not self._config.layers.is_parallel, f"{what} has no layers that could run at the same time")
        refuse_settings_of_weights(self._config.loading, what)

    def load_text_drafters(self, card: ModelCard) -> TextDrafters:
        """Returns what drafts without a model, for texts of a vocabulary."""
        texts = self._config.texts
        return TextDrafters.load(texts.retrieval_store, texts.shared_tokens, card.description.vocabulary_fingerprint)

    def require_texts_of(self, names: Sequence[str]) -> None:
        """Refuses settings of text drafters that are not among those named."""
        texts, strategy = self._config.texts, self._config.drafts.strategy
        has_store, shares = texts.retrieval_store is not None, texts.shared_tokens > 0
        require(RETRIEVAL in names or not has_store, f"strategy {strategy} takes no retrieval_store: add retrieval")
        require(SUFFIX in names or not shares, f"strategy {strategy} takes no shared_tokens: add suffix")
