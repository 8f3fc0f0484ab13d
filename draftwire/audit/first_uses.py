"""Selects the sessions that may be audited: those whose random numbers were not used before."""

import hashlib

BITS = 2**23
"""Size of the filter: 1 MiB."""


class FirstUses:
    """Set of the keys of past sessions in constant memory: a Bloom filter with one hash.

    Two sessions of one seed are drafted with the same random numbers, so the second one's tokens are no new evidence,
    and clients that use one seed for all their requests would get an honest drafter flagged. An audit therefore counts
    only the first session of each key. A false positive, a new key taken for a known one, has a probability below one
    half. When half of the bits are set, all are cleared; after that a key can count once more.
    """

    def __init__(self, bits: int = BITS) -> None:
        """Starts empty. `bits` is a multiple of 8, above 0."""
        if bits <= 0 or bits % 8:
            raise ValueError(f"{bits} bits, must be a multiple of 8 above 0")
        self._bits = bytearray(bits // 8)
        self._num_set = 0

    def claim(self, key: bytes, choice: int) -> bool:
        """Returns whether a session is the first with these random numbers, and adds it to the set.

        `key` is the verifying key, which drafters cannot know and which is derived from the same seed as theirs.
        """
        digest = hashlib.blake2b(choice.to_bytes(8, "little"), key=key, digest_size=8).digest()
        byte, bit = divmod(int.from_bytes(digest, "little") % (8 * len(self._bits)), 8)
        if self._bits[byte] & 1 << bit:
            return False
        if 2 * self._num_set >= 8 * len(self._bits):
            self._bits, self._num_set = bytearray(len(self._bits)), 0
        self._bits[byte] |= 1 << bit
        self._num_set += 1
        return True
