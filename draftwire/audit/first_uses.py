"""Which sessions may be audited: those whose random numbers were not used before."""

import hashlib

BITS = 2**23
"""1 MiB."""


class FirstUses:
    """Remembers the keys of sessions in constant memory.

    Two sessions of one seed are drafted with the same random numbers, so that what the second one's tokens say is not
    new, and clients that name one seed for all their requests would bring an honest drafter down. An audit therefore
    takes the sums of the first session of each key alone. A new key is taken for a known one with a probability below
    one half. When half of the bits are set, all are forgotten: in that many sessions a key can count once more.
    """

    def __init__(self, bits: int = BITS) -> None:
        """Starts with nothing seen. `bits` is a multiple of 8, above 0."""
        if bits <= 0 or bits % 8:
            raise ValueError(f"{bits} bits, must be a multiple of 8 above 0")
        self._bits = bytearray(bits // 8)
        self._num_set = 0

    def claim(self, key: bytes, choice: int) -> bool:
        """Returns whether a session is the first one with these random numbers; from now on none is.

        Args:
            key: the verifying key, which drafters cannot know and which is derived from the same seed as theirs.
            choice: index of the completion.
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
