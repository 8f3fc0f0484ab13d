"""Block manager of a paged KV cache with prefix reuse. Pure bookkeeping: no tensors, no model.

The cache is a pool of blocks of `BLOCK_SIZE` tokens. A sequence is a list of blocks. Blocks that are full and whose
tokens are final are *published* under a hash of everything up to their end, so that another sequence with the same
prefix shares them instead of computing them again. A block that no sequence uses any more keeps its contents until the
memory is needed.

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(arXiv 2309.06180), with the prefix reuse of SGLang (arXiv 2312.07104) by chained hashes.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftwire.errors import NoRoomError
from draftwire.models.free_blocks import FreeBlocks

BLOCK_SIZE = 32
"""Tokens in a block."""
NULL_BLOCK = 0
"""Never allocated: padding reads it, nothing writes it."""
AHEAD = 1 / 64
"""Share of the blocks that are evicted beyond those that are needed, so that growing texts find free ones behind their
last and are not scattered over the memory."""


def blocks_for(num_tokens: int) -> int:
    """Returns how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(slots=True, eq=False)
class CachedSequence:
    """One sequence's block table. Changed by `KvCache` only."""

    salt: bytes
    """Sequences share blocks only with sequences of the same salt."""
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    """Tokens in the cache."""
    parents: tuple[int, ...] = ()
    """Parents of the last of these tokens, if they are the nodes of a token tree of which no path has been kept yet: an
    index among them, or -1 for the token before the tree. The tokens before them are a text."""
    num_published: int = 0
    """Leading blocks that are final and may be shared."""
    chain: bytes = b""
    """Hash of the salt and all tokens in the published blocks."""
    num_reused: int = 0
    """Tokens of shared blocks that were found when the sequence was opened."""

    @property
    def base(self) -> int:
        """Tokens before the tree; without one, all tokens."""
        return self.length - len(self.parents)


