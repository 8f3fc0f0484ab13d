"""What greedy block verification remembers: how earlier rounds have modified the target of the tokens to come.

Source: Sun et al. 2024 (arXiv 2403.10444), Algorithms 5 and 6; see `examples.rules.greedy_block`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwire.verification.blocks import BlockBatch
from draftwire.verification.rule import Outcome

LARGEST_RATIO = 1e30
"""Upper bound of ratios: there the residual equals the target in every digit."""


@dataclass(frozen=True, slots=True)
class Modifications:
    """Modifications of the target by earlier rounds, oldest first."""

    ratios: Tensor
    """`[batch, modifications] float64`: R of the tokens since the round that made the modification."""
    left: Tensor
    """`[batch, modifications] int64`: number of tokens for which the modification is still in force."""

    @classmethod
    def none(cls, batch_size: int, device: torch.device | None = None) -> "Modifications":
        """Returns the empty modifications at the start of texts."""
        ratios = torch.zeros(batch_size, 0, dtype=torch.float64, device=device)
        return cls(ratios, torch.zeros(batch_size, 0, dtype=torch.int64, device=device))

    def select(self, index: Tensor) -> "Modifications":
        """Returns the modifications of the texts at `index`, `[any] int64`."""
        return Modifications(self.ratios[index], self.left[index])


@dataclass(frozen=True, slots=True)
class ModifiedBlocks:
    """Blocks with the modified target."""

    blocks: BlockBatch
    layers: Tensor
    """`[batch, max_len, modifications + 1, vocab] float64`: the target's rows before each modification, then after all.
    """
    ratios: Tensor
    """`[batch, max_len, modifications] float64`: R of each modification before each draft token."""
    left: Tensor
    """`[batch, modifications] int64`, the `left` before the blocks."""


def modify(blocks: BlockBatch, modifications: Modifications) -> ModifiedBlocks:
    """Applies modifications to the target's rows of blocks. Loops over positions, for each needs the row before it."""
    target, draft = blocks.padded_target_probs().to(torch.float64), blocks.padded_draft_probs().to(torch.float64)
    num_modifications = modifications.left.shape[1]
    ratios = modifications.ratios
    layers_along, ratios_along = [], []
    for position in range(blocks.max_len):
        layers = [target[:, position]]
        for index in range(num_modifications):
            residual = (ratios[:, index : index + 1] * layers[-1] - draft[:, position]).clamp(min=0.0)
            mass = residual.sum(dim=1, keepdim=True)
            in_force = (modifications.left[:, index : index + 1] > position) & (mass > 0.0)
            layers.append(torch.where(in_force, residual / torch.where(mass > 0.0, mass, 1.0), layers[-1]))
        layers_along.append(torch.stack(layers, dim=1))
        ratios_along.append(ratios)
        ratios = _extended(ratios, layers_along[-1][:, :-1], draft[:, position], blocks.draft_tokens[:, position])
    if not layers_along:
        return ModifiedBlocks(blocks, target[:, :0].unsqueeze(2), ratios.unsqueeze(1)[:, :0], modifications.left)
    layers_of_all = torch.stack(layers_along, dim=1)
    rows = torch.cat([layers_of_all[:, :, -1], target[:, -1:]], dim=1)
    modified = BlockBatch.padded(rows, draft, blocks.draft_tokens, blocks.lengths)
    return ModifiedBlocks(modified, layers_of_all, torch.stack(ratios_along, dim=1), modifications.left)


def advance(modified: ModifiedBlocks, outcome: Outcome) -> Modifications:
    """Returns the modifications after blocks were decided: those still in force, and those of the blocks themselves."""
    blocks, num_accepted = modified.blocks, outcome.num_accepted
    if blocks.max_len == 0:
        return Modifications.none(blocks.batch_size, blocks.lengths.device)
    batch = torch.arange(blocks.batch_size, device=blocks.lengths.device)
    stop = num_accepted.clamp(max=blocks.max_len - 1)  # after a whole block nothing is in force
    layers = modified.layers[batch, stop]
    own = torch.cat([blocks.ratios().new_ones(blocks.batch_size, 1), path_ratios(blocks)], dim=1)[batch, stop]
    draft = blocks.padded_draft_probs()[batch, stop]
    before = torch.cat([modified.ratios[batch, stop], own.unsqueeze(1)], dim=1)
    ratios = _extended(before, layers, draft, outcome.extra_tokens)
    committed = num_accepted + 1
    left = torch.cat([modified.left, blocks.lengths.unsqueeze(1)], dim=1) - committed.unsqueeze(1)
    in_force = (left > 0) & torch.isfinite(ratios)  # an infinite ratio leaves the target as it is
    kept = in_force.any(dim=0)
    return Modifications(torch.where(in_force, ratios, 0.0)[:, kept], torch.where(in_force, left, 0)[:, kept])


def path_ratios(blocks: BlockBatch) -> Tensor:
    """Returns R_1 .. R_n, `[batch, max_len] float64`: the product of the ratios so far, without a bound at 1."""
    return blocks.log_ratios().cumsum(dim=1).exp().clamp(max=LARGEST_RATIO)


def _extended(ratios: Tensor, layers: Tensor, draft: Tensor, tokens: Tensor) -> Tensor:
    """Returns the ratios extended by one token: multiplied by its probability in each layer over the drafter's.

    Args:
        ratios: `[batch, layers] float64`.
        layers: `[batch, layers, vocab]`.
        draft: `[batch, vocab]`.
        tokens: `[batch] int64`.
    """
    batch = torch.arange(len(tokens), device=tokens.device)
    return ratios * layers[batch, :, tokens] / draft[batch, tokens].unsqueeze(1)
