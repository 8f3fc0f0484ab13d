"""Our part of every rank of vLLM: `worker_extension_cls` of the engine. Imports vLLM where it runs."""

import multiprocessing
import os
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import structlog
import torch

from draftwire.models.loading import weights_fingerprint
from draftwire.runtime.logging import configure_logging
from draftwire.verification.rule_loading import served_rules
from draftwire_verifier.vllm.items import StepItems, StepReport
from draftwire_verifier.vllm.rank_decisions import RankDecisions, agreed

log = structlog.get_logger()


class RankExtension:
    """Mixed into vLLM's worker; its methods are called on every rank by `collective_rpc`."""

    model_runner: Any

    def draftwire_install(self, own_rules: Sequence[str], log_format: str) -> None:
        """Replaces what the rank's model runner samples with.

        Args:
            own_rules: import paths of further rules.
            log_format: of the verifier, for ranks in processes of their own.
        """
        if multiprocessing.parent_process() is not None:
            configure_logging(log_format, "verifier")
        RankStep(self.model_runner, own_rules).install()

    def draftwire_fingerprint(self) -> bytes:
        """Returns the fingerprint of the rank's share of the weights."""
        return weights_fingerprint(self.model_runner.get_model())


class RankStep:
    """One rank's part in the steps of the engine."""

    def __init__(self, runner: Any, own_rules: Sequence[str]) -> None:
        """Prepares; `runner` is vLLM's model runner."""
        from vllm.distributed.parallel_state import get_tp_group

        self._runner = runner
        self._group = get_tp_group()
        self._rank = self._group.rank_in_group
        self._decisions = RankDecisions(served_rules(own_rules))
        self._items = StepItems()
        self._report = StepReport()
        self._prompt_logits: dict[str, Any] = {}

    def install(self) -> None:
        """Takes the place of the runner's sampling."""
        runner, execute, sample = self._runner, self._runner.execute_model, self._runner.sample_tokens

        def execute_model(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
            self._items = getattr(scheduler_output, "draftwire_items", StepItems())
            self._decisions.forget(scheduler_output.finished_req_ids)
            with self._fatal():
                return execute(scheduler_output, *arguments, **options)

        def sample_tokens(*arguments: Any, **options: Any) -> Any:
            if runner.execute_model_state is None:
                return sample(*arguments, **options)
            with self._fatal():
                self._prompt_logits = self._read_prompts(runner.execute_model_state)
                output = sample(*arguments, **options)
            output.draftwire_report = self._report
            return output

        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
        runner._sample = types.MethodType(lambda _, logits, metadata: self._sample(logits, metadata), runner)

    def _sample(self, logits: Any, metadata: Any) -> Any:
        """Takes the place of `GPUModelRunner._sample`: decides instead of sampling."""
        from vllm.v1.outputs import SamplerOutput

        ids = self._runner.input_batch.req_ids
        num_drafted = [0] * len(ids) if metadata is None else metadata.num_draft_tokens
        starts = dict(zip(ids, accumulate((num + 1 for num in num_drafted), initial=0), strict=False))
        self._report = agreed(
            lambda: self._decisions.decide(self._items, starts, logits, self._prompt_logits),
            partial(self._group.broadcast_object, src=0),
            self._rank,
        )
        tokens = [self._report.tokens_of(name) for name in ids]
        width = max((len(own) for own in tokens), default=0)
        sampled = torch.full((len(ids), max(2, width)), -1, dtype=torch.int32)  # of one column, -1 would be a token
        for row, own in enumerate(tokens):
            sampled[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        device = self._runner.device
        return SamplerOutput(sampled_token_ids=sampled.to(device), logprobs_tensors=None)

    @torch.inference_mode()
    def _read_prompts(self, state: Any) -> dict[str, Any]:
        """Returns the logits behind the prompt tokens that the step reports. All ranks compute them, in one order."""
        prompts = self._items.prompts
        if not prompts:
            return {}
        num_scheduled = state.scheduler_output.num_scheduled_tokens
        ids = self._runner.input_batch.req_ids
        starts = dict(zip(ids, accumulate((num_scheduled[name] for name in ids), initial=0), strict=False))
        return {
            name: self._runner.model.compute_logits(
                state.hidden_states[starts[name] : starts[name] + prompts[name].num_rows]
            )
            for name in ids
            if name in prompts
        }

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """Ends another rank than 0 that fails: rank 0 would wait for it in the middle of a step. Rank 0 reports."""
        try:
            yield
        except Exception:
            if self._rank:
                log.exception("verifier.rank_failed", rank=self._rank)
                os._exit(1)
            raise