class KvCache:
    """Allocator of the blocks of one model's KV cache."""

    def __init__(self, num_tokens: int) -> None:
        """Starts with an empty cache of at least one token; the capacity is rounded up to whole blocks."""
        self.num_blocks = blocks_for(num_tokens)
        self.sequences: set[CachedSequence] = set()
        self._free = FreeBlocks(self.num_blocks)
        self._users = [0] * (self.num_blocks + 1)  # sequences that hold each block
        self._published: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}  # the inverse of _published
        self._idle: OrderedDict[int, None] = OrderedDict()  # published, held by no sequence; oldest first

    @property
    def num_slots(self) -> int:
        """Slots for tokens, the null block's included."""
        return (self.num_blocks + 1) * BLOCK_SIZE

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, including idle published blocks."""
        return len(self._free) + len(self._idle)

    def open(self, token_ids: Sequence[int] = (), salt: str = "") -> CachedSequence:
        """Opens a sequence that will read `token_ids`, and shares the published blocks of its prefix.

        At least one of the tokens is left to be read, because reading it yields the logits.
        """
        sequence = CachedSequence(_digest(b"salt", salt.encode()))
        sequence.chain = sequence.salt
        for start in range(0, len(token_ids) - BLOCK_SIZE, BLOCK_SIZE):
            chain = _chain(sequence.chain, token_ids[start : start + BLOCK_SIZE])
            block = self._published.get(chain)
            if block is None:
                break
            self._idle.pop(block, None)
            self._users[block] += 1
            sequence.blocks.append(block)
            sequence.chain = chain
        sequence.num_published = len(sequence.blocks)
        sequence.length = sequence.num_reused = len(sequence.blocks) * BLOCK_SIZE
        self.sequences.add(sequence)
        return sequence

    def append(self, sequence: CachedSequence, num_tokens: int, parents: tuple[int, ...] = ()) -> None:
        """Allocates slots for more tokens of a sequence; the caller writes their contents.

        Args:
            sequence: if it ends in a tree, all its new tokens belong to the tree.
            num_tokens: how many more.
            parents: of the last ones, which are new nodes of the sequence's tree; see `CachedSequence.parents`.

        Raises:
            NoRoomError: too few blocks are free. Nothing has changed.
        """
        assert len(parents) <= num_tokens
        assert len(parents) == num_tokens or not sequence.parents, "a text does not go on after a tree"
        for node, parent in enumerate(parents, len(sequence.parents)):
            assert -1 <= parent < node, "a node comes after its parent"
        missing = blocks_for(sequence.length + num_tokens) - len(sequence.blocks)
        if missing > self.num_free_blocks:
            raise NoRoomError(f"the KV cache of {self.num_blocks * BLOCK_SIZE} tokens is full")
        if missing > 0:
            self._evict(missing - len(self._free))
            for block in self._free.take(sequence.blocks[-1] if sequence.blocks else None, missing):
                self._users[block] = 1
                sequence.blocks.append(block)
        sequence.length += num_tokens
        sequence.parents += parents

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Keeps only the first `length` tokens. Published blocks stay published."""
        assert sequence.num_published * BLOCK_SIZE <= length <= sequence.length
        sequence.parents = sequence.parents[: max(length - sequence.base, 0)]
        for _ in range(len(sequence.blocks) - blocks_for(length)):
            self._release(sequence.blocks.pop())
        sequence.length = length

    def keep_path(self, sequence: CachedSequence, path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keeps of a sequence's token tree only a path, which then belongs to its text.

        Until the caller has copied the nodes, the text must not be published, nor the freed slots be written.

        Args:
            sequence: ends in a tree, or else `path` is empty.
            path: indices of the nodes to keep, each the parent of the next.

        Returns:
            The slots that the kept nodes have to be copied from and to, `[len(path)]` each.
        """
        parents, base = sequence.parents, sequence.base
        assert [parents[node] for node in path] == [-1, *path][: len(path)], "a path goes from parents to children"
        nodes = slots_between(sequence, base, sequence.length)
        sources, targets = nodes[list(path)], nodes[: len(path)]
        sequence.parents = ()
        self.truncate(sequence, base + len(path))
        return sources, targets

    def fork(
        self, sequence: CachedSequence, length: int
    ) -> tuple[CachedSequence, NDArray[np.int64], NDArray[np.int64]]:
        """Opens another sequence that has read the first `length` tokens of this one. Published blocks are shared.

        Args:
            sequence: is not changed.
            length: at least the published tokens, at most all before a tree.

        Returns:
            The new sequence, and the slots that its other tokens have to be copied from and to, `[count]` each.

        Raises:
            NoRoomError: too few blocks are free. Nothing has changed.
        """
        start = sequence.num_published * BLOCK_SIZE
        assert start <= length <= sequence.base
        fork = CachedSequence(
            sequence.salt,
            sequence.blocks[: sequence.num_published],
            start,
            num_published=sequence.num_published,
            chain=sequence.chain,
        )
        self.append(fork, length - start)
        for block in fork.blocks[: fork.num_published]:
            self._users[block] += 1
        self.sequences.add(fork)
        return fork, slots_between(sequence, start, length), slots_between(fork, start, length)

    def publish(self, sequence: CachedSequence, token_ids: Sequence[int]) -> None:
        """Declares tokens final and shares their full blocks with sequences of the same prefix.

        Args:
            sequence: must not be truncated into these tokens any more.
            token_ids: the sequence from its first token on; tokens that are not in the cache are ignored, and so is
                what lies where the nodes of a tree are.
        """
        for index in range(sequence.num_published, min(len(token_ids), sequence.base) // BLOCK_SIZE):
            block, start = sequence.blocks[index], index * BLOCK_SIZE
            sequence.chain = _chain(sequence.chain, token_ids[start : start + BLOCK_SIZE])
            sequence.num_published += 1
            if sequence.chain not in self._published:  # else another sequence was first, and this block stays private
                self._published[sequence.chain] = block
                self._hashes[block] = sequence.chain

    def close(self, sequence: CachedSequence) -> None:
        """Frees a sequence. Its published blocks keep their contents until the memory is needed."""
        self.sequences.remove(sequence)
        while sequence.blocks:  # from the end, so that the end of a text is evicted before its beginning
            self._release(sequence.blocks.pop())
        sequence.length = sequence.num_published = 0
        sequence.parents = ()

    def _evict(self, num_missing: int) -> None:
        """Frees so many idle blocks, if the number is positive, and some more; those that are idle for longest."""
        if num_missing <= 0:
            return
        for _ in range(min(num_missing + int(AHEAD * self.num_blocks), len(self._idle))):
            block, _ = self._idle.popitem(last=False)
            del self._published[self._hashes.pop(block)]
            self._free.put([block])

    def _release(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block]:
            return
        if block in self._hashes:
            self._idle[block] = None
        else:
            self._free.put([block])


def slots_of(sequences: Sequence[CachedSequence], width: int) -> NDArray[np.int64]:
    """Returns the slots of the first `width` tokens of each sequence, `[len(sequences), width]`.

    Positions beyond a sequence's length point into the null block.
    """
    num_blocks = blocks_for(width)
    table = np.full((len(sequences), num_blocks), NULL_BLOCK, dtype=np.int64)
    for row, sequence in zip(table, sequences, strict=True):
        blocks = sequence.blocks[:num_blocks]
        row[: len(blocks)] = blocks
    offsets = np.arange(BLOCK_SIZE)
    slots = (table[:, :, None] * BLOCK_SIZE + offsets).reshape(len(sequences), -1)[:, :width]
    lengths = np.array([[sequence.length] for sequence in sequences])
    return np.where(np.arange(width) < lengths, slots, NULL_BLOCK)


def slots_between(sequence: CachedSequence, start: int, stop: int) -> NDArray[np.int64]:
    """Returns the slots of the tokens from `start` to before `stop` of a sequence that has them all, `[stop - start]`;
    looks at no other blocks.
    """
    first = start // BLOCK_SIZE
    blocks = np.array(sequence.blocks[first : blocks_for(stop)], dtype=np.int64)
    slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)
    return slots[start - first * BLOCK_SIZE : stop - first * BLOCK_SIZE]


def _chain(previous: bytes, token_ids: Sequence[int]) -> bytes:
    return _digest(b"chain", previous, np.asarray(token_ids, dtype="<u4").tobytes())


def _digest(purpose: bytes, *parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16, person=purpose).digest()
