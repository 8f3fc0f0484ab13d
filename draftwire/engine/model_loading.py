"""Loads the models of the services, by name, folder or script. Called on the torch thread."""

from dataclasses import dataclass

import structlog
import torch

from draftwire.engine.model_settings import limited, refuse_settings_of_weights
from draftwire.errors import InvalidRequestError
from draftwire.models.cached_model import CachedModel, DraftModel, SequenceModel
from draftwire.models.card import ModelCard
from draftwire.models.decoder import Decoder, check_decoder, decoder_of
from draftwire.models.lean_decoder import LeanDecoder, why_not_lean
from draftwire.models.loading import LoadedModel, load_lean_model, load_model
from draftwire.models.parallel.layer_groups import LayerParallelism, written
from draftwire.models.parallel.layer_parallel import LayerParallelDecoder
from draftwire.models.script import Script, is_scripted
from draftwire.models.scripted import ScriptedTarget
from draftwire.runtime.settings import EngineSettings, LayerParallelSettings, ModelSettings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A loaded target model and its card."""

    card: ModelCard
    model: SequenceModel


def load_target(settings: ModelSettings, engine: EngineSettings) -> LoadedTarget:
    """Loads a verifier's model; see `load_model`."""
    if is_scripted(settings.model):
        refuse_settings_of_weights(settings, "a scripted model")
        torch.set_num_threads(settings.threads)  # verification rules still run on torch
        script = Script.parse(settings.model)
        return LoadedTarget(limited(script.card(), engine), ScriptedTarget(script, engine.kv_cache_tokens))
    loaded = _load(settings)
    return LoadedTarget(limited(loaded.card, engine), _cached(loaded, settings, engine))


def load_draft_model(
    settings: ModelSettings, engine: EngineSettings, layers: LayerParallelSettings
) -> tuple[ModelCard, DraftModel]:
    """Loads a drafter's model; see `load_model`.

    Raises:
        InvalidRequestError: its layers cannot be grouped as the settings say.
    """
    loaded = _load(settings)
    return loaded.card, _cached(loaded, settings, engine, layers)


def _load(settings: ModelSettings) -> LoadedModel:
    check_decoder(settings.decoder)
    torch.set_num_threads(settings.threads)
    lean = None
    if settings.decoder != "transformers":
        lean = load_lean_model(settings.model, settings.dtype, settings.device)
    return lean or load_model(settings.model, settings.dtype, settings.device, settings.revision)


def _cached(
    loaded: LoadedModel, settings: ModelSettings, engine: EngineSettings, layers: LayerParallelSettings | None = None
) -> CachedModel:
    decoder = decoder_of(loaded.model, settings.decoder, consumes=True)
    is_lean = isinstance(decoder, LeanDecoder)
    reason = "" if is_lean else why_not_lean(loaded.model) or "asked for"
    log.info("models.decoder_chosen", decoder="lean" if is_lean else "transformers", reason=reason)
    is_static = is_lean and settings.cuda_graphs and decoder.device.type == "cuda"
    drafting = None
    if layers is not None and layers.is_parallel:
        drafting = _layer_parallel(decoder, layers.parallelism, reason)
    return CachedModel(decoder, engine.kv_cache_tokens, is_static, drafting)


def _layer_parallel(decoder: Decoder, layers: LayerParallelism, reason: str) -> LayerParallelDecoder:
    """Returns a decoder that runs the layers of each group at the same time."""
    if not isinstance(decoder, LeanDecoder):
        raise InvalidRequestError(f"layers run at the same time on the lean decoder alone, not here: {reason}")
    groups = layers.of(decoder.num_layers)
    log.info("models.layers_grouped", groups=written(groups))
    return LayerParallelDecoder(decoder, groups)
