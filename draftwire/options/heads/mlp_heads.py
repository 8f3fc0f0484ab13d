"""Medusa and Hydra: an MLP for each draft token, over the target's last hidden state.

All tokens of a block are drafted from the features of one token. Those of Medusa do not see each other; an MLP of Hydra
also reads the embeddings of the tokens before its own, the committed one among them.

Source: Cai et al. 2024, Medusa (arXiv 2401.10774), section 2.1; Ankner et al. 2024, Hydra (arXiv 2402.05109), section
3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from draftwire.method.devices import upload
from draftwire.models.cached_model import appended
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.linear import STREAMED_BYTES, Linear
from draftwire.models.sequence_model import Segment
from draftwire.options.heads.draft_head import DraftHead, HeadState, PairReading
from draftwire.options.heads.head_names import HeadKind
from draftwire.options.heads.head_parts import DraftIds, Fusion
from draftwire.options.heads.head_shape import DRAFT_IDS, EMBEDDING, OUTPUT, TARGET_NORM, HeadShape, Tensors


@dataclass(frozen=True, slots=True)
class _Block:
    """A residual block."""

    inner: Linear
    shortcut: Linear | None
    """Projects the input to the width of the output, in the first block of Hydra; None adds the input itself."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns `[rows, hidden_size]`."""
        return (rows if self.shortcut is None else self.shortcut(rows)) + silu(self.inner(rows))


class MlpHead(DraftHead):
    """A Medusa or Hydra head. It has no keys and values: its cache only counts the pairs read."""

    def __init__(self, shape: HeadShape, tensors: Tensors, cache_tokens: int) -> None:
        """Wraps a head's tensors; see `EagleHead`."""
        self.config = shape.config
        self.device, self.dtype = tensors[TARGET_NORM].device, tensors[TARGET_NORM].dtype
        streamed = sum(tensor.nbytes for name, tensor in tensors.items() if name != EMBEDDING) > STREAMED_BYTES
        self._embedding = tensors[EMBEDDING] if shape.config.kind is HeadKind.HYDRA else None
        self.fuse = Fusion(shape, tensors)
        self._draft_ids = DraftIds(tensors.get(DRAFT_IDS), self.config.vocab_size)

        def layer(name: str) -> Linear:
            return Linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), streamed=streamed)

        def block(name: str) -> _Block:
            shortcut = f"{name}.res_connection"
            return _Block(layer(f"{name}.linear"), layer(shortcut) if f"{shortcut}.weight" in tensors else None)

        depths = range(cast(int, self.config.most_tokens))
        self._mlps = [[block(f"heads.{depth}.{index}") for index in range(shape.num_blocks)] for depth in depths]
        shared = layer("lm_head") if OUTPUT in tensors else None
        self._outputs = [shared or layer(f"heads.{depth}.output") for depth in depths]
        self.resize(cache_tokens)

    @torch.inference_mode()
    def read(self, readings: Sequence[PairReading]) -> HeadState:
        """Counts pairs, and returns the first logits of the readings with `keep`, from their last pairs."""
        kept = [reading for reading in readings if reading.keep]
        with appended(self.cache, [Segment(each.sequence, len(each.token_ids)) for each in readings]):
            features = [reading.features[-1:] for reading in kept] or [readings[0].features[:0]]
            token_ids = upload([reading.token_ids[-1] for reading in kept], self.device, torch.int64)
            return self._state([each.sequence for each in kept], 0, self._joined(torch.cat(features), token_ids))

    @torch.inference_mode()
    def extend(self, state: HeadState, token_ids: Tensor) -> HeadState:
        """Reads one more draft token of each block, which only Hydra uses."""
        with appended(self.cache, [Segment(sequence, 1) for sequence in state.sequences]):
            return self._state(state.sequences, state.depth + 1, self._joined(state.carried, token_ids))

    def _joined(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """Returns the input of the next MLP: that of the MLP before it, and for Hydra one more token."""
        return rows if self._embedding is None else torch.cat([rows, embedding(token_ids, self._embedding)], -1)

    def _state(self, sequences: list[CachedSequence], depth: int, rows: Tensor) -> HeadState:
        inner = rows
        for block in self._mlps[depth]:
            inner = block(inner)
        return HeadState(sequences, depth, rows, self._draft_ids.spread(self._outputs[depth](inner)))
