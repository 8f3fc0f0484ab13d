"""Compares two commands, or one command in two checkouts, in alternating runs, beside the spread of equal runs.

    python -m benchmarks.paired "python -m benchmarks.wire" --in-a ../before --in-b . --pairs 12
    python -m benchmarks.paired "draftwire bench --num-speculative-tokens 0 --json" "draftwire bench --json" \
        --figure plain.tokens_per_second --figure-b speculation.tokens_per_second
    python -m benchmarks.paired "python -m benchmarks.linear --threads 1" "python -m benchmarks.linear --threads 2" \
        --figure "products.17 rows.arranged_ms" --bar 0.7 --at-most

A ratio is B over A of one pair, so that it compares runs adjacent in time. Every pair runs A once more, called A': A'
over A is the noise of the same command, and no smaller difference can be detected. The order of the three changes from
pair to pair; over six pairs B and A' have the same places.

A figure is the wall time of the command, or with `--figure` a number of the last JSON object that begins a line of its
standard output, as every benchmark here and `draftwire bench --json` print one. Its path has the keys joined by dots;
keys may hold dots and blanks. Benchmarks print four digits. No shell reads the commands: `env NAME=value COMMAND` sets
a variable.

A bar is met if the interval reaches it and the median is beyond it or within `--tolerance` of it. The result is
undecided if A' over A is further from 1 than the tolerance, and than the median from the bar. The exit status is 0, or
1 for a missed bar, 2 for a command that fails, and 3 if undecided.
"""

import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from benchmarks.report import progress, write_report

RESAMPLES = 10_000
MIN_PAIRS = 3
TOLERANCE = 0.02
"""How far a median may lie before a bar that its interval reaches."""
ORDERS = ("ABa", "aBA", "AaB", "BaA", "aAB", "BAa")
"""Turns of six pairs, `a` for A'.

A and B alternate. B and A' have the same places and distances from A. Every second pair has the order of the one before
it backwards, so that a machine that slows down favours none.
"""
ROUNDING = 1e-9
"""Slack of tolerances, so that 1.18 is within 0.02 of 1.2 in floating point too."""
TAIL_LINES = 20
"""Lines of standard error that are shown of a failed command."""


class MeasurementError(Exception):
    """A command failed, or printed no figure."""


