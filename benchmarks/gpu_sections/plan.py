"""Sizes of all measurements: full on a GPU, tiny to test the code."""

from dataclasses import dataclass

import torch

from benchmarks.rules import Shape as RuleShape
from tools.synth.synthesis import SHAPES, ModelShape


@dataclass(frozen=True, slots=True)
class Plan:
    """Device and sizes of the measurements."""

    device: torch.device
    size: str
    """One of `SHAPES`."""
    repetitions: int
    """Of each timed step."""

    @property
    def is_tiny(self) -> bool:
        """Whether the run only tests the code."""
        return self.size == "tiny"

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that are timed."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    @property
    def shape(self) -> ModelShape:
        """Of the pair that is timed."""
        return SHAPES[self.size]

    @property
    def exact_shape(self) -> ModelShape:
        """Shape of the model whose logits are compared: head size and grouping of large models."""
        return SHAPES["tiny"] if self.is_tiny else ModelShape(1024, 2816, 4, 8, 2, 32_000, context_length=1024)

    @property
    def rule_shape(self) -> RuleShape:
        """Of the blocks that rules are timed with."""
        return RuleShape(vocab_size=2000) if self.is_tiny else RuleShape()

    @property
    def prompt_tokens(self) -> int:
        """Tokens that texts begin with."""
        return 24 if self.is_tiny else 256

    @property
    def new_tokens(self) -> int:
        """Tokens by which texts grow, at most, where speculation is timed."""
        return 100 if self.is_tiny else 240

    @property
    def longest_text(self) -> int:
        """Tokens of a text, at most."""
        return self.prompt_tokens + self.new_tokens

    def bound(self, value: float | None) -> float | None:
        """Returns a bound of a ratio of times; None where times are not meaningful."""
        return None if self.is_tiny else value

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Texts side by side."""
        return (1, 4) if self.is_tiny else (1, 4, 16, 64)

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """Draft tokens of a block where speculation is timed."""
        return (2, 4) if self.is_tiny else (2, 4, 6, 8)

    @property
    def seconds(self) -> float:
        """Largest duration of one measurement."""
        return 0.2 if self.is_tiny else 2.0
