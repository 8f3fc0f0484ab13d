"""Draft distributions in their wire format: quantized, sampled, encoded into bytes, and decoded."""

from dataclasses import replace

import torch
from torch import Tensor

from draftwire.checking.toy_models import Pair
from draftwire.method.distributions import SparseRows, joined, quantize, rows_of
from draftwire.method.encoding import TOTAL_WEIGHT, Claim, Supports, decode_one, encode_sparse
from draftwire.method.quantization import Quantization

COARSE = Quantization(mass=0.9, max_support=2)
"""Drops tokens of nearly all distributions over few tokens."""

FINE = Quantization(mass=1.0)
"""Only rounds the weights."""


def quantized(pair: Pair, quantization: Quantization) -> Pair:
    """Returns a pair whose drafter has the quantized distributions."""
    rows = quantize(pair.drafter, quantization)
    weights = torch.zeros_like(pair.drafter).scatter_add_(1, rows.token_ids, rows.weights.to(pair.drafter.dtype))
    return replace(pair, name=f"{pair.name}, quantized", drafter=weights / TOTAL_WEIGHT)


def through_bytes(probs: Tensor) -> SparseRows:
    """Encodes and decodes distributions in the sparse format, each distinct one as a block of its own.

    They are `[rows, vocab]`, in multiples of 1 / 65,536.
    """
    different, which = probs.unique(dim=0, return_inverse=True)  # all blocks of a model share few distinct rows
    weights, token_ids = (different * TOTAL_WEIGHT).to(torch.int64).sort(dim=1, descending=True)
    supports = Supports(token_ids.numpy(), weights.numpy(), probs.shape[1])
    encoded = encode_sparse(supports, [1] * len(different))
    claims = [Claim([likeliest], block) for likeliest, block in zip(token_ids[:, 0].tolist(), encoded, strict=True)]
    sparse = joined([rows_of(decode_one(claim, probs.shape[1])) for claim in claims])
    assert isinstance(sparse, SparseRows), "sent sparsely"
    return SparseRows(sparse.token_ids[which], sparse.probs[which], sparse.vocab_size)
