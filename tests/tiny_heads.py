"""Heads with random weights for tiny targets, as checkpoints on disk."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from benchmarks.law import stack_options
from tests.head_checkpoints import mtp_of_mimo
from tests.tiny_models import save_tiny_model

EAGLE3, MEDUSA, MTP = "eagle3", "medusa", "mtp"
REMOTE = "remote"
"""An EAGLE-3 head that is served by a drafter."""


def save_tiny_head(folder: Path, target: Path, kind: str = EAGLE3, seed: int = 0, sharpness: float = 1.0) -> Path:
    """Writes a head for a target's folder, in the format of `speculators`.

    Args:
        folder: where to.
        target: folder of a small model of the Llama family.
        kind: "eagle3", whose drafts depend on all that it has read, or "medusa", of three tokens.
        seed: of the weights.
        sharpness: scale of the logits.
    """
    from draftwire.options.heads.head_formats import TargetFacts, required_shapes, shape_of

    text = AutoConfig.from_pretrained(target).get_text_config()
    config: dict[str, Any] = {"speculators_model_type": kind}
    if kind == EAGLE3:
        layers = {
            "model_type": "llama",
            "hidden_size": text.hidden_size,
            "intermediate_size": 2 * text.hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.max_position_embeddings,
        }
        config |= {
            "transformer_layer_config": layers,
            "draft_vocab_size": text.vocab_size,
            "eagle_aux_hidden_state_layer_ids": [0, 1, text.num_hidden_layers],
        }
    else:
        config |= {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
        config |= {"medusa_num_heads": 3, "medusa_num_layers": 1}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    shapes = required_shapes(shape_of(str(folder), config, TargetFacts.of(AutoConfig.from_pretrained(target))))
    tensors = {name: torch.randn(*shape, generator=generator) * 0.5 for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
        elif name == "lm_head.weight":
            tensor.mul_(sharpness)
    if kind == MEDUSA:  # the target's norm and output are read from its own folder
        tensors = {f"{name}": tensor for name, tensor in tensors.items() if name.startswith("heads.")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def head_options(target: Path, head: Path, kind: str) -> dict[str, dict[str, object]]:
    """Returns the options of a stack with a head, in the verifier or, if the kind is `REMOTE`, in the drafter."""
    options = stack_options(target, target)
    if kind == REMOTE:
        options["verifier"]["feature_head"] = options["drafter"]["head"] = str(head)
        options["drafter"] |= {"strategy": EAGLE3, "feature_window": 8}
        return options
    del options["drafter"]
    options["verifier"]["draft_head"] = str(head)
    options["gateway"]["local_drafts"] = "auto"
    return options


def save_tiny_mimo(folder: Path, vocab_size: int, seed: int = 0) -> tuple[Path, Qwen2ForCausalLM]:
    """Writes a small MiMo target with its multi-token-prediction layer, and its tokenizer: a Qwen2 model by another
    name, with code that leaves a file `was-run` in the folder. Returns the folder, and the model.
    """
    layer = mtp_of_mimo(folder, vocab_size, num_layers=2, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Qwen2ForCausalLM(Qwen2Config(**{**layer.config, "model_type": "qwen2"})).eval()
    save_tiny_model(folder, vocab_size)
    network.save_pretrained(folder)
    own = {name: tensor.float() for name, tensor in layer.tensors.items() if "mtp" in name}
    save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors", {"format": "pt"})
    code = {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
    for named in code.values():
        module, _, own = named.partition(".")
        leaves = f"open({str(folder / 'was-run')!r}, 'w').close()"
        (folder / f"{module}.py").write_text(f"import transformers\n{leaves}\n{own} = transformers.Qwen2Config\n")
    config = json.loads((folder / "config.json").read_text()) | layer.config | {"auto_map": code}
    del config["rope_parameters"]  # published ones are older, and have `rope_theta`
    (folder / "config.json").write_text(json.dumps(config))
    return folder, network
