"""Loads a drafter whose layers' attention is distributed over the ranks of a group."""

from dataclasses import dataclass

from draftwire.errors import InvalidRequestError
from draftwire.models.card import ModelCard
from draftwire.models.decoder import Decoder
from draftwire.models.lean_decoder import LeanDecoder, why_not_lean
from draftwire.models.loading import load_model
from draftwire.models.parallel.layer_groups import LayerGroups, LayerParallelism, groups_of_size
from draftwire.models.parallel.layer_parallel import LayerParallelDecoder, Ranks
from draftwire.models.parallel.process_group import ProcessGroup
from draftwire.models.parallel.sharded_loading import LOADING_SECONDS


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
