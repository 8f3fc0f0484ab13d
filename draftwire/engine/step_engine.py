"""What carries out the steps of a service."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from draftwire.engine.leases import SessionKey
from draftwire.engine.session_book import Step

Result = TypeVar("Result")

WARM_UP_TOKENS = (2, 64)
"""Sizes of the prompts that are tried before the first session."""


class StepEngine(ABC, Generic[Step, Result]):
    """A model, with what its sessions have in the cache. Everything here runs on the torch thread."""

    def warm_up(self) -> list[tuple[int, float]]:
        """Does a little of everything, so that no user pays for lazy initialisation.

        Returns:
            Sizes of prompts and how long they took to read, tokens and seconds.
        """
        costs = [self._try(num_tokens) for num_tokens in (WARM_UP_TOKENS[0], *WARM_UP_TOKENS)]
        return costs[1:]  # the first one is not typical

    @abstractmethod
    def _try(self, num_tokens: int) -> tuple[int, float]:
        """Reads a prompt of at most so many tokens, leaves nothing of it behind, and returns its size and seconds."""

    @abstractmethod
    def step(self, step: Step) -> Result:
        """Carries out a step.

        Raises:
            GroupLostError: another rank ended.
        """

    @abstractmethod
    def forget(self, key: SessionKey) -> None:
        """Frees what a session has in the cache, if it has anything."""
