"""Interface of engines, which compute the forward passes of a model over a KV cache of theirs."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftwire.models.kv_storage import StoredFeatures
from draftwire.models.sequence_model import Segment

IdRows = Sequence[int] | Tensor
"""Token ids of a step: on the host, or `[num_tokens] int64` on the model's device."""


class Storage(Protocol):
    """Keys and values by slot, which the block manager (`KvCache`) knows nothing of."""

    @property
    def features(self) -> StoredFeatures | None:
        """Hidden states that are kept beside them, as far as they are; None if none are."""

    @property
    def token_bytes_of_layers(self) -> list[int]:
        """Bytes that each layer stores of a token, the features' last; of the layers that a step has reached."""

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies keys, values and features between slots, `[count] int64` each, in all layers."""


class Pass(Protocol):
    """Forward passes over a storage."""

    def logits(self, segments: list[Segment], token_ids: IdRows, kept: Sequence[int]) -> Tensor:
        """Computes one, and stores the keys and values of its tokens.

        Args:
            segments: new tokens of different sequences, whose blocks are allocated.
            token_ids: of one segment after the other.
            kept: ascending: the tokens whose logits are returned.

        Returns:
            `[len(kept), vocab]` on the device, which the caller may overwrite.
        """


class PassEngine(Protocol):
    """A model's weights, and how they are run."""

    @property
    def device(self) -> torch.device:
        """Device of the logits."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output."""

    @property
    def extends_exactly(self) -> bool:
        """Whether all passes compute the same."""

    @property
    def is_static(self) -> bool:
        """Whether steps are recorded and replayed, which takes memory for a second copy of what a step holds."""

    def begin(self, num_slots: int, features: StoredFeatures | None) -> tuple[Storage, Pass, Pass]:
        """Returns an empty storage for so many tokens and what is kept beside them, and the exact and the approximate
        passes over it, which are the same if all are exact.
        """
