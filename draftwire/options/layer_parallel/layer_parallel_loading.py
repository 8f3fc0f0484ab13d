"""Loads a drafter that computes the attention of several layers at once, alone or over the ranks of a group."""

from dataclasses import dataclass

import structlog

from draftwire.engine.cache_sizing import count_of, fitter_of, size_while_loading
from draftwire.engine.ranks.group_model import LoadedRank, join_group
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.errors import InvalidRequestError
from draftwire.models.card import ModelCard
from draftwire.models.decoder import Decoder
from draftwire.models.lean_decoder import LeanDecoder, why_not_lean
from draftwire.models.loading import load_model
from draftwire.models.parallel.process_group import ProcessGroup
from draftwire.models.parallel.sharded_loading import LOADING_SECONDS
from draftwire.models.parallel.tensor_parallel import ParallelModel
from draftwire.models.torch_engine import TorchEngine
from draftwire.options.layer_parallel.layer_groups import LayerGroups, LayerParallelism, groups_of_size, written
from draftwire.options.layer_parallel.layer_parallel import LayerParallelDecoder, Ranks
from draftwire.options.layer_parallel.layer_settings import LayerParallelSettings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedLayers:
    """A rank's decoders, and the model's description for peers."""

    card: ModelCard
    exact: Decoder
    """Computes one layer after the other."""
    drafting: LayerParallelDecoder
    """Computes the layers of a group in parallel."""
    groups: LayerGroups


def load_layer_parallel(
    name: str, dtype: str, device: str, revision: str | None, layers: LayerParallelism, group: ProcessGroup
) -> LoadedLayers:
    """Loads this rank's part of a drafter; arguments as for `load_model`. Called on all ranks with the same ones except
    for the device.

    Every rank reads the whole model, keeps all MLPs and drops the attention of layers that other ranks hold. Returns
    when all ranks have loaded their parts. A rank that fails leaves the group, so that no other rank waits for it.

    Raises:
        InvalidRequestError: as `load_model`; or the architecture is not supported, or `layers` does not fit the model.
        OSError: the files cannot be read.
        UnavailableError: another rank is lost, or could not load its part.
    """
    try:
        loaded = load_model(name, dtype, device, revision)
        reason = why_not_lean(loaded.model)
        if reason:
            raise InvalidRequestError(f"layers of {name} cannot run at the same time: {reason}")
        num_layers = loaded.model.config.num_hidden_layers
        groups = layers.of(num_layers)
        largest = max(map(len, groups))
        if group.size > largest:
            raise InvalidRequestError(f"{group.size} ranks cannot share groups of at most {largest} layers")
        ranks = Ranks(group, groups)
        base = LeanDecoder(loaded.model, consumes=True, without_attention=ranks.held_elsewhere)
        exact = LayerParallelDecoder(base, groups_of_size(1, num_layers), ranks)
        drafting = LayerParallelDecoder(base, groups, ranks)
        group.meet(LOADING_SECONDS)
    except BaseException as error:
        group.break_off(f"its part of {name} was not loaded: {type(error).__name__}")
        raise
    return LoadedLayers(loaded.card, exact, drafting, groups)


def load_draft_rank(config: RankConfig) -> LoadedRank:
    """Joins the group and loads this rank's share of the layers.

    Raises:
        InvalidRequestError: the model has no such groups of layers, or its layers cannot be shared.
        UnavailableError: another rank did not join in time, or was lost.
    """
    loading, group = config.loading, join_group(config)
    layers, device = LayerParallelSettings.parse(config.loader_settings).parallelism, str(group.device)
    fitter = fitter_of(config.engine, device, group.size)
    loaded = load_layer_parallel(loading.model, loading.dtype, device, loading.revision, layers, group)
    log.info("models.layers_grouped", groups=written(loaded.groups), rank=group.rank)
    # Not static: graphs with collectives in them have not been tried on GPUs.
    count, num_tokens = count_of(fitter, loaded.card), size_while_loading(config.engine)
    model = ParallelModel(TorchEngine(loaded.exact, drafting=loaded.drafting), num_tokens, group=group, count=count)
    return LoadedRank(loaded.card, model, group, count)


def layer_parallel(decoder: Decoder, reason: str, layers: LayerParallelism) -> LayerParallelDecoder:
    """Returns a decoder that runs the layers of each group at the same time.

    Args:
        decoder: has the weights.
        reason: why it is not the lean one; empty if it is.
        layers: says which layers are a group.

    Raises:
        InvalidRequestError: it is not the lean one, or has no such layers.
    """
    if not isinstance(decoder, LeanDecoder):
        raise InvalidRequestError(f"layers run at the same time on the lean decoder alone, not here: {reason}")
    groups = layers.of(decoder.num_layers)
    log.info("models.layers_grouped", groups=written(groups))
    return LayerParallelDecoder(decoder, groups)
