"""Interfaces of decoders, which compute the forward passes of a model."""

from typing import Protocol

import torch
from torch import Tensor

from draftwire.models.paged_attention import PackedStep


class Decoder(Protocol):
    """A model's weights and its forward pass."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""

    @property
    def hidden_size(self) -> int:
        """Numbers in a hidden state."""

    def logits(self, token_ids: Tensor, step: PackedStep, kept: Tensor) -> Tensor:
        """Computes the forward pass of a step, and stores the keys and values of its tokens. If the step's storage has
        a tap, it gets the hidden states; the logits are the same to the bit with it and without.

        Args:
            token_ids: `[num_tokens] int64`, on the model's device.
            step: the step's layout.
            kept: `[count] int64`, ascending: the tokens whose logits are returned.

        Returns:
            `[count, vocab]`, which the caller may overwrite.
        """


class DraftingDecoder(Decoder, Protocol):
    """A decoder that computes the forward passes of drafts with the weights of another, perhaps approximately."""

    @property
    def is_approximate(self) -> bool:
        """Whether any result differs from the other's."""

    @property
    def stacks(self) -> list[tuple[int, ...]]:
        """Layers whose keys and values have to be contiguous in the storage."""
