"""Loading of one rank's share of a model, and rank 0's model. All functions run on the torch thread."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog
import torch
from torch import Tensor

from draftwire.engine.cache_sizing import FeatureUser, count_of, fitter_of, size_while_loading
from draftwire.engine.model_loading import MakeHead, move_weights
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.errors import DraftwireError, GroupLostError, InvalidRequestError, NoRoomError
from draftwire.models.cached_model import CachedModel
from draftwire.models.card import ModelCard
from draftwire.models.decoders import check_decoder
from draftwire.models.huge_pages import resident_bytes
from draftwire.models.kv_cache import CachedSequence, KvCache
from draftwire.models.lean_decoder import LeanDecoder
from draftwire.models.model_names import is_scripted
from draftwire.models.parallel.process_group import GroupSettings, ProcessGroup
from draftwire.models.parallel.sharded_loading import (
    LOADING_SECONDS,
    LoadedShard,
    ModelSource,
    Progress,
    load_parallel_target,
)
from draftwire.models.parallel.tensor_parallel import ParallelModel
from draftwire.models.sequence_model import FeatureSpan, Reading
from draftwire.models.torch_engine import TorchEngine
from draftwire.runtime.settings import require

log = structlog.get_logger()

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank's share of the model, with its process group."""

    card: ModelCard
    model: ParallelModel
    group: ProcessGroup
    count: Callable[[CachedModel], int] | None
    """Says how many tokens the KV cache has room for on this rank; None if its size is set."""


def join_group(config: RankConfig) -> ProcessGroup:
    """Joins the process group, on this rank's device.

    Raises:
        InvalidRequestError: the model cannot be shared, or the device does not exist.
        UnavailableError: another rank did not join in time.
    """
    loading, place = config.loading, config.place
    require(not is_scripted(loading.model), f"a scripted model computes nothing that {place.setting} could share")
    check_decoder(loading.decoder)
    torch.set_num_threads(loading.threads)
    device = place.device(loading.device)
    return ProcessGroup.join(GroupSettings(place.rank, place.size, place.address, device, config.timeout_s))


class GroupModel:
    """Rank 0's model. An error in a forward pass may have struck one rank only, so every such error ends the group.

    Attributes:
        spoke_at: time of the last step or heartbeat, by `time.monotonic`. Any thread may read it.
    """

    def __init__(self, rank: LoadedRank, service: str) -> None:
        """Wraps what rank 0 has loaded, for the service "verifier" or "drafter"."""
        self._model = rank.model
        self._group = rank.group
        self._service = service
        self.vocab_size = rank.model.vocab_size
        self.device = rank.model.device
        self.spoke_at = -math.inf

    @property
    def cache(self) -> KvCache:
        """The block manager of the KV cache, which is the same on all ranks."""
        return self._model.cache

    def fit(self, count: Callable[[CachedModel], int]) -> int:
        """Gives the KV cache the size that fits on all ranks; see `CachedModel.fit`.

        Raises:
            InvalidRequestError: nothing fits on this rank.
            GroupLostError: it does not on another one, or any other error.
        """
        try:
            return self._model.fit(count)
        except InvalidRequestError:
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, DraftwireError) else type(error).__name__
            raise GroupLostError(f"the {self._service}'s group is lost: {reason}") from error

    @property
    def extends_exactly(self) -> bool:
        """Whether `extend` gives the keys, values and logits that `read` would; see `DraftModel.extends_exactly`."""
        return self._model.extends_exactly

    def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> Tensor:
        """Runs a forward pass on all ranks; see `SequenceModel.read` and `DraftModel.read`.

        Raises:
            NoRoomError: the cache is full. Rank 0 checks before it announces the step to the others.
            GroupLostError: any other error.
        """
        return self._together(lambda: self._model.read(readings, fuzzily))

    def extend(
        self, sequences: Sequence[CachedSequence], token_ids: Tensor, parents: Sequence[tuple[int, ...]] = ()
    ) -> Tensor:
        """Reads one more token or nodes of each sequence, on all ranks; see `DraftModel.extend`. Raises as `read`."""
        return self._together(lambda: self._model.extend(sequences, token_ids, parents))

    def keep_path(self, sequence: CachedSequence, path: Sequence[int]) -> None:
        """Keeps a path through a sequence's tree, on all ranks; see `SequenceModel.keep_path`.

        Raises:
            GroupLostError: any error.
        """
        self._together(lambda: self._model.keep_path(sequence, path))

    def features(self, spans: Sequence[FeatureSpan[CachedSequence]]) -> Tensor:
        """Returns what rank 0 keeps of tokens; see `CachedModel.features`. The others take no part."""
        return self._model.features(spans)

    def heartbeat(self) -> None:
        """Exchanges a heartbeat with the other ranks.

        Raises:
            GroupLostError: a rank does not answer.
        """
        self._together(self._model.heartbeat)

    def stop(self) -> None:
        """Stops the other ranks and leaves the group.

        Raises:
            GroupLostError: a rank could not be stopped.
        """
        self._together(self._stop)

    def _stop(self) -> None:
        self._model.stop()
        self._group.leave()

    def _together(self, act: Callable[[], Result]) -> Result:
        try:
            result = act()
        except NoRoomError:
            raise
        except Exception as error:
            # Messages of other errors may quote a prompt.
            reason = str(error) if isinstance(error, DraftwireError) else f"{type(error).__name__} on rank 0"
            raise GroupLostError(f"the {self._service}'s group is lost: {reason}") from error
        self.spoke_at = time.monotonic()
        return result


def load_target_rank(
    config: RankConfig, on_progress: Progress | None = None, make_head: MakeHead | None = None
) -> LoadedRank:
    """Joins the group and loads this rank's share of the weights; on rank 0 alone also the head that drafts beside the
    model.

    Raises:
        InvalidRequestError: the model cannot be shared by so many ranks, or not at all; or the head is not for it.
        UnavailableError: another rank did not join in time, or was lost.
    """
    loading, group = config.loading, join_group(config)
    fitter, resident = fitter_of(config.engine, str(group.device), group.size), resident_bytes()
    source = ModelSource(loading.model, loading.dtype, loading.revision)
    loaded = load_parallel_target(source, group, loading.decoder, on_progress)
    is_lean = isinstance(loaded.decoder, LeanDecoder)
    log.info("models.decoder_chosen", decoder="lean" if is_lean else "transformers", rank=group.rank)
    head = None if make_head is None else _head_of(group, loaded, make_head)
    move_weights(loading, loaded.decoder.device, resident)
    group.meet(LOADING_SECONDS)  # loading the head may take longer than ranks wait for each other
    # Not static: graphs with collectives in them have not been tried on GPUs.
    count, num_tokens = count_of(fitter, loaded.card, head), size_while_loading(config.engine)
    features = None if head is None else head.source
    model = ParallelModel(TorchEngine(loaded.decoder), num_tokens, features=features, group=group, count=count)
    return LoadedRank(loaded.card, model, group, count)


def _head_of(group: ProcessGroup, loaded: LoadedShard, make_head: MakeHead) -> FeatureUser:
    """Loads the head; if that fails, no other rank waits for this one."""
    try:
        return make_head(loaded.card, loaded.decoder.device, loaded.decoder.num_layers)
    except BaseException as error:
        group.break_off(f"the head was not loaded: {type(error).__name__}")
        raise
