"""Streams of draft blocks that nobody can use are read more slowly, and others at full speed."""

from draftwire_verifier.brake import BURST, EARNED, LONGEST_REST_S, REST_S, Brake


def test_useless_blocks_beyond_a_burst_are_rested_for() -> None:
    brake = Brake()
    assert brake.rest_s(0, BURST) == 0.0
    assert brake.rest_s(0, 10) == 10 * REST_S
    assert brake.rest_s(0, 10**6) == LONGEST_REST_S, "a message at most"
    assert brake.rest_s(0, 0) == 0.0, "what was rested for is paid"


def test_drafter_whose_blocks_are_judged_never_rests() -> None:
    brake = Brake()
    for _ in range(1000):
        assert brake.rest_s(1, EARNED) == 0.0
    assert brake.rest_s(1000, 0) == 0.0
    assert brake.rest_s(0, BURST + 1) == REST_S, "what is earned does not add up without end"
