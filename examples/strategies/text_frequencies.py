"""A drafting strategy of one's own: draw the next token as often as it stands in the text so far.

It knows nothing of language, so little is kept of what it drafts, and the output has the target's law all the same:
each token is drawn from the very distribution that is sent with it. `Drawer` sees to that, to the random numbers of the
round, and to how the rule wants blocks drawn. A better law is another `weights_after`.

    draftwire serve drafter --strategy examples.strategies.text_frequencies:TextFrequencies --model TARGET
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from draftwire.drafting.drawing import BlockStart, Drawer
from draftwire.drafting.strategies import StrategyContext
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest, DraftStep
from draftwire.errors import DraftwireError
from draftwire.requests.session_parameters import SessionParameters


class Text:
    """The committed tokens of one session. Nothing has to be read before they can be counted."""

    num_unread = num_reused = 0

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = list(token_ids)

    def calibrate(self, base_len: int, token_ids: list[int]) -> None:
        """Commits tokens after the first `base_len`."""
        self.token_ids[base_len:] = token_ids

    def close(self) -> None:
        """Does nothing: no resources are held."""


class TextFrequencies:
    """Drafts with the frequencies of the tokens in each text. The model is that whose tokens they are."""

    def __init__(self, context: StrategyContext) -> None:
        """Takes what a drafter is configured with."""
        context.require_no_weights("text_frequencies")
        description = context.limited(context.load_card()).description
        self.context_length, self._vocab_size = description.context_length, description.vocab_size
        self._quantization = context.quantization

    def open(self, token_ids: list[int], parameters: SessionParameters) -> Text:
        """Opens a text; `parameters` are those of the request."""
        return Text(token_ids)

    def step(self, draftings: Sequence[Drafting]) -> DraftStep:
        """Drafts for each text that is asked for a block."""
        return DraftStep([self._draft(cast(Text, each.sequence), each.request) for each in draftings])

    def _draft(self, text: Text, request: DraftRequest | None) -> Draft | DraftwireError | None:
        if request is None:
            return None
        vocab_size = min(request.vocab_size, self._vocab_size)
        start = BlockStart(request, vocab_size, len(text.token_ids))
        drawer = Drawer([start], self._quantization, torch.device("cpu"))
        is_going = True
        while is_going:  # one block; `Drawer` can draw many at once
            weights = self.weights_after([*text.token_ids, *drawer.token_ids(0)], vocab_size)
            drawer.draw([0], (weights / weights.sum()).float().unsqueeze(0))
            is_going = drawer.goes_on(0)
        return drawer.drafts()[0]

    def weights_after(self, token_ids: list[int], vocab_size: int) -> Tensor:
        """Returns how often each token stands in a text, and once more, `[vocab_size] float64`."""
        known = torch.tensor([token for token in token_ids if token < vocab_size])
        return torch.bincount(known, minlength=vocab_size).double() + 1.0
