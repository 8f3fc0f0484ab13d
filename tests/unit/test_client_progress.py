"""What a client makes of what comes, call after call, and asks for again after each interruption."""

from collections.abc import Iterator

import pytest

from draftwire.client.patience import Patience
from draftwire.client.progress import Progress
from draftwire.client.status import Interruption
from draftwire.client.stream import CompletionStream
from draftwire.errors import ProtocolViolationError, UnavailableError
from draftwire.v1 import gateway_pb2

LOST = Interruption(UnavailableError("lost"), may_pass=True)


def delta(choice: int, *token_ids: int) -> gateway_pb2.GenerateResponse:
    sources = [gateway_pb2.TOKEN_SOURCE_PLAIN] * len(token_ids)
    return gateway_pb2.GenerateResponse(
        delta=gateway_pb2.GenerateDelta(choice=choice, token_ids=token_ids, text="x", token_sources=sources)
    )


def asked_for_again(progress: Progress) -> list[tuple[int, list[int]]]:
    return [(came.choice, list(came.token_ids)) for came in progress.request.generated_choices]


def test_each_interruption_names_each_choice_once_with_all_that_has_come() -> None:
    progress = Progress(gateway_pb2.GenerateRequest(num_choices=2), Patience(1, 30.0, None))
    progress.patience.begin()
    progress.take(delta(0, 1, 2))
    assert progress.resume(LOST) is not None
    assert asked_for_again(progress) == [(0, [1, 2])]
    progress.take(delta(1, 7))
    progress.take(delta(0, 3))
    assert progress.resume(LOST) is not None
    assert asked_for_again(progress) == [(0, [1, 2, 3]), (1, [7])]


class CountedPatience(Patience):
    """Counts how often something came."""

    num_renewals = 0

    def renew(self) -> None:
        self.num_renewals += 1
        super().renew()


def finish(choice: int) -> gateway_pb2.GenerateResponse:
    statistics = gateway_pb2.GenerationStatistics(num_prompt_tokens=3)
    return gateway_pb2.GenerateResponse(
        finish=gateway_pb2.GenerateFinish(choice=choice, reason=gateway_pb2.FINISH_REASON_LENGTH, statistics=statistics)
    )


def test_end_of_a_choice_without_any_text_is_progress_too() -> None:
    patience = CountedPatience(1, 30.0, None)
    progress = Progress(gateway_pb2.GenerateRequest(num_choices=2), patience)
    assert progress.take(finish(1)) == []
    assert patience.num_renewals == 1
    assert progress.is_missing


def test_part_of_a_prompt_that_is_missing_is_noticed_at_once() -> None:
    progress = Progress(gateway_pb2.GenerateRequest(prompt_logprobs=0), Patience(1, 30.0, None))
    part = gateway_pb2.PromptLogprobs(first_position=2, token_ids=[5], logprobs=[-1.0])
    with pytest.raises(ProtocolViolationError, match="leaves out log-probabilities of the prompt"):
        progress.take(gateway_pb2.GenerateResponse(prompt_logprobs=part))


class CancellingCall:
    """A call whose first response comes just after its reader's stream was cancelled."""

    def __init__(self) -> None:
        self.stream: CompletionStream
        self.num_cancelled = 0

    def __iter__(self) -> Iterator[gateway_pb2.GenerateResponse]:
        self.stream.cancel()
        yield delta(0, 1)

    def cancel(self) -> None:
        self.num_cancelled += 1


def test_what_came_while_a_stream_was_cancelled_is_not_given_out() -> None:
    call = CancellingCall()
    progress = Progress(gateway_pb2.GenerateRequest(), Patience(1, 30.0, None))
    call.stream = CompletionStream(lambda request, timeout_s: call, progress)
    for _ in range(2):
        with pytest.raises(UnavailableError, match="cancelled"):
            next(call.stream)
    assert call.num_cancelled == 1
