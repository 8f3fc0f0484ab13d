"""Checks the bookkeeping of a KV cache, for tests and benchmarks."""

from draftwire.models.kv_cache import BLOCK_SIZE, KvCache, blocks_for


def check_integrity(cache: KvCache) -> None:
    """Checks that every block is in exactly one state and that no sequence's tokens can be overwritten.

    Raises:
        AssertionError: the bookkeeping is inconsistent.
    """
    held: dict[int, int] = {}
    for sequence in cache.sequences:
        assert len(sequence.blocks) == blocks_for(sequence.length), "a sequence has as many blocks as it needs"
        assert len(set(sequence.blocks)) == len(sequence.blocks), "a sequence holds each of its blocks once"
        assert sequence.num_published * BLOCK_SIZE <= sequence.base, "published tokens are in the cache, no nodes"
        for index, block in enumerate(sequence.blocks):
            held[block] = held.get(block, 0) + 1
            if index >= sequence.num_published:
                assert cache._users[block] == 1, "a block that is still written belongs to one sequence"
                assert block not in cache._hashes, "a block that is still written is not offered to others"
    assert held == {block: users for block, users in enumerate(cache._users) if users}, "holders are counted"
    everywhere = [*cache._free, *cache._idle, *held]
    assert sorted(everywhere) == list(range(1, cache.num_blocks + 1)), "a block is free, idle or held"
    assert {chain: block for block, chain in cache._hashes.items()} == cache._published, "each hash names its block"
    assert not cache._hashes.keys() & set(cache._free), "a free block is not offered"
    assert set(cache._idle) <= cache._hashes.keys(), "an idle block is kept for being offered"
