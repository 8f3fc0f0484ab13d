"""Loads a language model that drafts beside a verifier's target. Runs on the torch thread."""

from collections import deque
from dataclasses import replace

import torch

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.engine.cache_sizing import FeatureUser, size_while_loading
from draftwire.engine.model_loading import FittedModel, load_draft_model
from draftwire.engine.step_drafts import LOCAL_QUANTIZATION
from draftwire.errors import InvalidRequestError
from draftwire.models.cached_model import CachedModel
from draftwire.models.card import ModelCard
from draftwire.models.model_names import is_scripted
from draftwire.models.sequence_model import Reading
from draftwire.options.draft_model.model_drafts import ModelDrafts
from draftwire.runtime.settings import EngineSettings, ModelSettings


class OwnDraftModel:
    """A small model with the target's vocabulary, and a KV cache for as many tokens as the target's."""

    def __init__(self, settings: ModelSettings, target: ModelSettings, engine: EngineSettings) -> None:
        """Notes what to load.

        Raises:
            InvalidRequestError: one of the models has no weights.
        """
        if is_scripted(settings.model) or is_scripted(target.model):
            raise InvalidRequestError(
                "draft_model: models that draft in the verifier's process have weights, as its own"
            )
        self._settings, self._target, self._engine = settings, target, engine
        self._loaded: FittedModel[CachedModel] | None = None

    def load(self, target: ModelCard, head: FeatureUser | None) -> FeatureUser:
        """Loads it, with a cache for the largest step, and returns what is beside the target: this, and a head if there
        is one.

        Raises:
            InvalidRequestError: it has other tokens than the target, or see `load_draft_model`.
        """
        sized = replace(self._engine, kv_cache_tokens=size_while_loading(self._engine), max_tree_nodes=0)
        loaded = self._loaded = load_draft_model(self._settings, sized)
        torch.set_num_threads(self._target.threads)
        if loaded.card.description.vocabulary_fingerprint != target.description.vocabulary_fingerprint:
            raise InvalidRequestError(f"draft_model: {self._settings.model} has other tokens than the target")
        model = loaded.model
        sequence = model.cache.open()
        model.read([Reading(sequence, [0], 1)])  # then its size is known
        model.cache.close(sequence)
        if head is None:
            return FeatureUser(None, model.token_bytes[0], self.resize)

        def resize(cache_tokens: int) -> None:
            head.resize(cache_tokens)
            self.resize(cache_tokens)

        return FeatureUser(head.source, head.token_bytes + model.token_bytes[0], resize)

    def resize(self, cache_tokens: int) -> None:
        """Gives its cache room for so many tokens."""
        assert self._loaded is not None, "it is loaded first"
        self._loaded.model.resize(cache_tokens)

    def drafts(self, vocab_size: int) -> ModelDrafts:
        """Returns what drafts with it for a target with so many tokens, warmed up."""
        assert self._loaded is not None, "it is loaded first"
        loaded = self._loaded
        if loaded.make_steps is not None:
            deque(loaded.make_steps(), maxlen=0)
        context_length = loaded.card.description.context_length
        drafter = LanguageModelDrafter(loaded.model, context_length, 0, LOCAL_QUANTIZATION)
        own, targets = self._settings.threads, self._target.threads
        return ModelDrafts(drafter, vocab_size, None if own == targets else (own, targets))
