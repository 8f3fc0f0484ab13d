"""Loads drafting strategies as a drafter of one process does."""

from types import SimpleNamespace

from draftwire.drafting.strategies import AUTO, LoadedStrategy, load_strategy
from draftwire.engine.ranks.place import Place
from draftwire.options.layer_parallel.layer_settings import LayerParallelSettings
from draftwire.runtime.settings import EngineSettings, ModelSettings, TextDraftSettings
from draftwire_drafter.config import DrafterConfig, DraftSettings
from draftwire_drafter.strategy_context import ConfiguredContext


def load_drafter(
    loading: ModelSettings,
    engine: EngineSettings | None = None,
    drafts: DraftSettings | None = None,
    layers: LayerParallelSettings | None = None,
    strategy: str = AUTO,
    texts: TextDraftSettings | None = None,
) -> LoadedStrategy:
    """Returns what a drafter with these settings runs."""
    config = DrafterConfig(
        loading,
        engine=engine or EngineSettings(),
        drafts=drafts or DraftSettings(),
        layers=layers or LayerParallelSettings(),
        texts=texts or TextDraftSettings(),
    )
    return load_strategy(strategy, ConfiguredContext(config, SimpleNamespace(place=Place())))  # type: ignore[arg-type]
