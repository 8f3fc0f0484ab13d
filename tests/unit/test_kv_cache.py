"""The accounts of the KV cache add up, and no sequence ever reads what was not written for its very beginning.

The state machine plays the model: what is written for a token depends on the salt and on every token up to it, as keys
and values do. A place then holds the right thing only if its whole history was right.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from draftwire.errors import NoRoomError
from draftwire.models.kv_cache import (
    BLOCK_SIZE,
    NULL_BLOCK,
    CachedSequence,
    KvCache,
    blocks_for,
    slots_between,
    slots_of,
)
from tests.cache_integrity import check_integrity

NULL_SLOTS = range(NULL_BLOCK * BLOCK_SIZE, (NULL_BLOCK + 1) * BLOCK_SIZE)
Key = tuple[str, str]
"""Salt and text up to the end of a block."""
HALF = BLOCK_SIZE // 2
"""Tokens of half a block."""
TEXTS = tuple(
    first * num_blocks * BLOCK_SIZE + second * (25 * HALF - num_blocks * BLOCK_SIZE)
    for first, num_blocks, second in (("a", 0, "a"), ("a", 2, "b"), ("b", 0, "b"), ("a", 4, "c"))
)
SALTS = ("", "tenant")


def ids(text: str) -> list[int]:
    """Returns ids that differ above their lower 16 bits only."""
    return [1 + ord(letter) * 2**16 for letter in text]


@dataclass
class Expected:
    """What a sequence should be."""

    sequence: CachedSequence
    salt: str
    text: str
    holds: list[Key | None] = field(default_factory=list)
    """For each published block its key if this is the block that others share, None if it stayed private."""

    @property
    def num_final(self) -> int:
        return len(self.holds) * BLOCK_SIZE


def path_to(node: int, parents: tuple[int, ...]) -> list[int]:
    """Returns the nodes from the root to a node of a tree."""
    return [] if node < 0 else [*path_to(parents[node], parents), node]


class KvCacheMachine(RuleBasedStateMachine):
    """Compares a cache with a plain account of texts: who holds what, what is kept, and in which order it is lost."""

    @initialize(num_blocks=st.integers(2, 14))
    def make(self, num_blocks: int) -> None:
        self.cache = KvCache(num_blocks * BLOCK_SIZE - 3)
        assert self.cache.num_blocks == num_blocks
        self.written: list[Key | None] = [None] * self.cache.num_slots
        self.live: list[Expected] = []
        self.users: dict[Key, int] = {}
        self.idle: OrderedDict[Key, None] = OrderedDict()

    def pick(self, data: st.DataObject) -> Expected:
        return data.draw(st.sampled_from(self.live))

    def num_unused(self) -> int:
        shared = sum(1 for users in self.users.values() if users)
        private = sum(blocks_for(len(one.text)) - sum(1 for key in one.holds if key is not None) for one in self.live)
        return self.cache.num_blocks - shared - private - len(self.idle)

    def write(self, one: Expected, position: int, entry: Key) -> None:
        slot = int(slots_of([one.sequence], position + 1)[0, position])
        assert slot not in NULL_SLOTS
        self.written[slot] = entry

    def grow(self, one: Expected, more: str, parents: tuple[int, ...] = ()) -> bool:
        """Appends, and writes `more` after what there is. Returns whether there was room."""
        needed = blocks_for(len(one.text) + len(more)) - blocks_for(len(one.text))
        unused = self.num_unused()
        if needed > unused + len(self.idle):
            before = [(other.sequence.blocks.copy(), other.sequence.length) for other in self.live]
            with pytest.raises(NoRoomError, match=f" {self.cache.num_blocks * BLOCK_SIZE} tokens"):
                self.cache.append(one.sequence, len(more), parents)
            assert before == [(other.sequence.blocks, other.sequence.length) for other in self.live]
            return False
        self.cache.append(one.sequence, len(more), parents)
        for _ in range(needed - unused):
            key, _ = self.idle.popitem(last=False)
            del self.users[key]
        start = len(one.text)
        one.text += more
        for position in range(start, len(one.text)):
            self.write(one, position, (one.salt, one.text[: position + 1]))
        return True

    @rule(text=st.sampled_from(TEXTS), length=st.integers(0, 11 * HALF), salt=st.sampled_from(SALTS))
    def open(self, text: str, length: int, salt: str) -> None:
        sequence = self.cache.open(ids(text[:length]), salt)
        holds: list[Key | None] = []
        while (len(holds) + 1) * BLOCK_SIZE < length:
            key = (salt, text[: (len(holds) + 1) * BLOCK_SIZE])
            if key not in self.users:
                break
            self.users[key] += 1
            self.idle.pop(key, None)
            holds.append(key)
        num_reused = len(holds) * BLOCK_SIZE
        assert sequence.num_reused == sequence.length == num_reused
        self.live.append(Expected(sequence, salt, text[:num_reused], holds))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), text=st.sampled_from(TEXTS), count=st.integers(1, 6 * HALF))
    def append(self, data: st.DataObject, text: str, count: int) -> None:
        one = self.pick(data)
        self.grow(one, text[len(one.text) :][:count] or "d")

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        one = self.pick(data)
        length = data.draw(st.integers(one.num_final, len(one.text)))
        self.cache.truncate(one.sequence, length)
        one.text = one.text[:length]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tail=st.text("de", max_size=3))
    def publish(self, data: st.DataObject, tail: str) -> None:
        one = self.pick(data)
        final = data.draw(st.integers(0, len(one.text)))
        # Tokens that are committed but not read yet do not count.
        self.cache.publish(one.sequence, ids(one.text[:final] + (tail if final == len(one.text) else "")))
        self.note_published(one, final)

    def note_published(self, one: Expected, final: int) -> None:
        """Notes that the first `final` tokens were published."""
        for index in range(len(one.holds), final // BLOCK_SIZE):
            key = (one.salt, one.text[: (index + 1) * BLOCK_SIZE])
            one.holds.append(None if key in self.users else key)
            self.users.setdefault(key, 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_nodes=st.integers(0, 3 * HALF))
    def read_tree_and_keep_path(self, data: st.DataObject, num_nodes: int) -> None:
        one = self.pick(data)
        text, base_len = one.text, len(one.text)
        parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(num_nodes))
        if num_nodes == 0 or not self.grow(one, "?" * num_nodes, parents):
            return
        assert (one.sequence.base, one.sequence.parents) == (base_len, parents)
        if data.draw(st.booleans()):  # whoever knows the path before it is kept must not share its places
            self.cache.publish(one.sequence, ids(text + "t" * num_nodes))
            self.note_published(one, base_len)
        path = path_to(data.draw(st.integers(-1, num_nodes - 1)), parents)
        kept = ""
        for index in path:  # a node's keys know its ancestors, wherever it lies
            kept += "t"
            self.write(one, base_len + index, (one.salt, text + kept))
        nodes = slots_of([one.sequence], one.sequence.length)[0, base_len:]
        sources, targets = self.cache.keep_path(one.sequence, path)
        assert sources.tolist() == [nodes[node] for node in path]
        assert targets.tolist() == nodes[: len(path)].tolist()
        moved = [self.written[source] for source in sources]
        for target, entry in zip(targets, moved, strict=True):
            self.written[target] = entry
        one.text = text + kept

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        one = self.pick(data)
        start = one.num_final
        length = data.draw(st.integers(start, len(one.text)))
        needed, unused = blocks_for(length) - start // BLOCK_SIZE, self.num_unused()
        if needed > unused + len(self.idle):
            with pytest.raises(NoRoomError):
                self.cache.fork(one.sequence, length)
            return
        fork, sources, targets = self.cache.fork(one.sequence, length)
        for _ in range(needed - unused):
            key, _ = self.idle.popitem(last=False)
            del self.users[key]
        for key in one.holds:
            if key is not None:
                self.users[key] += 1
        table = slots_of([one.sequence, fork], length)
        assert table[:, start:].tolist() == [sources.tolist(), targets.tolist()]
        moved = [self.written[source] for source in sources]
        for target, entry in zip(targets, moved, strict=True):
            assert target not in NULL_SLOTS
            self.written[target] = entry
        self.live.append(Expected(fork, one.salt, one.text[:length], list(one.holds)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        one = self.pick(data)
        self.live.remove(one)
        self.cache.close(one.sequence)
        assert one.sequence.blocks == []
        for key in reversed(one.holds):
            if key is not None:
                self.users[key] -= 1
                if not self.users[key]:
                    self.idle[key] = None

    @invariant()
    def accounts_add_up(self) -> None:
        check_integrity(self.cache)
        assert self.cache.num_free_blocks == self.num_unused() + len(self.idle)
        assert self.cache.sequences == {one.sequence for one in self.live}

    @precondition(lambda self: self.live)
    @invariant()
    def every_sequence_reads_what_was_written_for_its_text_and_salt(self) -> None:
        for one in self.live:
            assert one.sequence.length == len(one.text)
        width = max(len(one.text) for one in self.live) + 20
        table = slots_of([one.sequence for one in self.live], width)
        assert table.shape == (len(self.live), width)
        for one, slots in zip(self.live, table.tolist(), strict=True):
            for position, slot in enumerate(slots[: len(one.text)]):
                assert self.written[slot] == (one.salt, one.text[: position + 1])
            assert set(slots[len(one.text) :]) <= set(NULL_SLOTS)

    @invariant()
    def blocks_that_may_be_written_are_held_by_one_sequence(self) -> None:
        blocks = [set(one.sequence.blocks) for one in self.live]
        for index, one in enumerate(self.live):
            writable = set(one.sequence.blocks[len(one.holds) :])
            assert NULL_BLOCK not in blocks[index]
            assert not any(writable & other for place, other in enumerate(blocks) if place != index)


# Without shrinking, which takes longer than a test may.
KvCacheMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, phases=(Phase.explicit, Phase.generate)
)
TestKvCache = KvCacheMachine.TestCase


def read(cache: KvCache, text: str) -> CachedSequence:
    """Opens a sequence that has read all of `text` and published it."""
    sequence = cache.open(ids(text))
    cache.append(sequence, len(text) - sequence.length)
    cache.publish(sequence, ids(text))
    return sequence


def num_known(cache: KvCache, text: str) -> int:
    """Returns how much of a text would be reused, and leaves no trace but in the order of eviction."""
    sequence = cache.open(ids(text))
    cache.close(sequence)
    return sequence.num_reused


def test_text_left_longest_ago_is_lost_first_from_its_end() -> None:
    for num_lost, left in enumerate([[1, 2, 1], [1, 1, 1], [1, 0, 1], [1, 0, 0], [0, 0, 0]]):
        cache = KvCache(4 * BLOCK_SIZE)
        for letter, num_blocks in zip("abc", (1, 2, 1), strict=True):
            cache.close(read(cache, letter * num_blocks * BLOCK_SIZE))
        assert num_known(cache, "a" * (BLOCK_SIZE + 1)) == BLOCK_SIZE  # which makes it the youngest
        cache.append(cache.open(), num_lost * BLOCK_SIZE)
        known = [num_known(cache, letter * (2 * BLOCK_SIZE + 1)) for letter in "abc"]
        assert known == [num_blocks * BLOCK_SIZE for num_blocks in left]


def test_forgetting_what_is_published_or_unread_is_a_bug_of_the_caller() -> None:
    cache, num_tokens = KvCache(12 * BLOCK_SIZE), 5 * BLOCK_SIZE // 2
    sequence = read(cache, "a" * num_tokens)
    for length in (2 * BLOCK_SIZE - 1, num_tokens + 1):
        with pytest.raises(AssertionError):
            cache.truncate(sequence, length)
    with pytest.raises(AssertionError, match="after its parent"):
        cache.append(sequence, 2, (-1, 1))
    cache.append(sequence, 3, (-1, 0, 0))
    for path in ([1], [0, 0], [1, 2], [2, 0]):
        with pytest.raises(AssertionError, match="from parents to children"):
            cache.keep_path(sequence, path)
    with pytest.raises(AssertionError, match="after a tree"):
        cache.append(sequence, 1)
    with pytest.raises(AssertionError):
        cache.fork(sequence, num_tokens + 1)


def test_tree_that_is_cut_keeps_its_first_nodes() -> None:
    cache = KvCache(200)
    sequence = read(cache, "a" * 40)
    cache.append(sequence, 5, (-1, 0, 0))
    assert (sequence.length, sequence.base) == (45, 42)
    for length, parents in ((44, (-1, 0)), (43, (-1,)), (42, ()), (41, ())):
        cache.truncate(sequence, length)
        assert (sequence.length, sequence.parents, sequence.base) == (length, parents, min(length, 42))
        check_integrity(cache)


class CountedBlocks(list[int]):
    """A block table that counts how many of its blocks are looked at."""

    num_looked_at = 0

    @override
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_looked_at += len(found) if isinstance(index, slice) else 1
        return found


def num_looked_at(sequence: CachedSequence, take: Callable[[], object]) -> int:
    """Returns how many of a sequence's blocks are looked at in a call."""
    sequence.blocks = blocks = CountedBlocks(sequence.blocks)
    take()
    return blocks.num_looked_at


