"""Ranks the tokens that may stand in the places of drafted blocks."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftwire.drafting.drawing import Drawer
from draftwire.drafting.strategy import Draft
from draftwire.errors import DraftwireError
from draftwire.method.devices import upload
from draftwire.method.encoding import DraftDistributions
from draftwire.method.quantization import Encoding

POSSIBLE_FIRST = 1e4
"""Added to the scores of tokens that are possible, so that they come before all others: no logit is that large."""


class RankedPlaces:
    """The `PlaceGuesses` of drafters."""

    def __init__(self, drawer: Drawer) -> None:
        """Starts before the first place of a drawer's blocks."""
        self._drawer = drawer
        wanted = [block.request.guesses for block in drawer.blocks]
        self._most = [0 if one is None else one.most for one in wanted]
        self._ranked: list[list[Tensor]] = [[] for _ in self._most]  # of each place of each block
        self._rows: list[int] = []  # those of the next places, among all rows of the step
        self._blocks: list[int] = []
        self._logits = torch.empty(0)

    def see(self, blocks: Sequence[int], logits: Tensor) -> None:
        """Keeps the logits of the next places."""
        self._rows = [row for row, block in enumerate(blocks) if self._most[block]]
        self._blocks = [blocks[row] for row in self._rows]
        self._logits = logits[upload(self._rows, logits.device, torch.int64)].float()

    def rank(self, probs: Tensor) -> None:
        """Ranks the tokens of the next places: possible ones by their probability, under a coupled rule by the race of
        the place; then the others by their logits, since the target may think otherwise of them.
        """
        if not self._rows:
            return
        own = probs[upload(self._rows, probs.device, torch.int64)]
        scores = torch.where(own > 0.0, own.log() + POSSIBLE_FIRST, self._logits)
        all_blocks = self._drawer.blocks
        coupled = [place for place, block in enumerate(self._blocks) if all_blocks[block].request.is_coupled]
        if coupled:
            places = upload(coupled, probs.device, torch.int64)
            times = self._drawer.race_times([self._blocks[place] for place in coupled], probs.shape[1])
            scores[places] -= times.log().float()
        for place, block in enumerate(self._blocks):
            most = self._most[block] + 1  # the drawn token may be among them
            self._ranked[block].append(scores[place].topk(min(most, probs.shape[1])).indices)

    def added_to(self, drafts: Sequence[Draft | DraftwireError]) -> list[Draft | DraftwireError]:
        """Returns drafts with guesses; one without tokens for who asked for none."""
        return [self._added(index, draft) for index, draft in enumerate(drafts)]

    def _added(self, index: int, draft: Draft | DraftwireError) -> Draft | DraftwireError:
        most, ranked = self._most[index], [row.tolist() for row in self._ranked[index]]
        block = self._drawer.blocks[index]
        if not block.request.num_tokens:
            nothing = DraftDistributions(Encoding.NONE, block.vocab_size)
            return Draft([], nothing, [row[:most] for row in ranked])
        if isinstance(draft, DraftwireError):
            return draft
        pairs = zip(ranked, draft.token_ids, strict=False)  # a block that was cut short has ranked more places
        return replace(draft, guesses=[[token for token in row if token != drawn][:most] for row, drawn in pairs])
