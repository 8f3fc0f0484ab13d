"""The law of rounds whose draft distributions are made integers, drawn from, encoded, and decoded from their bytes."""

import pytest
import torch
from torch import Tensor

from draftwire.checking import check_round
from draftwire.checking.toy_models import adversarial_pairs, random_pairs
from draftwire.checking.wire_rounds import COARSE, FINE, WireRound, quantized, through_bytes
from draftwire.method.distributions import DraftRows, draw, quantize
from draftwire.verification import RULES

LOSSLESS = [name for name, rule in RULES.items() if rule.is_lossless and rule.needs_draft_probs]
slow = pytest.mark.slow
PAIR = random_pairs(3)[1]
OTHERS = [pytest.param(pair, marks=slow) for pair in (random_pairs(3)[3], *adversarial_pairs(3)[:3])]


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("pair", [PAIR, *OTHERS], ids=lambda pair: pair.name)
@pytest.mark.parametrize("quantization", [COARSE, FINE], ids=["coarse", "fine"])
def test_round_through_bytes_keeps_the_targets_law(rule, pair, quantization) -> None:
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
    for rule in LOSSLESS:
        assert check_round(WireRound(RULES[rule], PAIR, 1)).deviation < 1e-11
        for mistake in (DrawsFromAllStatesTheLikeliest, SendsWeightsOneLess):
            assert check_round(mistake(RULES[rule], PAIR, 1)).deviation > 1e-4, (rule, mistake)


def test_bytes_keep_integers_to_the_bit() -> None:
    pair = quantized(random_pairs(7)[2], FINE)
    assert torch.equal(through_bytes(pair.drafter).dense().double(), pair.drafter)
