"""Drafts with a small language model, token by token."""

from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftwire.distributions import DraftDistributions, draw
from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.models.cached_model import CachedSequence
from draftwire.sampling import probabilities


class LanguageModelDrafter:
    """A causal language model as a drafting strategy."""

    def __init__(self, model: PreTrainedModel, context_length: int, substitute_id: int = 0) -> None:
        """Wraps a loaded model.

        Args:
            model: in evaluation mode, on its device.
            context_length: positions that the model can attend to.
            substitute_id: read in the place of committed ids that this model's vocabulary lacks.
        """
        self.model = model
        self.context_length = context_length
        self.vocab_size = int(cast(Tensor, model.get_input_embeddings().weight).shape[0])
        self.substitute_id = substitute_id

    def new_sequence(self) -> "LanguageModelSequence":
        """Starts an empty sequence."""
        return LanguageModelSequence(self)


class LanguageModelSequence:
    """One session's tokens in the drafter's cache.

    Between calls the cache holds all committed tokens but the last, or more: logits for the next token are computed
    when that last token is read.
    """

    def __init__(self, drafter: LanguageModelDrafter) -> None:
        """Starts empty."""
        self._drafter = drafter
        self._cached = CachedSequence(drafter.model)
        self._ids: list[int] = []  # everything known: committed tokens, then drafted ones
        self._next_logits: Tensor | None = None  # [vocab], for the token after all committed ones

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """See `DraftSequence.calibrate`. Accepted draft tokens stay in the cache; only what differs is read again."""
        committed = self._ids[:base_len] + token_ids
        agreeing = base_len
        for known, token in zip(self._ids[base_len:], token_ids, strict=False):
            if known != token:
                break
            agreeing += 1
        # The last token is always read (again), because its logits are the ones to draw from.
        self._cached.truncate(min(agreeing, self._cached.length, len(committed) - 1))
        self._ids = committed
        self._next_logits = self._read(committed[self._cached.length :])

    def draft(self, request: DraftRequest) -> Draft:
        """See `DraftSequence.draft`."""
        assert self._next_logits is not None, "calibrate comes first"
        uniforms = request.key.uniforms(request.num_tokens)
        limit = min(request.vocab_size, self._drafter.vocab_size)
        logits, token_ids, rows = self._next_logits, [], []
        for position in range(request.num_tokens):
            row = probabilities(logits[:limit], request.sampling).float().cpu()  # as it is sent
            token = int(draw(row.unsqueeze(0), uniforms[position : position + 1]))
            rows.append(row)
            token_ids.append(token)
            if position + 1 < request.num_tokens:
                logits = self._read([token])
        self._ids += token_ids
        self._next_logits = None
        if request.sampling.greedy:
            return Draft(token_ids, DraftDistributions.one_hot(limit))
        return Draft(token_ids, DraftDistributions.from_rows(torch.stack(rows)))

    def _read(self, token_ids: list[int]) -> Tensor:
        """Feeds tokens to the model and returns the logits after the last, `[vocab]`."""
        vocab_size, substitute = self._drafter.vocab_size, self._drafter.substitute_id
        return self._cached.extend([token if token < vocab_size else substitute for token in token_ids])[-1]
