"""The public formats of heads: the shapes that their configurations state, and the names of their tensors.

Those of the EAGLE authors (`midlayer.*`, or `layers.*` of EAGLE-1), of the authors of Medusa and of Hydra, that of the
`speculators` package, whose names are used here for EAGLE-3, and the multi-token-prediction layers of MiMo, which lie
in the target's own checkpoint. Reads no tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from draftwire.errors import InvalidRequestError
from draftwire.models.card import context_length_of
from draftwire.models.lean_model import STEADY_ROTATIONS, head_size
from draftwire.options.heads.draft_head import HeadConfig
from draftwire.options.heads.head_names import WITH_LAYERS, HeadKind
from draftwire.options.heads.head_shape import (
    DRAFT_IDS,
    EMBEDDING,
    GATE_UP,
    HIDDEN_NORM,
    OUTPUT,
    QUERIES_KEYS_VALUES,
    TARGET_NORM,
    TOKEN_NORM,
    HeadShape,
)

SPECULATORS = "speculators_model_type"
"""Entry of a configuration of the `speculators` format that names the kind of head."""
TAPS = "eagle_aux_hidden_state_layer_ids"
"""Entry with the layers whose inputs a head reads."""
BLOCK_DIFFUSION = ("dflash", "dspark", "jetspec")
"""Kinds of the `speculators` format that draft a whole block in one pass, from masks."""
LAYER_TYPES = ("llama", "qwen3")
"""Kinds of decoder layers that heads have."""
MTP_TYPE = "mimo"
"""`model_type` of the targets whose multi-token-prediction layers are read."""
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Entries of a target's configuration that count its multi-token-prediction layers."""
MTP_LACKS = {
    "deepseek_v3": "latent attention and a mixture of experts",
    "deepseek_v32": "sparse latent attention and a mixture of experts",
    "ernie4_5_moe": "norms and names of their own, in a target with a mixture of experts",
    "glm4_moe": "a mixture of experts",
    "glm4_moe_lite": "latent attention and a mixture of experts",
    "mimo_v2_flash": "attention with sinks and values narrower than keys",
    "qwen3_5": "gated attention",
    "qwen3_5_moe": "gated attention and a mixture of experts",
    "qwen3_next": "gated attention and a mixture of experts",
}
"""Parts of the layers of other targets that `EagleHead` does not compute, by `model_type`."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Properties of a target that a head has to fit."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    epsilon: float
    """Epsilon of the final norm: added to the mean of the squares."""
    num_positions: int
    """Positions that it can attend to."""

    @classmethod
    def of(cls, config: Any) -> "TargetFacts":
        """Returns the facts of a configuration of transformers."""
        text = config.get_text_config()
        epsilon = float(getattr(text, "rms_norm_eps", 1e-6))
        positions = context_length_of(config, "the target")
        return cls(int(text.hidden_size), int(text.num_hidden_layers), int(text.vocab_size), epsilon, positions)


def shape_of(name: str, config: Mapping[str, Any], target: TargetFacts) -> HeadShape:
    """Returns the shape of a head.

    Raises:
        InvalidRequestError: the head is of a kind or form that is not supported, or for another target; the message
            names it.
    """
    kind = config.get(SPECULATORS)
    if kind in BLOCK_DIFFUSION:
        raise InvalidRequestError(
            f"{name} drafts whole blocks from masks ({kind}), which is not supported: docs/heads.md says what it needs"
        )
    if kind is not None and kind not in ("eagle3", "medusa", "hydra"):
        raise InvalidRequestError(f"{name} is a head of kind {kind!r}; supported: eagle3, medusa, hydra")
    if "medusa_num_heads" in config or kind == "medusa":
        return _medusa_shape(name, config, target)
    if "hydra_num_heads" in config or kind == "hydra":
        return _hydra_shape(name, config, target)
    if _is_target_with_mtp(config):
        return _mtp_shape(name, config, target)
    return _eagle_shape(name, config, target)


def _eagle_shape(name: str, config: Mapping[str, Any], target: TargetFacts) -> HeadShape:
    values = config.get("transformer_layer_config") if SPECULATORS in config else config
    if not isinstance(values, Mapping) or "hidden_size" not in values:
        raise InvalidRequestError(f"the configuration of {name} states no decoder layers: it is of no known head")
    model_type = values.get("model_type", "llama")
    if model_type not in LAYER_TYPES:
        raise InvalidRequestError(f"{name} has layers of type {model_type}; supported: {', '.join(LAYER_TYPES)}")
    layers: Any = AutoConfig.for_model(**{**values, "model_type": model_type})
    _check_layers(name, layers)
    is_eagle3 = _is_eagle3(config)
    target_size = config.get("target_hidden_size") or layers.hidden_size
    _check_target(name, target, target_size, layers.vocab_size)
    if not is_eagle3 and layers.hidden_size != target.hidden_size:
        raise InvalidRequestError(f"{name} is {layers.hidden_size} wide, and its target {target.hidden_size}")
    taps = _taps_of(name, config, target) if is_eagle3 else (target.num_layers,)
    draft_vocab_size = (config.get("draft_vocab_size") if is_eagle3 else None) or layers.vocab_size
    facts = HeadConfig(
        HeadKind.EAGLE3 if is_eagle3 else HeadKind.EAGLE,
        taps,
        target_size,
        layers.hidden_size,
        target.vocab_size,
        draft_vocab_size,
    )
    return HeadShape(
        facts,
        layers,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fusion=bool(config.get("norm_before_fc", False)),
        target_epsilon=target.epsilon,
        num_positions=target.num_positions,
    )


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or [""]
    return "draft_vocab_size" in config or "eagle3" in names[0].lower() or SPECULATORS in config


def _is_target_with_mtp(config: Mapping[str, Any]) -> bool:
    """Returns whether a configuration is a target's own, which has multi-token-prediction layers."""
    if _is_eagle3(config):  # which may copy entries of its target
        return False
    model_type = config.get("model_type")
    if model_type in LAYER_TYPES:  # a head, whose configuration may be a copy of its target's
        return False
    return model_type == MTP_TYPE or model_type in MTP_LACKS or any(config.get(entry) for entry in MTP_LAYERS)


