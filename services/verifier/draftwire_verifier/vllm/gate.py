"""SessionGate in front of vLLM's scheduler: a request takes part in a step only with an item. No vLLM here.

vLLM's own scheduler runs whatever it can. Here a session waits for its next block, a prompt is read in chunks of the
verifier's choice, and drafts come from outside: all that is arranged by attributes of vLLM's requests before its
scheduler runs, and put right after it.
"""

from collections.abc import Mapping
from typing import Any

from draftwire.verification.deciding import reports_prompt
from draftwire_verifier.vllm.items import PromptToReport, RoundItem, StepItems, StepReport

NEVER = 1 << 60
"""A step that does not come."""


class LimitedReading:
    """Mixin of vLLM's `Request`: hides the tokens that are not to be read in the coming step.

    Attributes:
        readable: how many tokens of the text vLLM's scheduler sees; None is all, and the draft tokens after them.
    """

    _all_token_ids: list[int]
    spec_token_ids: list[int]
    readable: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the text, as far as they are to be read."""
        return len(self._all_token_ids) if self.readable is None else self.readable

    @property
    def num_tokens_with_spec(self) -> int:
        """The same, and the draft tokens if all of the text is to be read."""
        return len(self._all_token_ids) + len(self.spec_token_ids) if self.readable is None else self.readable


class SessionGate:
    """Mixin of vLLM's `Scheduler`.

    Attributes:
        items: of the next step, by request id. Set by the engine; taken by `schedule`.
        report: what rank 0 decided in the last step, by request id; None if no rank ran.
        reused: prefix cache hits of each request's first step, tokens. Taken by the engine.
        num_scheduled: tokens that the last step read.
        cut_blocks: requests of the last step whose block vLLM's scheduler could have read, and of which it took a part.
            It would do so again.
    """

    running: list[Any]
    waiting: Any
    requests: Mapping[str, Any]
    kv_cache_manager: Any

    def open_gate(self) -> None:
        """Starts without items."""
        self.items: dict[str, RoundItem] = {}
        self.report: StepReport | None = None
        self.reused: dict[str, int] = {}
        self.num_scheduled = 0
        self.cut_blocks: frozenset[str] = frozenset()

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Schedules the requests that have items, and adds these to the scheduler's output as `draftwire_items`."""
        resting = [request for request in self.waiting if request.request_id not in self.items]  # were preempted
        self.waiting.remove_requests(resting)
        for request in self.running:
            item = self.items.get(request.request_id)
            request.next_decode_eligible_step = NEVER if item is None else 0
            if item is not None:
                _prepare(request, item, request.num_computed_tokens, may_draft=True)
        for request in self.waiting:
            num_hit = self.kv_cache_manager.get_computed_blocks(request)[1]
            _prepare(request, self.items[request.request_id], num_hit, may_draft=False)
        offered = {one.request_id for one in self.running if one.spec_token_ids}
        try:
            output = super().schedule(throttle_prefills)  # type: ignore[misc]
        finally:
            for request in self.requests.values():
                request.readable, request.spec_token_ids = None, []
            for request in resting:
                self.waiting.add_request(request)
        for new in output.scheduled_new_reqs:
            self.reused[new.req_id] = new.num_computed_tokens
        output.draftwire_items = self._taken(output)
        self.cut_blocks = frozenset(offered & output.num_scheduled_tokens.keys() - output.draftwire_items.deciding)
        self.num_scheduled = output.total_num_scheduled_tokens
        self.items = {}
        return output

    def update_from_output(self, output: Any, result: Any) -> Any:
        """Adds what was decided to the texts. Requests that were not decided keep their last token unread."""
        self.report = getattr(result, "draftwire_report", None)
        outputs = super().update_from_output(output, result)  # type: ignore[misc]
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None:
                # Read to the end and nothing decided: the logits are needed again, with the block behind them.
                request.num_computed_tokens = min(request.num_computed_tokens, len(request._all_token_ids) - 1)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Ignores drafts of vLLM: blocks come from `items` alone."""

    def _taken(self, output: Any) -> StepItems:
        reading, deciding, prompts = {}, [], {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request, item = self.requests[request_id], self.items[request_id]
            reading[request_id] = item
            end, num_text = request.num_computed_tokens, len(request._all_token_ids)
            drafted = list(output.scheduled_spec_decode_tokens.get(request_id, ()))
            if drafted == item.draft_tokens and end == num_text + len(drafted):
                deciding.append(request_id)
            start = end - num_tokens
            num_rows = min(end, item.prompt_len - 1) - start
            if reports_prompt(item.report) and num_rows > 0:
                prompts[request_id] = PromptToReport(start, num_rows)
        return StepItems(reading, frozenset(deciding), prompts)


def _prepare(request: Any, item: RoundItem, num_computed: int, *, may_draft: bool) -> None:
    """Lets vLLM's scheduler see what a request is to read.

    Args:
        request: of vLLM.
        item: of the step.
        num_computed: tokens of its text that are in the KV cache.
        may_draft: whether draft tokens can be read in this step: vLLM takes none of requests that it starts or resumes.
    """
    num_text = len(request._all_token_ids)
    num_unread = num_text - num_computed
    request.readable, request.spec_token_ids = None, []
    if num_unread > item.max_read:
        request.readable = num_computed + item.max_read
    elif item.draft_tokens and num_unread > 1:
        request.readable = num_text - 1  # the block is read with the last token, in the next step
    elif may_draft:
        request.spec_token_ids = list(item.draft_tokens)
