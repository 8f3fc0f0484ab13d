"""Ways of drafting, by name. Each makes itself of what a drafter is configured with, and asks for weights if it needs
any.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.scripted_drafter import ScriptedDrafter
from draftwire.drafting.strategy import DraftingStrategy
from draftwire.errors import InvalidRequestError
from draftwire.method.quantization import Quantization
from draftwire.models.cached_model import DraftModel
from draftwire.models.loading import ModelCard
from draftwire.models.scripted import Script, is_scripted

AUTO = "auto"
"""Stands for the strategy that takes what the option `model` says."""


@dataclass(frozen=True, slots=True)
class LoadedStrategy:
    """What a drafter runs."""

    card: ModelCard
    """Whose tokens it proposes."""
    strategy: DraftingStrategy


class StrategyContext(Protocol):
    """What a strategy can be made of. Nothing is loaded before it is asked for. Used on the torch thread."""

    @property
    def model(self) -> str:
        """What the option `model` says."""

    @property
    def quantization(self) -> Quantization:
        """What is made of distributions before tokens are drawn from them."""

    @property
    def calibrates(self) -> bool:
        """Whether what was drafted approximately is computed again."""

    def limited(self, card: ModelCard) -> ModelCard:
        """Shortens the context to what the KV cache can hold of one session."""

    def load_language_model(self) -> tuple[ModelCard, DraftModel]:
        """Loads the weights, on this process and the other ranks, if there are several.

        Raises:
            InvalidRequestError: the model cannot be served, or not in this way.
        """

    def require_no_weights(self, what: str) -> None:
        """Refuses settings that would have no effect without weights.

        Args:
            what: has none, for the message.

        Raises:
            InvalidRequestError: there is one.
        """


@dataclass(frozen=True, slots=True)
class StrategyKind:
    """One way of drafting."""

    load: Callable[[StrategyContext], LoadedStrategy]
    takes: Callable[[str], bool]
    """Whether it is meant by what the option `model` says, where no strategy is named."""


def _load_language_model(context: StrategyContext) -> LoadedStrategy:
    card, model = context.load_language_model()
    card = context.limited(card)
    described = card.description
    substitute = described.stop_token_ids[0] if described.stop_token_ids else 0
    quantization, calibrates = context.quantization, context.calibrates
    return LoadedStrategy(
        card, LanguageModelDrafter(model, described.context_length, substitute, quantization, calibrates)
    )


def _load_script(context: StrategyContext) -> LoadedStrategy:
    if not is_scripted(context.model):
        raise InvalidRequestError(f"strategy scripted takes a script as its model, not {context.model!r}")
    context.require_no_weights("a scripted model")
    script = Script.parse(context.model)
    return LoadedStrategy(context.limited(script.card()), ScriptedDrafter(script))


STRATEGIES = {
    "scripted": StrategyKind(_load_script, is_scripted),
    "model": StrategyKind(_load_language_model, lambda model: not is_scripted(model)),
}
"""All that a drafter can be asked for by name."""


def load_strategy(name: str, context: StrategyContext) -> LoadedStrategy:
    """Makes a strategy. Runs on the torch thread.

    Args:
        name: of `STRATEGIES`, or `AUTO`.
        context: what it is made of.

    Raises:
        InvalidRequestError: there is none of that name, or it cannot be made of this.
    """
    if name == AUTO:
        name = next(name for name, kind in STRATEGIES.items() if kind.takes(context.model))
    if name not in STRATEGIES:
        raise InvalidRequestError(f"unknown strategy {name!r}; known: {', '.join((AUTO, *STRATEGIES))}")
    return STRATEGIES[name].load(context)
