"""A causal language model that remembers what it has read, and can be made to forget the end of it.

Everything here touches tensors and must run on the process's one torch thread.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

PREFILL_CHUNK = 512
"""Tokens read in one forward pass at most; bounds the memory that a long prompt takes."""


class CachedSequence:
    """One sequence in a model's KV cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Starts empty."""
        self._model = model
        # Without a config the cache keeps every position of every layer, so that it can be rolled back also where a
        # layer attends to a sliding window only.
        self._cache = DynamicCache()
        self.length = 0
        """Tokens in the cache."""

    @torch.inference_mode()
    def extend(self, token_ids: list[int], keep: int = 1) -> Tensor:
        """Reads more tokens.

        Args:
            token_ids: what to read, at least one.
            keep: how many of the last positions to return logits for, 1 to `len(token_ids)`.

        Returns:
            `[keep, vocab]` logits in the model's dtype: row i is for the token after `token_ids[-keep + i]`.
        """
        assert 1 <= keep <= len(token_ids)
        chunks = [token_ids[start : start + PREFILL_CHUNK] for start in range(0, len(token_ids), PREFILL_CHUNK)]
        kept: list[Tensor] = []
        unread = len(token_ids)
        for chunk in chunks:
            unread -= len(chunk)
            wanted = min(len(chunk), max(1, keep - unread))
            output = self._model(
                input_ids=torch.tensor([chunk], device=self._model.device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=wanted,
            )
            self.length += len(chunk)
            if keep > unread:
                kept.append(output.logits[0])
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        assert 0 <= length <= self.length
        if length < self.length:
            self._cache.crop(length - self.length)
            self.length = length
