"""Derives cache sizes and context lengths of models from settings, with weights or without. No torch here."""

from dataclasses import replace

import structlog

from draftwire.method.tree_limits import num_read_nodes
from draftwire.models.card import ModelCard
from draftwire.runtime.settings import EngineSettings, ModelSettings, require

log = structlog.get_logger()


def num_tree_tokens(settings: EngineSettings) -> int:
    """Returns how many tokens a session may have in a KV cache beside its text, for trees: those of a drafter, which
    are at least as many as a verifier's.
    """
    return num_read_nodes(settings.max_tree_nodes, settings.max_draft_tokens)


def limited(card: ModelCard, num_tokens: int, num_spare: int = 0) -> ModelCard:
    """Returns the card with its context length limited to what one session has room for.

    Args:
        card: of the model.
        num_tokens: capacity of the KV cache, tokens.
        num_spare: tokens of it that a session reserves beside its text, for trees.

    Raises:
        InvalidRequestError: no room is left for a text.
    """
    require(num_tokens > num_spare, f"kv_cache_tokens {num_tokens} has no room for a text beside {num_spare} of a tree")
    context_length = min(card.description.context_length, num_tokens - num_spare)
    if context_length < card.description.context_length:
        of_model = card.description.context_length
        log.warning("models.context_limited", by="kv_cache_tokens", tokens=context_length, of=of_model)
    return replace(card, description=replace(card.description, context_length=context_length))


def size_without_memory(settings: EngineSettings, context_length: int) -> int:
    """Returns the size of a KV cache that takes no memory, of models without weights, tokens.

    Args:
        settings: of the engine. Where they say "auto", every session may fill its context.
        context_length: of the model, tokens.
    """
    size = settings.kv_cache_tokens
    return size if isinstance(size, int) else settings.max_sessions * (context_length + num_tree_tokens(settings))


def refuse_settings_of_weights(settings: ModelSettings, what: str) -> None:
    """Refuses settings that have no effect without weights.

    Raises:
        InvalidRequestError: such a setting is not at its default.
    """
    engine = "draftwire" if settings.engine == "draftwire" else "auto"
    plain = ModelSettings(settings.model, threads=settings.threads, engine=engine)
    require(settings == plain, f"{what} has no revision, dtype, weights, device, engine or decoder")