def _mtp_shape(name: str, config: Mapping[str, Any], target: TargetFacts) -> HeadShape:
    """Returns the shape of MiMo's layer: one of Qwen2, whose configuration is the target's."""
    model_type = config.get("model_type")
    if model_type != MTP_TYPE:
        lacking = MTP_LACKS.get(str(model_type), "a form that is not known here")
        raise InvalidRequestError(
            f"{name} is a target of type {model_type}, whose multi-token-prediction layers have {lacking}, which is "
            f"not supported; supported: {MTP_TYPE}"
        )
    count = config.get("num_nextn_predict_layers") or 0
    if count != 1:
        raise InvalidRequestError(f"{name} has {count} multi-token-prediction layers; heads are made of one")
    if config.get("use_sliding_window"):
        raise InvalidRequestError(f"{name} has attention within a window, which heads do not compute")
    if config.get("num_hidden_layers") != target.num_layers:
        raise InvalidRequestError(
            f"{name} is of a target of {config.get('num_hidden_layers')} layers, and this one has {target.num_layers}"
        )
    own = {"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": None}
    layers: Any = AutoConfig.for_model(**{**config, **own})
    _check_layers(name, layers)
    _check_target(name, target, layers.hidden_size, layers.vocab_size)
    size, vocab_size = target.hidden_size, target.vocab_size
    facts = HeadConfig(HeadKind.MTP, (target.num_layers,), size, size, vocab_size, vocab_size)
    return HeadShape(facts, layers, target_epsilon=target.epsilon, num_positions=target.num_positions)


def _check_layers(name: str, layers: Any) -> None:
    """Refuses decoder layers that `EagleHead` does not compute, by their configuration."""
    rotation = (layers.rope_parameters or {}).get("rope_type")
    if rotation not in STEADY_ROTATIONS:
        raise InvalidRequestError(f"{name} has position embeddings of kind {rotation}, which are not supported")
    if layers.hidden_act != "silu":
        raise InvalidRequestError(f"the activation of {name} is {layers.hidden_act}, which is not supported")


