"""What settings make of models, with weights or without. No torch here."""

from dataclasses import replace

from draftwire.models.card import ModelCard
from draftwire.runtime.settings import EngineSettings, ModelSettings, require


def limited(card: ModelCard, num_tokens: int) -> ModelCard:
    """Returns the card with the context length limited to the capacity of the KV cache, tokens."""
    context_length = min(card.description.context_length, num_tokens)
    return replace(card, description=replace(card.description, context_length=context_length))


def size_without_memory(settings: EngineSettings, context_length: int) -> int:
    """Returns the size of a KV cache that takes no memory, of models without weights, tokens.

    Args:
        settings: of the engine. Where they say "auto", every session may fill its context.
        context_length: of the model, tokens.
    """
    size = settings.kv_cache_tokens
    return size if isinstance(size, int) else settings.max_sessions * context_length


def refuse_settings_of_weights(settings: ModelSettings, what: str) -> None:
    """Refuses settings that have no effect without weights.

    Args:
        settings: of the model.
        what: the kind of model without weights, for the message.

    Raises:
        InvalidRequestError: such a setting is not at its default.
    """
    plain = ModelSettings(settings.model, threads=settings.threads)
    require(settings == plain, f"{what} has no revision, dtype, device or decoder")
