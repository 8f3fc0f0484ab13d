"""Drawing the tokens of drafts and encoding their distributions, without the drafter's forward pass."""

from typing import Any

import torch

from benchmarks.gpu_kernel_sections.inferred import DRAW_OPERATIONS
from benchmarks.gpu_kernel_sections.recording import num_operations
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.timer import Timer
from draftwire.drafting.drawing import BlockStart, Drawer
from draftwire.drafting.strategy import DraftRequest
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.quantization import Quantization
from draftwire.method.sampling import Span, probabilities_of_spans
from draftwire.requests.parameters import SamplingParams

TEXTS, TINY_TEXTS = (1, 16, 64), (1, 4)
BLOCK_LENGTH = 4
QUANTIZATIONS = {"64 entries": Quantization(), "512 entries": Quantization(mass=0.99, max_support=512)}
POSITION = 100
"""Of the blocks in their texts."""


class Drafts:
    """Blocks of some texts that are drawn from given logits."""

    def __init__(self, plan: Plan, texts: int, quantization: Quantization, is_coupled: bool = False) -> None:
        """Makes logits as of text: the r-th likeliest token has mass r^-1.2."""
        self._vocab_size, self._device = plan.shape.vocab_size, plan.device
        self._quantization, self._is_coupled, self._texts = quantization, is_coupled, texts
        generator = torch.Generator(plan.device).manual_seed(texts)
        order = torch.rand(texts, self._vocab_size, generator=generator, device=plan.device).argsort(dim=1)
        self._logits = (order + 1.0).log_().mul_(-1.2)
        self._spans = [Span(SamplingParams(), 1)] * texts
        self.start()
        self.take_laws()

    def start(self) -> None:
        """Forgets the drawn tokens."""
        requests = [
            DraftRequest(
                BLOCK_LENGTH,
                SamplingParams(),
                DrawKey(derive_key(seed, Role.COUPLING if self._is_coupled else Role.DRAFTING), 0, 0),
                self._vocab_size,
                is_coupled=self._is_coupled,
                needs_probs=not self._is_coupled,
            )
            for seed in range(self._texts)
        ]
        blocks = [BlockStart(request, self._vocab_size, POSITION) for request in requests]
        self._drawer = Drawer(blocks, self._quantization, self._device)

    def take_laws(self) -> None:
        """Turns logits into distributions, for each token of a block."""
        self._probs = [probabilities_of_spans(self._logits.clone(), self._spans) for _ in range(BLOCK_LENGTH)]

    def restart(self) -> None:
        """Prepares for drawing again."""
        self.start()
        self.take_laws()

    def draw(self) -> None:
        """Draws all tokens; waits for nothing."""
        for probs in self._probs:
            self._drawer.draw(range(self._texts), probs)

    def drawn(self) -> None:
        """Prepares for encoding."""
        self.restart()
        self.draw()

    def encode(self) -> None:
        """Waits for the tokens and encodes their distributions."""
        self._drawer.drafts()


@torch.inference_mode()
def draws(plan: Plan, findings: Findings, budget: Budget) -> None:
    """Runs the section."""
    timer = Timer(plan.device)
    for texts in TINY_TEXTS if plan.is_tiny else TEXTS:
        ways = {name: Drafts(plan, texts, own) for name, own in QUANTIZATIONS.items()}
        ways["coupled"] = Drafts(plan, texts, Quantization(), is_coupled=True)
        for name, drafts in ways.items():
            if budget.is_nearly_spent:
                findings.lacks(f"{texts} texts, {name}", "the section's time was spent")
                continue
            label = f"{texts} text{'s' if texts > 1 else ''}, {name}"
            findings.results[label] = found = times_of(drafts, plan, timer)
            findings.rows.append(Row(f"{label}: drawing a token", found["draw_ms"], "ms"))
            if texts == 1 and name == "64 entries":
                inferred = DRAW_OPERATIONS
                findings.rows.append(Row("  operations, law included", found["operations"], inferred=inferred))
            findings.rows.append(Row(f"{label}: encoding {BLOCK_LENGTH} tokens", found["encode_ms"], "ms"))


def times_of(drafts: Drafts, plan: Plan, timer: Timer) -> dict[str, Any]:
    """Returns the times of drawing, of a token, and of encoding, of a block, and the operations of a token."""
    draw_ms = timer.median_ms(drafts.draw, plan.repetitions, drafts.restart)
    encode_ms = timer.median_ms(drafts.encode, plan.repetitions, drafts.drawn)
    drafts.start()
    laws, drawing = num_operations(drafts.take_laws), num_operations(drafts.draw)
    own = (laws + drawing) / BLOCK_LENGTH - 1  # the copy of the logits is the benchmark's
    return {"draw_ms": draw_ms / BLOCK_LENGTH, "encode_ms": encode_ms, "operations": own}
