"""Checkpoints that are not served, by what their configuration says: they are refused before weights are read."""

from typing import TYPE_CHECKING

from draftwire.errors import InvalidRequestError
from draftwire.models.lean_model import KNOWN_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SINKS = "sinks"
"""Name of the parameter in which layers keep attention sinks."""


def check_layers(name: str, model: "PreTrainedModel") -> None:
    """Refuses models, perhaps on the meta device, with a state that cannot be rolled back, or a kind of attention that
    `paged_attention` lacks.

    Mixtures of experts pass: transformers routes each token by itself, whatever shares its step.

    Raises:
        InvalidRequestError: the model is one of those; the message says why.
    """
    if getattr(model, "_is_stateful", False):
        raise InvalidRequestError(f"{name} keeps a recurrent state, which speculative decoding cannot roll back")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {*KNOWN_LAYERS}
    if kinds:
        raise InvalidRequestError(f"{name} has layers of a kind that is not supported: {', '.join(sorted(kinds))}")
    if getattr(config, "attention_chunk_size", None):
        raise InvalidRequestError(f"{name} attends to chunks, which is not supported")
    if not getattr(model, "_supports_attention_backend", False):
        raise InvalidRequestError(f"{name} computes attention in its own way, which is not supported")
    if any(parameter.rpartition(".")[2] == SINKS for parameter, _ in model.named_parameters()):
        raise InvalidRequestError(f"{name} has attention sinks, which are not supported")
