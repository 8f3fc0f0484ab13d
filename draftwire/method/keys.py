"""Keys of random numbers: one for each role, derived from a request's seed. `draftwire.method.randomness` generates the
numbers; this module does not import torch.
"""

import hashlib
import secrets
from enum import Enum

KEY_BYTES = 16
MAX_SEED = 2**64 - 1


class Role(Enum):
    """Use of a key. Keys of different roles are independent."""

    DRAFTING = "drafting"
    VERIFYING = "verifying"
    COUPLING = "coupling"


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
