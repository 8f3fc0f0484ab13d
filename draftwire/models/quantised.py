"""Quantised checkpoints, which are refused by what their configuration says. No torch here."""

from collections.abc import Mapping
from typing import Any

from draftwire.errors import InvalidRequestError

QUANTIZATIONS = ("quantization_config", "compression_config")
"""Entries of a configuration that say how weights are quantised; the second one is of old checkpoints."""


def refuse_quantised(name: str, config: Any) -> None:
    """Refuses checkpoints whose weights are quantised, by their configuration or the values in its file.

    Raises:
        InvalidRequestError: they are.
    """
    parts = (config, config.get("text_config")) if isinstance(config, Mapping) else (config, config.get_text_config())
    for part in parts:
        found = next(filter(None, (_entry(part, entry) for entry in QUANTIZATIONS)), None)
        if found is not None:
            raise InvalidRequestError(
                f"{name} is quantised ({_method_of(found)}), and this engine reads dense float weights: "
                "`--engine vllm` of the verifier serves quantised ones"
            )


def _entry(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def _method_of(quantization: Any) -> str:
    """Returns the method of an entry, with the bits of a weight if it says them, such as "gptq, 4 bits"."""
    values = quantization if isinstance(quantization, Mapping) else vars(quantization)
    method = values.get("quant_method") or "of an unknown method"
    by_flag = [bits for bits in (4, 8) if values.get(f"load_in_{bits}bit") or values.get(f"_load_in_{bits}bit")]
    bits = values.get("bits") or values.get("w_bit") or next(iter(by_flag), None)
    return f"{getattr(method, 'value', method)}" + (f", {bits} bits" if isinstance(bits, int) else "")
