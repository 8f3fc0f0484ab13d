"""The verifier's engine on vLLM: an EngineCore in this process, stepped on the torch thread. Imports vLLM at start."""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from threading import Event
from typing import Any

import structlog

from draftwire.engine.admission import Room
from draftwire.engine.leases import SessionKey
from draftwire.engine.step_engine import StepEngine
from draftwire.engine.target_session import Step, StepItem, StepResult, TargetSession, mask_us_of
from draftwire.errors import BlockViolationError, DraftwireError, GroupLostError, InvalidRequestError, UnavailableError
from draftwire.method.distributions import rows_of
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.models.card import ModelCard, load_card
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime.settings import EngineSettings, require
from draftwire.verification.deciding import Judgement, JudgingOutcome, StillReading, make_masks, reports_prompt
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.vllm.arguments import (
    check_arguments,
    check_device,
    check_installed,
    engine_arguments,
    law_of,
    why_not_served,
)
from draftwire_verifier.vllm.cache_bytes import cache_bytes
from draftwire_verifier.vllm.items import RoundItem, StepReport
from draftwire_verifier.vllm.timer_slack import coarse_timers

log = structlog.get_logger()

ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # its lines go through our log
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # threads of gRPC do not survive a fork
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables of vLLM that are set unless they are given."""
TRIES = 3
"""Steps of vLLM until one reads something: one may do nothing but preempt."""
WARM_UP = "warm-up"
CUT = "vLLM's scheduler took a part of a block, which cannot be decided: its limits are lower than the verifier's"


@dataclass(frozen=True, slots=True)
class LoadedVllm:
    """vLLM with a loaded model."""

    card: ModelCard
    engine: "VllmEngine"


def load_vllm(config: VerifierConfig) -> LoadedVllm:
    """Loads the target into vLLM. Runs on the torch thread.

    Raises:
        InvalidRequestError: vLLM is missing or another release, an argument is refused, or the model cannot be served.
        OSError: files cannot be read.
    """
    check_arguments(config.vllm.arguments)
    release = check_installed()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from draftwire_verifier.vllm.gated_scheduler import GatedRequest

    check_arguments(config.vllm.arguments, {one.name for one in fields(EngineArgs)})
    check_device(config.loading.device, current_platform.device_type)
    card = load_card(config.loading.model, config.loading.revision)
    try:
        arguments = engine_arguments(config, card.description.context_length)
        settings = EngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise InvalidRequestError(f"vLLM refuses the settings: {_first_line(error)}") from error
    model = settings.model_config
    names = ("has_inner_state", "is_hybrid", "is_attention_free", "is_encoder_decoder")
    reason = why_not_served({name: bool(getattr(model, name)) for name in names})
    require(reason is None, f"{config.loading.model} {reason}")
    require(not settings.use_v2_model_runner, "drafts from outside need vLLM's first model runner")
    require(settings.kv_transfer_config is None, "a session's keys and values stay where they are: no KV transfer")
    if isinstance(size := config.engine.kv_cache_tokens, int):
        settings.cache_config.kv_cache_memory_bytes = cache_bytes(settings, size + _spare(config.engine))
    fault = Event()  # set by a thread of vLLM when a rank has exited
    core = _start_core(settings, fault)
    num_groups = len(core.scheduler.kv_cache_config.kv_cache_groups)
    require(num_groups == 1, f"{config.loading.model} has {num_groups} kinds of KV cache, which is not supported")
    core.collective_rpc("draftwire_install", args=(list(config.own_rules), config.server.log_format))
    digests = core.collective_rpc("draftwire_fingerprint")
    description = replace(
        card.description,
        dtype=_numerics(model.dtype, settings.cache_config.cache_dtype),
        vocab_size=model.get_vocab_size(),
        context_length=model.max_model_len,
        weights_fingerprint=sha256(b"vllm" + law_of(config.vllm.arguments) + b"".join(digests)).digest(),
    )
    log.info("verifier.vllm_started", release=release, ranks=len(digests), dtype=description.dtype)
    return LoadedVllm(replace(card, description=description), VllmEngine(core, config.engine, fault, GatedRequest.open))


def _start_core(settings: Any, fault: Event) -> Any:
    """Starts vLLM's EngineCore.

    Raises:
        InvalidRequestError: it does not start, such as for want of memory.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    # Two were seen not to start in time: see docs/measurements/verifier-on-vllm.md.
    is_alone = settings.parallel_config.world_size == 1
    try:
        with coarse_timers() if is_alone else nullcontext():
            core = EngineCore(settings, Executor.get_class(settings), log_stats=False, executor_fail_callback=fault.set)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise InvalidRequestError(f"vLLM cannot start: {_first_line(error)}") from error
    core.log_error_detail = lambda _: nullcontext()  # would log draft tokens
    return core


