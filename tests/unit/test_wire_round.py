"""The law of rounds whose draft distributions are made integers, drawn from, encoded, and decoded from their bytes."""

import pytest
import torch
from torch import Tensor

from draftwire.checking import check_round
from draftwire.checking.models import adversarial_pairs, random_pairs
from draftwire.checking.wire import COARSE, FINE, WireRound, quantized, through_bytes
from draftwire.distributions import DenseRows, DraftRows, draw, quantize
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


class DrawsFromFewStatesAll(WireRound):
    """Draws from the integers and sends what they were made of."""

    def stated_law(self, rows: Tensor) -> DraftRows:
        return DenseRows(rows)


class DrawsWithEightBits(WireRound):
    """Draws from coarser integers than it sends."""

    def drawn(self, rows: Tensor, uniforms: Tensor) -> Tensor:
        return quantize(rows, self.quantization, total=256).draw(uniforms)


class DrawsAnotherOrder(WireRound):
    """Draws places in the order of the ids, weights in the order of their size."""

    def drawn(self, rows: Tensor, uniforms: Tensor) -> Tensor:
        kept = quantize(rows, self.quantization)
        places = (kept.weights.cumsum(1) <= (uniforms * 65536).to(torch.int64).unsqueeze(1)).sum(1, keepdim=True)
        return kept.token_ids.sort(dim=1).values.gather(1, places).squeeze(1)


class SendsWeightsOneLess(WireRound):
    """The verifier forgets that weights are stored as one less."""

    def stated_law(self, rows: Tensor) -> DraftRows:
        sparse = super().stated_law(rows)
        return type(sparse)(sparse.token_ids, sparse.probs - (sparse.probs > 0) / 256, sparse.vocab_size)


MISTAKES = (
    DrawsFromAllStatesTheLikeliest,
    DrawsFromFewStatesAll,
    DrawsWithEightBits,
    DrawsAnotherOrder,
    SendsWeightsOneLess,
)


def test_mistakes_on_the_wire_are_found() -> None:
    """Each already shows in blocks of one token."""
    for rule in LOSSLESS:
        found = {mistake.__name__: check_round(mistake(RULES[rule], PAIR, 1)).deviation for mistake in MISTAKES}
        assert min(found.values()) > 1e-4, (rule, found)
    assert check_round(WireRound(RULES["block"], PAIR, 1)).deviation < 1e-11


def test_bytes_keep_integers_to_the_bit() -> None:
    pair = quantized(random_pairs(7)[2], FINE)
    assert torch.equal(through_bytes(pair.drafter).dense().double(), pair.drafter)
