"""Interface of models that read many sequences in one forward pass, and can roll each back.

Everything here uses tensors and must run on the process's one torch thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftwire.models.kv_cache import CachedSequence, KvCache


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one sequence in a step."""

    sequence: CachedSequence
    """Sequence whose length already includes the new tokens when the step is laid out, and whose tree the new nodes."""
    num_tokens: int
    parents: tuple[int, ...] = ()
    """Parents of the last new tokens, if they are nodes of the sequence's tree; see `CachedSequence.parents`."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the sequence's tree, those that were read earlier included."""
        return len(self.sequence.parents)


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens to read for one sequence."""

    sequence: CachedSequence
    token_ids: list[int]
    """Tokens to read, at least one."""
    keep: int
    """How many of the last tokens to return logits after, 0 to `len(token_ids)`."""
    parents: tuple[int, ...] = ()
    """Parents of the last of these tokens, if they are nodes of the sequence's token tree: an index among all nodes,
    those that were read earlier included, or -1 for the token before the tree. Until a path is kept, the sequence reads
    nodes only."""

    @property
    def segment(self) -> Segment:
        """The new tokens as a segment of a packed step."""
        return Segment(self.sequence, len(self.token_ids), self.parents)


Text = TypeVar("Text")


@dataclass(frozen=True, slots=True)
class FeatureSpan(Generic[Text]):
    """Consecutive tokens of a text whose features are wanted."""

    sequence: Text
    """The text, as whoever has its features knows it: a sequence of the target's cache, where that is."""
    start: int
    stop: int
    """End, at most as many as it has: of a sequence its length, of tokens that are in the cache, read or shared."""


class SequenceModel(Protocol):
    """A model that reads tokens and returns logits. `cache` manages the blocks of its KV cache."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output."""

    @property
    def cache(self) -> KvCache:
        """The block manager of the KV cache."""

    def read(self, readings: Sequence[Reading]) -> Tensor:
        """Reads tokens of some sequences, each at most once in a call, and appends them to the KV cache.

        Returns:
            `[sum of keep, vocab]` logits on the model's device: for each reading in order, the rows of its last `keep`
            tokens. The row of a node is that of the text up to the tree and the path to the node.

        Raises:
            NoRoomError: the cache is full. On any error the sequences are unchanged.
        """

    def keep_path(self, sequence: CachedSequence, path: Sequence[int]) -> None:
        """Keeps of a sequence's token tree only a path, after which its text goes on. Does not wait for the device.

        Only then may the path's tokens be published. On any error the sequence has none of the tree's tokens.

        Args:
            sequence: ends in a tree, or else `path` is empty.
            path: indices of the nodes to keep, each the parent of the next.
        """


class DraftModel(SequenceModel, Protocol):
    """A model that can also read tokens which are only on the device, and may read approximately."""

    @property
    def device(self) -> torch.device:
        """Device of the logits."""

    @property
    def extends_exactly(self) -> bool:
        """Whether `extend` returns the logits and stores the keys and values that `read` would."""

    def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> Tensor:
        """Reads like every `SequenceModel` or, fuzzily, approximately like `extend`."""

    def extend(
        self, sequences: Sequence[CachedSequence], token_ids: Tensor, parents: Sequence[tuple[int, ...]] = ()
    ) -> Tensor:
        """Reads one more token of each sequence, or several nodes of each one's tree. Does not wait for the device.

        Args:
            sequences: different sequences.
            token_ids: `[num_tokens] int64` on the model's device, of one sequence after the other.
            parents: of each sequence's new nodes, as `Reading.parents`; none for one more token of its text.

        Returns:
            `[num_tokens, vocab]` logits, as `read`.

        Raises:
            NoRoomError: as `read`.
        """
