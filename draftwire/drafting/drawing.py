"""Samples the tokens of many blocks, and states the distribution of each.

A distribution is converted to its wire format before a token is drawn from it, never after: the verifier reads the very
numbers that were sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain

import torch
from torch import Tensor

from draftwire.drafting.strategy import Draft, DraftRequest
from draftwire.errors import DraftwireError, UnavailableError
from draftwire.method.devices import upload
from draftwire.method.distributions import QuantizedRows, draw, quantize, race
from draftwire.method.encoding import DraftDistributions, Supports, encode_dense, encode_sparse
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.randomness import exponentials, uniforms
from draftwire.method.sampling import is_distribution

NOISE_AT_ONCE = {"cpu": 1}
"""Exponentials that are computed at once for later places of blocks, by device. A processor computes those of a place
when it is drawn; on a GPU, which takes longer to be told than to compute them, a block's are computed together."""
MOST_NOISE_AT_ONCE = 2**21
"""The same for other devices: bounds the memory of the noise."""


@dataclass(frozen=True, slots=True)
class BlockStart:
    """A block before its first token is drawn."""

    request: DraftRequest
    vocab_size: int
    """Only ids below it may be drawn."""
    position: int
    """Position of the first token in the text."""


class _DrawMode(Enum):
    """How the tokens of a block are drawn and their distributions sent."""

    COUPLED = auto()
    """Draws with the noise of the tokens' positions in the text; no distribution is sent."""
    SPARSE = auto()
    """Draws from a few tokens with integer weights, which are sent."""
    DENSE = auto()
    """Draws from all probabilities, which are sent."""
    UNSTATED = auto()
    """Draws from all probabilities, which are not sent: the rule does not read them, or they are one-hot."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Result of one call of `Drawer.draw`."""

    blocks: list[int]
    token_ids: Tensor
    """`[blocks] int64`."""
    is_good: Tensor
    """`[blocks] bool`: whether the row was a distribution."""


@dataclass(frozen=True, slots=True)
class _Noise:
    """Exponentials of consecutive places of a block."""

    ends: int
    """The first place after them."""
    times: Tensor
    """`[places, vocab] float64`."""


