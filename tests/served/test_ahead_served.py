"""Blocks that are drafted before their text is known, through the services. Their law is in `test_law.py`."""

from typing import Any

import pytest
from observing import read_metric

from draftwire.client import Client
from tests.in_process import InProcessStack

SCRIPT = "scripted:verify_ms=20,draft_ms=1,acceptance=0.8,recovered=0.5"


def ahead(options: dict[str, Any], rounds: int = 2) -> dict[str, Any]:
    """Returns a stack's options with drafts for so many rounds ahead."""
    return {**options, "gateway": {**options["gateway"], "draft_ahead_rounds": rounds}}


def test_hits_save_the_trip_and_the_drafting() -> None:
    """With a stack of its own: of a script with rejections that the drafter may foresee."""
    options = {name: {"model": SCRIPT, "threads": 1} for name in ("verifier", "drafter")} | {"gateway": {}}
    with InProcessStack(ahead(options)) as running, Client(running.address) as client:
        result = client.generate("a", max_tokens=200, num_speculative_tokens=4)
        statistics = result.statistics
        assert statistics.num_ahead_hits >= 10
        hits = read_metric(running, "verifier", "held_blocks", 'outcome="hit"')
        assert hits >= statistics.num_ahead_hits - 2
        assert read_metric(running, "verifier", "held_blocks", 'outcome="missed"') > 0
        assert read_metric(running, "drafter", "branches", 'outcome="hit"') > 0
        strict = client.generate("a", max_tokens=8, num_speculative_tokens=0)
        assert strict.statistics.num_ahead_hits == strict.statistics.num_ahead_misses == 0


@pytest.mark.slow
def test_going_ahead_is_chosen_by_measurement() -> None:
    """A drafter on cores of its own, which waits for verdicts otherwise."""
    options = {name: {"model": SCRIPT, "threads": 1} for name in ("verifier", "drafter")}
    gateway = {"draft_ahead_rounds": 2, "draft_ahead_branches": 16, "local_drafts": "none"}
    with InProcessStack({**options, "gateway": gateway}) as running, Client(running.address) as client:
        client.generate("a", max_tokens=800, ignore_eos=True)  # from which it is learnt
        result = client.generate("a", max_tokens=400, ignore_eos=True)
        (choice,) = client.explain_speculation().choices
    (load,) = choice.loads
    assert {way.drafter for way in load.estimates} == {"", "scripted", "scripted, ahead"}
    assert load.chosen == "scripted, ahead", load
    assert result.statistics.num_ahead_hits > result.statistics.num_rounds / 4
    assert result.statistics.num_verifiers_lost == 0, "blocks of a length before are no violation"
