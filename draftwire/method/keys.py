"""Keys of random numbers: one for each role, derived from a request's seed, and of each round with it.

`draftwire.method.randomness` generates the numbers; this module does not import torch.
"""

import hashlib
import secrets
import struct
from dataclasses import dataclass
from enum import Enum

KEY_BYTES = 16
MAX_SEED = 2**64 - 1


class Role(Enum):
    """Use of a key. Keys of different roles are independent."""

    DRAFTING = "drafting"
    """Draws draft tokens, at the drafter."""
    VERIFYING = "verifying"
    """Decides rounds, at the verifier."""
    COUPLING = "coupling"
    """Does both under a coupled rule, whose drafter draws with the verifier's noise."""


def new_seed() -> int:
    """Returns a random seed for a request without one."""
    return secrets.randbits(64)


def derive_key(seed: int, role: Role) -> bytes:
    """Returns the 16-byte key of a role."""
    return hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=KEY_BYTES, person=role.value.encode()).digest()


def local_drafting_key(verifying_key: bytes) -> bytes:
    """Returns the key that a verifier draws its own drafts with: none of their numbers tells anything of those that the
    rule draws with the verifying key. Under a coupled rule, drafts are drawn with the coupling key itself.
    """
    return hashlib.blake2b(b"", key=verifying_key, digest_size=KEY_BYTES, person=b"local drafting").digest()


@dataclass(frozen=True, slots=True)
class DrawKey:
    """Identifies all random numbers of one round of one session."""

    key: bytes
    """16 bytes, of one role."""
    choice: int
    """Index of the completion that the session generates."""
    round: int

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
    message = struct.pack(f"<{len(numbers)}Q", *numbers)
    first, second = struct.unpack("<2I", hashlib.blake2b(message, key=key, digest_size=8, person=purpose).digest())
    return first, second
