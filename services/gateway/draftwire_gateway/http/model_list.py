"""GET /v1/models: the target, under each of its names. Drafters only draft, and are no models of their own here."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.refusal import RefusedError

ListDrafters = Callable[[], Collection[str]]
"""Returns the names of the models of the connected drafters."""


def listed_models(core: GatewayCore, drafters: ListDrafters, created: int) -> list[dict[str, Any]]:
    """Returns the models that can be asked; `created` is their creation time, seconds since 1970."""
    target = core.description
    own = {
        "vocab_size": target.vocab_size,
        "dtype": target.dtype,
        "revision": target.revision,
        "num_speculative_tokens": core.defaults.num_speculative_tokens,
        "max_speculative_tokens": core.defaults.max_speculative_tokens,
        "rejection_sample_method": core.defaults.rule,
        "drafters": sorted(drafters()),
    }
    common = {
        "object": "model",
        "created": created,
        "owned_by": "draftwire",
        "root": target.name,
        "max_model_len": target.context_length,
        "draftwire": own,
    }
    return [{"id": name, **common} for name in core.model_names]


def model_named(name: str, models: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the model of a name.

    Raises:
        RefusedError: there is no model of this name.
    """
    for model in models:
        if model["id"] == name:
            return model
    raise RefusedError(404, "there is no such model here", code="model_not_found", param="model")
