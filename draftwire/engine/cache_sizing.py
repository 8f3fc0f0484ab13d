"""The size of the KV cache where the option `kv_cache_tokens` is "auto": measured once the weights are loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from draftwire.engine.memory import CpuMeter, FreeMemory, GpuMeter, MemoryMeter
from draftwire.engine.model_settings import num_tree_tokens
from draftwire.engine.prefill import LARGEST_CHUNK
from draftwire.errors import InvalidRequestError
from draftwire.models.cached_model import CachedModel
from draftwire.models.card import ModelCard
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for
from draftwire.models.kv_storage import StoredFeatures
from draftwire.runtime.settings import AUTO, EngineSettings

log = structlog.get_logger()

GATHERED_LAYERS = 4
"""How many layers' worth of the whole cache is kept back for attention, which gathers the keys and values of one layer
at a time for all sessions of a step, padded, and the scores over them."""
MOST_SESSIONS = "max_sessions x context"
"""Bound of a cache that every session can fill its context in: more room would never be used."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of a KV cache, and why it is that."""

    num_tokens: int
    bound: str


@dataclass(frozen=True, slots=True)
class FeatureUser:
    """A head beside a target, the fusion of one elsewhere, or a draft model: it may read features of the target."""

    source: Callable[[int], StoredFeatures] | None
    """Returns room for the features that the target keeps for it, of so many tokens; None if it reads none."""
    token_bytes: int
    """Bytes that its own cache stores of a token."""
    resize: Callable[[int], None]
    """Gives its cache room for so many tokens, if it has one. No sequence is open."""


def cache_size(free: FreeMemory, token_bytes: int, layer_bytes: int, most_tokens: int) -> CacheSize:
    """Returns how many tokens a KV cache has room for.

    Args:
        free: what it may take.
        token_bytes: what all layers store of a token.
        layer_bytes: what the largest layer stores of a token.
        most_tokens: more would never be used.

    Raises:
        InvalidRequestError: there is no room for a single block.
    """
    of_a_token = token_bytes + GATHERED_LAYERS * layer_bytes
    num_blocks = free.num_bytes // (of_a_token * BLOCK_SIZE) - 1  # one is for padding
    if num_blocks < 1:
        raise InvalidRequestError(
            f"kv_cache_tokens auto: {free.bound} leaves {free.num_bytes / 2**20:,.0f} MiB for the KV cache, of which a "
            f"token takes {of_a_token / 2**10:,.0f} KiB; lower max_sessions or max_draft_tokens, or give it more memory"
        )
    if most_tokens <= num_blocks * BLOCK_SIZE:
        return CacheSize(blocks_for(most_tokens) * BLOCK_SIZE, MOST_SESSIONS)
    return CacheSize(num_blocks * BLOCK_SIZE, free.bound)


def size_while_loading(settings: EngineSettings) -> int:
    """Returns the size of the cache that a model is loaded with: the option's, or as much as the largest step takes."""
    if isinstance(settings.kv_cache_tokens, int):
        return settings.kv_cache_tokens
    num_drafted = max(settings.max_draft_tokens, num_tree_tokens(settings))
    of_a_session = blocks_for(num_drafted + 2) * BLOCK_SIZE
    return (settings.max_sessions + 1) * of_a_session + LARGEST_CHUNK


class CacheFitter:
    """Finds the size of one process's KV cache. Made before the weights are loaded; used on the torch thread."""

    def __init__(self, settings: EngineSettings, device: str, num_ranks: int = 1) -> None:
        """Notes how much memory is free."""
        self._settings = settings
        is_gpu = torch.device(device).type == "cuda"
        self._meter: MemoryMeter = GpuMeter(device, settings.gpu_memory_utilization) if is_gpu else CpuMeter(num_ranks)

    def begin(self) -> None:
        """Starts to measure: the weights are loaded, and the largest step comes next."""
        self._meter.begin()

    def size_for(self, model: CachedModel, context_length: int, head: FeatureUser | None = None) -> int:
        """Returns how many tokens this process has room for, after the largest step, and logs why.

        Args:
            model: has run the largest step on its small cache, which is dropped.
            context_length: of the model, tokens.
            head: has a cache of as many tokens beside the model's, which is dropped too; None if there is none.

        Raises:
            InvalidRequestError: there is none.
        """
        token_bytes, layer_bytes = model.token_bytes
        model.resize(BLOCK_SIZE)
        if head is not None:
            token_bytes += head.token_bytes
            head.resize(BLOCK_SIZE)
        # CUDA graphs keep a second copy of what a step holds for a while.
        free = self._meter.free(2 if model.is_static else 1)
        most_tokens = self._settings.max_sessions * (context_length + num_tree_tokens(self._settings))
        size = cache_size(free, token_bytes, layer_bytes, most_tokens)
        log.info(
            "models.cache_sized",
            num_tokens=size.num_tokens,
            num_bytes=size.num_tokens * token_bytes,
            token_bytes=token_bytes,
            free_bytes=free.num_bytes,
            bound=size.bound,
        )
        return size.num_tokens


def fitter_of(settings: EngineSettings, device: str, num_ranks: int = 1) -> CacheFitter | None:
    """Returns what finds the size of the KV cache; None if that is set. See `CacheFitter`."""
    return CacheFitter(settings, device, num_ranks) if settings.kv_cache_tokens == AUTO else None


def count_of(
    fitter: CacheFitter | None, card: ModelCard, head: FeatureUser | None = None
) -> Callable[[CachedModel], int] | None:
    """Returns what counts how many tokens a model's cache has room for, for `CachedModel.fit`; None if that is set.

    Call it once the weights are loaded, the head's included: what is measured begins here.
    """
    if fitter is None:
        return None
    fitter.begin()
    return partial(fitter.size_for, context_length=card.description.context_length, head=head)


def run_largest(run: Callable[[], object], settings: EngineSettings) -> None:
    """Runs the largest step.

    Raises:
        InvalidRequestError: the GPU's memory does not suffice.
    """
    try:
        run()
    except torch.OutOfMemoryError as error:
        raise InvalidRequestError(
            f"a step of {settings.max_sessions} sessions with {settings.max_draft_tokens} draft tokens each"
            f"{f', or trees of {settings.max_tree_nodes},' if settings.max_tree_nodes else ''} takes more "
            "memory than is left beside the weights: lower max_sessions, max_draft_tokens or max_tree_nodes"
        ) from error
