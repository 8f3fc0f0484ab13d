"""Tensor parallelism: a cached model whose weights are sharded over a process group.

Rank 0 uses it like any other model. Before each forward pass it broadcasts a plan, and the other ranks, in `follow`,
run the same step on their shards of the weights and of the cache.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3: two all-reduces per layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from draftwire.errors import InvalidRequestError
from draftwire.models.cached_model import CachedModel
from draftwire.models.kv_storage import StoredFeatures
from draftwire.models.parallel.process_group import ProcessGroup
from draftwire.models.parallel.step_plan import (
    CopyPlan,
    PlanChannel,
    ReadPlan,
    Signal,
    StepPlan,
    host_ids,
)
from draftwire.models.pass_engine import IdRows, PassEngine
from draftwire.models.sequence_model import Segment


def check_divides(config: Any, size: int) -> None:
    """Checks that the heads and MLPs of a model, by the configuration of its text part, can be divided among ranks.

    Query heads and the MLPs' inner dimension are divided. Key heads are divided too, or, if there are fewer than ranks,
    replicated on the ranks that need them. The vocabulary need not be divisible.

    Raises:
        InvalidRequestError: they cannot be divided; the message names the possible sizes.
    """
    heads, inner = int(config.num_attention_heads), int(config.intermediate_size)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    possible = [ranks for ranks in range(1, heads + 1) if _divides(heads, kv_heads, inner, ranks)]
    if size not in possible:
        raise InvalidRequestError(
            f"a model of {heads} attention heads, {kv_heads} key heads and an intermediate size of {inner} cannot be "
            f"spread over {size} processes; over {', '.join(map(str, possible))} it can"
        )


def _divides(heads: int, kv_heads: int, inner: int, size: int) -> bool:
    return heads % size == 0 and inner % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


class ParallelModel(CachedModel):
    """One rank's shard of a `CachedModel`.

    Only rank 0 calls the reading methods. After an `UnavailableError` every later call raises it too.

    An error on rank 0 in the middle of a step aborts the group, because the other ranks cannot leave that step.
    """

    def __init__(
        self,
        engine: PassEngine,
        cache_tokens: int,
        features: Callable[[int], StoredFeatures] | None = None,
        *,
        group: ProcessGroup,
        count: Callable[[CachedModel], int] | None = None,
    ) -> None:
        """Starts with an empty cache, of the same size on all ranks; arguments as for `CachedModel`, of this rank's
        shard. Features are kept on rank 0 alone: hidden states are whole on every rank. `count` is that of `fit`, on
        this rank; None if the size of the cache is not to be found.
        """
        super().__init__(engine, cache_tokens, features)
        self.group = group
        self._count = count
        self._plans = PlanChannel(group)

    def heartbeat(self) -> None:
        """Checks that all ranks are alive. Rank 0 has to call it, or read, more often than the group's timeout.

        Raises:
            UnavailableError: another rank is lost or late.
        """
        self._plans.announce(Signal.HEARTBEAT)
        self.group.meet()

    def stop(self) -> None:
        """Makes the other ranks return from `follow`.

        Raises:
            UnavailableError: as `heartbeat`.
        """
        self._plans.announce(Signal.STOP)

    @override
    def fit(self, count: Callable[[CachedModel], int]) -> int:
        """Gives the KV cache the size that fits on all ranks, the smallest that any of them counts."""
        self._plans.announce(Signal.FIT)
        return self._fit_together(count)

    def _fit_together(self, count: Callable[[CachedModel], int]) -> int:
        try:
            own = torch.tensor([count(self)], dtype=torch.int64)
            num_tokens = int(self.group.all_gather(own).min())
            self.resize(num_tokens)
            return num_tokens
        except BaseException as error:
            self.group.break_off(f"the KV cache was not sized: {type(error).__name__}")
            raise

    def _run(self, segments: list[Segment], token_ids: IdRows, kept: Sequence[int], fuzzily: bool) -> Tensor:
        self._plans.announce(ReadPlan(segments, host_ids(token_ids), kept, fuzzily))
        return self._together(segments, token_ids, kept, fuzzily)

    def _together(self, segments: list[Segment], token_ids: IdRows, kept: Sequence[int], fuzzily: bool) -> Tensor:
        """Runs a step whose plan all ranks have."""
        try:
            if isinstance(token_ids, Tensor) and token_ids.device.type != "cpu":
                self.group.broadcast(token_ids.contiguous() if self.group.rank == 0 else token_ids)
            return super()._run(segments, token_ids, kept, fuzzily)
        except BaseException as error:
            self.group.break_off(f"a step failed with {type(error).__name__}")
            raise

    def _copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        self._plans.announce(CopyPlan(sources, targets))
        super()._copy(sources, targets)

    def _carry_out(self, plan: StepPlan) -> bool:
        """Runs a plan on a rank other than 0; returns whether more will follow."""
        match plan:
            case ReadPlan(segments, token_ids, kept, fuzzily):
                ids = torch.empty(plan.num_tokens, dtype=torch.int64, device=self.device)
                self._together(segments, ids if token_ids is None else token_ids.tolist(), kept, fuzzily)
            case CopyPlan(sources, targets):
                super()._copy(sources, targets)
            case Signal.HEARTBEAT:
                self.group.meet()
            case Signal.FIT:
                assert self._count is not None, "ranks have the same settings"
                self._fit_together(self._count)
            case Signal.STOP:
                return False
            case _:
                assert_never(plan)
        return True


@torch.inference_mode()
def follow(model: ParallelModel) -> None:
    """Runs rank 0's plans until `stop`; on the other ranks.

    Raises:
        UnavailableError: rank 0, or another rank in the middle of a step, is lost or silent for longer than the group's
            timeout.
    """
    assert model.group.rank > 0
    try:
        while model._carry_out(model._plans.receive()):
            pass
    except BaseException as error:
        model.group.break_off(f"following failed with {type(error).__name__}")
        raise
