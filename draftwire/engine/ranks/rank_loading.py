"""Loads one rank's share of a model that several processes compute. To be called on the torch thread."""

import structlog

from draftwire.engine.ranks.group_model import LoadedRank, join_group
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.models.lean_decoder import LeanDecoder
from draftwire.models.parallel.layer_groups import written
from draftwire.models.parallel.layer_parallel_loading import load_layer_parallel
from draftwire.models.parallel.sharded_loading import Progress, load_parallel_target
from draftwire.models.parallel.tensor_parallel import ParallelModel

log = structlog.get_logger()


def load_target_rank(config: RankConfig, on_progress: Progress | None = None) -> LoadedRank:
    """Joins the group and loads this rank's share of the weights.

    Raises:
        InvalidRequestError: the model cannot be shared by so many, or not at all.
        UnavailableError: another rank did not come, or is lost.
    """
    loading, group = config.loading, join_group(config)
    loaded = load_parallel_target(
        loading.model, loading.dtype, str(group.device), loading.revision, group, loading.decoder, on_progress
    )
    is_lean = isinstance(loaded.decoder, LeanDecoder)
    log.info("models.decoder_chosen", decoder="lean" if is_lean else "transformers", rank=group.rank)
    # Not static: graphs with collectives in them have not been tried on GPUs.
    model = ParallelModel(loaded.decoder, config.cache_tokens, group=group)
    return LoadedRank(loaded.card, model, group)


def load_draft_rank(config: RankConfig) -> LoadedRank:
    """Joins the group and loads this rank's share of the layers.

    Raises:
        InvalidRequestError: the model has no such groups of layers, or its layers cannot be shared.
        UnavailableError: another rank did not come, or is lost.
    """
    loading, group = config.loading, join_group(config)
    layers, device = config.layers.parallelism, str(group.device)
    loaded = load_layer_parallel(loading.model, loading.dtype, device, loading.revision, layers, group)
    log.info("models.layers_grouped", groups=written(loaded.groups), rank=group.rank)
    # Not static: graphs with collectives in them have not been tried on GPUs.
    model = ParallelModel(loaded.exact, config.cache_tokens, drafting=loaded.drafting, group=group)
    return LoadedRank(loaded.card, model, group)
