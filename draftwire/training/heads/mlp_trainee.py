"""Medusa and Hydra heads that gradients flow through."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from draftwire.options.heads.head_names import HeadKind
from draftwire.options.heads.head_shape import HeadShape
from draftwire.training.heads.eagle_trainee import TraineeNorm


class MlpTrainee(nn.Module):
    """A trainable Medusa or Hydra head. Modules have the names of `MlpHead`'s tensors. The output layer is the
    target's own, which is not trained.
    """

    def __init__(self, shape: HeadShape) -> None:
        """Builds MLPs that return the last hidden state unchanged, as the authors of Medusa start."""
        super().__init__()
        config = shape.config
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(False)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False).requires_grad_(False)
        self.target_norm = TraineeNorm(size, shape.target_epsilon).requires_grad_(False)
        self._is_hydra = config.kind is HeadKind.HYDRA
        widths = [2 + depth if self._is_hydra else 1 for depth in range(cast(int, config.most_tokens))]
        self.heads = nn.ModuleList(
            nn.ModuleList(
                _Block(size, size * width if not index else size, self._is_hydra and not index)
                for index in range(shape.num_blocks)
            )
            for width in widths
        )

    def forward(self, features: Tensor, token_ids: Tensor) -> list[Tensor]:
        """Returns the logits of each draft token, `[batch, count, draft_vocab_size]`; see `EagleTrainee`."""
        count = features.shape[1]
        rows = self.target_norm(features)
        logits = []
        for step, blocks in enumerate(self.heads):
            if self._is_hydra:
                rows = torch.cat([rows, self.embed_tokens(token_ids[:, 1 + step : 1 + step + count])], -1)
            inner = rows
            for block in cast(Any, blocks):
                inner = block(inner)
            logits.append(self.lm_head(inner))
        return logits


class _Block(nn.Module):
    def __init__(self, size: int, width: int, has_shortcut: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection: nn.Linear | None = None
        if has_shortcut:
            self.res_connection = nn.Linear(width, size)
            nn.init.zeros_(self.res_connection.weight)
            nn.init.zeros_(self.res_connection.bias)
            nn.init.eye_(self.res_connection.weight[:, :size])

    def forward(self, rows: Tensor) -> Tensor:
        shortcut = rows if self.res_connection is None else self.res_connection(rows)
        return shortcut + silu(self.linear(rows))