OpenRequest = Callable[[Any, str, Sequence[int], str, bool], None]
"""Adds a session to an EngineCore: its name, tokens, salt of the prefix cache, and whether it may take over blocks."""


class VllmEngine(StepEngine[Step, StepResult]):
    """vLLM's EngineCore with one request per session.

    Attributes:
        core: of vLLM.
        spoke_at: time of the last step or check, by `time.monotonic`. Any thread may read it.
    """

    def __init__(self, core: Any, settings: EngineSettings, fault: Event, open_request: OpenRequest) -> None:
        """Starts without sessions. The ranks of `core`, an EngineCore, have our extension installed; `fault` is its
        executor's.
        """
        self.core = core
        self.spoke_at = -math.inf
        self._fault = fault
        self._settings = settings
        self._open_request = open_request
        self._num_reused: dict[str, int] = {}
        self._num_opened = 0
        self._names: dict[SessionKey, str] = {}

    @property
    def _scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def num_cached_tokens(self) -> int:
        """Size of vLLM's KV cache, tokens; one of its blocks is never used."""
        return int((self.core.vllm_config.cache_config.num_gpu_blocks - 1) * self._scheduler.block_size)

    def room(self, max_sessions: int, kv_cache_tokens: int) -> Room:
        """Returns the room in vLLM's KV cache, in its blocks."""
        return Room(max_sessions, kv_cache_tokens, self._scheduler.block_size, _spare(self._settings))

    def _time_prompt(self, num_tokens: int) -> tuple[int, float]:
        num_tokens = min(num_tokens, self.core.vllm_config.model_config.max_model_len - 1)
        started = time.perf_counter()
        self._open_request(self.core, WARM_UP, [0] * num_tokens, "", False)
        item = RoundItem(
            draft_tokens=[],
            draft=None,
            sampling=SamplingParams(),
            rule="block",
            key=DrawKey(bytes(KEY_BYTES), 0, 0),
            num_committed=num_tokens,
            max_read=num_tokens,
            prompt_len=num_tokens,
        )
        self._run({WARM_UP: item})
        self._end(WARM_UP)
        return num_tokens, time.perf_counter() - started

    def step(self, step: Step) -> StepResult:
        """Runs a step: verification of blocks, plain decoding, prefill.

        Raises:
            GroupLostError: a rank exited, or failed in a forward pass that others take part in.
        """
        started = time.perf_counter()
        names = [self._name_of(item.session) for item in step.items]
        items: dict[str, RoundItem] = {}
        failed: dict[str, JudgingOutcome] = {}
        for name, part in zip(names, step.items, strict=True):
            try:
                items[name] = _item_of(part)
            except DraftwireError as error:
                failed[name] = error
        try:
            report = self._run(items) if items else StepReport()
            if report.error is not None:
                raise report.error
        except GroupLostError:
            raise
        except Exception:  # vLLM's prefix cache has a step's blocks before they are computed
            for name, part in zip(names, step.items, strict=True):
                self._discard(part.session.key, name)
            raise
        num_tokens = self._scheduler.num_scheduled if items else 0
        outcomes = [failed.get(name) or self._outcome_of(name, report) for name in names]
        if items and not num_tokens:
            outcomes = [UnavailableError("vLLM's KV cache is full")] * len(names)
        num_unread = [self._num_unread(name) for name in names]
        result = StepResult(
            outcomes=outcomes,
            num_unread=num_unread,
            num_reused=[self._num_reused.get(name, 0) for name in names],
            num_tokens=num_tokens,
            verify_us=int((time.perf_counter() - started) * 1e6),
            audit=lambda: [report.audits.get(name) for name in names],
            mask_us=mask_us_of(step.items),
        )
        for part, name, outcome in zip(step.items, names, outcomes, strict=True):
            if not isinstance(outcome, Judgement | StillReading):
                self._discard(part.session.key, name)
        return result

    def forget(self, key: SessionKey) -> None:
        """Frees a session's KV cache."""
        name = self._names.pop(key, None)
        if name is not None:
            self._end(name)

    def heartbeat(self) -> None:
        """Checks that the ranks are there.

        Raises:
            GroupLostError: one has exited.
        """
        self._check_ranks()
        self.spoke_at = time.monotonic()

    def stop(self) -> None:
        """Ends vLLM and its ranks."""
        self.core.shutdown()

    def _run(self, items: Mapping[str, RoundItem]) -> StepReport:
        """Runs one step of vLLM with these items, or more if one did nothing but preempt."""
        self._check_ranks()
        scheduler = self._scheduler
        for _ in range(TRIES):
            scheduler.items, scheduler.report, scheduler.num_scheduled = dict(items), None, 0
            self._step_core()
            if scheduler.num_scheduled:
                break
        self.spoke_at = time.monotonic()
        for name, num_reused in scheduler.reused.items():
            self._num_reused.setdefault(name, num_reused)
        scheduler.reused.clear()
        return scheduler.report or StepReport()

    def _step_core(self) -> None:
        try:
            self.core.step()
        except Exception as error:
            executor = self.core.model_executor
            is_alone = self.core.vllm_config.parallel_config.world_size == 1
            # A rank that did not answer in time answers later, in the place of the next step.
            has_answered = not isinstance(error, TimeoutError) and not getattr(executor, "is_failed", False)
            if is_alone and has_answered:
                raise
            raise GroupLostError(f"the verifier's group is lost: {type(error).__name__} in vLLM") from error

    def _check_ranks(self) -> None:
        if self._fault.is_set():
            raise GroupLostError("the verifier's group is lost: a rank of vLLM has exited")

    def _name_of(self, session: TargetSession) -> str:
        name = self._names.get(session.key)
        if name is None:
            self._num_opened += 1
            name = f"{session.key[0]}-{session.key[1]}-{self._num_opened}"
            # What is reported of a prompt needs every logit: no prefix is reused, since cached tokens give none.
            reuses = not reports_prompt(session.report)
            self._open_request(self.core, name, session.committed.ids, session.spec.parameters.cache_salt, reuses)
            self._names[session.key] = name
        return name

    def _end(self, name: str) -> None:
        self._num_reused.pop(name, None)
        self.core.abort_requests([name])

    def _discard(self, key: SessionKey, name: str) -> None:
        """Ends a session that failed, whose keys and values may be wrong: nobody takes them over."""
        manager = self._scheduler.kv_cache_manager
        if name in self._scheduler.requests:
            manager.evict_blocks({block for group in manager.get_block_ids(name) for block in group})
        self._names.pop(key, None)
        self._end(name)

    def _outcome_of(self, name: str, report: StepReport) -> JudgingOutcome:
        if name in self._scheduler.cut_blocks:
            return UnavailableError(CUT)
        return report.outcomes.get(name, StillReading())

    def _num_unread(self, name: str) -> int:
        request = self._scheduler.requests.get(name)
        return 1 if request is None else max(1, request.num_tokens - request.num_computed_tokens)


