"""The chi-square of texts finds a law that is off by little, and raises no alarm at the right one.

Seeds are fixed; under fresh ones a right law would fail with a probability of 1e-3.
"""

import torch
from torch import Tensor

from tests.attacks.honest_law import p_value, transforms

NUM_TOKENS, VOCAB_SIZE = 20_000, 40


def drawn_p_value(share_of_drafter: float) -> float:
    """Draws tokens of a mixture of both laws and returns the p-value under the target's."""
    generator = torch.Generator().manual_seed(3)
    target, drafter = (
        torch.randn(NUM_TOKENS, VOCAB_SIZE, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2)
    )
    law: Tensor = share_of_drafter * drafter + (1.0 - share_of_drafter) * target
    tokens = law.multinomial(1, generator=generator).squeeze(1)
    return p_value(transforms(target, drafter, tokens, generator))


def test_texts_of_the_target_pass() -> None:
    assert drawn_p_value(0.0) > 1e-3


def test_texts_with_a_twentieth_of_the_drafters_law_fail() -> None:
    assert drawn_p_value(0.05) < 1e-6


def test_tokens_that_one_of_both_never_draws_are_placed_at_the_ends() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    drafter = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.5, 0.5]], dtype=torch.float64)
    first, second = transforms(target, drafter, torch.tensor([1, 0]), torch.Generator().manual_seed(0))
    assert 0.0 <= first <= 0.5 <= second <= 1.0
