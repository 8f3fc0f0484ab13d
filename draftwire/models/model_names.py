"""Kinds of models by their names. Neither torch nor transformers here."""

SCRIPT_PREFIX = "scripted:"
GGUF_SUFFIX = ".gguf"


def is_scripted(model: str) -> bool:
    """Whether a model's name is a script."""
    return model.startswith(SCRIPT_PREFIX)


def is_gguf(model: str) -> bool:
    """Whether a model's name is that of a GGUF file."""
    return model.lower().endswith(GGUF_SUFFIX)
