"""Checkpoints that are not served, by what their configuration says: they are refused before weights are read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftwire.errors import InvalidRequestError
from draftwire.models.lean_model import KNOWN_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SINKS = "sinks"
"""Name of the parameter in which layers keep attention sinks."""
QUANTIZATIONS = ("quantization_config", "compression_config")
"""Entries of a configuration that say how weights are quantised; the second one is of old checkpoints."""


def refuse_quantised(name: str, config: Any) -> None:
    """Refuses checkpoints whose weights are quantised.

    Raises:
        InvalidRequestError: they are.
    """
    for part in (config, config.get_text_config()):
        found = next(filter(None, (getattr(part, entry, None) for entry in QUANTIZATIONS)), None)
        if found is not None:
            raise InvalidRequestError(
                f"{name} is quantised ({_method_of(found)}), and this engine reads dense float weights: "
                "`--engine vllm` of the verifier serves quantised ones"
            )


def _method_of(quantization: Any) -> str:
    """Returns the method of an entry, with the bits of a weight if it says them, such as "gptq, 4 bits"."""
    values = quantization if isinstance(quantization, Mapping) else vars(quantization)
    method = values.get("quant_method") or "of an unknown method"
    by_flag = [bits for bits in (4, 8) if values.get(f"load_in_{bits}bit") or values.get(f"_load_in_{bits}bit")]
    bits = values.get("bits") or values.get("w_bit") or next(iter(by_flag), None)
    return f"{getattr(method, 'value', method)}" + (f", {bits} bits" if isinstance(bits, int) else "")


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
