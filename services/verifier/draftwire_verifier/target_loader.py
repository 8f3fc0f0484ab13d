"""Loads what a verifier serves, on the torch thread: its target, and what is configured beside it."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from draftwire.engine.cache_sizing import FeatureUser, run_largest
from draftwire.engine.model_loading import FittedModel, load_target
from draftwire.engine.model_settings import limited
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.engine.step_engine import StepEngine
from draftwire.engine.target_session import Step, StepDrafter, StepResult
from draftwire.models.card import ModelCard
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.sequence_model import SequenceModel
from draftwire.options.draft_model.draft_model_name import DRAFT_MODEL
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.progress import LoadProgress

if TYPE_CHECKING:
    from draftwire.options.draft_model.own_draft_model import OwnDraftModel
    from draftwire.options.heads.target_heads import TargetHead


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A target, ready for steps."""

    card: ModelCard
    engine: StepEngine[Step, StepResult]
    kv_cache_tokens: int
    """Size of the KV cache, tokens."""
    max_tree_nodes: int = 0
    """Most tokens of a token tree."""
    head: "TargetHead | None" = None
    """The head whose features are kept; None if none are."""
    drafts_by: tuple[str, ...] = ()
    """Strategies by which the engine drafts."""


class TargetLoader:
    """Loads what is configured. `group` takes what several processes share."""

    def __init__(self, config: VerifierConfig, group: GroupGuard) -> None:
        self._config, self._group = config, group
        self._head: TargetHead | None = None
        self._draft_model: OwnDraftModel | None = None

    def load(self) -> LoadedEngine:
        """Loads the target, and the head beside it.

        Raises:
            InvalidRequestError: something cannot be loaded as the settings say; the message says what.
            OSError: files cannot be read.
        """
        return self._load_vllm() if self._config.is_vllm else self._load_own()

    def _load_vllm(self) -> LoadedEngine:
        from draftwire_verifier.vllm.vllm_engine import load_vllm

        loaded = load_vllm(self._config)
        self._group.take(loaded.engine)
        return LoadedEngine(loaded.card, loaded.engine, loaded.engine.num_cached_tokens)  # it reads no trees

    def _load_own(self) -> LoadedEngine:
        config = self._config
        if config.heads.folder is not None:
            from draftwire.options.heads.target_heads import TargetHead

            drafts = config.heads.draft_head is not None
            self._head = TargetHead(config.heads.folder, config.loading, config.engine, drafts=drafts)
        settings = config.own_drafts.loading(config.loading)
        if settings is not None:
            from draftwire.options.draft_model.own_draft_model import OwnDraftModel

            self._draft_model = OwnDraftModel(settings, config.loading, config.engine)
        target, max_nodes = self._load_target(), config.engine.max_tree_nodes
        num_tokens = self._size_cache(target)
        card = limited(target.card, num_tokens, max_nodes)
        if self._head is not None:
            self._head.resize(num_tokens)  # a text has fewer pairs than tokens
        if self._draft_model is not None:
            self._draft_model.resize(num_tokens)
        names = () if self._head is None else self._head.names
        names += () if self._draft_model is None else (DRAFT_MODEL,)
        return LoadedEngine(card, self._engine_of(target, card), num_tokens, max_nodes, self._head, names)

    def _size_cache(self, target: FittedModel[SequenceModel]) -> int:
        """Returns the size of the KV cache, which is found if it is not set, tokens."""
        settings, size = self._config.engine, target.model.cache.num_blocks * BLOCK_SIZE
        if target.fit is None:
            return settings.kv_cache_tokens if isinstance(settings.kv_cache_tokens, int) else size
        trial = self._engine_of(target, limited(target.card, size))
        most_rows = max(settings.max_draft_tokens, settings.max_tree_nodes)
        run_largest(partial(trial.run_largest, settings.max_sessions, most_rows), settings)
        return target.fit()

    def _load_target(self) -> FittedModel[SequenceModel]:
        config = self._config
        make_head = None if self._head is None and self._draft_model is None else self._load_beside
        if self._group.place.size == 1:
            return load_target(config.loading, config.engine, make_head)
        from draftwire.engine.ranks.group_model import GroupModel, load_target_rank

        progress = LoadProgress(config.server.log_format)
        try:
            rank = load_target_rank(RankConfig.of(config, self._group.place), progress, make_head)
        finally:
            progress.end()
        model = GroupModel(rank, "verifier")
        self._group.take(model)
        return FittedModel(rank.card, model, None if rank.count is None else partial(model.fit, rank.count))

    def _load_beside(self, card: ModelCard, device: torch.device, num_layers: int) -> FeatureUser:
        """Loads what drafts beside a target of so many layers; see `MakeHead`."""
        head = None if self._head is None else self._head.load(card, device, num_layers)
        if self._draft_model is not None:
            return self._draft_model.load(card, head)
        assert head is not None, "there is one of the two"
        return head

    def _engine_of(self, target: FittedModel[SequenceModel], card: ModelCard) -> TargetEngine:
        drafters: dict[str, StepDrafter] = {}
        if self._head is not None:
            drafters |= self._head.drafters(target.model)
        if self._draft_model is not None:
            drafters[DRAFT_MODEL] = self._draft_model.drafts(target.model.vocab_size)
        return TargetEngine(target.model, card.description.context_length, drafters, target.make_steps)
