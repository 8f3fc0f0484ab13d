"""Keys of random numbers: one for each role, derived from a request's seed. What is drawn with them is in
`draftwire.method.randomness`: no torch here.
"""

import hashlib
import secrets
from enum import Enum

KEY_BYTES = 16
MAX_SEED = 2**64 - 1


class Role(Enum):
    """What a key is for. Keys of different roles are independent."""

    DRAFTING = "drafting"
    VERIFYING = "verifying"
    COUPLING = "coupling"


def new_seed() -> int:
    """Returns a seed for a request that names none."""
    return secrets.randbits(64)


def derive_key(seed: int, role: Role) -> bytes:
    """Returns the 16-byte key of a role."""
    return hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=KEY_BYTES, person=role.value.encode()).digest()
