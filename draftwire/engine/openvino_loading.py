"""Loads models for OpenVINO, where it is asked for or is the faster engine."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from draftwire.errors import InvalidRequestError
from draftwire.models.card import ModelCard, path_of
from draftwire.models.configuration import config_of
from draftwire.models.gguf.cache import source_types
from draftwire.models.lean_model import LeanModel
from draftwire.models.lean_reading import why_not_read
from draftwire.models.loading import LoadedModel, dtype_on_cpu, load_lean_model
from draftwire.models.openvino import runtime
from draftwire.models.openvino.kept_weights import KeptWeights
from draftwire.runtime.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class OpenVinoModel:
    """A model to be compiled."""

    folder: Path
    loaded: LoadedModel
    """Its weights, in float32 unless they are rounded to eight bits, with the card and fingerprint of those."""
    quantizes: bool
    """Whether it is to be run with weights of eight bits."""

    @property
    def network(self) -> LeanModel:
        """The weights."""
        assert isinstance(self.loaded.model, LeanModel), "it was loaded as one"
        return self.loaded.model

    def packed(self) -> KeptWeights | None:
        """Returns its matrices in eight bits, as far as they are kept; None if they are not to be rounded."""
        if not self.quantizes:
            return None
        return KeptWeights.of_model(self.folder, self.loaded.description.weights_fingerprint)

    @property
    def name(self) -> str:
        """Engine and weights, as descriptions have them: what computes alike."""
        return f"{'u8' if self.quantizes else 'float32'}/openvino"

    @property
    def card(self) -> ModelCard:
        """Card of what is computed: its numerics are those of this engine and these weights."""
        card = self.loaded.card
        marked = card.description.weights_fingerprint + f"{self.name} {runtime.RELEASE}".encode()
        fingerprint = hashlib.sha256(marked).digest()
        description = replace(card.description, dtype=self.name, weights_fingerprint=fingerprint)
        return replace(card, description=description)


def load_for_openvino(settings: ModelSettings, why_not: str = "", *, reads_trees: bool = False) -> OpenVinoModel | None:
    """Loads a model for OpenVINO, if the settings ask for that or leave the choice and it is the faster engine.

    Where the weights' type is left open, it is eight bits for a model that was quantised in the file it was read from.

    Args:
        settings: of the model.
        why_not: reason why whoever loads it cannot use this engine; empty if there is none.
        reads_trees: whether the model is to read token trees.

    Returns:
        The model; None if another engine is to run it.

    Raises:
        InvalidRequestError: OpenVINO is asked for and cannot run the model, which the message explains; no weights have
            been read then. Otherwise as `load_lean_model`.
        OSError: as `load_lean_model`.
    """
    is_asked_for = settings.engine == "openvino" or settings.weights != "auto"
    if settings.engine not in ("auto", "openvino"):
        return None
    reason = why_not or why_not_with(settings) or runtime.why_not_here() or why_not_model(settings, reads_trees)
    was_quantised = not reason and bool(source_types(Path(path_of(settings.model, settings.dtype))))
    quantizes = settings.weights == "u8" or (settings.weights == "auto" and was_quantised)
    if not is_asked_for and (reason or (not quantizes and _is_in_bfloat16(settings))):
        return None
    loaded = None if reason else load_lean_model(settings.model, "float32", as_stored=quantizes)
    if loaded is None:
        if not is_asked_for:
            return None
        what = "engine openvino" if settings.engine == "openvino" else f"weights {settings.weights}"
        raise InvalidRequestError(f"{what}: {reason or 'its weights are not those of its configuration'}")
    card = replace(loaded.card, description=replace(loaded.description, dtype="float32"))  # what is computed in
    return OpenVinoModel(Path(path_of(settings.model, settings.dtype)), replace(loaded, card=card), quantizes)


def why_not_with(settings: ModelSettings) -> str:
    """Returns the reason why other settings of a model rule OpenVINO out; empty if they do not."""
    if torch.device(settings.device).type != "cpu":
        return f"it runs on CPUs, not on {settings.device}"
    if settings.dtype not in ("auto", "float32"):
        return f"it computes in float32, not in {settings.dtype}"
    return "" if settings.decoder == "auto" else f"decoder {settings.decoder} is of engine draftwire"


def why_not_model(settings: ModelSettings, reads_trees: bool) -> str:
    """Returns the reason why OpenVINO cannot run a model, by its configuration; empty if it can.

    Raises:
        InvalidRequestError: the folder is or lacks something.
        OSError: its files cannot be read.
    """
    path = path_of(settings.model, settings.dtype)
    if not Path(path).is_dir():
        return f"it reads the weights of a folder: huggingface-cli download {path} --local-dir FOLDER"
    config = config_of(path)
    if reason := why_not_read(config):
        return f"it runs models of the Llama family alone, and {reason}"
    kinds = getattr(config, "layer_types", None) or ()
    has_windows = bool(config.sliding_window) if config.model_type == "mistral" else "sliding_attention" in kinds
    return "it reads no token trees with sliding windows: max_tree_nodes" if has_windows and reads_trees else ""


def _is_in_bfloat16(settings: ModelSettings) -> bool:
    """Whether our own decoder would compute in bfloat16, and be faster than OpenVINO in float32."""
    with torch.device("meta"):
        model = LeanModel(config_of(path_of(settings.model, settings.dtype)))
    return settings.dtype == "auto" and dtype_on_cpu(model) is torch.bfloat16
