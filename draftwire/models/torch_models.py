"""Models that a decoder of torch runs, with static steps if they are wanted."""

from collections.abc import Callable

from draftwire.models.cached_model import CachedModel
from draftwire.models.decoder import Decoder, DraftingDecoder
from draftwire.models.kv_storage import StoredFeatures
from draftwire.models.static_steps import StaticSteps
from draftwire.models.torch_engine import TorchEngine


def torch_model(
    decoder: Decoder,
    cache_tokens: int,
    is_static: bool = False,
    drafting: DraftingDecoder | None = None,
    features: Callable[[int], StoredFeatures] | None = None,
) -> CachedModel:
    """Returns a model with an empty cache.

    Args:
        decoder: computes the forward passes.
        cache_tokens: capacity of the KV cache, tokens of all sequences together.
        is_static: whether some of the steps are run faster, by `StaticSteps`; by default all are run alike.
        drafting: computes `extend` with the same weights, approximately; by default `decoder` does.
        features: see `CachedModel`.
    """
    return CachedModel(TorchEngine(decoder, StaticSteps if is_static else None, drafting), cache_tokens, features)