class Drawer:
    """Samples a batch of blocks, position by position. The host does not wait for the device before all are drawn."""

    def __init__(self, blocks: Sequence[BlockStart], quantization: Quantization, device: torch.device) -> None:
        """Prepares a batch; all methods run on the torch thread."""
        self.blocks = blocks
        self._quantization = quantization
        self._device = device
        self._modes = [_mode_of(block.request, quantization) for block in blocks]
        most = max((block.request.num_tokens for block in blocks), default=0)
        self._uniforms: list[list[float]] = uniforms([block.request.key for block in blocks], most).tolist()
        self._counts = [0] * len(blocks)
        self._is_cut = [False] * len(blocks)
        self._drawn: list[_Drawn] = []
        self._known: list[list[int]] = [[] for _ in blocks]  # tokens copied to the host, of the first `_num_known`
        self._num_known = 0
        self._dense_rows: list[list[Tensor]] = [[] for _ in blocks]
        self._sparse_rows: list[list[int]] = [[] for _ in blocks]  # row numbers in the concatenation of `_quantized`
        self._quantized: list[QuantizedRows] = []
        self._noise: list[_Noise | None] = [None] * len(blocks)

    def num_left(self, block: int) -> int:
        """Returns how many tokens of a block are still to be drawn."""
        return self.blocks[block].request.num_tokens - self._counts[block]

    def goes_on(self, block: int) -> bool:
        """Returns whether another token of a block is to be drawn. Asked after each one, and no more once it is not."""
        if not self.num_left(block):
            return False
        self._is_cut[block] = self.blocks[block].request.is_cut()
        return not self._is_cut[block]

    def position(self, block: int) -> int:
        """Returns the position of a block's next token in the text."""
        return self.blocks[block].position + self._counts[block]

    def token_ids(self, block: int) -> list[int]:
        """Returns the tokens drawn so far for a block. Waits for the device."""
        unknown = self._drawn[self._num_known :]
        if unknown:
            self._num_known = len(self._drawn)
            tokens = torch.cat([drawn.token_ids for drawn in unknown]).tolist()
            for index, token in zip(chain.from_iterable(drawn.blocks for drawn in unknown), tokens, strict=True):
                self._known[index].append(token)
        return self._known[block]

    def draw(self, members: Sequence[int], probs: Tensor) -> Tensor:
        """Draws the next token of some blocks.

        Args:
            members: indices of the blocks, each once.
            probs: `[members, vocab] float32`. Each row is a distribution that is 0 beyond its block's vocabulary. If it
                is none (`is_distribution`), any token is drawn, and the block ends before it. Overwritten.

        Returns:
            The tokens, `[members] int64` on the device.
        """
        is_good = is_distribution(probs)
        if is_good.is_cuda or not bool(is_good.all()):  # on a GPU this is cheaper than the test, which waits
            probs.nan_to_num_(nan=0.0)
            probs[:, 0].masked_fill_(~is_good, 1.0)
        groups: dict[_DrawMode, list[int]] = {}
        for row, block in enumerate(members):
            groups.setdefault(self._modes[block], []).append(row)
        if len(groups) == 1:
            tokens = self._tokens(self._modes[members[0]], members, probs)
        else:
            tokens = torch.empty(len(members), dtype=torch.int64, device=self._device)
            for mode, rows in groups.items():
                index = upload(rows, self._device)
                tokens[index] = self._tokens(mode, [members[row] for row in rows], probs[index])
        self._drawn.append(_Drawn(list(members), tokens, is_good))
        for block in members:
            self._counts[block] += 1
        return tokens

    def drafts(self) -> list[Draft | DraftwireError]:
        """Returns the drafts with their distributions; an error for a block without a valid token."""
        lengths = self._lengths()
        sparse = self._encoded_sparse(lengths)
        drafts: list[Draft | DraftwireError] = []
        for index, (block, length) in enumerate(zip(self.blocks, lengths, strict=True)):
            if not length:
                drafts.append(UnavailableError("the draft model gave no finite logits"))
                continue
            match self._modes[index]:
                case _DrawMode.SPARSE:
                    stated = sparse[index]
                case _DrawMode.DENSE:
                    rows = torch.stack([row[: block.vocab_size] for row in self._dense_rows[index][:length]])
                    stated = encode_dense(self._quantization.encoding, rows.cpu().numpy())
                case _:
                    encoding = Encoding.ONE_HOT if block.request.needs_probs else Encoding.NONE
                    stated = DraftDistributions(encoding, block.vocab_size)
            token_ids = self.token_ids(index)[:length]
            is_whole = not self._is_cut[index] or length < self._counts[index]
            drafts.append(Draft(token_ids, stated, is_whole=is_whole))
        return drafts

    def _lengths(self) -> list[int]:
        """Returns the length of each block: its tokens before the first one without a valid distribution."""
        lengths = self._counts.copy()
        if self._drawn:
            seen = [0] * len(self.blocks)
            is_good = torch.cat([drawn.is_good for drawn in self._drawn]).tolist()
            for block, good in zip(chain.from_iterable(drawn.blocks for drawn in self._drawn), is_good, strict=True):
                if not good:
                    lengths[block] = min(lengths[block], seen[block])
                seen[block] += 1
        return lengths

    def _tokens(self, mode: _DrawMode, blocks: Sequence[int], probs: Tensor) -> Tensor:
        """Returns the next tokens of blocks that share a mode, `[blocks] int64`."""
        if mode is _DrawMode.COUPLED:
            return race(probs, self.race_times(blocks, probs.shape[1])).winners
        numbers = upload([self._uniforms[block][self._counts[block]] for block in blocks], self._device, torch.float64)
        if mode is _DrawMode.SPARSE:
            quantized = quantize(probs, self._quantization)
            first = sum(len(part.weights) for part in self._quantized)
            self._quantized.append(quantized)
            for row, block in enumerate(blocks, first):
                self._sparse_rows[block].append(row)
            return quantized.draw(numbers)
        if mode is _DrawMode.DENSE:
            if self._quantization.encoding is Encoding.DENSE_FLOAT16:
                probs = probs.half()
            for row, block in zip(probs, blocks, strict=True):
                self._dense_rows[block].append(row)
        return draw(probs.float(), numbers)  # float16 sums have 11 bits

    def race_times(self, blocks: Sequence[int], vocab_size: int) -> Tensor:
        """Returns the noise of the next places of blocks under a coupled rule, `[blocks, vocab] float64`."""
        missing = [block for block in blocks if self._noise_of_next(block) is None]
        if missing:
            self._compute_noise(missing, vocab_size)
        times = [self._noise_of_next(block) for block in blocks]
        return torch.stack([each for each in times if each is not None])

    def _noise_of_next(self, block: int) -> Tensor | None:
        """Returns the noise of a block's next place, `[vocab] float64`, if it was computed."""
        noise = self._noise[block]
        place = self._counts[block]
        return noise.times[place - noise.ends] if noise is not None and place < noise.ends else None

    def _compute_noise(self, blocks: Sequence[int], vocab_size: int) -> None:
        """Computes the noise of the next places of blocks, of as many as fit."""
        at_once = NOISE_AT_ONCE.get(self._device.type, MOST_NOISE_AT_ONCE) // (len(blocks) * vocab_size)
        num_places = max(1, min(at_once, max(map(self.num_left, blocks))))
        words = upload([self.blocks[block].request.key.text_words for block in blocks], self._device)
        first = upload([self.position(block) for block in blocks], self._device)
        positions = first.unsqueeze(1) + torch.arange(num_places, device=self._device)
        times = exponentials(words.repeat_interleave(num_places, 0), positions.flatten(), vocab_size)
        for block, own in zip(blocks, times.split(num_places), strict=True):
            self._noise[block] = _Noise(self._counts[block] + num_places, own)

    def _encoded_sparse(self, lengths: Sequence[int]) -> dict[int, DraftDistributions]:
        """Returns the encoded distributions, by block, of the sparse blocks that are not empty."""
        if not self._quantized:
            return {}
        token_ids = torch.cat([part.token_ids for part in self._quantized]).cpu().numpy()
        weights = torch.cat([part.weights for part in self._quantized]).cpu().numpy()
        encoded: dict[int, DraftDistributions] = {}
        for vocab_size in {block.vocab_size for block in self.blocks}:
            members = [
                index
                for index, block in enumerate(self.blocks)
                if self._sparse_rows[index] and lengths[index] and block.vocab_size == vocab_size
            ]
            order = [row for index in members for row in self._sparse_rows[index][: lengths[index]]]
            supports = Supports(token_ids[order], weights[order], vocab_size)
            blocks = encode_sparse(supports, [lengths[index] for index in members])
            encoded.update(zip(members, blocks, strict=True))
        return encoded


def _mode_of(request: DraftRequest, quantization: Quantization) -> _DrawMode:
    if request.is_coupled:
        return _DrawMode.COUPLED
    if request.sampling.greedy or not request.needs_probs:
        return _DrawMode.UNSTATED
    return _DrawMode.SPARSE if quantization.encoding is Encoding.SPARSE_UINT16 else _DrawMode.DENSE
