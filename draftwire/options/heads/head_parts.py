"""Parts of heads of all kinds: the fusion of features, and the ids that they draft."""

import torch
from torch import Tensor

from draftwire.models.lean_decoder import Norm
from draftwire.models.linear import Linear
from draftwire.options.heads.head_names import HeadKind
from draftwire.options.heads.head_shape import (
    FUSING,
    FUSING_BIAS,
    HIDDEN_NORM,
    INPUT_NORM,
    TARGET_NORM,
    HeadShape,
    Tensors,
)


def fusion_names(shape: HeadShape) -> tuple[str, ...]:
    """Returns the names of the tensors that `Fusion` reads, the optional ones included."""
    if shape.config.kind is not HeadKind.EAGLE3:
        return (HIDDEN_NORM if shape.config.kind is HeadKind.MTP else TARGET_NORM,)
    return (FUSING, FUSING_BIAS, INPUT_NORM) if shape.norm_before_fusion else (FUSING, FUSING_BIAS)


class Fusion:
    """First operation of a head on features, which may run where the target is: see `DraftHead.fuse`. `fc` of EAGLE-3;
    of MTP a norm of its own, of all others the target's final norm.
    """

    def __init__(self, shape: HeadShape, tensors: Tensors, streamed: bool = False) -> None:
        """Wraps those of a head's tensors that `fusion_names` returns; see `Linear` for `streamed`."""
        self._linear: Linear | None = None
        self._norm: Norm | None = None
        self._dtype = tensors[fusion_names(shape)[0]].dtype
        if shape.config.kind is not HeadKind.EAGLE3:
            (name,) = fusion_names(shape)
            self._norm = Norm(tensors[name], shape.fusion_epsilon)
            return
        self._linear = Linear(tensors[FUSING], tensors.get(FUSING_BIAS), streamed=streamed)
        if shape.norm_before_fusion:
            self._norm = Norm(tensors[INPUT_NORM], shape.fusion_epsilon)

    @torch.inference_mode()
    def __call__(self, features: Tensor) -> Tensor:
        """Returns `[tokens, HeadConfig.hidden_size]` of `[tokens, HeadConfig.feature_size]`."""
        rows = features.to(self._dtype)
        rows = rows if self._norm is None else self._norm(rows)
        return rows if self._linear is None else self._linear(rows)


class DraftIds:
    """Ids of the target that a head can draft."""

    def __init__(self, offsets: Tensor | None, vocab_size: int) -> None:
        """Wraps `[draft_vocab_size] int64` offsets, `d2t`; None if the head drafts all ids."""
        self._vocab_size = vocab_size
        self.target_ids = None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets

    def spread(self, logits: Tensor) -> Tensor:
        """Returns `[rows, vocab_size]` for `[rows, draft_vocab_size]`; -inf for all other ids."""
        if self.target_ids is None:
            return logits
        spread = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return spread.index_copy_(1, self.target_ids, logits)
