"""One training loop for both models: seeded, resumable, with a progress bar."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from draftwire.training.batches import TrainingBatch
from draftwire.training.muon import Muon, fast_type
from draftwire.training.plan import TrainingPlan

LossFunction = Callable[..., Tensor]
"""Maps the model and the tensors of a batch to a scalar loss in nats per token."""
BatchesFrom = Callable[[int], Iterator[TrainingBatch]]
"""Yields the batches of a plan from a step on."""


class Trainer:
    """Runs a plan on a model. Saves a checkpoint every few minutes, from which an interrupted run resumes."""

    CHECKPOINT_SECONDS = 240.0

    def __init__(self, model: nn.Module, plan: TrainingPlan, state_path: Path, compiled: bool) -> None:
        """Prepares the optimisers and loads `state_path` where an interrupted run with the same plan left it.

        Raises:
            ValueError: the checkpoint at `state_path` was made under another plan.
        """
        self.model, self.plan, self.state_path, self.compiled = model, plan, state_path, compiled
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        matrices = [p for n, p in trained.items() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        chosen = {id(p) for p in matrices}
        others = [p for p in trained.values() if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=plan.matrix_learning_rate, weight_decay=0.01, dtype=fast_type(matrices[0].device)),
            torch.optim.AdamW(others, lr=plan.embedding_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.peak_rates = [plan.matrix_learning_rate, plan.embedding_learning_rate]
        self.step = 0
        self.log: list[dict[str, float]] = []
        if state_path.exists():
            self._restore()

    def run(self, batches_from: BatchesFrom, loss_function: LossFunction, title: str) -> None:
        """Trains to the end of the plan."""

        def loss_of(*batch: Tensor) -> Tensor:
            return loss_function(self.model, *batch)

        compute: Callable[..., Tensor] = torch.compile(loss_of, dynamic=False) if self.compiled else loss_of
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
            for batch in batches_from(self.step):
                loss = self._train_step(batch, compute)
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

    def _train_step(self, batch: TrainingBatch, compute: Callable[..., Tensor]) -> float:
        """One optimiser step; returns its mean loss."""
        for optimizer, peak in zip(self.optimizers, self.peak_rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * self.plan.rate(self.step)
        rows = max(1, self.plan.micro_batch_tokens // (batch[0].shape[1] - 1))
        total = 0.0
        for part in zip(*(each.split(rows) for each in batch), strict=True):
            loss = compute(*part) * (len(part[0]) / len(batch[0]))
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
        state = torch.load(self.state_path, map_location="cpu", weights_only=True)  # perhaps of another device
        if state["plan"] != json.dumps(asdict(self.plan)):
            raise ValueError(f"{self.state_path} was made under another plan; delete it to start again")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.log = state["step"], state["log"]
