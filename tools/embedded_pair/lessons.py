"""What drafters learn from: text of the target's own, and its distributions on texts, stored once for many readings.

The target's forward pass would take longer than everything else in a small drafter's training step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor
from transformers import LlamaForCausalLM

from draftwire.training.batches import Order, TrainingBatch, TrainingTexts, batches
from draftwire.training.plan import TrainingPlan


@torch.inference_mode()
def sample_continuations(
    target: LlamaForCausalLM,
    prompts: NDArray[np.uint16],
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> NDArray[np.uint16]:
    """Draws `new_tokens` after each prompt and returns prompt and continuation, `[batch, length]`.

    The drafter is used on the target's own text, so it is trained on that text too. The prompts are
    `[batch, prompt_length] uint16`, the generator is on the target's device.
    """
    ids = torch.from_numpy(prompts.astype(np.int64)).to(target.device)
    produced, cache, step_input = [ids], None, ids
    for _ in range(new_tokens):
        output = target(input_ids=step_input, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        step_input = torch.multinomial((output.logits[:, -1].float() / temperature).softmax(-1), 1, generator=generator)
        produced.append(step_input)
    return torch.cat(produced, dim=1).cpu().numpy().astype(np.uint16)


@dataclass(frozen=True, slots=True)
class Lessons:
    """Batches of texts with the target's last hidden states, from which its distributions follow.

    They take two bytes per token and unit of the target's width.
    """

    plan: TrainingPlan
    """Plan of the windows of the texts; one reading of the lessons."""
    folder: Path
    """Holds two arrays for each of the plan's phases, of all its steps."""

    def write(self, target: LlamaForCausalLM, sources: Sequence[TrainingTexts], compiled: bool) -> None:
        """Writes down what `target` says about `sources`."""

        def states_of(ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                states: Tensor = target.model(input_ids=ids, use_cache=False).last_hidden_state
                return states

        compute = torch.compile(states_of, dynamic=False) if compiled else states_of
        texts = batches(sources, self.plan)
        self.folder.mkdir(parents=True, exist_ok=True)
        begun = 0
        for number, (phase, ended) in enumerate(zip(self.plan.phases, self.plan.phase_ends, strict=True)):
            length, steps = phase.sequence_length, ended - begun
            rows, width = self.plan.batch_tokens // length, target.config.hidden_size
            ids = open_memmap(self._path(number, "ids"), "w+", np.uint16, (steps, rows, length + 1))
            states = open_memmap(self._path(number, "states"), "w+", np.float16, (steps, rows, length, width))
            for step in track(range(steps), f"lessons of {length} tokens"):
                (batch,) = next(texts)
                ids[step] = batch.numpy()
                with torch.no_grad():
                    states[step] = compute(batch[:, :-1]).to(torch.float16).numpy()
            begun = ended

    def batches(self, plan: TrainingPlan, first_step: int = 0) -> Iterator[TrainingBatch]:
        """Yields ids `[batch, length + 1] int64` and states `[batch, length, width] float32` from `first_step` on.

        `plan` has the phases of the lessons' plan and as many tokens in a batch. Every epoch of a phase reads each of
        its batches once, in an order of its own.
        """
        begun = 0
        for number, ended in enumerate(plan.phase_ends):
            ids, states = (np.load(self._path(number, kind), mmap_mode="r") for kind in ("ids", "states"))
            order = Order(len(ids), 1, (plan.seed, number))
            for step in range(max(begun, first_step), ended):
                place = order.window(step - begun)
                yield torch.from_numpy(ids[place].astype(np.int64)), torch.from_numpy(states[place].astype(np.float32))
            begun = ended

    def _path(self, phase: int, kind: str) -> Path:
        return self.folder / f"lessons-{phase}-{kind}.npy"
