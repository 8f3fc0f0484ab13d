"""One training loop for both models: seeded, resumable, with a progress bar."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel

LossFunction = Callable[[PreTrainedModel, Tensor], Tensor]
"""Maps the model and a batch of ids `[batch, sequence_length + 1] int64` to a scalar loss in nats per token."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast to train. Two runs with equal plans and data see the same batches in the same order."""

    total_tokens: int
    """Tokens to train on, repeats included."""
    sequence_length: int = 512
    """Tokens of context in each training window."""
    batch_tokens: int = 16_384
    """Tokens in one optimiser step."""
    micro_batch_tokens: int = 8_192
    """Tokens in one forward and backward pass."""
    matrix_learning_rate: float = 0.02
    """Peak rate of Muon, which trains the layers' weight matrices."""
    embedding_learning_rate: float = 3e-3
    """Peak rate of AdamW, which trains embeddings and norms."""
    warmup_fraction: float = 0.02
    """Share of the steps over which the rates rise from zero."""
    decay_fraction: float = 0.6
    """Share of the steps, at the end, over which the rates fall to zero."""
    seed: int = 0
    """Orders the training windows."""

    def __post_init__(self) -> None:
        if not self.sequence_length <= self.micro_batch_tokens <= self.batch_tokens:
            raise ValueError("sequence_length <= micro_batch_tokens <= batch_tokens must hold")
        if not (0.0 < self.warmup_fraction <= 1.0 and 0.0 < self.decay_fraction <= 1.0):
            raise ValueError("warmup_fraction and decay_fraction must be in (0, 1]")

    @property
    def steps(self) -> int:
        """Optimiser steps in the whole run."""
        return max(1, self.total_tokens // self.batch_tokens)

    def rate(self, step: int) -> float:
        """Learning rate of `step` as a share of the peak: warm-up, plateau, linear decay."""
        done = step / self.steps
        return min(1.0, (done + 1 / self.steps) / self.warmup_fraction, (1.0 - done) / self.decay_fraction)


def windows(tokens: NDArray[np.uint16], plan: TrainingPlan, first_step: int = 0) -> Iterator[Tensor]:
    """Yields the batches from `first_step` on, `[batch, sequence_length + 1] int64`, reshuffled every epoch."""
    length, rows = plan.sequence_length, plan.batch_tokens // plan.sequence_length
    count = (len(tokens) - 1) // length
    if count < rows:
        raise ValueError(f"{len(tokens)} training tokens do not fill one batch of {plan.batch_tokens}")
    epoch, order = -1, np.empty(0, dtype=np.int64)
    for step in range(first_step, plan.steps):
        picked = []
        for position in range(step * rows, (step + 1) * rows):
            if position // count != epoch:
                epoch = position // count
                order = np.random.default_rng((plan.seed, epoch)).permutation(count)
            start = int(order[position % count]) * length
            picked.append(tokens[start : start + length + 1])
        yield torch.from_numpy(np.stack(picked).astype(np.int64))


class Trainer:
    """Runs a plan on a model. Saves a checkpoint every few minutes, from which an interrupted run resumes."""

    CHECKPOINT_SECONDS = 240.0

    def __init__(self, model: PreTrainedModel, plan: TrainingPlan, state_path: Path, compiled: bool) -> None:
        """Prepares the optimisers and loads `state_path` where an interrupted run with the same plan left it.

        Raises:
            ValueError: the checkpoint at `state_path` was made under another plan.
        """
        self.model, self.plan, self.state_path = model, plan, state_path
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=plan.matrix_learning_rate, weight_decay=0.01, nesterov=True),
            torch.optim.AdamW(others, lr=plan.embedding_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.peak_rates = [plan.matrix_learning_rate, plan.embedding_learning_rate]
        self.step = 0
        self.log: list[dict[str, float]] = []
        if state_path.exists():
            self._restore()
        self.forward = cast(PreTrainedModel, torch.compile(model)) if compiled else model

    def run(self, tokens: NDArray[np.uint16], loss_function: LossFunction, title: str) -> None:
        """Trains to the end of the plan on `tokens`."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tok/s"),
        )
        saved_at = started_at = time.monotonic()
        first_step = self.step
        average = math.nan
        with Progress(*columns, refresh_per_second=1, speed_estimate_period=120) as bar:
            task = bar.add_task(title, total=self.plan.steps, completed=self.step, loss=math.nan, speed=0.0)
            for batch in windows(tokens, self.plan, self.step):
                loss = self._train_step(batch, loss_function)
                average = loss if math.isnan(average) else 0.95 * average + 0.05 * loss
                self.step += 1
                speed = (self.step - first_step) * self.plan.batch_tokens / (time.monotonic() - started_at)
                bar.update(task, completed=self.step, loss=average, speed=speed)
                if self.step % 20 == 0:
                    self.log.append({"step": self.step, "loss": average, "tokens_per_s": speed})
                    if not bar.console.is_terminal:
                        progress = f"{self.step}/{self.plan.steps}"
                        bar.console.print(f"{title} {progress} loss {average:.3f} {speed:,.0f} tok/s")
                if time.monotonic() - saved_at > self.CHECKPOINT_SECONDS:
                    self._save()
                    saved_at = time.monotonic()
        self._save()

    def _train_step(self, batch: Tensor, loss_function: LossFunction) -> float:
        """One optimiser step; returns its mean loss."""
        for optimizer, peak in zip(self.optimizers, self.peak_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * self.plan.rate(self.step)
        parts = batch.split(max(1, self.plan.micro_batch_tokens // self.plan.sequence_length))
        total = 0.0
        for part in parts:
            loss = loss_function(self.forward, part) * (len(part) / len(batch))
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _save(self) -> None:
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "plan": json.dumps(asdict(self.plan)),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "log": self.log,
        }
        partial = self.state_path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.state_path)

    def _restore(self) -> None:
        state = torch.load(self.state_path, weights_only=True)
        if state["plan"] != json.dumps(asdict(self.plan)):
            raise ValueError(f"{self.state_path} was made under another plan; delete it to start again")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.log = state["step"], state["log"]