def test_slots_of_a_texts_end_are_found_without_reading_its_beginning() -> None:
    """Whatever the length of the text; of the published blocks a fork takes over each once."""
    looked_at = set()
    for num_published in (3, 30, 300):
        cache = KvCache(800 * BLOCK_SIZE)
        sequence = read(cache, "a" * (num_published * BLOCK_SIZE + 5))
        cache.append(sequence, BLOCK_SIZE + 4, (-1, *range(BLOCK_SIZE + 3)))
        by_fork = num_looked_at(sequence, partial(cache.fork, sequence, sequence.base))
        by_path = num_looked_at(sequence, partial(cache.keep_path, sequence, (0, 1)))
        looked_at.add((by_fork - num_published, by_path))
    assert looked_at == {(1, 2)}


@given(data=st.data(), num_blocks=st.lists(st.integers(1, 3), min_size=2, max_size=6))
def test_slots_between_two_places_are_those_of_the_table(data: st.DataObject, num_blocks: list[int]) -> None:
    cache = KvCache(40 * BLOCK_SIZE)
    sequences = [cache.open(), cache.open()]
    for index, count in enumerate(num_blocks):  # in turn, so that a text is in several places
        cache.append(sequences[index % 2], count * BLOCK_SIZE - index)
    for sequence in sequences:
        stop = data.draw(st.integers(0, sequence.length))
        start = data.draw(st.integers(0, stop))
        found = slots_between(sequence, start, stop)
        assert found.dtype == np.int64
        assert found.tolist() == slots_of([sequence], sequence.length)[0, start:stop].tolist()


