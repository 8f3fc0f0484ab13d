"""RemoteDrafter: vLLM's speculator that asks draftwire's drafter services. Imports vLLM only where it runs."""

import asyncio
import atexit
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import Any

import structlog

from draftwire.errors import ModelMismatchError
from draftwire.models.card import load_card
from draftwire.models.description import ModelDescription
from draftwire.runtime.addresses import host_and_port
from draftwire.runtime.settings import ConnectionSettings
from draftwire.runtime.tls import Dialler, watch_tls
from draftwire_gateway.peers.wire import Check, DrafterLink, SessionLink
from vllm_remote_drafter.block_endpoint import BlockEndpoint
from vllm_remote_drafter.drafted_texts import IDLE_SECONDS, DraftedTexts, Lateness, RowIds
from vllm_remote_drafter.remote_settings import parse_settings

log = structlog.get_logger()

START_SECONDS = 60.0
"""Timeout of the start: of reading the tokenizer, and listening."""
STOP_SECONDS = 5.0
CALL_SECONDS = 30.0
"""Timeout of calls to drafters, prefill included. No step of vLLM waits for it."""
CHECK_SECONDS = 1.0
"""Interval of looking for texts that have ended."""


class RemoteDrafter:
    """`speculative_config.model` of a `vllm serve` that drafts by draftwire's drafter services.

        vllm serve TARGET --speculative-config '{"method": "custom_class", "model": "vllm_remote_drafter.RemoteDrafter",
            "num_speculative_tokens": 4}' --additional-config '{"draftwire": {"drafters": ["drafter:50053"]}}'

    vLLM decides, from the ids alone: its output is what it would be without, whatever is drafted. If anything fails, or
    takes longer than the deadline, nothing is drafted.
    """

    def __init__(self, config: Any) -> None:
        """Reads the settings from vLLM's configuration.

        Raises:
            InvalidRequestError: see `parse_settings`.
        """
        self._settings = parse_settings(config.additional_config)
        self._model, self._revision = config.model_config.model, config.model_config.revision
        self._max_len = config.model_config.max_model_len
        self._num_draft_tokens = config.speculative_config.num_speculative_tokens
        self._deadline_s = self._settings.deadline_ms / 1e3
        self._running: Future[DraftedTexts] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._failed = ""
        self._lateness = Lateness()
        """Lateness of the event loop. Kept by the thread of `propose`, since a loop that is blocked decides nothing."""
        self._thread = Thread(target=self._run, name="draftwire-drafts", daemon=True)

    def load_model(self, model: Any) -> None:
        """Starts to listen for blocks, and to connect to drafters, on rank 0: vLLM takes drafts of that rank alone.

        Raises:
            DraftwireError: it cannot listen, or the target's tokenizer cannot be read.
        """
        from vllm.distributed.parallel_state import get_tp_group

        if get_tp_group().rank_in_group == 0:
            self.start()

    def start(self) -> None:
        """Starts; see `load_model`."""
        self._thread.start()
        self._running.result(START_SECONDS)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends all sessions and connections."""
        atexit.unregister(self.stop)
        if self._is_running and self._loop is not None and self._work is not None:
            self._loop.call_soon_threadsafe(self._work.cancel)
            self._thread.join(STOP_SECONDS)

    @property
    def _is_running(self) -> bool:
        return self._running.done() and self._thread.is_alive()

    def propose(
        self, sampled_token_ids: Sequence[Any], num_tokens_no_spec: Any, token_ids_cpu: Any, **_options: Any
    ) -> list[list[int]]:
        """Returns draft tokens for each row of vLLM's batch; waits for `deadline_ms` at most.

        Args:
            sampled_token_ids: what the step has added to each text; nothing to one whose prompt is still being read.
            num_tokens_no_spec: `[rows]`: length of each text, that included.
            token_ids_cpu: `[rows, max_model_len]`: the texts.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self._is_running:  # another rank, or it has ended
            return drafts
        began = time.monotonic()
        if began < self._lateness.rests_until:
            return drafts
        ends_at = began + self._deadline_s
        try:
            rows = {
                row: token_ids_cpu[row, : num_tokens_no_spec[row]].copy()
                for row, sampled in enumerate(sampled_token_ids)
                if len(sampled)
            }
            blocks = self._ask(rows) if rows else {}
            wait(blocks.values(), max(0.0, ends_at - time.monotonic()))
            for row, block in blocks.items():
                if block.done():
                    drafts[row] = block.result()
        except Exception as error:  # whatever it is: vLLM goes on without drafts
            if (failed := type(error).__name__) != self._failed:
                self._failed = failed
                log.warning("remote_drafter.step_failed", reason=failed)
        return drafts

    def _ask(self, rows: Mapping[int, RowIds]) -> dict[int, Future[list[int]]]:
        assert self._loop is not None, "it has started"
        texts = self._running.result()
        is_late = False

        async def ask() -> dict[int, Future[list[int]]]:
            return {} if is_late else texts.ask(rows)  # a coroutine that is cancelled before it starts may still run

        asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        try:
            blocks = asked.result(self._deadline_s)
            self._lateness.num_late = 0
            return blocks
        except TimeoutError:
            is_late = True
            self._lateness.count(time.monotonic(), self._deadline_s)
            raise
        finally:
            asked.cancel()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        """Runs until it is stopped."""
        self._loop, self._work = asyncio.get_running_loop(), asyncio.current_task()
        try:
            card = await asyncio.to_thread(load_card, self._model, self._revision)
            target = replace(card.description, context_length=self._max_len)
            settings, files = self._settings, watch_tls(self._settings.tls)
            dialler = Dialler(ConnectionSettings(), settings.tls, files)
            links = [DrafterLink(address, dialler, CALL_SECONDS) for address in settings.drafters]
            texts = DraftedTexts(links, target, settings.address, self._num_draft_tokens, self._deadline_s)
            endpoint = BlockEndpoint(target, self._num_draft_tokens, texts.deliver)
            port = await endpoint.start(settings, files)
            texts.address = settings.address or host_and_port(settings.host, port)
        except BaseException as error:
            self._running.set_exception(error)
            return
        self._running.set_result(texts)
        log.info("remote_drafter.server_listening", address=texts.address)
        try:
            async with asyncio.TaskGroup() as group:
                for link in links:
                    group.create_task(link.maintain(_check_vocabulary(target)))
                group.create_task(_end_idle(texts))
        finally:
            texts.end(-1.0)
            for link in links:
                await link.disconnect()
            await endpoint.stop()


def _check_vocabulary(target: ModelDescription) -> Check:
    async def check(link: SessionLink[Any, Any], model: ModelDescription) -> None:
        if model.vocabulary_fingerprint != target.vocabulary_fingerprint:
            raise ModelMismatchError(f"the vocabulary of {link.address} is not that of {target.name}")

    return check


async def _end_idle(texts: DraftedTexts) -> None:
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        texts.end(IDLE_SECONDS)
