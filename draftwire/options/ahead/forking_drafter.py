"""Drafts with a language model for several texts that a session may have next: the `ForkingStrategy` of models."""

from copy import copy
from typing import Protocol, Self, runtime_checkable

from typing_extensions import override

from draftwire.drafting.language_model import BatchMember, Chains, LanguageModelDrafter, LanguageModelSequence
from draftwire.drafting.model_strategy import load_drafter
from draftwire.drafting.strategies import LoadedStrategy, StrategyContext
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.sequence_model import DraftModel
from draftwire.options.ahead.guessed_chains import GuessedChains
from draftwire.options.confidence.confident_chains import ConfidentChains
from draftwire.requests.session_parameters import SessionParameters


@runtime_checkable
class ForkingModel(DraftModel, Protocol):
    """A model that can continue a text in several ways at once."""

    def fork(self, sequence: CachedSequence, length: int) -> CachedSequence:
        """Opens another sequence that has read the first `length` tokens of this one; see `KvCache.fork`.

        Raises:
            NoRoomError: the cache is full.
        """


class ForkingSequence(LanguageModelSequence):
    """One session's tokens in the drafter's KV cache, of which others can share the beginning."""

    def fork(self, model: ForkingModel, base_len: int, token_ids: list[int]) -> Self:
        """Returns another sequence; see `ForkingStrategy.fork`. `model` is this one's."""
        fork = copy(self)
        fork.ids = self.ids[:base_len]
        fork._commit(base_len, token_ids)
        fork.cached = model.fork(self.cached, min(base_len, self.num_kept, fork._num_committed - 1))
        fork._num_read_exactly = min(self._num_read_exactly, fork.cached.length)
        return fork


class ForkingDrafter(LanguageModelDrafter):
    """A causal language model that can draft ahead, and knows how sure it is."""

    reports_confidence = True
    """Whether it takes `DraftRequest.stop_below`."""

    @override
    def open(self, token_ids: list[int], parameters: SessionParameters) -> ForkingSequence:
        return ForkingSequence(self.model, token_ids, parameters.cache_salt, self._substitute_id, self._calibrates)

    @property
    def can_fork(self) -> bool:
        """Whether sequences can be forked: not those of a model that several ranks share, nor where what was read
        approximately stays, so that little can be shared.
        """
        return isinstance(self.model, ForkingModel) and (self._calibrates or self.model.extends_exactly)

    def fork(self, sequence: ForkingSequence, base_len: int, token_ids: list[int]) -> ForkingSequence:
        """Returns another sequence that shares what the model has read; see `ForkingStrategy.fork`."""
        assert isinstance(self.model, ForkingModel), "only asked of strategies that can fork"
        return sequence.fork(self.model, base_len, token_ids)

    @override
    def _chains(self, members: list[BatchMember]) -> Chains:
        requests = [member.request for member in members]
        if any(request.guesses is not None for request in requests):
            return GuessedChains(self.model, members, self._quantization)
        kind = Chains if all(request.stop_below is None for request in requests) else ConfidentChains
        return kind(self.model, members, self._quantization)


def load(_name: str, context: StrategyContext) -> LoadedStrategy:
    """Loads a language model as a strategy."""
    card, drafter = load_drafter(context, ForkingDrafter)
    return LoadedStrategy(card, drafter)