def too_long(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    one.length += BLOCK_SIZE


def block_twice(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    one.blocks[-1] = one.blocks[-2]


def published_beyond_the_end(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    one.num_published = len(one.blocks)


def written_by_two(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    two.blocks[-1] = one.blocks[-1]
    cache._users[one.blocks[-1]] = 2


def offered_while_written(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    cache._hashes[one.blocks[-1]] = b"x"
    cache._published[b"x"] = one.blocks[-1]


def miscounted_holders(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    cache._users[one.blocks[0]] += 1


def free_though_held(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    cache._free.put([one.blocks[0]])


def lost_block(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    cache._free.take(None, 1)


def null_block_given_out(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    cache._free.put([NULL_BLOCK])


def free_twice(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    start, end = next((start, end) for start, end in cache._free._ends.items() if end > start + 1)
    cache._free._ends[start + 1] = end


def hash_of_another_block(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    cache._published[cache._hashes[one.blocks[0]]] = one.blocks[1]


def free_but_offered(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    block = next(iter(cache._free))
    cache._hashes[block] = b"x"
    cache._published[b"x"] = block


def idle_but_not_offered(cache: KvCache, one: CachedSequence, two: CachedSequence) -> None:
    cache._idle[cache._free.take(None, 1)[0]] = None


COMPLAINTS = {
    too_long: "as many blocks as it needs",
    block_twice: "each of its blocks once",
    published_beyond_the_end: "published tokens are in the cache",
    written_by_two: "belongs to one sequence",
    offered_while_written: "still written is not offered",
    miscounted_holders: "holders are counted",
    free_though_held: "free, idle or held",
    lost_block: "free, idle or held",
    null_block_given_out: "free, idle or held",
    free_twice: "free, idle or held",
    hash_of_another_block: "each hash names its block",
    free_but_offered: "a free block is not offered",
    idle_but_not_offered: "kept for being offered",
}


@pytest.mark.parametrize("plant", COMPLAINTS)
def test_check_of_integrity_notices(plant: Callable[[KvCache, CachedSequence, CachedSequence], None]) -> None:
    cache = KvCache(20 * BLOCK_SIZE)
    num_more = 3 * BLOCK_SIZE // 2
    one, two, other = (read(cache, first * BLOCK_SIZE + second * num_more) for first, second in ("aa", "ab", "cc"))
    cache.close(other)
    check_integrity(cache)
    plant(cache, one, two)
    with pytest.raises(AssertionError, match=COMPLAINTS[plant]):
        check_integrity(cache)
