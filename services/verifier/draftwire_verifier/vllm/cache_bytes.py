"""How much memory vLLM's KV cache takes, from vLLM's configuration. No vLLM here."""

from typing import Any

LARGEST_BLOCK = 256
"""Tokens in a block of vLLM's KV cache where it chooses the size later."""


def cache_bytes(settings: Any, num_tokens: int) -> int:
    """Returns the memory of so many tokens, of all sessions together, in a rank's KV cache by a VllmConfig, in whole
    blocks, or a little more, bytes.
    """
    model, parallel = settings.model_config, settings.parallel_config
    block_size = settings.cache_config.block_size or LARGEST_BLOCK
    num_blocks = -(-num_tokens // block_size) + 1  # one is never used
    of_a_token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    return int(num_blocks * block_size * of_a_token * max(2, model.dtype.itemsize))


def most_bytes(settings: Any) -> int:
    """Returns the memory of a rank's KV cache in which all sessions are as long as a VllmConfig lets any be, bytes."""
    block_size = settings.cache_config.block_size or LARGEST_BLOCK
    of_a_session = settings.model_config.max_model_len + settings.num_speculative_tokens + 1
    num_blocks = -(-of_a_session // block_size)
    return cache_bytes(settings, settings.scheduler_config.max_num_seqs * num_blocks * block_size)
