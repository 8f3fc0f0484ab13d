"""How rows of features travel. No torch and no numpy here: the command line imports it."""

from enum import Enum


class FeatureEncoding(Enum):
    """How rows of features travel."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    """e4m3, with a float32 scale for each row."""

    def row_bytes(self, size: int) -> int:
        """Returns the bytes of a row of `size` numbers, without its scale."""
        return size * {FeatureEncoding.FLOAT32: 4, FeatureEncoding.BFLOAT16: 2, FeatureEncoding.FLOAT8: 1}[self]

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scale."""
        return 4 if self is FeatureEncoding.FLOAT8 else 0
