"""Reads the configurations of models, those included that are of a known family under another name. No torch here."""

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

RENAMED_TYPES = {"mimo": "qwen2"}
"""Values of `model_type` that transformers does not know, and whose models are those of another one but for layers that
draft: MiMo's multi-token-prediction layers, for which see docs/heads.md."""
DRAFTING_WEIGHTS = "model.mtp_layers."
"""How the names of their weights begin."""


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
