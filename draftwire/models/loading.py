"""Loads Hugging Face causal language models, by path or hub name, with their tokenizers."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from draftwire.method.devices import prepare
from draftwire.models.card import ModelCard, context_length_of, path_of, stop_token_ids_of
from draftwire.models.configuration import config_of
from draftwire.models.description import ModelDescription
from draftwire.models.lean_model import LeanModel
from draftwire.models.lean_reading import read_weights, why_not_read
from draftwire.models.quantised import refuse_quantised
from draftwire.models.tokenizer import tokenizer_of
from draftwire.models.unsupported import check_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
LARGE_PARAMETERS = 2**26
"""Parameters of a model whose steps on a CPU take as long as reading its weights does."""

FINGERPRINT_ENTRIES = 64
"""Entries of each weight that the fingerprint hashes."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its card."""

    model: "PreTrainedModel | LeanModel"
    card: ModelCard

    @property
    def description(self) -> ModelDescription:
        """The model's description for peers."""
        return self.card.description


def load_model(name: str, dtype: str = "auto", device: str = "cpu", revision: str | None = None) -> LoadedModel:
    """Loads a model for inference. Safetensors weights only, and no code from the repository is run.

    Args:
        name: folder, or name on the model hub.
        dtype: one of `DTYPES`; "auto" is the checkpoint's own, or on a CPU what `dtype_on_cpu` says.
        device: a torch device.
        revision: commit or branch on the hub.

    Raises:
        InvalidRequestError: the dtype is unknown, the device or the folder is missing, or the model cannot be served:
            it is quantised, keeps a state that cannot be rolled back (recurrent and state-space layers), or uses an
            unsupported kind of attention. No weights have been read then.
        OSError: the files cannot be read.
    """
    path = path_of(name, dtype)
    prepare(device)
    disable_progress_bar()  # would write into the log
    loaded: Any = _load_weights(name, path, dtype, device, revision)
    loaded.eval()
    return LoadedModel(loaded, card_of(loaded, name, path, revision, weights_fingerprint(loaded)))


def load_lean_model(
    name: str, dtype: str = "auto", device: str = "cpu", *, as_stored: bool = False
) -> LoadedModel | None:
    """Loads a model of the Llama family for the lean decoder, without transformers' modelling code; arguments as for
    `load_model`, but for weights that are left `as_stored`, of whatever types.

    Returns:
        The model that `load_model` would load, as far as the lean decoder can tell; None if that is left to it: for
        models on the hub, on other devices than a CPU, and for which `why_not_read` finds a reason.

    Raises:
        InvalidRequestError: the dtype is unknown, the device is missing, the folder is or lacks something, or the
            weights are quantised.
        OSError: the files cannot be read.
    """
    path = path_of(name, dtype)
    prepare(device)
    if not Path(path).is_dir() or torch.device(device).type != "cpu":
        return None
    config = config_of(path)
    refuse_quantised(name, config)
    model = None if why_not_read(config) else read_weights(Path(path), config)
    if model is None:
        return None
    try:
        model.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:  # there is none
        model.generation_config = GenerationConfig.from_model_config(config)
    if not as_stored:
        model.to(dtype_on_cpu(model) if dtype == "auto" else getattr(torch, dtype))
    return LoadedModel(model, card_of(model, name, path, None, weights_fingerprint(model)))


def card_of(model: Any, name: str, path: str, revision: str | None, fingerprint: bytes) -> ModelCard:
    """Returns the card of a model from a folder or the hub, whose weights may be on the meta device."""
    tokenizer = tokenizer_of(path, model.config, revision)
    return ModelCard.of(
        tokenizer,
        name=Path(path).name if Path(path).is_dir() else name,
        revision=getattr(model.config, "_commit_hash", None) or "",
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        context_length=context_length_of(model.config, name),
        stop_token_ids=stop_token_ids_of(getattr(model.generation_config, "eos_token_id", None), tokenizer),
        weights_fingerprint=fingerprint,
    )


def _load_weights(name: str, path: str, dtype: str, device: str, revision: str | None) -> "PreTrainedModel":
    """Returns a model on its device; refuses it before any weight is read, if it is not supported."""
    from transformers import AutoModelForCausalLM, PreTrainedModel

    config = config_of(path, revision)
    refuse_quantised(name, config)
    network = on_meta(config)
    check_layers(name, network)
    if dtype == "auto" and torch.device(device).type == "cpu":
        dtype = str(dtype_on_cpu(network)).removeprefix("torch.")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, revision=revision, use_safetensors=True
    )
    return cast(PreTrainedModel, loaded.to(device))


def on_meta(config: Any) -> "PreTrainedModel":
    """Returns a model of a configuration on the meta device: shapes without weights."""
    from transformers import AutoModelForCausalLM, PreTrainedModel

    with torch.device("meta"):
        return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config).eval())


def dtype_on_cpu(network: "PreTrainedModel | LeanModel") -> torch.dtype:
    """Returns the dtype of "auto" on a CPU: bfloat16 if a large model, which may be on the meta device, is stored so
    and this CPU multiplies it.

    Else float32: other CPUs convert bfloat16 in every product, and reading a small model takes no time.
    """
    is_stored_so = getattr(network.config, "dtype", None) is torch.bfloat16
    is_large = sum(weight.numel() for weight in network.parameters()) >= LARGE_PARAMETERS
    return torch.bfloat16 if is_stored_so and is_large and cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16() -> bool:
    """Returns whether this CPU has instructions that multiply bfloat16; without, it is slower than float32."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older releases do not say
    return any(capabilities.get(name, False) for name in BFLOAT16_INSTRUCTIONS)


def weights_fingerprint(model: torch.nn.Module) -> bytes:
    """Returns the SHA-256 of the weights' names, shapes and types, and of some entries of each.

    Distinguishes models that were trained separately; no protection against deliberate changes of weights.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        entries = tensor.flatten()
        places = torch.linspace(
            0, max(0, len(entries) - 1), min(FINGERPRINT_ENTRIES, len(entries)), dtype=torch.float64
        )
        digest.update(entries[places.to(torch.int64).to(entries.device)].cpu().view(torch.uint8).numpy().tobytes())
    return digest.digest()
