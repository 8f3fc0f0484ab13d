"""Says where what an existing vLLM loads to draft by drafter services is now."""


def __getattr__(name: str) -> object:
    if name == "RemoteDrafter":  # no AttributeError, whose text `from draftwire.vllm import` would hide
        raise ImportError(
            "RemoteDrafter is now vllm_remote_drafter.RemoteDrafter: contrib/vllm_remote_drafter/README.md"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
