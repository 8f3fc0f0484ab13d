"""Plugin for vLLM: drafts of drafter services for an existing `vllm serve`. See docs/vllm.md."""

from draftwire.vllm.remote_drafter import RemoteDrafter

__all__ = ["RemoteDrafter"]
