"""The engine on vLLM over a core that does as little as vLLM must: failures and what they leave. Without vLLM."""

from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from session_specs import target_spec

from draftwire.engine.admission import Room
from draftwire.engine.prefill import PrefillPacer
from draftwire.errors import GroupLostError, UnavailableError
from draftwire.method.rounds import Verdict
from draftwire.runtime.settings import EngineSettings
from draftwire.verification.deciding import Judgement
from draftwire_verifier.draft_waits import DraftWaits
from draftwire_verifier.scheduler import Scheduler
from draftwire_verifier.vllm.cache_bytes import cache_bytes, most_bytes
from draftwire_verifier.vllm.items import StepReport
from draftwire_verifier.vllm.vllm_engine import CUT, VllmEngine


class Core:
    """As much of an EngineCore, with its scheduler, as the engine touches. Every request holds one block."""

    block_size = 16

    def __init__(self, num_ranks: int = 1) -> None:
        self.scheduler = self
        self.kv_cache_manager = self
        self.model_executor = SimpleNamespace(is_failed=False)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=num_ranks))
        self.requests: dict[str, Any] = {}
        self.items: dict[str, Any] = {}
        self.reused: dict[str, int] = {}
        self.cut_blocks: frozenset[str] = frozenset()
        self.report: StepReport | None = None
        self.num_scheduled = 0
        self.evicted: set[int] = set()
        self.run: Callable[[], None] = self.decide

    def open(self, core: Any, name: str, token_ids: Any, salt: str, reuses: bool) -> None:
        self.requests[name] = SimpleNamespace(
            num_tokens=len(token_ids), num_computed_tokens=0, block=len(self.requests)
        )

    def step(self) -> None:
        self.num_scheduled = len(self.items)
        self.run()

    def decide(self) -> None:
        self.report = StepReport({name: Judgement([5], 0) for name in self.items})

    def get_block_ids(self, name: str) -> tuple[list[int], ...]:
        return ([self.requests[name].block],)

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks

    def abort_requests(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)


class Served:
    """The engine under the verifier's scheduler."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.core = Core(num_ranks)
        self.engine = VllmEngine(self.core, EngineSettings(), Event(), self.core.open)
        self.scheduler = Scheduler(
            context_length=512,
            vocab_size=320,
            max_draft_tokens=8,
            room=Room(64, 16_384),
            pacer=PrefillPacer(1.0),
            waits=DraftWaits(float),
        )

    def open(self, session_id: int) -> None:
        self.scheduler.open(target_spec(session_id=session_id, token_ids=[1, 2, 3], plain_rounds=1), lease_id=0)

    def step(self) -> list[Any]:
        step = self.scheduler.next_step()
        assert step is not None
        return [event for _, event in self.scheduler.complete(step, self.engine.step(step))]


def fail(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize("is_deciding", [False, True])
def test_blocks_of_a_failed_step_are_taken_over_by_nobody(is_deciding: bool) -> None:
    """vLLM has them in its prefix cache before they are computed. Who waits meanwhile keeps its own."""
    served = Served()
    served.open(1)
    assert isinstance(served.step()[0], Verdict)
    served.open(2)
    served.open(3)
    if is_deciding:
        served.core.run = lambda: setattr(served.core, "report", StepReport(error=UnavailableError("planted")))
    else:
        served.core.run = fail(ZeroDivisionError("planted"))
    with pytest.raises(UnavailableError if is_deciding else ZeroDivisionError, match="planted"):
        served.step()
    assert served.core.evicted == {1, 2}
    assert len(served.core.requests) == 1
    for key in ((2, 0), (3, 0)):
        served.engine.forget(key)  # as the service does
    served.engine.forget((1, 0))
    assert not served.core.requests


@pytest.mark.parametrize(
    ("error", "is_failed", "num_ranks", "is_lost"),
    [
        (RuntimeError("in a forward pass"), False, 1, False),
        (RuntimeError("in a forward pass"), False, 2, True),
        (TimeoutError("of a call"), False, 1, True),
        (RuntimeError("Executor failed."), True, 1, True),
    ],
)
def test_rank_that_may_answer_late_or_never_ends_the_verifier(
    error: Exception, is_failed: bool, num_ranks: int, is_lost: bool
) -> None:
    served = Served(num_ranks)
    served.open(1)
    served.core.run = fail(error)
    served.core.model_executor.is_failed = is_failed
    with pytest.raises(GroupLostError if is_lost else RuntimeError):
        served.step()


def test_part_of_a_block_is_reported_in_words() -> None:
    """vLLM would take the same part again in the next step."""
    served = Served()
    served.open(1)
    served.open(2)

    def cut() -> None:
        served.core.decide()
        served.core.cut_blocks = frozenset(list(served.core.items)[:1])

    served.core.run = cut
    error, verdict = served.step()
    assert isinstance(error, UnavailableError)
    assert str(error) == CUT
    assert isinstance(verdict, Verdict)
    assert len(served.core.requests) == 1


def test_cache_has_the_bytes_of_its_tokens_in_whole_blocks() -> None:
    model = SimpleNamespace(
        get_num_layers=lambda _: 3,
        get_num_kv_heads=lambda _: 2,
        get_head_size=lambda: 5,
        dtype=SimpleNamespace(itemsize=4),
        max_model_len=120,
    )
    settings = SimpleNamespace(
        model_config=model,
        parallel_config=None,
        cache_config=SimpleNamespace(block_size=16),
        scheduler_config=SimpleNamespace(max_num_seqs=7),
        num_speculative_tokens=8,
    )
    of_a_block = 16 * 2 * 3 * 2 * 5 * 4
    assert [cache_bytes(settings, num) for num in (1, 16, 17)] == [2 * of_a_block, 2 * of_a_block, 3 * of_a_block]
    assert most_bytes(settings) == (7 * 9 + 1) * of_a_block, "120 tokens, 8 drafts and one more are 9 blocks"
