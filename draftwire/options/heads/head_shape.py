"""Shapes of heads, as their checkpoints state them, and the names of their tensors."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftwire.options.heads.draft_head import HeadConfig
from draftwire.options.heads.head_names import HeadKind

Tensors = dict[str, Tensor]
"""Tensors of a head, by their names in `speculators`, such as `layers.0.self_attn.q_proj.weight`."""

EMBEDDING, OUTPUT, TARGET_NORM = "embed_tokens.weight", "lm_head.weight", "target_norm.weight"
"""Names of tensors that a head may share with its target. The last is the target's final norm: EAGLE-1, Medusa and
Hydra read hidden states after it."""
DRAFT_IDS = "d2t"
"""Name of the tensor with the offset of the target's id from each draft id."""

FUSING, FUSING_BIAS, INPUT_NORM = "fc.weight", "fc.bias", "input_norm.weight"
"""Names of the fusion of EAGLE-3 features, its bias, and the norm before it."""
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
    """Whether the first layer of EAGLE-3 adds to the normalised fused features, not to the fused ones themselves."""
    norm_before_fusion: bool = False
    """Whether the joined features of EAGLE-3 are normalised before they are fused."""
    num_blocks: int = 1
    """Residual blocks of each MLP of Medusa and Hydra."""
    num_positions: int = 0
    """Positions that decoder layers have rotations for: those of the target."""
    target_epsilon: float = 1e-6
    """Epsilon of the target's final norm: added to the mean of the squares."""

    @property
    def fusion_epsilon(self) -> float:
        """Epsilon of the norm before, or in the place of, the fusion: added to the mean of the squares."""
        is_own = self.config.kind in (HeadKind.EAGLE3, HeadKind.MTP)
        return float(self.layers.rms_norm_eps) if is_own else self.target_epsilon
