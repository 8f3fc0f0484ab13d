"""Interface of the engines that run the steps of drafter and verifier."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from draftwire.engine.admission import Room
from draftwire.engine.leases import SessionKey
from draftwire.engine.session_book import Step

Result = TypeVar("Result")

WARM_UP_TOKENS = (2, 64)
"""Lengths of the prompts of the warm-up, tokens."""


class StepEngine(ABC, Generic[Step, Result]):
    """A model and the KV cache of its sessions. All methods run on the torch thread.

    The seam between a service and what computes for it: a service knows its engine by these methods alone.

    Attributes:
        is_prepared: whether `prepare` has nothing more to do. For any thread.
    """

    is_prepared = True

    def warm_up(self) -> list[tuple[int, float]]:
        """Runs short prompts, so that no request pays for lazy initialisation.

        Returns:
            Length and prefill time of each prompt, tokens and seconds.
        """
        costs = [self._time_prompt(num_tokens) for num_tokens in (WARM_UP_TOKENS[0], *WARM_UP_TOKENS)]
        return costs[1:]  # the first includes lazy initialisation

    def prepare(self) -> None:
        """Makes a step of a size that later ones would wait for. While no session is open, until `is_prepared`."""

    @abstractmethod
    def _time_prompt(self, num_tokens: int) -> tuple[int, float]:
        """Reads a prompt of at most `num_tokens`, frees its cache, and returns its length and seconds."""

    @abstractmethod
    def step(self, step: Step) -> Result:
        """Runs a step.

        Raises:
            GroupLostError: another rank exited.
        """

    @abstractmethod
    def forget(self, key: SessionKey) -> None:
        """Frees a session's KV cache, if it has any."""

    def room(self, max_sessions: int, kv_cache_tokens: int) -> Room:
        """Returns the room for so many sessions in a KV cache of this size: what is admitted to it always fits."""
        return Room(max_sessions, kv_cache_tokens)
