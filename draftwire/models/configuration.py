"""Reads the configurations of models, those included that are of a known family under another name. No torch here."""

from importlib import import_module
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig
from transformers.utils import import_utils

RENAMED_TYPES = {"mimo": "qwen2"}
"""Values of `model_type` that transformers does not know, and whose models are those of another one but for layers that
draft: MiMo's multi-token-prediction layers, for which see docs/heads.md."""
VALIDATORS = ("tokenization_utils_base", "video_utils", "utils.generic", "utils.type_validators")
"""Modules of transformers, the last of which checks configurations and imports the others."""
DRAFTING_WEIGHTS = "model.mtp_layers."
"""How the names of their weights begin."""


def import_validators() -> None:
    """Imports transformers' checks of configurations without the names of activations: to know these, they would import
    700 modules more, of torch's compiler and of its distributed tensors, which takes a second and is used for nothing
    else here. What they import besides is imported first, and knows of torch. Other releases may have no such module.
    """
    *others, checks = (f"transformers.{name}" for name in VALIDATORS)
    has_torch = import_utils.is_torch_available
    try:
        for name in others:
            import_module(name)
        import_utils.is_torch_available = lambda: False
        import_module(checks)
    except ImportError:
        pass
    finally:
        import_utils.is_torch_available = has_torch


import_validators()


def config_of(path: str | Path, revision: str | None = None) -> PretrainedConfig:
    """Returns the configuration of a model, a folder or one of the hub. No code of its repository is run.

    Raises:
        OSError: it cannot be read.
        ValueError: transformers does not know the model.
    """
    values, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    known = RENAMED_TYPES.get(values.get("model_type", ""))
    config: PretrainedConfig
    if known is None:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    else:
        values.pop("auto_map", None)  # names code of the repository
        config = AutoConfig.for_model(**{**values, "model_type": known, "name_or_path": str(path)})
    return config
