"""Whether the texts of honest users are distributed as the target's: a chi-square over all of their tokens.

The randomised probability integral transform of a token, under the target's distribution given the text before it, is
uniform and independent of all others if texts follow the target's law, and only then for every order of the tokens.
Here they are ordered by how much likelier the drafter makes them than the target: a rule that accepts too much, or
draws from the wrong residual, moves tokens to one end.

Source: Rosenblatt 1952, "Remarks on a multivariate transformation".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import AutoModelForCausalLM

NUM_BINS = 50


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion at temperature 1."""

    prompt: list[int]
    token_ids: list[int]


def transforms(target: Tensor, drafter: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the randomised probability integral transform of each token.

    Args:
        target: `[n, vocab]` float64, the target's distributions.
        drafter: `[n, vocab]` float64, the drafter's.
        tokens: `[n]` int64.
        generator: places each token within its step of the distribution function.

    Returns:
        `[n]` float64 in [0, 1]; uniform if each token is drawn from the target's distribution.
    """
    order = (drafter.log() - target.log()).nan_to_num().argsort(dim=1, descending=True, stable=True)
    sorted_target = target.gather(1, order)
    at = (order == tokens.unsqueeze(1)).int().argmax(1, keepdim=True)
    own = sorted_target.gather(1, at).squeeze(1)
    up_to = sorted_target.cumsum(1).gather(1, at).squeeze(1)
    return up_to - own * torch.rand(own.shape, dtype=own.dtype, generator=generator)


def p_value(uniforms: Tensor) -> float:
    """Returns the p-value of the hypothesis that all numbers are uniform, by `NUM_BINS` bins of equal probability."""
    counts = torch.histc(uniforms, NUM_BINS, 0.0, 1.0)
    return float(chisquare(counts.numpy()).pvalue)


@torch.inference_mode()
def honest_p_value(samples: Sequence[Sample], pair: tuple[Path, Path], seed: int = 0) -> float:
    """Returns the p-value of the hypothesis that completions follow the target's law.

    Args:
        samples: completions at temperature 1, each of at least one token.
        pair: folders of target and drafter.
        seed: of the transform.
    """
    generator = torch.Generator().manual_seed(seed)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in pair]
    found = []
    for sample in samples:
        ids = torch.tensor([sample.prompt + sample.token_ids])
        rows = slice(len(sample.prompt) - 1, -1)
        target, drafter = (model(input_ids=ids).logits[0, rows].double().softmax(-1) for model in models)
        found.append(transforms(target, drafter, torch.tensor(sample.token_ids), generator))
    return p_value(torch.cat(found))
