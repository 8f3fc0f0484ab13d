"""Causal attention for training on CPUs, where torch's own kernel is slow backwards, and for one token in bfloat16."""

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

CHUNK = 128
"""Queries that are attended for together; windows of training are whole chunks."""

NAME = "draftwire_chunked"


def chunked_attention(
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attends with a chunk of queries at a time to all keys up to its end, so that up to half of the work falls away.

    It is two matrix products; a compiler fuses everything between them.

    Args:
        _module: ignored, as is `_mask`: every text is whole, so that only the causal mask counts.
        query: `[batch, heads, length, head_dim]`, of the last tokens.
        key: `[batch, heads, key_length, head_dim]`; there must be as many heads.
        value: as `key`.
        scaling: factor of the scores.

    Returns:
        `[batch, length, heads, head_dim]`, and no weights.
    """
    dtype, length, parts = query.dtype, query.shape[2], []
    before = key.shape[2] - length
    query, key, value = (each.to(torch.bfloat16) for each in (query * scaling, key, value))
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        seen = before + end
        scores = query[:, :, start:end] @ key[:, :, :seen].transpose(-1, -2)
        is_visible = torch.ones(end - start, seen, dtype=torch.bool, device=query.device).tril(before + start)
        weights = scores.float().masked_fill(~is_visible, -torch.inf).softmax(-1).to(query.dtype)
        parts.append(weights @ value[:, :, :seen])
    return torch.cat(parts, 2).transpose(1, 2).contiguous().to(dtype), None


def attend_in_chunks(model: PreTrainedModel) -> None:
    """Makes the model, which has as many key as query heads, use this attention."""
    AttentionInterface.register(NAME, chunked_attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    model.set_attn_implementation(NAME)
