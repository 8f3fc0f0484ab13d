"""What vLLM loads of draftwire: drafts of drafter services for an existing `vllm serve`. See README.md."""

from vllm_remote_drafter.remote_drafter import RemoteDrafter

__all__ = ["RemoteDrafter"]
