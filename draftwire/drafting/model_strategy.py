"""Loads language models as drafting strategies."""

from typing import TypeVar

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategies import StrategyContext
from draftwire.models.card import ModelCard

Drafter = TypeVar("Drafter", bound=LanguageModelDrafter)


def load_drafter(context: StrategyContext, kind: type[Drafter]) -> tuple[ModelCard, Drafter]:
    """Loads a language model, and returns its card with a drafter of a kind that draws from it."""
    card, model = context.load_language_model()
    card = context.limited(card)
    described = card.description
    substitute = described.stop_token_ids[0] if described.stop_token_ids else 0
    return card, kind(model, described.context_length, substitute, context.quantization, context.calibrates)
