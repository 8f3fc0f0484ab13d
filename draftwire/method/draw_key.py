"""Keys of random numbers; `draftwire.method.randomness` draws the numbers. No torch here."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrawKey:
    """Identifies all random numbers of one round of one session."""

    key: bytes
    """16 bytes, of one role."""
    choice: int
    """Index of the completion that the session generates."""
    round: int
    """Number of the round."""

    @property
    def round_words(self) -> tuple[int, int]:
        """Two 32-bit words derived from key, choice and round."""
        # The last number told repeated draws of a round apart, of which there are none. It stays: without it, the same
        # seed would give another text.
        return _hashed(self.key, b"round", self.choice, self.round, 0)

    @property
    def text_words(self) -> tuple[int, int]:
        """Two 32-bit words derived from key and choice alone."""
        return _hashed(self.key, b"text", self.choice)


def _hashed(key: bytes, purpose: bytes, *numbers: int) -> tuple[int, int]:
    """Returns two 32-bit words that reveal neither the key nor the words of other numbers: a keyed hash."""
    message = b"".join(number.to_bytes(8, "little") for number in numbers)
    digest = hashlib.blake2b(message, key=key, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
