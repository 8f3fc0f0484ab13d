"""Draws the tokens of many blocks, and states what each of them was drawn from.

A distribution is made what it travels as before a token is drawn from it, never after: the verifier reads the very
numbers that decided.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from draftwire.distributions import QuantizedRows, draw, quantize, race
from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.encoding import DraftDistributions, Supports, encode_dense, encode_sparse
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.quantization import Encoding, Quantization
from draftwire.randomness import exponentials, uniforms


@dataclass(frozen=True, slots=True)
class BlockStart:
    """A block before its first token is drawn."""

    request: DraftRequest
    vocab_size: int
    """Tokens that may be drawn: ids below it."""
    position: int
    """Where in the text the first token stands."""


class _Manner(Enum):
    """How the tokens of a block are drawn."""

    COUPLED = auto()
    """With the noise of their places in the text."""
    SPARSE = auto()
    """From few tokens with integer weights, which are sent."""
    DENSE = auto()
    """From all probabilities, which are sent."""
    UNSTATED = auto()
    """From all probabilities, which are not sent: nobody asks, or they follow from the tokens."""


class Drawer:
    """Draws blocks side by side, position by position.

    Attributes:
        token_ids: what was drawn, block by block.
    """

    def __init__(self, blocks: Sequence[BlockStart], quantization: Quantization) -> None:
        """Prepares; runs on the thread of the tensors, like everything here."""
        self.token_ids: list[list[int]] = [[] for _ in blocks]
        self._blocks = blocks
        self._quantization = quantization
        self._manners = [_manner(block.request, quantization) for block in blocks]
        most = max((block.request.num_tokens for block in blocks), default=0)
        self._uniforms = uniforms([block.request.key for block in blocks], most)
        self._dense_rows: list[list[Tensor]] = [[] for _ in blocks]
        self._sparse_rows: list[list[int]] = [[] for _ in blocks]  # where in all of `_quantized` together
        self._quantized: list[QuantizedRows] = []

    def num_left(self, block: int) -> int:
        """Returns how many tokens of a block are still to be drawn."""
        return self._blocks[block].request.num_tokens - len(self.token_ids[block])

    def position(self, block: int) -> int:
        """Returns where in the text a block's next token stands."""
        return self._blocks[block].position + len(self.token_ids[block])

    def draw(self, members: Sequence[int], probs: Tensor) -> None:
        """Draws the next token of some blocks.

        Args:
            members: which blocks, each once.
            probs: `[members, vocab] float32`, each a distribution that is 0 beyond its block's vocabulary.
        """
        groups: dict[_Manner, list[int]] = {}
        for row, block in enumerate(members):
            groups.setdefault(self._manners[block], []).append(row)
        for manner, rows in groups.items():
            own = probs if len(rows) == len(members) else probs[torch.tensor(rows, device=probs.device)]
            blocks = [members[row] for row in rows]
            for block, token in zip(blocks, self._drawn(manner, blocks, own).tolist(), strict=True):
                self.token_ids[block].append(token)

    def drafts(self) -> list[Draft | DraftwireError]:
        """Returns what was drawn, with what it was drawn from; an error for a block of which nothing was drawn."""
        sparse = self._encoded_sparse()
        drafts: list[Draft | DraftwireError] = []
        for index, (block, tokens) in enumerate(zip(self._blocks, self.token_ids, strict=True)):
            if not tokens:
                drafts.append(UnavailableError("the draft model gave no finite logits"))
                continue
            match self._manners[index]:
                case _Manner.SPARSE:
                    stated = sparse[index]
                case _Manner.DENSE:
                    rows = torch.stack([row[: block.vocab_size] for row in self._dense_rows[index]])
                    stated = encode_dense(self._quantization.encoding, rows.numpy())
                case _:
                    encoding = Encoding.ONE_HOT if block.request.needs_probs else Encoding.NONE
                    stated = DraftDistributions(encoding, block.vocab_size)
            drafts.append(Draft(tokens, stated))
        return drafts

    def _drawn(self, manner: _Manner, blocks: list[int], probs: Tensor) -> Tensor:
        """Returns the next tokens of blocks that are all drawn in one manner, `[blocks] int64`."""
        if manner is _Manner.COUPLED:
            words = torch.tensor([self._blocks[block].request.key.text_words for block in blocks], device=probs.device)
            positions = torch.tensor([self.position(block) for block in blocks], device=probs.device)
            return race(probs, exponentials(words, positions, probs.shape[1])).winners
        numbers = self._uniforms[blocks, [len(self.token_ids[block]) for block in blocks]].to(probs.device)
        if manner is _Manner.SPARSE:
            quantized = quantize(probs, self._quantization)
            first = sum(len(part.weights) for part in self._quantized)
            self._quantized.append(quantized)
            for row, block in enumerate(blocks, first):
                self._sparse_rows[block].append(row)
            return quantized.draw(numbers)
        if manner is _Manner.DENSE:
            if self._quantization.encoding is Encoding.DENSE_FLOAT16:
                probs = probs.half()
            for row, block in zip(probs.cpu(), blocks, strict=True):
                self._dense_rows[block].append(row)
        return draw(probs.float(), numbers)  # sums of float16 would be rounded to 11 bits

    def _encoded_sparse(self) -> dict[int, DraftDistributions]:
        """Returns the distributions of the blocks that are drawn sparsely and have any."""
        if not self._quantized:
            return {}
        token_ids = np.concatenate([part.token_ids.cpu().numpy() for part in self._quantized])
        weights = np.concatenate([part.weights.cpu().numpy() for part in self._quantized])
        encoded: dict[int, DraftDistributions] = {}
        for vocab_size in {block.vocab_size for block in self._blocks}:
            members = [
                index
                for index, block in enumerate(self._blocks)
                if self._sparse_rows[index] and block.vocab_size == vocab_size
            ]
            order = [row for index in members for row in self._sparse_rows[index]]
            supports = Supports(token_ids[order], weights[order], vocab_size)
            blocks = encode_sparse(supports, [len(self.token_ids[index]) for index in members])
            encoded.update(zip(members, blocks, strict=True))
        return encoded


def _manner(request: DraftRequest, quantization: Quantization) -> _Manner:
    if request.is_coupled:
        return _Manner.COUPLED
    if request.sampling.greedy or not request.needs_probs:
        return _Manner.UNSTATED
    return _Manner.SPARSE if quantization.encoding is Encoding.SPARSE_UINT16 else _Manner.DENSE
