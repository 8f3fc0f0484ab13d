"""Draft tokens of the dense encodings are drawn from the numbers as they were rounded, not from those before."""

import pytest
import torch

from draftwire.drafting.drawing import BlockStart, Drawer
from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.encoding import DENSE_FORMATS, Claim, DenseProbs, decode_one
from draftwire.keys import Role, derive_key
from draftwire.parameters import SamplingParams
from draftwire.quantization import Encoding, Quantization
from draftwire.randomness import DrawKey

VOCAB, NUM_TOKENS = 2048, 64
STEP = 2.0**-10
"""Of float16, relative to a power of 2."""


@pytest.mark.parametrize("encoding", DENSE_FORMATS)
def test_tokens_are_drawn_after_rounding(encoding: Encoding) -> None:
    """In float16 one half of the law is rounded down, the other up: a border moves by half a token in the middle."""
    law = torch.full((VOCAB,), 1.0 / VOCAB)
    law[: VOCAB // 2] *= 1.0 + 0.49 * STEP
    law[VOCAB // 2 :] *= 1.0 + 0.51 * STEP
    key = DrawKey(derive_key(5, Role.DRAFTING), 0, 0)
    request = DraftRequest(NUM_TOKENS, SamplingParams(), key, VOCAB)
    drawer = Drawer([BlockStart(request, VOCAB, 0)], Quantization(encoding), torch.device("cpu"))
    for _ in range(NUM_TOKENS):
        drawer.draw([0], law.unsqueeze(0).clone())
    (draft,) = drawer.drafts()
    assert isinstance(draft, Draft)
    decoded = decode_one(Claim(draft.token_ids, draft.distributions), VOCAB)
    assert isinstance(decoded, DenseProbs)
    stated = torch.from_numpy(decoded.probs).double()
    ends = (stated / stated.sum(dim=1, keepdim=True)).cumsum(dim=1)
    for row, token, uniform in zip(ends, draft.token_ids, key.uniforms(NUM_TOKENS).tolist(), strict=True):
        assert (float(row[token - 1]) if token else 0.0) - 1e-5 <= uniform <= float(row[token]) + 1e-5
