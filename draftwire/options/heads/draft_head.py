"""Interface of a head that drafts from the target's hidden states.

The target's hidden states of a token, at the layers that a head names (`HeadConfig.taps`), are the token's *features*.
A head first projects them to its own width (`fuse`), which may be done where the target is: *fused features* are stored
or sent.

A head reads *pairs*: the fused features of a token of the text, and the id of the token after it. So it can read up to
the last committed token but one before the target has read the last one, and drafts the tokens after the last one. From
there on it has no features, and reads its own output in their place (*self-conditioned*): those pairs are dropped with
`truncate` when the true features are there.

    text     x0  x1  x2  x3           committed; the target has read x0, x1, x2
    pairs    (f0, x1) (f1, x2) (f2, x3)
    drafted  x4, after the last pair; then x5, after (own output, x4)

Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840), section 3.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftwire.models.kv_cache import CachedSequence, KvCache
from draftwire.options.heads.head_names import HeadKind


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes and properties of a head."""

    kind: HeadKind
    taps: tuple[int, ...]
    """Layers of the target whose inputs are the features, in the order in which they are joined; the number of its
    layers means the output of the last one, before the final norm."""
    target_hidden_size: int
    """Width of the target's hidden states."""
    hidden_size: int
    """Width of the fused features."""
    vocab_size: int
    """Rows of the head's logits: the target's vocabulary."""
    draft_vocab_size: int
    """Ids that the head can draft; the logits of all others are -inf."""
    most_tokens: int | None = None
    """Draft tokens that the head can draft after a pair; None is any number."""
    reads_history: bool = True
    """Whether drafts depend on all pairs of the text. If not, only the last pair has to be read."""

    @property
    def feature_size(self) -> int:
        """Width of a token's features before they are fused."""
        return len(self.taps) * self.target_hidden_size


@dataclass(frozen=True, slots=True)
class PairReading:
    """Pairs to read for one sequence."""

    sequence: CachedSequence
    """Sequence that `DraftHead.open` returned; its length is the number of pairs that it has read."""
    token_ids: list[int]
    """Ids of the tokens after those of the features, at least one; below `HeadConfig.vocab_size`."""
    features: Tensor
    """`[len(token_ids), hidden_size]`, fused, of the head's type and on its device."""
    keep: bool = True
    """Whether to draft after the last pair."""
    begins_text: bool = True
    """Whether the first pair that its sequence has read, or reads now, is the text's first one."""


@dataclass(frozen=True, slots=True)
class HeadState:
    """Blocks that are being drafted, after the same number of draft tokens."""

    sequences: list[CachedSequence]
    depth: int
    """Draft tokens so far."""
    carried: Tensor
    """`[sequences, any]`: the head's state from one draft token to the next."""
    logits: Tensor
    """`[sequences, vocab_size]`, of the next token; -inf where the head cannot draft. The caller may overwrite it."""

    def select(self, rows: Sequence[int]) -> "HeadState":
        """Returns some of the blocks, without logits: those that go on."""
        if len(rows) == len(self.sequences):
            return self
        index = torch.tensor(rows, device=self.carried.device)
        return replace(
            self,
            sequences=[self.sequences[row] for row in rows],
            carried=self.carried.index_select(0, index),
            logits=self.logits[:0],
        )


class DraftHead(ABC):
    """A head with its cache, which counts the pairs of its sequences. Used on the torch thread only."""

    config: HeadConfig
    """Sizes and properties of the head."""
    device: torch.device
    """Device of its weights."""
    dtype: torch.dtype
    """Type of its weights, and of fused features."""
    token_bytes: int = 0
    """Bytes that its cache stores of a token."""
    fuse: Callable[[Tensor], Tensor]
    """Projects features to the width of the head: the hidden states at the taps, joined in their order, `[tokens,
    HeadConfig.feature_size]`, to `[tokens, HeadConfig.hidden_size]`. Allocates its result; runs on the device of the
    weights."""

    def resize(self, cache_tokens: int) -> None:
        """Replaces the cache with an empty one of so many tokens, of all sequences together. No sequence is open."""
        self.cache = KvCache(cache_tokens)

    def open(self) -> CachedSequence:
        """Opens a sequence that has read no pair."""
        return self.cache.open()

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Keeps the first `length` pairs of a sequence, self-conditioned ones included."""
        self.cache.truncate(sequence, length)

    def close(self, sequence: CachedSequence) -> None:
        """Frees what a sequence holds."""
        self.cache.close(sequence)

    @abstractmethod
    def read(self, readings: Sequence[PairReading]) -> HeadState:
        """Reads pairs of some sequences, each at most once in a call.

        Returns:
            The first draft token's logits for the readings with `keep`, in order.

        Raises:
            NoRoomError: the cache is full. On any error the sequences are unchanged.
        """

    @abstractmethod
    def extend(self, state: HeadState, token_ids: Tensor) -> HeadState:
        """Reads one more draft token of each block. Does not wait for the device.

        Args:
            state: from `read` or `extend`, perhaps some of its blocks. At most `HeadConfig.most_tokens` - 1 deep.
            token_ids: `[sequences] int64`, drawn from its logits.

        Raises:
            NoRoomError: as `read`.
        """
