"""Features and logits of whole texts, as training needs them: by the decoder that serves, without a lasting cache."""

from collections.abc import Mapping

import torch
from torch import Tensor

from draftwire.models.decoder import Decoder
from draftwire.models.kv_cache import BLOCK_SIZE, KvCache, blocks_for
from draftwire.models.kv_storage import KvStorage
from draftwire.models.packing import pack
from draftwire.models.sequence_model import Segment
from draftwire.options.heads.taps import check_taps, joined


class _Collected:
    """A tap that keeps the features of one pass, in the order of its tokens."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.features: Tensor | None = None

    def take(self, states: Mapping[int, Tensor], slots: Tensor) -> None:
        self.features = joined(states, self.layers)


@torch.no_grad()
def features_and_logits(decoder: Decoder, token_ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns the features of texts of the same length, and the logits after each of their tokens.

    Runs on the torch thread. The results may be used where gradients of other tensors are computed.

    Args:
        decoder: of the model.
        token_ids: `[batch, length] int64`, on the decoder's device; both at least 1.
        layers: ids of the taps; see `draftwire.options.heads.taps`.

    Returns:
        Features, `[batch, length, len(layers) * hidden]`, and logits, `[batch, length, vocab]`, in the dtype of the
        model.

    Raises:
        InvalidRequestError: the model has no such layers.
    """
    check_taps(layers, decoder.num_layers)
    batch, length = token_ids.shape
    cache = KvCache(batch * blocks_for(length) * BLOCK_SIZE)
    collected = _Collected(layers)
    storage = KvStorage(cache.num_slots, tap=collected)
    segments = []
    for _ in range(batch):
        sequence = cache.open()
        cache.append(sequence, length)
        segments.append(Segment(sequence, length))
    step = pack(segments, storage, decoder.device)
    kept = torch.arange(batch * length, device=decoder.device)
    logits = decoder.logits(token_ids.flatten(), step, kept)
    assert collected.features is not None, "a pass passes its states on"
    return collected.features.unflatten(0, (batch, length)), logits.unflatten(0, (batch, length))
