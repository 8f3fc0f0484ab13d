"""The law of texts that the services' own code generates is the target's, enumerated over all random numbers.

Gateway, verifiers and drafters run in one network in virtual time, joined by bytes, while drafters are slow, silent or
lost: see `tests.enumerated`. Mistakes are planted in their sources, and each is seen.
"""

import pytest
import torch

from tests.enumerated.cases import CASES
from tests.enumerated.mistakes import LEAST_DEVIATION, MISTAKES, Mistake
from tests.enumerated.scenes import BOUND, Scene

torch.set_num_threads(1)

MOST_RUNS = 500
"""Of a case: there are many."""
BY_NAME = {case.name: case for case in CASES}


def marked(name: str, is_slow: bool, value: object) -> object:
    return pytest.param(value, marks=pytest.mark.slow if is_slow else (), id=name)


@pytest.mark.parametrize("case", [marked(case.name, case.is_slow, case) for case in CASES])
def test_texts_of_the_services_have_the_law_of_the_target(case: Scene) -> None:
    result = case.enumerate()
    assert result.deviation < BOUND
    assert result.shown >= case.happens, "what the case is for did not happen"
    assert result.num_runs <= MOST_RUNS


@pytest.mark.parametrize("mistake", [marked(mistake.name, mistake.is_slow, mistake) for mistake in MISTAKES])
def test_mistake_in_the_services_sources_changes_the_law(mistake: Mistake) -> None:
    with mistake.planted():
        assert BY_NAME[mistake.case].enumerate().deviation > LEAST_DEVIATION
