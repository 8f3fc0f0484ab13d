"""Random numbers from a counter-based generator, so that no draw depends on batches, threads or what was drawn before.

A draw is named by a key and a counter. The gateway derives one key per role from the request's seed; drafters never
hold the verifying key, because a drafter that could compute the verifier's uniforms could bias the output.
"""

import hashlib
import secrets
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True)
class DrawKey:
    """Names all random numbers of one round of one session."""

    key: bytes
    """16 bytes, of one role."""
    choice: int
    """Index of the completion that the session generates."""
    round: int
    """Number of the round."""
    attempt: int = 0
    """Raised whenever a draw of this round was thrown away after its value had been seen."""

    def uniforms(self, count: int) -> Tensor:
        """Returns the first `count` numbers of the round, `[count] float64` on the CPU, independent uniforms in [0, 1).

        Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x64-10).
        """
        counter = (self.attempt << 192) | (self.choice << 128) | (self.round << 64)
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(self.key, "little"), counter=counter))
        return torch.from_numpy(generator.random(count))
