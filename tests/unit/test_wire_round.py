"""The law of rounds whose draft distributions are made integers, drawn from, encoded, and decoded from their bytes."""

from itertools import product

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from draftwire.checking import check_round
from draftwire.checking.toy_models import Pair, adversarial_pairs, random_pairs
from draftwire.checking.whole_round import Round
from draftwire.checking.wire_rounds import COARSE, FINE, quantized, through_bytes
from draftwire.method.distributions import DraftRows, draw, quantize
from draftwire.method.encoding import TOTAL_WEIGHT
from draftwire.method.quantization import Quantization
from draftwire.verification import RULES

LOSSLESS = [name for name, rule in RULES.items() if rule.is_lossless and rule.needs_draft_probs]
slow = pytest.mark.slow
PAIR = random_pairs(3)[1]
OTHERS = (random_pairs(3)[3], *adversarial_pairs(3)[:3])


FIRST = [("block", COARSE, PAIR), ("token", FINE, PAIR)]
"""What every run of the tests looks at; the others are slow."""
CASES = [
    pytest.param(*case, id=f"{case[0]}-{'coarse' if case[1] is COARSE else 'fine'}-{case[2].name}", marks=marks)
    for cases, marks in (
        (FIRST, ()),
        ([case for case in product(LOSSLESS, (COARSE, FINE), (PAIR, *OTHERS)) if case not in FIRST], slow),
    )
    for case in cases
]


class WireRound(Round):
    """A round whose draft tokens are drawn from integer weights, which the rule receives as bytes."""

    quantization = COARSE

    @override
    def drawn(self, rows: Tensor, uniforms: Tensor) -> Tensor:
        return quantize(rows, self.quantization).draw(uniforms)

    @override
    def stated_law(self, rows: Tensor) -> DraftRows:
        stated = quantize(rows, self.quantization)
        weights = torch.zeros_like(rows).scatter_add_(1, stated.token_ids, stated.weights.to(rows.dtype))
        return through_bytes(weights / TOTAL_WEIGHT)


@pytest.mark.parametrize(("rule", "quantization", "pair"), CASES)
def test_round_through_bytes_keeps_the_targets_law(rule: str, quantization: Quantization, pair: Pair) -> None:
    whole = WireRound(RULES[rule], pair, 2)
    whole.quantization = quantization
    report = check_round(whole)
    assert report.is_exact
    assert report.deviation < 1e-11


class DrawsFromAllStatesTheLikeliest(WireRound):
    """Draws from the full softmax and sends its largest entries."""

    def drawn(self, rows: Tensor, uniforms: Tensor) -> Tensor:
        drawn = draw(rows, uniforms)
        kept = quantize(rows, self.quantization)
        is_kept = ((kept.token_ids == drawn.unsqueeze(1)) & (kept.weights > 0)).any(dim=1)
        return torch.where(is_kept, drawn, kept.token_ids[:, 0])  # else the verifier would refuse the block


class SendsWeightsOneLess(WireRound):
    """The verifier forgets that weights are stored as one less."""

    def stated_law(self, rows: Tensor) -> DraftRows:
        sparse = super().stated_law(rows)
        return type(sparse)(sparse.token_ids, sparse.probs - (sparse.probs > 0) / 256, sparse.vocab_size)


def test_mistakes_on_the_wire_are_found() -> None:
    """On the side that draws and on the one that reads. Each already shows in blocks of one token."""
    for rule, mistake in zip(LOSSLESS, (DrawsFromAllStatesTheLikeliest, SendsWeightsOneLess), strict=True):
        assert check_round(WireRound(RULES[rule], PAIR, 1)).deviation < 1e-11
        assert check_round(mistake(RULES[rule], PAIR, 1)).deviation > 1e-4, (rule, mistake)


def test_bytes_keep_integers_to_the_bit() -> None:
    pair = quantized(random_pairs(7)[2], FINE)
    assert torch.equal(through_bytes(pair.drafter).dense().double(), pair.drafter)
