"""GET /v1/models: the target, and the models of the drafters that are connected."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from draftwire.models.description import ModelDescription
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.refusal import RefusedError


class ListedDrafter(Protocol):
    """A drafter in the list of models."""

    @property
    def description(self) -> ModelDescription:
        """The draft model."""


ListDrafters = Callable[[], Sequence[ListedDrafter]]


class ModelList:
    """The target and the models of the connected drafters."""

    def __init__(self, core: GatewayCore, drafters: ListDrafters) -> None:
        """Stores the sources of the models; the current time becomes their creation time."""
        self._core = core
        self._drafters = drafters
        self._since = int(time.time())

    def all(self) -> dict[str, Any]:
        """Returns all models, the target first."""
        return {"object": "list", "data": list(self._objects())}

    def one(self, name: str) -> dict[str, Any]:
        """Returns the model of a name; the target, if a drafter's model has the same name.

        Raises:
            RefusedError: there is no model of this name.
        """
        for model in self._objects():
            if model["id"] == name:
                return model
        raise RefusedError(404, "there is no such model here", code="model_not_found", param="model")

    def _objects(self) -> Iterator[dict[str, Any]]:
        core = self._core
        speculation = {
            "num_speculative_tokens": core.defaults.num_speculative_tokens,
            "max_speculative_tokens": core.defaults.max_speculative_tokens,
            "rejection_sample_method": core.defaults.rule,
        }
        yield self._object(core.description, "target", speculation)
        drafters = {drafter.description.name: drafter.description for drafter in self._drafters()}
        for _, description in sorted(drafters.items()):
            yield self._object(description, "drafter", {})

    def _object(self, model: ModelDescription, role: str, more: dict[str, Any]) -> dict[str, Any]:
        own = {
            "role": role,
            "context_length": model.context_length,
            "vocab_size": model.vocab_size,
            "dtype": model.dtype,
            "revision": model.revision,
            **more,
        }
        return {
            "id": model.name,
            "object": "model",
            "created": self._since,
            "owned_by": "draftwire",
            "draftwire": own,
        }
