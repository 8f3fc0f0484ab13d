"""Drafting strategies by name. Each builds itself from the drafter's configuration, and loads weights if needed.

Torch is imported by those that have weights, and by no other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from draftwire.drafting.heads.head_names import HEAD_NAMES
from draftwire.drafting.model_free.names import JOINT, TEXT_DRAFTER_NAMES, are_text_drafters, parts_of
from draftwire.drafting.model_free.registry import TextDrafters
from draftwire.drafting.model_free.text_drafter import TextDrafter
from draftwire.drafting.model_free_drafter import ModelFreeDrafter
from draftwire.drafting.scripted_drafter import ScriptedDrafter
from draftwire.drafting.strategy import DraftingStrategy
from draftwire.errors import InvalidRequestError
from draftwire.method.features import FeatureNeed
from draftwire.method.quantization import Quantization
from draftwire.models.card import ModelCard
from draftwire.models.script import Script, is_scripted

if TYPE_CHECKING:
    from draftwire.drafting.heads.draft_head import DraftHead
    from draftwire.drafting.language_model import LanguageModelDrafter
    from draftwire.models.sequence_model import DraftModel

MODEL = "model"
AUTO = "auto"
"""Selects the strategy that accepts the value of the option `model`."""


@dataclass(frozen=True, slots=True)
class LoadedStrategy:
    """A strategy ready to run, with the description of its model."""

    card: ModelCard
    """The model whose tokens the strategy proposes."""
    strategy: DraftingStrategy


class StrategyContext(Protocol):
    """Configuration that a strategy is built from. Weights are loaded on request only. Used on the torch thread."""

    @property
    def model(self) -> str:
        """Value of the option `model`."""

    @property
    def quantization(self) -> Quantization:
        """Applied to distributions before tokens are drawn from them."""

    @property
    def calibrates(self) -> bool:
        """Whether tokens that were read approximately are read again exactly."""

    def limited(self, card: ModelCard) -> ModelCard:
        """Returns the card with its context length limited to one session's room in the KV cache."""

    def load_card(self) -> ModelCard:
        """Loads the tokenizer and the configuration of a model, or the card of a script.

        Raises:
            InvalidRequestError: there is no such model.
        """

    def load_language_model(self) -> "tuple[ModelCard, DraftModel]":
        """Loads the weights on all ranks.

        Raises:
            InvalidRequestError: the model cannot be served, or not in this way.
        """

    def load_head(self) -> "tuple[ModelCard, DraftHead, FeatureNeed]":
        """Loads a head with what it shares with its target, which the option `model` names, and says what it has to be
        fed with.

        Raises:
            InvalidRequestError: the head cannot be served, or is for another target.
        """

    def require_no_weights(self, what: str) -> None:
        """Refuses settings that would have no effect without weights.

        Args:
            what: the strategy without weights, for the message.

        Raises:
            InvalidRequestError: such a setting is present.
        """

    def load_text_drafters(self, card: ModelCard) -> TextDrafters:
        """Returns what drafts without a model, for texts of a vocabulary.

        Raises:
            InvalidRequestError: the store to retrieve from cannot be used.
        """

    def require_texts_of(self, names: Sequence[str]) -> None:
        """Refuses settings of drafts without a model that would have no effect.

        Args:
            names: of the text drafters that there are to be; none if a model or a script drafts alone.

        Raises:
            InvalidRequestError: such a setting is present.
        """


@dataclass(frozen=True, slots=True)
class StrategyKind:
    """An entry of `STRATEGIES`."""

    load: Callable[[StrategyContext], LoadedStrategy]
    takes: Callable[[str], bool]
    """Whether `AUTO` selects the strategy for a value of the option `model`."""


def _load_language_model(context: StrategyContext) -> LoadedStrategy:
    card, drafter = _language_model(context)
    return LoadedStrategy(card, drafter)


def _language_model(context: StrategyContext) -> "tuple[ModelCard, LanguageModelDrafter]":
    from draftwire.drafting.language_model import LanguageModelDrafter

    card, model = context.load_language_model()
    card = context.limited(card)
    described = card.description
    substitute = described.stop_token_ids[0] if described.stop_token_ids else 0
    quantization, calibrates = context.quantization, context.calibrates
    return card, LanguageModelDrafter(model, described.context_length, substitute, quantization, calibrates)


def _load_script(context: StrategyContext) -> LoadedStrategy:
    if not is_scripted(context.model):
        raise InvalidRequestError(f"strategy scripted takes a script as its model, not {context.model!r}")
    context.require_no_weights("a scripted model")
    script = Script.parse(context.model)
    return LoadedStrategy(context.limited(script.card()), ScriptedDrafter(script))


def _load_model_free(name: str, context: StrategyContext) -> LoadedStrategy:
    context.require_no_weights(f"strategy {name}")
    card = context.limited(context.load_card())
    described = replace(card.description, name=name)
    return LoadedStrategy(
        replace(card, description=described),
        ModelFreeDrafter(_text_drafter(name, context, card), described.vocab_size, described.context_length),
    )


STRATEGIES = {
    "scripted": StrategyKind(_load_script, is_scripted),
    MODEL: StrategyKind(_load_language_model, lambda model: not is_scripted(model)),
}
"""The strategies that propose a model's or a script's tokens, by name; others are named by `TEXT_DRAFTER_NAMES`."""


def _text_drafter(name: str, context: StrategyContext, card: ModelCard) -> TextDrafter:
    context.require_texts_of(parts_of(name))
    return context.load_text_drafters(card).named(name)


def _load_cascade(name: str, context: StrategyContext) -> LoadedStrategy:
    from draftwire.drafting.cascade_drafter import CascadeDrafter

    card, model = _language_model(context)
    texts = _text_drafter(name, context, card)
    described = replace(card.description, name=f"{card.description.name}{JOINT}{name}")
    return LoadedStrategy(replace(card, description=described), CascadeDrafter(model, texts))


def _load_head(name: str, context: StrategyContext) -> LoadedStrategy:
    from draftwire.drafting.heads.fed_head import FedHeadDrafter

    card, head, need = context.load_head()
    if head.config.kind.value != name:
        raise InvalidRequestError(
            f"strategy {name} takes a head of that kind, and this one is {head.config.kind.value}"
        )
    return LoadedStrategy(card, FedHeadDrafter(head, card.description.context_length, need, context.quantization))


def load_strategy(name: str, context: StrategyContext) -> LoadedStrategy:
    """Builds a strategy. Runs on the torch thread.

    Args:
        name: a key of `STRATEGIES`, one of `TEXT_DRAFTER_NAMES` or several joined, the same behind "model+", one of
            `HEAD_NAMES`, or `AUTO`.
        context: the drafter's configuration.

    Raises:
        InvalidRequestError: the name is unknown, or the strategy does not support the configuration.
    """
    if name == AUTO:
        name = next(name for name, kind in STRATEGIES.items() if kind.takes(context.model))
    if are_text_drafters(name):
        return _load_model_free(name, context)
    if name.startswith(MODEL + JOINT) and are_text_drafters(name.removeprefix(MODEL + JOINT)):
        return _load_cascade(name.removeprefix(MODEL + JOINT), context)
    context.require_texts_of(())
    if name in HEAD_NAMES:
        return _load_head(name, context)
    if name not in STRATEGIES:
        known = (AUTO, *TEXT_DRAFTER_NAMES, *STRATEGIES, *HEAD_NAMES)
        raise InvalidRequestError(f"unknown strategy {name!r}; known: {', '.join(known)}")
    return STRATEGIES[name].load(context)