def _item_of(part: StepItem) -> RoundItem:
    """Returns what vLLM's ranks need of a part of a step.

    Raises:
        InvalidRequestError: the form of its text cannot be followed.
    """
    session, spec, block = part.session, part.session.spec, part.block
    parameters, committed = spec.parameters, session.committed.ids
    draft_tokens = block.token_ids if block else []
    masks = session.masks
    if session.automaton is not None and masks is None:
        masks = make_masks(session.automaton, committed[parameters.prompt_len :], draft_tokens)
    if isinstance(masks, DraftwireError):
        raise masks
    reads_text = parameters.sampling.penalizes or reports_prompt(session.report)
    return RoundItem(
        draft_tokens=draft_tokens,
        draft=rows_of(block.draft) if block and not isinstance(block.draft, BlockViolationError) else None,
        sampling=parameters.sampling,
        rule=session.rule.name,
        is_used=block is None or block.is_used,
        key=DrawKey(spec.verifying_key, parameters.choice, session.round),
        num_committed=len(committed),
        max_read=part.max_read,
        prompt_len=parameters.prompt_len,
        stop_token_ids=parameters.stop_token_ids,
        report=session.report,
        committed=list(committed) if reads_text else (),
        masks=masks,
    )


def _spare(settings: EngineSettings) -> int:
    """Returns the tokens that a session may hold beyond its text: a block that is read and rejected."""
    return settings.max_draft_tokens + 1


def _numerics(dtype: Any, cache_dtype: str) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if cache_dtype == "auto" else f"{name}, {cache_dtype} cache"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] or type(error).__name__
