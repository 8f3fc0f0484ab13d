"""Tests of many cases that are one test: nothing is collected for each of them, and a failure names all that failed."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature


def every(names: str | tuple[str, ...], cases: Iterable[object]) -> Callable[[Callable], Callable]:
    """Runs a test for each case in turn, as `pytest.mark.parametrize` does, but as one test.

    Fixtures are made once for all cases. Decorators stack: then all combinations are run.

    Args:
        names: of the parameters that a case gives.
        cases: values, or tuples of them if there are several names.
    """
    keys = (names,) if isinstance(names, str) else names
    values = [(case,) if isinstance(names, str) else case for case in cases]

    def decorate(test: Callable) -> Callable:
        @wraps(test)
        def run(**fixtures: object) -> None:
            failures = []
            for case in values:
                given = dict(zip(keys, case, strict=True))
                try:
                    test(**fixtures, **given)
                except Exception as error:
                    error.add_note(f"case: {given!r:.300}")
                    failures.append(error)
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(values)} cases failed", failures)

        own = signature(test)
        kept = [parameter for name, parameter in own.parameters.items() if name not in keys]
        run.__signature__ = own.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
