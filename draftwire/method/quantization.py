"""Settings of the quantization of draft distributions. No numpy and no torch: the command line imports this too."""

from dataclasses import dataclass
from enum import Enum

from draftwire.errors import InvalidRequestError

MAX_SUPPORT = 1024
"""Upper bound of the tokens of a sparse distribution."""

WEIGHT_BYTES = 2
"""Upper bound of the bytes of a weight. Weights are stored as weight - 1, so that 65,536 fits too."""


class Encoding(Enum):
    """Wire format of a block's distributions."""

    SPARSE_UINT16 = "sparse_uint16"
    DENSE_FLOAT32 = "dense_float32"
    DENSE_FLOAT16 = "dense_float16"
    ONE_HOT = "one_hot"
    NONE = "none"


DENSE_BYTES = {Encoding.DENSE_FLOAT32: 4, Encoding.DENSE_FLOAT16: 2}
"""Bytes per number of the dense encodings."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a drafter quantizes its distributions before it draws from them."""

    encoding: Encoding = Encoding.SPARSE_UINT16
    """A sparse or dense encoding."""
    mass: float = 0.98
    """A sparse distribution keeps the fewest tokens that hold this share of the mass, in (0, 1]."""
    max_support: int = 64
    """Upper bound of the tokens that a sparse distribution keeps, 1 to 1,024."""

    def __post_init__(self) -> None:
        if self.encoding is not Encoding.SPARSE_UINT16 and self.encoding not in DENSE_BYTES:
            raise InvalidRequestError(f"drafts are not drawn from distributions of encoding {self.encoding.value}")
        if not 0.0 < self.mass <= 1.0:
            raise InvalidRequestError(f"draft_mass must be in (0, 1], not {self.mass}")
        if not 1 <= self.max_support <= MAX_SUPPORT:
            raise InvalidRequestError(f"draft_max_support must be in 1..{MAX_SUPPORT}, not {self.max_support}")


def id_width(vocab_size: int) -> int:
    """Returns the bytes of an encoded token id: as few as hold the largest id."""
    return max(1, ((vocab_size - 1).bit_length() + 7) // 8)


def position_bytes(encoding: Encoding, vocab_size: int, max_support: int) -> int:
    """Returns the maximum bytes of one position's distribution, including its sizes."""
    if encoding is Encoding.SPARSE_UINT16:
        return max_support * (id_width(vocab_size) + WEIGHT_BYTES) + 4
    return DENSE_BYTES.get(encoding, 0) * vocab_size
