"""Chains of a language model, with the other tokens that may stand in their places."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.drafting.language_model import BatchMember
from draftwire.drafting.strategy import Draft
from draftwire.errors import DraftwireError
from draftwire.method.devices import upload
from draftwire.method.encoding import DraftDistributions
from draftwire.method.quantization import Encoding, Quantization
from draftwire.models.sequence_model import DraftModel
from draftwire.options.confidence.confident_chains import ConfidentChains

POSSIBLE_FIRST = 1e4
"""Added to the scores of tokens that are possible, so that they come before all others: no logit is that large."""


class GuessedChains(ConfidentChains):
    """Chains, some with guesses of other tokens for their places, without influence on what is drawn."""

    def __init__(self, model: DraftModel, members: Sequence[BatchMember], quantization: Quantization) -> None:
        super().__init__(model, members, quantization)
        wanted = [member.request.guesses for member in members]
        self._most = [0 if one is None else one.most for one in wanted]
        self._ranked: list[list[Tensor]] = [[] for _ in members]  # of each place of each chain

    @override
    def draw(self, logits: Tensor) -> list[Draft | DraftwireError]:
        drawing = [index for index in self.active if self.drawer.num_left(index)]
        if len(drawing) < len(self.active):  # the others want the guesses of the next place alone
            self.active = [index for index in self.active if index not in drawing]
            self.probabilities(self.masked(logits[upload(self.active, logits.device, torch.int64)]))
            self.active, logits = drawing, logits[upload(drawing, logits.device, torch.int64)]
        return [self._with_guesses(index, draft) for index, draft in enumerate(super().draw(logits))]

    @override
    def probabilities(self, logits: Tensor) -> Tensor:
        rows = [row for row, index in enumerate(self.active) if self._most[index]]
        if not rows:
            return super().probabilities(logits)
        places = upload(rows, logits.device, torch.int64)
        own_logits = logits[places].float()
        probs = super().probabilities(logits)
        self._rank([self.active[row] for row in rows], own_logits, probs[places])
        return probs

    def _rank(self, indices: list[int], logits: Tensor, probs: Tensor) -> None:
        """Ranks the tokens of the next places: possible ones by their probability, under a coupled rule by the race of
        the place; then the others by their logits, since the target may think otherwise of them.

        Args:
            indices: of members that want guesses.
            logits: `[indices, vocab] float32`.
            probs: the distributions, `[indices, vocab] float32`.
        """
        scores = torch.where(probs > 0.0, probs.log() + POSSIBLE_FIRST, logits)
        coupled = [row for row, index in enumerate(indices) if self.members[index].request.is_coupled]
        if coupled:
            times = self.drawer.race_times([indices[row] for row in coupled], probs.shape[1])
            scores[upload(coupled, probs.device, torch.int64)] -= times.log().float()
        for row, index in enumerate(indices):
            most = self._most[index] + 1  # the drawn token may be among them
            self._ranked[index].append(scores[row].topk(min(most, probs.shape[1])).indices)

    def _with_guesses(self, index: int, draft: Draft | DraftwireError) -> Draft | DraftwireError:
        """Returns a member's draft with its guesses; one without tokens for who asked for none."""
        most, ranked = self._most[index], [row.tolist() for row in self._ranked[index]]
        block = self.drawer.blocks[index]
        if not block.request.num_tokens:
            nothing = DraftDistributions(Encoding.NONE, block.vocab_size)
            return Draft([], nothing, [row[:most] for row in ranked])
        if isinstance(draft, DraftwireError):
            return draft
        pairs = zip(ranked, draft.token_ids, strict=False)  # a block that was cut short has ranked more places
        return replace(draft, guesses=[[token for token in row if token != drawn][:most] for row, drawn in pairs])
