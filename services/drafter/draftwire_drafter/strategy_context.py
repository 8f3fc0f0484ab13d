"""Settings and model loading for a drafting strategy. Torch is imported where weights are loaded, and not before."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from draftwire.engine.model_settings import limited, num_tree_tokens, refuse_settings_of_weights, size_without_memory
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.method.quantization import Quantization
from draftwire.models.card import ModelCard, load_card
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.model_names import is_scripted
from draftwire.models.script import Script
from draftwire.runtime.settings import require
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.engine import DraftEngine

if TYPE_CHECKING:
    from draftwire.engine.model_loading import MakeDrafting
    from draftwire.models.sequence_model import DraftModel
    from draftwire.options.heads.draft_head import DraftHead
    from draftwire.options.heads.features import FeatureNeed
    from draftwire.options.model_free.registry import TextDrafters

LAST_ONLY = 32
"""`feature_window` of heads that read the features of the last token alone: more than a round commits."""


class ConfiguredContext:
    """`draftwire.drafting.strategies.StrategyContext` from a drafter's settings. Used on the torch thread."""

    def __init__(self, config: DrafterConfig, group: GroupGuard) -> None:
        """Takes the drafter's settings and the ranks that share its model."""
        self._config = config
        self._group = group
        self._num_tokens: int | None = None

    @property
    def kv_cache_tokens(self) -> int:
        """Size of the KV cache, tokens. The strategy has been loaded."""
        assert self._num_tokens is not None, "every strategy limits its card"
        return self._num_tokens

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

    @property
    def max_tree_nodes(self) -> int:
        """Draft tokens of the largest token tree."""
        return self._config.engine.max_tree_nodes

    def limited(self, card: ModelCard) -> ModelCard:
        """Returns the card with the context length limited to one session's room in the KV cache."""
        if self._num_tokens is None:
            self._num_tokens = size_without_memory(self._config.engine, card.description.context_length)
        return limited(card, self._num_tokens, num_tree_tokens(self._config.engine))

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

            loaded = load_draft_model(config.loading, config.engine, self._make_drafting())
            self._size_cache(loaded.card, loaded.model, loaded.fit)
            if loaded.make_steps is not None:
                deque(loaded.make_steps(), maxlen=0)
            return loaded.card, loaded.model
        from draftwire.engine.ranks.group_model import GroupModel
        from draftwire.options.layer_parallel.layer_parallel_loading import load_draft_rank

        rank = load_draft_rank(RankConfig.of(config, place))
        model = GroupModel(rank, "drafter")
        self._group.take(model)
        self._size_cache(rank.card, model, None if rank.count is None else partial(model.fit, rank.count))
        return rank.card, model

    def _make_drafting(self) -> "MakeDrafting | None":
        """Returns what makes the decoder that runs layers at the same time; None if none do."""
        if not self._config.layers.is_parallel:
            return None
        from draftwire.options.layer_parallel.layer_parallel_loading import layer_parallel

        return partial(layer_parallel, layers=self._config.layers.parallelism)

    def _size_cache(self, card: ModelCard, model: "DraftModel", fit: Callable[[], int] | None) -> None:
        """Finds the size of the KV cache, if that is not set."""
        if fit is None:
            return
        from draftwire.engine.cache_sizing import run_largest
        from draftwire.options.trees.session_trees import SessionTrees
        from draftwire.options.trees.tree_model_drafter import TreeModelDrafter

        engine = self._config.engine
        context_length = min(card.description.context_length, model.cache.num_blocks * BLOCK_SIZE)
        drafter = TreeModelDrafter(model, context_length, 0, self.quantization, self.calibrates)
        trial = DraftEngine(drafter, [SessionTrees(engine.max_tree_nodes)])
        run_largest(partial(trial.run_largest, engine.max_sessions, engine.max_draft_tokens), engine)
        self._num_tokens = fit()

    def load_head(self) -> "tuple[ModelCard, DraftHead, FeatureNeed]":
        """Loads the head of the option `head`, with what it shares with the target, and what it has to be fed with."""
        import torch

        from draftwire.method.devices import prepare
        from draftwire.models.card import path_of
        from draftwire.options.heads.features import FeatureNeed
        from draftwire.options.heads.head_loading import load_fusion, load_head

        config, loading = self._config, self._config.loading
        require(not config.layers.is_parallel, "a head has no layers that could run at the same time")
        assert config.heads.head is not None, "checked with the strategy"
        torch.set_num_threads(loading.threads)
        prepare(loading.device)
        folder, target = Path(config.heads.head).expanduser(), Path(path_of(loading.model, loading.dtype))
        card = self.limited(load_card(loading.model, loading.revision))
        dtype = None if loading.dtype == "auto" else getattr(torch, loading.dtype)
        if dtype is None and loading.device == "cpu":
            dtype = torch.float32
        head = load_head(folder, target, self.kv_cache_tokens, dtype, loading.device)
        description = replace(card.description, name=folder.name, dtype=str(head.dtype).removeprefix("torch."))
        window = (
            config.heads.feature_window if head.config.reads_history else min(LAST_ONLY, config.heads.feature_window)
        )
        fingerprint = load_fusion(folder, target).fingerprint
        need = FeatureNeed(fingerprint, config.heads.feature_encoding, head.config.hidden_size, window)
        return replace(card, description=description), head, need

    def require_no_weights(self, what: str) -> None:
        """Refuses settings that have no effect without weights; `what` names the kind of model."""
        require(not self._config.layers.is_parallel, f"{what} has no layers that could run at the same time")
        refuse_settings_of_weights(self._config.loading, what)

    def load_text_drafters(self, card: ModelCard) -> "TextDrafters":
        """Returns what drafts without a model, for texts of a vocabulary."""
        from draftwire.options.model_free.registry import TextDrafters

        texts = self._config.texts
        return TextDrafters.load(texts.retrieval_store, texts.shared_tokens, card.description.vocabulary_fingerprint)

    def refuse_texts_but(self, *names: str) -> None:
        """Refuses settings of text drafters that are not among those named."""
        texts, strategy = self._config.texts, self._config.drafts.strategy
        has_store, shares = texts.retrieval_store is not None, texts.shared_tokens > 0
        require("retrieval" in names or not has_store, f"strategy {strategy} takes no retrieval_store: add retrieval")
        require("suffix" in names or not shares, f"strategy {strategy} takes no shared_tokens: add suffix")
