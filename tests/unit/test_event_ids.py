"""Ids of events say whether tokens were lost, repeated or mixed up."""

import json

import pytest

from draftwire_gateway.http.body import CompletionBody, read
from draftwire_gateway.http.event_ids import EventIds, event_id_of
from draftwire_gateway.http.refusal import RefusedError


def test_id_depends_on_choice_and_all_tokens_but_not_on_how_they_came() -> None:
    ids = EventIds(2)
    assert [ids.add([1, 2]), ids.add([]), ids.add([3])] == [event_id_of(2, [1, 2])] * 2 + [event_id_of(2, [1, 2, 3])]
    resumed = EventIds(2, [1, 2])
    assert resumed.add([3]) == event_id_of(2, [1, 2, 3])
    others = [event_id_of(*other) for other in ((2, [1, 2]), (1, [1, 2, 3]), (2, [1, 3, 2]), (2, [1, 2, 3, 3]))]
    assert event_id_of(2, [1, 2, 3]) not in others


@pytest.mark.parametrize("token_ids", [[7], [7, 8, 8], [8, 7], [-1], [2**64]])
def test_ids_that_do_not_fit_the_event_are_refused(token_ids: list[int]) -> None:
    def body(token_ids: list[int]) -> bytes:
        generated = {"choice": 0, "token_ids": token_ids, "event_id": event_id_of(0, [7, 8])}
        return json.dumps({"model": "m", "prompt": "p", "generated_choices": [generated]}).encode()

    assert read(CompletionBody, body([7, 8])).generated_choices[0].token_ids == [7, 8]
    with pytest.raises(RefusedError) as refused:
        read(CompletionBody, body(token_ids))
    assert refused.value.status == 400
