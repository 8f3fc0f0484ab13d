"""Prints the exact law of what the services' own code generates, case by case, and what mistakes in it cause.

    python -m tests.enumerated [PART OF A NAME ...]

The status is 1 if a text has another law than the target's, a case does not show what it is for, or a mistake is not
seen.
"""

import sys
import time
from pathlib import Path

import structlog
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where tests find what they share

from tests.enumerated.cases import CASES
from tests.enumerated.mistakes import LEAST_DEVIATION, MISTAKES
from tests.enumerated.scenes import BOUND, Enumerated, Scene

ERRORS_ALONE = 40
"""Level of log lines: what the services report of planted losses is no news."""


def main(parts: list[str]) -> int:
    """Enumerates the cases whose names have one of some parts, and returns the status."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(ERRORS_ALONE))
    are_right = [_print_case(case) for case in CASES if _is_wanted(case.name, parts)]
    print(f"\nmistakes, each planted in the services' sources, which have to be seen: {LEAST_DEVIATION:g} or more")
    by_name = {case.name: case for case in CASES}
    for mistake in MISTAKES:
        if _is_wanted(mistake.name, parts):
            with mistake.planted():
                result = _print(mistake.name, by_name[mistake.case])
            are_right.append(result.deviation > LEAST_DEVIATION)
    print("\nall as it has to be" if all(are_right) else "\nNOT AS IT HAS TO BE")
    return 0 if all(are_right) else 1


def _is_wanted(name: str, parts: list[str]) -> bool:
    return not parts or any(part in name for part in parts)


def _print_case(case: Scene) -> bool:
    result = _print(case.name, case)
    missing = case.happens - result.shown
    if missing:
        print(f"  never seen: {', '.join(sorted(missing))}")
    return result.deviation < BOUND and not missing


def _print(name: str, case: Scene) -> Enumerated:
    started = time.perf_counter()
    result = case.enumerate()
    print(
        f"{name:76} {result.num_runs:4} runs  {result.deviation:8.1e}  {time.perf_counter() - started:5.1f} s",
        flush=True,
    )
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