class Verdict(Enum):
    """Result of a comparison with a bar."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "not decided"


EXIT_STATUS = {None: 0, Verdict.MET: 0, Verdict.MISSED: 1, Verdict.UNDECIDED: 3}


@dataclass(frozen=True, slots=True)
class Bar:
    """A required ratio."""

    value: float
    """Ratio of B over A; positive."""
    is_at_least: bool
    """Whether larger ratios meet it, rather than smaller ones."""
    tolerance: float = TOLERANCE
    """How far the median may lie before the bar; not relative."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > 0.0):
            raise ValueError(f"a bar must be positive, not {self.value}")
        if not 0.0 <= self.tolerance < self.value:
            raise ValueError(f"a tolerance must be at least 0 and less than the bar, not {self.tolerance}")

    def __str__(self) -> str:
        return f"{'at least' if self.is_at_least else 'at most'} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios with its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2.0

    def meets(self, bar: Bar) -> bool:
        """Returns whether the interval reaches the bar, and the median is beyond it or within its tolerance."""
        if bar.is_at_least:
            missing, reached = bar.value - self.median, self.high >= bar.value
        else:
            missing, reached = self.median - bar.value, self.low <= bar.value
        return reached and missing <= bar.tolerance + ROUNDING

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Spread:
    """Noise of equal runs: A' over A."""

    ratio: Ratio
    percentile_10: float
    """Of the ratios of single pairs."""
    percentile_90: float

    @property
    def reach(self) -> float:
        """Largest distance of the interval from 1, the ratio of equal runs."""
        return max(self.ratio.high - 1.0, 1.0 - self.ratio.low)

    def __str__(self) -> str:
        return (
            f"{self.ratio}, half width {self.ratio.half_width:.3f}, up to {self.reach:.3f} from 1; "
            f"10th to 90th percentile of pairs {self.percentile_10:.3f} to {self.percentile_90:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Paired:
    """Results of alternating measurements of A and B."""

    ratio: Ratio
    """B over A."""
    spread: Spread | None
    """None if A was not run again."""
    a: tuple[float, ...]
    """Figures of A, one of each pair, in the unit of the figure."""
    b: tuple[float, ...]
    a_again: tuple[float, ...]
    """Empty if A was not run again."""

    def is_too_coarse(self, bar: Bar) -> bool:
        """Returns whether equal runs differ by more than the bar's tolerance."""
        return self.spread is not None and self.spread.reach > bar.tolerance + ROUNDING

    def verdict(self, bar: Bar) -> Verdict:
        """Returns whether the bar is met.

        That is not decided if equal runs differ by more than its tolerance, and by more than the median is away from
        it. Without a spread this is not known, and the bar is met or missed.
        """
        distance = abs(self.ratio.median - bar.value)
        if self.spread is not None and self.is_too_coarse(bar) and self.spread.reach > distance:
            return Verdict.UNDECIDED
        return Verdict.MET if self.ratio.meets(bar) else Verdict.MISSED


def bootstrap_median(ratios: Sequence[float], generator: np.random.Generator, resamples: int = RESAMPLES) -> Ratio:
    """Returns the median with its 95 % interval: percentiles of the medians of resamples.

    With few ratios it holds the true median less often: about 93 % of the time with 6 to 24, but 87 % with seven, and
    with three, where it goes from the smallest to the largest, 75 %.
    """
    drawn = generator.choice(np.asarray(ratios, dtype=np.float64), (resamples, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5]).tolist()
    return Ratio(median(ratios), low, high)


def ratio_of(figures: Sequence[float], base: Sequence[float]) -> Ratio:
    """Returns the ratio of paired figures, for a benchmark that alternates both measurements itself.

    Args:
        figures: of B, one of each turn.
        base: of A, in the same turns and unit.

    With fewer than `MIN_PAIRS` turns the interval goes from the least to the most, and says little.

    Raises:
        ValueError: the numbers of figures differ.
    """
    return bootstrap_median(_over(figures, base), np.random.default_rng(0))


def paired_ratios(
    measure_a: Callable[[], float],
    measure_b: Callable[[], float],
    pairs: int,
    generator: np.random.Generator,
    warm_up: int = 1,
    has_spread: bool = True,
) -> Paired:
    """Measures A and B alternately.

    Args:
        measure_a: runs A and returns its figure, of any unit.
        measure_b: runs B and returns its figure, of the same unit.
        pairs: at least `MIN_PAIRS`; multiples of six balance the turns.
        generator: draws the resamples.
        warm_up: runs of each before the first pair, which do not count.
        has_spread: whether every pair runs A again.

    Raises:
        ValueError: too few pairs.
        MeasurementError: a figure is not positive and finite, so that it has no ratio.
    """
    if pairs < MIN_PAIRS or warm_up < 0:
        raise ValueError(f"at least {MIN_PAIRS} pairs and no fewer than 0 warm-up runs, not {pairs} and {warm_up}")
    measures = {"A": measure_a, "B": measure_b, "a": measure_a}
    figures: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(warm_up):
        measure_a()
        measure_b()
    for pair in progress(range(pairs), "pairs"):
        for name in ORDERS[pair % len(ORDERS)]:
            if has_spread or name != "a":
                figures[name].append(_ratable(measures[name]()))
    ratio = bootstrap_median(_over(figures["B"], figures["A"]), generator)
    spread = _spread(_over(figures["a"], figures["A"]), generator) if has_spread else None
    return Paired(ratio, spread, tuple(figures["A"]), tuple(figures["B"]), tuple(figures["a"]))


def _ratable(figure: float) -> float:
    if not (math.isfinite(figure) and figure > 0.0):
        raise MeasurementError(f"a figure must be positive and finite to have a ratio, not {figure}")
    return figure


def _over(figures: Sequence[float], base: Sequence[float]) -> list[float]:
    return [own / other for own, other in zip(figures, base, strict=True)]


def _spread(ratios: Sequence[float], generator: np.random.Generator) -> Spread:
    return Spread(bootstrap_median(ratios, generator), *np.percentile(ratios, [10.0, 90.0]).tolist())


# Commands


@dataclass(frozen=True, slots=True)
class Command:
    """A command and where it runs."""

    words: tuple[str, ...]
    folder: Path
    timeout_s: float
    figure: str | None = None
    """Path of a number that it prints; None for its wall time in seconds."""

    def measure(self) -> float:
        """Runs the command and returns its figure.

        Raises:
            MeasurementError: it failed, took longer than its timeout, or printed no such figure.
        """
        with TemporaryFile() as output, TemporaryFile() as errors:
            started = time.perf_counter()
            try:
                process = subprocess.Popen(
                    self.words,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                raise MeasurementError(f"{self} does not start: {error}") from error
            is_late = _wait(process, self.timeout_s)
            seconds = time.perf_counter() - started
            for file in (output, errors):
                file.seek(0)
            if is_late or process.returncode != 0:
                reason = f"took longer than {self.timeout_s:g} s" if is_late else f"exited {process.returncode}"
                tail = errors.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
                raise MeasurementError("\n".join([f"{self} {reason}", *tail]))
            if self.figure is None:
                return seconds
            return read_figure(output.read().decode(errors="replace"), self.figure)

    def __str__(self) -> str:
        return f"{shlex.join(self.words)} (in {self.folder})"


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Waits for a process; on timeout kills its process group. Returns whether it was killed.

    `Popen.wait(timeout)` would poll, and be up to 50 ms late.
    """
    is_late = threading.Event()

    def end() -> None:
        if process.poll() is None:
            is_late.set()
            _kill(process)

    timer = threading.Timer(timeout_s, end)
    timer.start()
    try:
        process.wait()
    except BaseException:  # Ctrl-C does not reach a process in its own session
        _kill(process)
        raise
    finally:
        timer.cancel()
    return is_late.is_set()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_figure(text: str, path: str) -> float:
    """Returns the number at a path of the last JSON object that begins a line.

    Args:
        text: what a command printed.
        path: keys, and indices of lists, joined by dots.

    Raises:
        MeasurementError: there is no object, or not one number of that path in it.
    """
    objects = list(_objects(text))
    if not objects:
        raise MeasurementError("no line of the output begins a JSON object")
    numbers = list(_numbers(objects[-1]))
    found = [number for own, number in numbers if own == path]
    if len(found) != 1:
        known = ", ".join(own for own, _ in numbers) or "none"
        raise MeasurementError(f"{len(found)} numbers are called {path!r}; those of the output: {known}")
    return found[0]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder, end = json.JSONDecoder(), 0
    for brace in re.finditer(r"^\{", text, re.MULTILINE):
        if brace.start() >= end:
            try:
                found, end = decoder.raw_decode(text, brace.start())
            except json.JSONDecodeError:
                continue
            yield found


def _numbers(tree: object, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield path, float(tree)
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from _numbers(value, f"{path}.{key}" if path else str(key))


# Command line


def summary(paired: Paired, name: str, bar: Bar | None) -> str:
    """Returns a comparison as text.

    Args:
        paired: what was measured.
        name: what the figure is called, with its unit.
        bar: the required ratio.
    """
    lines = [
        f"{name}, {len(paired.a)} pairs; medians of ratios, with 95 % intervals",
        f"A       {median(paired.a):.4g}",
        f"B       {median(paired.b):.4g}",
        f"B / A   {paired.ratio}",
        f"A' / A  {paired.spread or 'not measured'}",
    ]
    if bar is not None:
        lines.append(f"bar     {bar}, tolerance {bar.tolerance:g}: {paired.verdict(bar).value}")
        if paired.spread is not None and paired.is_too_coarse(bar):
            lines.append(
                f"        the tolerance is tighter than what equal runs differ by: {bar.tolerance:g} beside "
                f"{paired.spread.reach:.3f}; take more pairs or a quieter machine"
            )
    return "\n".join(lines)


def _commands(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[Command, Command]:
    """Returns A and B; a bad argument ends the process with a line about it, and exit status 2."""
    texts = (arguments.a, arguments.a if arguments.b is None else arguments.b)
    folders = (arguments.in_a or Path(), arguments.in_b or Path())
    if arguments.b is None and folders[0].resolve() == folders[1].resolve():
        parser.error("one command in one folder: B, --in-a or --in-b is needed")
    if arguments.figure_b is not None and arguments.figure is None:
        parser.error("--figure-b needs --figure")
    if not (arguments.timeout_s > 0.0 and arguments.warm_up >= 0 and arguments.pairs >= MIN_PAIRS):
        parser.error(f"--pairs must be at least {MIN_PAIRS}, --warm-up at least 0, --timeout-s more than 0")
    commands = []
    figures = (arguments.figure, arguments.figure_b or arguments.figure)
    for text, folder, figure in zip(texts, folders, figures, strict=True):
        if not folder.is_dir():
            parser.error(f"{folder} is no folder")
        try:
            words = shlex.split(text)
        except ValueError as error:
            parser.error(f"{text!r} is no command: {error}")
        if not words:
            parser.error("a command is empty")
        commands.append(Command(tuple(words), folder, arguments.timeout_s, figure))
    return commands[0], commands[1]


def _bar(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Bar | None:
    """Returns the bar, if one is given; a bad argument ends the process as in `_commands`."""
    if (arguments.bar is None) != (arguments.is_at_least is None):
        parser.error("--bar needs --at-least or --at-most, and they need it")
    if arguments.bar is None:
        return None
    try:
        return Bar(arguments.bar, arguments.is_at_least, arguments.tolerance)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("a", metavar="A", help="a command")
    parser.add_argument("b", metavar="B", nargs="?", help="another one [default: A, in the folder of --in-b]")
    parser.add_argument("--in-a", type=Path, metavar="DIR", help="where A runs [default: here]")
    parser.add_argument("--in-b", type=Path, metavar="DIR", help="where B runs [default: here]")
    parser.add_argument("--pairs", type=int, default=12, help="multiples of six balance the turns [%(default)s]")
    parser.add_argument("--figure", metavar="KEY.KEY", help="number of the JSON it prints [default: wall seconds]")
    parser.add_argument("--figure-b", metavar="KEY.KEY", help="that of B, in the same unit [default: as of A]")
    parser.add_argument("--warm-up", type=int, default=1, help="runs of each that do not count [%(default)s]")
    parser.add_argument("--no-spread", action="store_true", help="do not run A again in every pair")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one run [%(default)g]")
    parser.add_argument("--bar", type=float, help="a ratio to be reached")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--at-least", dest="is_at_least", action="store_const", const=True)
    ways.add_argument("--at-most", dest="is_at_least", action="store_const", const=False)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of the bar [%(default)g]")
    parser.add_argument("--seed", type=int, default=0, help="of the resamples [%(default)s]")
    parser.add_argument("--output", type=Path)
    return parser


def main() -> int:
    """Measures, writes JSON, prints a summary, and returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args()
    a, b = _commands(parser, arguments)
    bar = _bar(parser, arguments)
    name = a.figure or "wall seconds"
    if b.figure != a.figure:
        name = f"{b.figure} over {name}"
    generator = np.random.default_rng(arguments.seed)
    try:
        paired = paired_ratios(
            a.measure, b.measure, arguments.pairs, generator, arguments.warm_up, not arguments.no_spread
        )
    except MeasurementError as error:
        print(error, file=sys.stderr)
        return 2
    verdict = None if bar is None else paired.verdict(bar)
    results: dict[str, Any] = {"a": str(a), "b": str(b), "figure": name}
    results |= {"median_a": median(paired.a), "median_b": median(paired.b)}
    results |= {"b_over_a": paired.ratio, "a_again_over_a": paired.spread}
    if verdict is not None:
        results |= {"bar": bar, "verdict": verdict.value}
    figures = {"figures_of_a": paired.a, "figures_of_b": paired.b, "figures_of_a_again": paired.a_again}
    write_report(arguments, {**results, **{key: list(own) for key, own in figures.items()}})
    print(summary(paired, name, bar))
    return EXIT_STATUS[verdict]


if __name__ == "__main__":
    sys.exit(main())
