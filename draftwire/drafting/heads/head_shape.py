"""What heads are made of, as their checkpoints state it: shapes, and tensors by name."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftwire.drafting.heads.draft_head import HeadConfig
from draftwire.drafting.heads.head_names import HeadKind

Tensors = dict[str, Tensor]
"""Of a head, by the names that `speculators` gives them, such as `layers.0.self_attn.q_proj.weight`."""

EMBEDDING, OUTPUT, TARGET_NORM = "embed_tokens.weight", "lm_head.weight", "target_norm.weight"
"""Names of tensors that a head may share with its target. The last is the target's final norm: EAGLE-1, Medusa and
Hydra take hidden states after it."""
DRAFT_IDS = "d2t"
"""Name of the tensor that says of each draft id how far from it the target's id is."""

FUSING, FUSING_BIAS, INPUT_NORM = "fc.weight", "fc.bias", "input_norm.weight"
"""Names of what makes features of EAGLE-3 narrow, and of a norm before that."""
TOKEN_NORM, HIDDEN_NORM = "token_norm.weight", "hidden_norm.weight"
"""Names of the norms of a multi-token-prediction layer's embeddings and features."""
QUERIES_KEYS_VALUES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Projections of a decoder layer that are computed as one."""
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
"""The same of its MLP."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Everything about a head but its tensors."""

    config: HeadConfig
    layers: Any = None
    """Configuration of transformers of the decoder layers; None if there are none."""
    norm_before_residual: bool = False
    """Of EAGLE-3: whether the first layer adds to the normalised fused features, not to what they were before."""
    norm_before_fusion: bool = False
    """Of EAGLE-3: whether the joined features are normalised before they are fused."""
    num_blocks: int = 1
    """Of Medusa and Hydra: residual blocks of each MLP."""
    num_positions: int = 0
    """That decoder layers have rotations for: the target's."""
    target_epsilon: float = 1e-6
    """What the target's final norm adds to the mean of the squares."""

    @property
    def fusion_epsilon(self) -> float:
        """What the norm before, or in the place of, the fusion adds to the mean of the squares."""
        is_own = self.config.kind in (HeadKind.EAGLE3, HeadKind.MTP)
        return float(self.layers.rms_norm_eps) if is_own else self.target_epsilon
