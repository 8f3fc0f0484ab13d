"""The comparison of a head with a draft model: what picks the lengths is not what compares them."""

from benchmarks.local_head import AGAIN, ARMS, HEAD, MODEL, PLAIN, compared


def test_best_lengths_of_half_of_the_turns_are_compared_in_the_others() -> None:
    turns = {arm: [10.0, 10.0] for arm in ARMS}
    turns[HEAD, 4] = [12.0, 30.0]
    turns[HEAD, 8] = [90.0, 20.0]
    turns[MODEL, 2] = [6.0, 16.0]
    turns[PLAIN, 0] = [8.0, 15.0]
    turns[AGAIN, 0] = [4.0, 99.0]
    found = compared(turns, 1.0, 1)
    assert (found.best_head, found.best_model) == ("head, 4", "model, 2")
    assert found.head_over_better.median == 12.0 / 6.0
    assert found.model_over_plain.median == 6.0 / 8.0
    assert found.plain_over_itself.median == 4.0 / 8.0
    assert found.tokens_per_second["head, 8"] == 55.0


def test_head_is_compared_with_plain_decoding_if_the_model_drafts_less() -> None:
    turns = {arm: [10.0, 10.0] for arm in ARMS}
    turns[PLAIN, 0] = [5.0, 20.0]
    assert compared(turns, 0.0, 1).head_over_better.median == 10.0 / 5.0
