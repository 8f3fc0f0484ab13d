"""The attacks of the docs are those that are carried out, and each is judged."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.__main__ import MAX_RESIDENT_MIB, failures_of, growth_of
from tests.attacks.victim import HARM, all_attacks

THREATS = Path(__file__).parents[2] / "docs" / "threats.md"


def test_attacks_of_the_docs_are_those_that_are_carried_out() -> None:
    section = THREATS.read_text().partition("## Attacks\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [row.split("|")[1] for row in rows]
    documented = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(documented) == sorted(listed.name for listed in all_attacks())


def report(ended_s: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Returns the report of an attack that did no harm."""
    sizes = dict.fromkeys(MAX_RESIDENT_MIB, 100.0)
    quiet = {"figures": {HARM: []}, "lost": [], "largest_gap_s": 0.1, "resident_mib": sizes, "peak_mib": sizes}
    return {**quiet, "ended_s": ended_s, **changes}


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({}, ""),
        ({"figures": {HARM: ["a token was heard"]}}, "a token was heard"),
        ({"lost": ["UnavailableError"]}, "lost: UnavailableError"),
        ({"largest_gap_s": 1.5}, "a gap of 1.50 s"),
        ({"resident_mib": {"verifier": 0.0}}, "verifier ended"),
        ({"peak_mib": {"verifier": 2000.0}}, "verifier took 2000 MiB"),
    ],
)
def test_attack_fails_by_what_it_achieves_and_by_what_others_notice(changes: dict[str, Any], failure: str) -> None:
    assert failures_of(report(**changes), 1.0, None) == [failure] * bool(failure)


@pytest.mark.parametrize(("gap_s", "control_s", "fails"), [(0.85, 0.1, False), (0.95, 0.1, True), (0.95, 0.4, False)])
def test_attack_fails_if_its_gap_exceeds_three_times_that_of_its_control(
    gap_s: float, control_s: float, fails: bool
) -> None:
    """Gaps below 0.3 s count as that: a quiet stack has some."""
    found = failures_of(report(largest_gap_s=gap_s), 1.0, report(largest_gap_s=control_s))
    assert found == ["more than 3 times the gap of its control"] * fails


def test_memory_is_compared_between_attacks_from_a_third_of_the_time_on() -> None:
    grown = dict.fromkeys(MAX_RESIDENT_MIB, 150.0)
    peak = dict.fromkeys(MAX_RESIDENT_MIB, 900.0)
    reports = [report(60.0, resident_mib=peak), report(700.0), report(800.0, peak_mib=peak)]
    assert growth_of([*reports, report(1700.0, peak_mib=peak)], 30.0) == dict.fromkeys(MAX_RESIDENT_MIB, 1.0)
    assert growth_of([*reports, report(1800.0, resident_mib=grown)], 30.0) == dict.fromkeys(MAX_RESIDENT_MIB, 1.5)
