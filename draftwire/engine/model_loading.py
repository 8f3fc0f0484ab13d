"""Loads the models of the services, by name, folder or script. Called on the torch thread."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import structlog
import torch

from draftwire.engine.cache_sizing import CacheFitter, FeatureUser, count_of, fitter_of, size_while_loading
from draftwire.engine.model_settings import refuse_settings_of_weights, size_without_memory
from draftwire.engine.openvino_loading import OpenVinoModel, load_for_openvino
from draftwire.method.devices import prepare
from draftwire.models.cached_model import CachedModel
from draftwire.models.card import ModelCard
from draftwire.models.decoder import Decoder, DraftingDecoder
from draftwire.models.decoders import check_decoder, decoder_of
from draftwire.models.huge_pages import LEAST_TOTAL_BYTES, resident_bytes, use_huge_pages
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.lean_decoder import LeanDecoder, why_not_lean
from draftwire.models.loading import LoadedModel, load_lean_model, load_model
from draftwire.models.model_names import is_scripted
from draftwire.models.openvino.openvino_engine import OpenVinoEngine
from draftwire.models.openvino.warming import warm_up
from draftwire.models.script import Script
from draftwire.models.scripted import ScriptedTarget
from draftwire.models.sequence_model import SequenceModel
from draftwire.models.torch_models import torch_model
from draftwire.runtime.settings import EngineSettings, ModelSettings

log = structlog.get_logger()


AnyModel = TypeVar("AnyModel", bound=SequenceModel, covariant=True)


@dataclass(frozen=True, slots=True)
class FittedModel(Generic[AnyModel]):
    """A loaded model and its card."""

    card: ModelCard
    model: AnyModel
    fit: Callable[[], int] | None = None
    """Gives the KV cache the size that fits, and returns it, once the largest step has been run; None if its size is
    set."""
    make_steps: Callable[[], Iterator[object]] | None = None
    """Makes the first steps of the sizes that are needed soon, once the cache has its size, and returns what makes
    those of others, one each time; None if first steps take no longer."""


MakeHead = Callable[[ModelCard, torch.device, int], FeatureUser]
"""Loads the head of a target of so many layers, onto its device, with room in its cache for the largest step."""
MakeDrafting = Callable[[Decoder, str], DraftingDecoder]
"""Makes what computes drafts with the weights of a decoder, which is the lean one, or else is not for some reason."""


def load_target(
    settings: ModelSettings, engine: EngineSettings, make_head: MakeHead | None = None
) -> FittedModel[SequenceModel]:
    """Loads a verifier's model; see `load_model`."""
    if is_scripted(settings.model):
        refuse_settings_of_weights(settings, "a scripted model")
        torch.set_num_threads(settings.threads)  # verification rules still run on torch
        script = Script.parse(settings.model)
        num_tokens = size_without_memory(engine, script.context_length)
        return FittedModel(script.card(), ScriptedTarget(script, num_tokens))
    return _load(settings, engine, make_head=make_head)


def load_draft_model(
    settings: ModelSettings, engine: EngineSettings, make_drafting: MakeDrafting | None = None
) -> FittedModel[CachedModel]:
    """Loads a drafter's model; see `load_model`."""
    return _load(settings, engine, make_drafting=make_drafting, drafts=True)


def _load(
    settings: ModelSettings,
    engine: EngineSettings,
    make_drafting: MakeDrafting | None = None,
    make_head: MakeHead | None = None,
    *,
    drafts: bool = False,
) -> FittedModel[CachedModel]:
    """Returns the model that runs the weights."""
    check_decoder(settings.decoder)
    torch.set_num_threads(settings.threads)
    prepare(settings.device)
    resident = resident_bytes()
    fitter = fitter_of(engine, settings.device)
    if chosen := load_for_openvino(
        settings, _why_not_openvino(engine, make_drafting, drafts=drafts), reads_trees=engine.max_tree_nodes > 0
    ):
        return _compile(settings, engine, chosen, fitter, make_head)
    lean = None
    if settings.decoder != "transformers":
        lean = load_lean_model(settings.model, settings.dtype, settings.device)
    loaded = lean or load_model(settings.model, settings.dtype, settings.device, settings.revision)
    decoder, reason = _decoder_of(loaded, settings)
    head = None if make_head is None else make_head(loaded.card, decoder.device, decoder.num_layers)
    move_weights(settings, decoder.device, resident)
    is_static = isinstance(decoder, LeanDecoder) and settings.cuda_graphs and decoder.device.type == "cuda"
    drafting = None if make_drafting is None else make_drafting(decoder, reason)
    features = None if head is None else head.source
    model = torch_model(decoder, size_while_loading(engine), is_static, drafting, features)
    count = count_of(fitter, loaded.card, head)
    return FittedModel(loaded.card, model, None if count is None else partial(model.fit, count))


def _why_not_openvino(engine: EngineSettings, make_drafting: MakeDrafting | None, *, drafts: bool) -> str:
    """Returns the reason why a service cannot use OpenVINO; empty if it can."""
    if make_drafting is not None:
        return "layers are run at the same time by engine draftwire alone"
    return "drafters grow token trees with engine draftwire alone" if drafts and engine.max_tree_nodes else ""


def _compile(
    settings: ModelSettings,
    engine: EngineSettings,
    chosen: OpenVinoModel,
    fitter: CacheFitter | None,
    make_head: MakeHead | None,
) -> FittedModel[CachedModel]:
    """Returns the model that OpenVINO runs."""
    network, num_layers = chosen.network, chosen.network.config.num_hidden_layers
    head = None if make_head is None else make_head(chosen.loaded.card, network.device, num_layers)
    source = None if head is None else head.source
    taps = () if source is None else source(BLOCK_SIZE).layers
    packed = chosen.packed()
    compiled = OpenVinoEngine(network, threads=settings.threads, packed=packed, taps=taps)
    if packed is not None:
        packed.keep()
    log.info("models.engine_chosen", engine="openvino", weights=chosen.name)
    model = CachedModel(compiled, size_while_loading(engine), source)
    count = count_of(fitter, chosen.card, head)
    fit = None if count is None else partial(model.fit, count)
    return FittedModel(chosen.card, model, fit, partial(warm_up, model))


def move_weights(settings: ModelSettings, device: torch.device, resident: int) -> None:
    """Moves loaded weights to huge pages, if they are many, in the memory of a CPU, and the settings want it.

    Args:
        settings: of the model.
        device: of its weights.
        resident: memory of this process before they were loaded, bytes.
    """
    is_large = resident_bytes() - resident >= LEAST_TOTAL_BYTES
    if settings.huge_pages and device.type == "cpu" and is_large:
        log.info("models.huge_pages_used", num_bytes=use_huge_pages())


def _decoder_of(loaded: LoadedModel, settings: ModelSettings) -> tuple[Decoder, str]:
    """Returns the decoder, and the reason why it is not the lean one; empty if it is."""
    decoder = decoder_of(loaded.model, settings.decoder, consumes=True)
    is_lean = isinstance(decoder, LeanDecoder)
    reason = "" if is_lean else why_not_lean(loaded.model) or "asked for"
    log.info("models.decoder_chosen", decoder="lean" if is_lean else "transformers", reason=reason)
    return decoder, reason
