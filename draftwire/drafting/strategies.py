"""Drafting strategies, by name or by import path.

Each builds itself from the drafter's configuration, and loads weights if it needs them. None is imported before it is
asked for.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from draftwire.drafting.strategy import DraftingStrategy
from draftwire.errors import InvalidRequestError
from draftwire.method.quantization import Quantization
from draftwire.models.card import ModelCard
from draftwire.models.model_names import is_scripted
from draftwire.requests.import_paths import made_by, named_by

if TYPE_CHECKING:
    from draftwire.models.sequence_model import DraftModel

AUTO = "auto"
"""Selects the strategy that accepts the value of the option `model`."""
MODEL, SCRIPTED = "model", "scripted"
TEXTS = ("suffix", "lookup", "retrieval")
"""Strategies that guess from texts, of which several are joined."""
JOINT = "+"

STRATEGIES = {
    **dict.fromkeys(TEXTS, "draftwire.options.model_free.model_free_drafter:load"),
    SCRIPTED: "draftwire.options.scripted.scripted_drafter:load",
    MODEL: "draftwire.options.ahead.forking_drafter:load",
    **dict.fromkeys(("eagle", "eagle3", "medusa", "hydra", "mtp"), "draftwire.options.heads.fed_head:load"),
}
"""Import paths of what loads the strategy of a name, called with the name and a `StrategyContext`."""
MODEL_WITH_TREES = "draftwire.options.trees.tree_model_drafter:load"
MODEL_WITH_TEXTS = "draftwire.options.model_free.cascade_drafter:load"


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

    @property
    def max_tree_nodes(self) -> int:
        """Draft tokens of the largest token tree that may be asked for; 0 if none may."""

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

    def require_no_weights(self, what: str) -> None:
        """Refuses settings that would have no effect without weights.

        Raises:
            InvalidRequestError: such a setting is present.
        """

    def refuse_texts_but(self, *names: str) -> None:
        """Refuses settings of strategies that guess from texts, but for those of `names`.

        Raises:
            InvalidRequestError: a setting of another one is present.
        """


def load_strategy(name: str, context: StrategyContext) -> LoadedStrategy:
    """Builds a strategy. Runs on the torch thread.

    Args:
        name: a key of `STRATEGIES`, several of `TEXTS` joined, the same behind "model+", `AUTO`, or the import path of
            a strategy of one's own, as `package.module:Class`: a class or function that is called with the context, and
            returns a strategy or, to describe its model itself, a `LoadedStrategy`.
        context: the drafter's configuration.

    Raises:
        InvalidRequestError: the name is unknown, or the strategy does not support the configuration; the message is one
            line.
    """
    if name == AUTO:
        name = SCRIPTED if is_scripted(context.model) else MODEL
    path, texts = _place_of(name, context)
    context.refuse_texts_but(*texts)
    if path is not None:
        module, _, function = path.partition(":")
        return cast(LoadedStrategy, getattr(import_module(module), function)(name, context))
    if not set(":.").intersection(name):
        known = ", ".join((AUTO, *STRATEGIES))
        raise InvalidRequestError(f"unknown strategy {name!r}; known: {known}, or package.module:Class of your own")
    return _load_own(name, context)


def _place_of(name: str, context: StrategyContext) -> tuple[str | None, list[str]]:
    """Returns the import path of what loads one of the library's strategies, and the texts that it guesses from."""
    first, *others = name.split(JOINT)
    is_joint = first == MODEL and bool(others)
    texts = others if is_joint else [first, *others]
    if set(TEXTS).issuperset(texts) and len(set(texts)) == len(texts):
        return (MODEL_WITH_TEXTS if is_joint else STRATEGIES[first]), texts
    return (MODEL_WITH_TREES if name == MODEL and context.max_tree_nodes else STRATEGIES.get(name)), []


def _load_own(path: str, context: StrategyContext) -> LoadedStrategy:
    """Returns the strategy of an import path."""
    found = named_by(path)
    if not callable(found):
        raise InvalidRequestError(f"{path!r} is no drafting strategy: it is neither a class nor a function")
    made = made_by(found, path, "drafting strategy", context)
    if not isinstance(made, LoadedStrategy):
        made = LoadedStrategy(context.load_card(), cast(DraftingStrategy, made))
    for method in ("open(token_ids, parameters)", "step(draftings)"):
        if not callable(getattr(made.strategy, method.partition("(")[0], None)):
            raise InvalidRequestError(f"{path!r} is no drafting strategy: it has no method {method}")
    if not isinstance(getattr(made.strategy, "context_length", None), int):
        raise InvalidRequestError(f"{path!r} is no drafting strategy: it has no context_length (int)")
    return LoadedStrategy(context.limited(made.card), made.strategy)
