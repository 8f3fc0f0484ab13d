"""Loads what a verifier serves, on the torch thread: its target, and what is configured beside it."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from draftwire.engine.cache_sizing import FeatureUser, run_largest, size_while_loading
from draftwire.engine.model_loading import LoadedTarget, load_target
from draftwire.engine.model_settings import limited
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.engine.step_engine import StepEngine
from draftwire.engine.target_session import Step, StepResult
from draftwire.models.card import ModelCard, path_of
from draftwire.models.decoder import Decoder
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.script import is_scripted
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.engine import TargetEngine
from draftwire_verifier.progress import LoadProgress

if TYPE_CHECKING:
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

    def load(self) -> LoadedEngine:
        """Loads the target, and the head beside it.

        Raises:
            InvalidRequestError: something cannot be loaded as the settings say; the message says what.
            OSError: files cannot be read.
        """
        return self._load_vllm() if self._config.target.is_vllm else self._load_own()

    def _load_vllm(self) -> LoadedEngine:
        from draftwire_verifier.vllm.vllm_engine import load_vllm

        loaded = load_vllm(self._config)
        self._group.take(loaded.engine)
        return LoadedEngine(loaded.card, loaded.engine, loaded.engine.num_cached_tokens)  # it reads no trees

    def _load_own(self) -> LoadedEngine:
        heads, loading, max_nodes = self._config.heads, self._config.loading, self._config.engine.max_tree_nodes
        if heads.folder is not None and not is_scripted(loading.model):
            from draftwire.options.heads.target_heads import TargetHead

            target = Path(path_of(loading.model, loading.dtype))
            self._head = TargetHead(Path(heads.folder).expanduser(), target, drafts=heads.draft_head is not None)
        target = self._load_target()
        num_tokens = self._size_cache(target)
        card = limited(target.card, num_tokens, max_nodes)
        if self._head is not None:
            self._head.resize(num_tokens)  # a text has fewer pairs than tokens
        names = () if self._head is None else self._head.names
        return LoadedEngine(card, self._engine_of(target, card), num_tokens, max_nodes, self._head, names)

    def _size_cache(self, target: LoadedTarget) -> int:
        """Returns the size of the KV cache, which is found if it is not set, tokens."""
        settings, size = self._config.engine, target.model.cache.num_blocks * BLOCK_SIZE
        if target.fit is None:
            return settings.kv_cache_tokens if isinstance(settings.kv_cache_tokens, int) else size
        trial = self._engine_of(target, limited(target.card, size))
        most_rows = max(settings.max_draft_tokens, settings.max_tree_nodes)
        run_largest(partial(trial.run_largest, settings.max_sessions, most_rows), settings)
        return target.fit()

    def _load_target(self) -> LoadedTarget:
        config = self._config
        make_head = self._make_head if config.heads.folder is not None else None
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
        return LoadedTarget(rank.card, model, None if rank.count is None else partial(model.fit, rank.count))

    def _make_head(self, card: ModelCard, decoder: Decoder) -> FeatureUser:
        assert self._head is not None, "it was found to fit"
        return self._head.load(card, decoder, size_while_loading(self._config.engine))

    def _engine_of(self, target: LoadedTarget, card: ModelCard) -> TargetEngine:
        drafters = {} if self._head is None else self._head.drafters(target.model)
        return TargetEngine(target.model, card.description.context_length, drafters)