def _taps_of(name: str, config: Mapping[str, Any], target: TargetFacts) -> tuple[int, ...]:
    """Returns the layers whose inputs an EAGLE-3 head reads.

    The configuration may name them; the default is that of the authors. An `eagle_config` names layers whose outputs
    are read, as in SGLang.
    """
    named = config.get(TAPS)
    within = config.get("eagle_config")
    if named is None and isinstance(within, Mapping) and within.get(TAPS) is not None:
        named = [layer + 1 for layer in within[TAPS]]
    if named is None:
        named = [2, target.num_layers // 2, target.num_layers - 3]
    taps = tuple(named)
    in_range = all(isinstance(tap, int) and 0 <= tap <= target.num_layers for tap in taps)
    if not taps or not in_range or len(set(taps)) < len(taps):
        raise InvalidRequestError(
            f"{name} reads hidden states at layers {', '.join(map(str, taps))} of a target that has {target.num_layers}"
        )
    return taps


def _medusa_shape(name: str, config: Mapping[str, Any], target: TargetFacts) -> HeadShape:
    size = config.get("medusa_hidden_size") or config.get("hidden_size") or target.hidden_size
    vocab_size = config.get("medusa_vocab_size") or config.get("vocab_size") or target.vocab_size
    _check_target(name, target, size, vocab_size)
    depth = _count(name, config, "medusa_num_heads", "num_heads")
    blocks = _count(name, config, "medusa_num_layers", "num_hidden_layers")
    draft_vocab_size = config.get("truncated_vocab_size") or vocab_size
    return _mlp_shape(HeadKind.MEDUSA, target, depth, blocks, draft_vocab_size)


def _hydra_shape(name: str, config: Mapping[str, Any], target: TargetFacts) -> HeadShape:
    arch = config.get("hydra_head_arch", "mlp")
    if arch != "mlp" or config.get("use_prefix_mlp"):
        raise InvalidRequestError(f"{name} is a Hydra head with attention over the text, which is not supported")
    if not config.get("grounded_heads", True):
        raise InvalidRequestError(f"{name} is a Hydra head that does not read draft tokens, which is not supported")
    layers = config.get("transformer_layer_config") or {}
    size = layers.get("hidden_size") or config.get("hidden_size") or target.hidden_size
    vocab_size = layers.get("vocab_size") or config.get("vocab_size") or target.vocab_size
    _check_target(name, target, size, vocab_size)
    depth = _count(name, config, "hydra_num_heads", "num_hydra_heads")
    blocks = _count(name, config, "hydra_num_layers", "num_hydra_layers")
    return _mlp_shape(HeadKind.HYDRA, target, depth, blocks, config.get("draft_vocab_size") or vocab_size)


def _mlp_shape(kind: HeadKind, target: TargetFacts, depth: int, blocks: int, draft_vocab_size: int) -> HeadShape:
    size, taps = target.hidden_size, (target.num_layers,)
    facts = HeadConfig(kind, taps, size, size, target.vocab_size, draft_vocab_size, depth, reads_history=False)
    return HeadShape(facts, num_blocks=blocks, target_epsilon=target.epsilon)


def _count(name: str, config: Mapping[str, Any], *entries: str) -> int:
    found = next((config[entry] for entry in entries if entry in config), None)
    if not isinstance(found, int) or found < 1:
        raise InvalidRequestError(f"the configuration of {name} states no {entries[0]}")
    return found


def _check_target(name: str, target: TargetFacts, hidden_size: int, vocab_size: int) -> None:
    if hidden_size != target.hidden_size:
        raise InvalidRequestError(
            f"{name} reads hidden states of {hidden_size}, and those of its target are {target.hidden_size} wide"
        )
    if vocab_size != target.vocab_size:
        raise InvalidRequestError(
            f"{name} is for a vocabulary of {vocab_size:,} tokens, and its target has {target.vocab_size:,}"
        )


# Tensors

RENAMED = (
    (re.compile(r"^(?:model\.)?midlayer\."), "layers.0."),
    (re.compile(r"^model\.(?=layers|embed_tokens|fc|norm|lm_head)"), ""),
)
"""Patterns of the names of EAGLE heads in other formats, with their replacements."""
MTP_RENAMED = {
    "token_layernorm": "token_norm",
    "hidden_layernorm": "hidden_norm",
    "input_proj": "fc",
    "final_layernorm": "norm",
}
"""Names of the parts around the decoder layer of a multi-token-prediction layer."""
MTP_NAMES = re.compile(r"^(?:model\.)?mtp_layers\.0\.(?P<part>[^.]+)(?P<rest>\..+)$")
"""Pattern of the names of such a layer's tensors, in MiMo's checkpoint."""
MLP_NAMES = re.compile(
    r"^(?:medusa_head\.|hydra_mlp\.|blocks\.)?(?P<depth>\d+)\.(?:layers\.)?(?P<place>\d+)\."
    r"(?P<part>linear\.|res_connection\.)?(?P<kind>weight|bias)$"
)
"""Pattern of the names of the parts of an MLP, of Medusa and Hydra."""
OUTPUT_NAMES = re.compile(r"^(?:lm_heads|hydra_lm_heads?)\.(?P<depth>\d+)\.(?:\d+\.)?(?P<kind>weight|bias)$")


def known_names(shape: HeadShape, names: list[str]) -> dict[str, str]:
    """Returns the names that the tensors of a checkpoint have here, by their own names. Unknown names stay as they are;
    of a target's checkpoint, only the tensors of the multi-token-prediction layer are included.
    """
    if shape.config.kind is HeadKind.MTP:
        return {
            name: f"{MTP_RENAMED.get(match['part'], 'layers.0.' + match['part'])}{match['rest']}"
            for name in names
            if (match := MTP_NAMES.match(name))
        }
    if shape.config.kind in WITH_LAYERS:
        renamed = {}
        for name in names:
            own = name
            for pattern, other in RENAMED:
                own = pattern.sub(other, own)
            renamed[name] = own
        return renamed
    found = {name: match for name in names if (match := MLP_NAMES.match(name))}
    places: dict[str, list[int]] = {}
    for match in found.values():
        places.setdefault(match["depth"], []).append(int(match["place"]))
    renamed = {name: name for name in names}
    for name, match in found.items():
        # Layers that hold no tensors, such as dropout, have numbers too.
        place = sorted(set(places[match["depth"]])).index(int(match["place"]))
        is_output = place == shape.num_blocks and match["part"] is None
        part = "output." if is_output else f"{place}.{match['part'] or 'linear.'}"
        renamed[name] = f"heads.{match['depth']}.{part}{match['kind']}"
    for name in names:
        if output := OUTPUT_NAMES.match(name):
            renamed[name] = f"heads.{output['depth']}.output.{output['kind']}"
    return renamed


def required_shapes(shape: HeadShape) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors that a head requires, those of its target included."""
    config = shape.config
    size = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.kind is not HeadKind.MEDUSA:
        shapes[EMBEDDING] = (config.vocab_size, size)
    if config.draft_vocab_size != config.vocab_size:
        shapes[DRAFT_IDS] = (config.draft_vocab_size,)
    if config.kind is HeadKind.MTP:
        shapes |= {TOKEN_NORM: (size,), HIDDEN_NORM: (size,), "norm.weight": (size,)}
    elif config.kind is not HeadKind.EAGLE3:
        shapes[TARGET_NORM] = (config.target_hidden_size,)
    if config.kind in WITH_LAYERS:
        shapes[OUTPUT] = (config.draft_vocab_size, size)
        shapes |= _eagle_shapes(shape)
        return shapes
    for depth in range(config.most_tokens or 0):
        width = size if config.kind is HeadKind.MEDUSA else (2 + depth) * size
        for place in range(shape.num_blocks):
            shapes[f"heads.{depth}.{place}.linear.weight"] = (size, size if place else width)
            if config.kind is HeadKind.HYDRA and not place:
                shapes[f"heads.{depth}.{place}.res_connection.weight"] = (size, width)
    return shapes


def _eagle_shapes(shape: HeadShape) -> dict[str, tuple[int, ...]]:
    config, layers = shape.config, shape.layers
    is_eagle3 = config.kind is HeadKind.EAGLE3
    size, inner, head = config.hidden_size, int(layers.intermediate_size), head_size(layers)
    queries, keys = layers.num_attention_heads * head, layers.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, config.feature_size if is_eagle3 else 2 * size)}
    if is_eagle3:
        shapes["norm.weight"] = (size,)
        shapes["layers.0.hidden_norm.weight"] = (size,)
    if shape.norm_before_fusion:
        shapes["input_norm.weight"] = (config.feature_size,)
    for index in range(layers.num_hidden_layers):
        width = 2 * size if is_eagle3 and not index else size
        own: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (size, queries),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
            "post_attention_layernorm": (size,),
        }
        if index or config.kind is not HeadKind.EAGLE:
            own["input_layernorm"] = (size,)
        if layers.model_type == "qwen3":
            own |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
        shapes |= {f"layers.{index}.{name}.weight": each for name, each in own.items()}
        biased: tuple[str, ...] = ()
        if layers.model_type == "qwen2":
            biased += QUERIES_KEYS_VALUES
        elif getattr(layers, "attention_bias", False):
            biased += (*QUERIES_KEYS_VALUES, "self_attn.o_proj")
        biased += (*GATE_UP, "mlp.down_proj") if getattr(layers, "mlp_bias", False) else ()
        shapes |= {f"layers.{index}.{name}.bias": own[name][:1] for name in biased}
    return shapes
