"""Chains of a language model that end before a place of which the model is not sure."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from draftwire.drafting.language_model import BatchMember, Chains
from draftwire.drafting.strategy import Draft
from draftwire.errors import DraftwireError
from draftwire.method.confidence import bucket_of
from draftwire.method.devices import upload
from draftwire.method.encoding import DraftDistributions
from draftwire.method.quantization import Encoding, Quantization
from draftwire.models.sequence_model import DraftModel


def confidence_of(logits: Tensor) -> Tensor:
    """Returns the largest probability of each row at temperature 1, `[rows] float32`.

    Args:
        logits: `[rows, vocab]`, any float dtype, as the model gives them. NaN for a row that is not finite.
    """
    return logits.float().softmax(dim=1).amax(dim=1)


class ConfidentChains(Chains):
    """Chains, some of which end before a place that is not sure, and report how sure each place was.

    A chain ends before a token is drawn, by logits that depend on kept tokens alone, and leaves the batch: its next
    pass is without it. The host waits for the device only where a chain may end.
    """

    def __init__(self, model: DraftModel, members: Sequence[BatchMember], quantization: Quantization) -> None:
        super().__init__(model, members, quantization)
        self._limits = [member.request.stop_below for member in members]
        self._places: list[tuple[list[int], Tensor]] = []  # members that report, and how sure each is of its next place
        self._unsure: set[int] = set()  # members whose chains have ended for that

    @override
    def draw(self, logits: Tensor) -> list[Draft | DraftwireError]:
        drafts = super().draw(self._sure(logits))
        buckets: list[list[int]] = [[] for _ in drafts]
        if self._places:
            values = torch.cat([values for _, values in self._places]).nan_to_num(nan=0.0).tolist()
            for index, value in zip((index for indices, _ in self._places for index in indices), values, strict=True):
                buckets[index].append(bucket_of(value))
        return [self._reported(index, draft, bytes(buckets[index])) for index, draft in enumerate(drafts)]

    @override
    def extend(self, tokens: Tensor) -> Tensor:
        return self._sure(super().extend(tokens))

    def _sure(self, logits: Tensor) -> Tensor:
        """Returns the logits of the chains that go on, `[active, vocab]`, and ends the others before their next place.

        Args:
            logits: of the next places of all that are active, `[active, vocab]`.
        """
        limits = [self._limits[index] for index in self.active]
        rows = [row for row, limit in enumerate(limits) if limit is not None]
        if not rows:
            return logits
        logits = self.masked(logits)
        own = logits if len(rows) == len(limits) else logits[upload(rows, logits.device, torch.int64)]
        confidence = confidence_of(own)
        self._places.append(([self.active[row] for row in rows], confidence))
        if not any(limits):
            return logits
        least = upload([limits[row] for row in rows], logits.device, torch.float32)
        is_unsure = (confidence < least).tolist()  # a row that is not finite is none of its own, and ends elsewhere
        unsure = {row for row, ends in zip(rows, is_unsure, strict=True) if ends}
        if not unsure:
            return logits
        self._unsure |= {self.active[row] for row in unsure}
        going = [row for row in range(len(limits)) if row not in unsure]
        self.active = [self.active[row] for row in going]
        return logits[upload(going, logits.device, torch.int64)]

    def _reported(self, index: int, draft: Draft | DraftwireError, buckets: bytes) -> Draft | DraftwireError:
        """Returns a draft with the buckets of its places, and of the one that it ended before if it was not sure."""
        num_tokens = 0 if isinstance(draft, DraftwireError) else len(draft.token_ids)
        # One that ends before a row that is no distribution has drawn further tokens, which are none of it.
        has_ended = index in self._unsure and len(buckets) == num_tokens + 1
        if not isinstance(draft, DraftwireError):
            return replace(draft, confidence_buckets=buckets if has_ended else buckets[:num_tokens])
        if not has_ended:
            return draft
        block = self.drawer.blocks[index]
        encoding = Encoding.ONE_HOT if block.request.needs_probs else Encoding.NONE
        return Draft([], DraftDistributions(encoding, block.vocab_size), confidence_buckets=buckets)
