"""Loads one rank's share of a model, and guards rank 0's view of the whole. All of it runs on the torch thread."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from draftwire.errors import DraftwireError, GroupLostError, NoRoomError
from draftwire.models.cached_model import Reading
from draftwire.models.decoder import check_decoder
from draftwire.models.lean_decoder import LeanDecoder
from draftwire.models.loading import ModelCard
from draftwire.models.process_group import GroupSettings, ProcessGroup
from draftwire.models.scripted import is_scripted
from draftwire.models.sharded_loading import Progress, load_parallel_target
from draftwire.models.tensor_parallel import ParallelModel
from draftwire.services.settings import require
from draftwire.services.verifier.follower import RankConfig

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """What one rank runs."""

    card: ModelCard
    model: ParallelModel
    group: ProcessGroup


def load_parallel(config: RankConfig, on_progress: Progress | None = None) -> LoadedRank:
    """Joins the group and loads this rank's share of the weights.

    Raises:
        InvalidRequestError: the model cannot be shared by so many, or not at all.
        UnavailableError: another rank did not come, or is lost.
    """
    loading, place = config.loading, config.place
    require(not is_scripted(loading.model), "a scripted model computes nothing that tensor_parallel_size could share")
    check_decoder(loading.decoder)
    torch.set_num_threads(loading.threads)
    device = place.device(loading.device)
    group = ProcessGroup.join(GroupSettings(place.rank, place.size, place.address, device, config.timeout_s))
    loaded = load_parallel_target(
        loading.model, loading.dtype, device, loading.revision, group, loading.decoder, on_progress
    )
    is_lean = isinstance(loaded.decoder, LeanDecoder)
    log.info("models.decoder_chosen", decoder="lean" if is_lean else "transformers", rank=place.rank)
    # Not static: graphs with collectives in them have not been tried on GPUs.
    model = ParallelModel(loaded.decoder, config.cache_tokens, group=group)
    return LoadedRank(loaded.card, model, group)


class GroupModel:
    """Rank 0's model. Whatever fails in a forward pass may have struck on one rank only, so it ends the group."""

    def __init__(self, rank: LoadedRank) -> None:
        self._model = rank.model
        self._group = rank.group
        self.vocab_size = rank.model.vocab_size
        self.cache = rank.model.cache

    def read(self, readings: Sequence[Reading]) -> Tensor:
        """See `SequenceModel.read`.

        Raises:
            NoRoomError: the cache is full, which rank 0 finds out before it tells the others of a step.
            GroupLostError: anything else.
        """
        try:
            return self._model.read(readings)
        except NoRoomError:
            raise
        except Exception as error:
            raise _lost(error) from error

    def heartbeat(self) -> None:
        """Shows the other ranks that this one is alive, and finds out whether they are.

        Raises:
            GroupLostError: one is not.
        """
        try:
            self._model.heartbeat()
        except Exception as error:
            raise _lost(error) from error

    def stop(self) -> None:
        """Lets the other ranks go.

        Raises:
            GroupLostError: one did not hear it.
        """
        try:
            self._model.stop()
            self._group.leave()
        except Exception as error:
            raise _lost(error) from error


def _lost(error: Exception) -> GroupLostError:
    # The messages of other errors may quote what the error is about.
    reason = str(error) if isinstance(error, DraftwireError) else f"{type(error).__name__} on rank 0"
    return GroupLostError(f"the verifier's group is lost: {reason}")
