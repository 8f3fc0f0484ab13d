"""Comparisons in turns: the ratios, their intervals, the bar, and the commands that are run.

Odds of a false alarm: seeds are fixed, so these tests pass or fail alike each time. Where intervals are simulated, the
docstring says how likely sound ones are to fail under a fresh seed.
"""

import json
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paired import (
    Bar,
    Command,
    MeasurementError,
    Paired,
    Ratio,
    Spread,
    Verdict,
    bootstrap_median,
    main,
    paired_ratios,
    ratio_of,
    read_figure,
)

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, str, str]]
"""Runs the command line; returns its exit status and what it printed to standard output and error."""

PYTHON = f"{sys.executable} -I -S"
FIGURE = """import json
print("{not JSON}")
print(json.dumps({"1 rows": {"arranged_ms": %s}}, indent=2))
print("done")
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def command_line(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paired", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            sys.exit(main())
        printed = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, printed.out, printed.err

    return command_line


def paired_of(median: float, low: float, high: float, spread: tuple[float, float] | None) -> Paired:
    own = None if spread is None else Spread(Ratio(1.0, *spread), *spread)
    return Paired(Ratio(median, low, high), own, (1.0,), (median,), () if spread is None else (1.0,))


def test_ratio_of_turns_is_of_the_first_over_the_second_in_each() -> None:
    assert ratio_of([2.0, 6.0, 12.0], [1.0, 2.0, 3.0]).median == 3.0
    assert ratio_of([5.0, 7.0], [5.0, 7.0]) == Ratio(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="argument 2"):
        ratio_of([1.0], [1.0, 2.0])


def test_ratios_are_b_over_a_and_a_again_over_a_of_the_same_pair() -> None:
    """Speeds change by up to 1,000 from pair to pair: ratios of pairs do not, and leave no interval."""
    speeds = [float(10**exponent) for exponent in (0, 3, 1, 2, 3, 0)]
    calls = {"A": 0, "B": 0}

    def of(name: str, number_per_pair: int, ratio: float) -> float:
        calls[name] += 1
        return speeds[(calls[name] - 1) // number_per_pair] * ratio

    paired = paired_ratios(
        lambda: of("A", 2, 1.0), lambda: of("B", 1, 1.25), len(speeds), np.random.default_rng(0), warm_up=0
    )
    assert paired.ratio == Ratio(1.25, 1.25, 1.25)
    assert paired.spread == Spread(Ratio(1.0, 1.0, 1.0), 1.0, 1.0)
    assert paired.a == paired.a_again == tuple(speeds)

    varied = cycle([1.0, 4.0, 2.0])
    alone = paired_ratios(lambda: 2.0, lambda: next(varied), 3, np.random.default_rng(0), warm_up=0, has_spread=False)
    assert alone.ratio == Ratio(1.0, 0.5, 2.0)
    assert (alone.spread, alone.a_again) == (None, ())


def test_turns_alternate_and_treat_b_and_a_again_alike() -> None:
    turns: list[str] = []

    def take(name: str) -> float:
        turns.append(name)
        return 1.0 + len(turns)

    for has_spread in (True, False):
        turns.clear()
        paired = paired_ratios(lambda: take("A"), lambda: take("B"), 6, np.random.default_rng(0), 2, has_spread)
        assert turns[:4] == ["A", "B"] * 2  # they do not count
        size = 3 if has_spread else 2
        pairs = ["".join(turns[start : start + size]) for start in range(4, len(turns), size)]
        assert pairs == (["ABA", "ABA", "AAB", "BAA", "AAB", "BAA"] if has_spread else ["AB", "BA"] * 3)
        assert all((a < b) == (pair % 2 == 0) for pair, (a, b) in enumerate(zip(paired.a, paired.b, strict=True)))
    # Each figure is the time of its turn, so that over six pairs B and A' must differ from A by the same times.
    paired = paired_ratios(lambda: take("A"), lambda: take("B"), 6, np.random.default_rng(0))
    away = [
        sorted(own - base for own, base in zip(figures, paired.a, strict=True))
        for figures in (paired.b, paired.a_again)
    ]
    assert away[0] == away[1] == [-2.0, -1.0, -1.0, 1.0, 1.0, 2.0]


def test_intervals_hold_the_true_median_as_often_as_they_say() -> None:
    """500 skewed samples of 24; 94 % hold it. Sound intervals fail with fresh seeds once in 10,000 times."""
    generator = np.random.default_rng(5)
    held = 0
    for _ in range(500):
        ratios = 1.3 * np.exp(0.2 * (generator.exponential(size=24) - np.log(2.0)))
        interval = bootstrap_median(ratios.tolist(), generator, resamples=1_000)
        assert interval.low <= interval.median == float(np.median(ratios)) <= interval.high
        held += interval.low <= 1.3 <= interval.high
    assert 445 <= held <= 490
    again = [bootstrap_median(ratios.tolist(), np.random.default_rng(7)) for _ in range(2)]
    assert again[0] == again[1]


def test_bar_is_met_if_the_interval_reaches_it_and_the_median_is_near() -> None:
    at_least, at_most = Bar(1.2, is_at_least=True), Bar(0.8, is_at_least=False)
    for median, low, high, bar, is_met in (
        (1.18, 1.10, 1.20, at_least, True),  # both at their edges
        (1.179, 1.10, 1.30, at_least, False),  # the interval reaches it, the median is too far
        (1.19, 1.10, 1.199, at_least, False),  # the median is near, the interval does not reach it
        (1.50, 1.40, 1.60, at_least, True),  # beyond
        (0.70, 0.60, 0.75, at_least, False),
        (0.82, 0.80, 0.90, at_most, True),
        (0.821, 0.70, 0.90, at_most, False),
        (0.81, 0.801, 0.90, at_most, False),
        (0.50, 0.40, 0.60, at_most, True),
        (1.50, 1.40, 1.60, at_most, False),
    ):
        case = (median, low, high, str(bar))
        assert Ratio(median, low, high).meets(bar) == is_met, case
        expected = Verdict.MET if is_met else Verdict.MISSED
        for spread in (None, (0.98, 1.02)):  # as wide as the tolerance, which is not too wide
            assert paired_of(median, low, high, spread).verdict(bar) == expected, case
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="bar"):
            Bar(bad, is_at_least=True)
    with pytest.raises(ValueError, match="tolerance"):
        Bar(1.0, is_at_least=True, tolerance=-0.1)


def test_nothing_is_decided_within_what_equal_runs_differ_by() -> None:
    bar = Bar(1.0, is_at_least=True)
    for spread in ((0.95, 1.01), (0.99, 1.05), (1.03, 1.05)):  # what counts is how far it is from 1
        for median, verdict in (
            (1.1, Verdict.MET),
            (1.03, Verdict.UNDECIDED),
            (0.99, Verdict.UNDECIDED),
            (0.96, Verdict.UNDECIDED),
            (0.9, Verdict.MISSED),
        ):
            assert paired_of(median, median - 0.05, median + 0.05, spread).verdict(bar) == verdict, (spread, median)
            assert paired_of(median, median - 0.05, median + 0.05, spread).is_too_coarse(bar)


def test_figure_is_read_from_the_last_object_that_begins_a_line() -> None:
    text = 'x {"a": 9}\n{"a": 1}\n{not one}\n{\n"a.b":\n{"c d": [2, 3.5]}, "e": true, "f": "4"\n}\ntable {"a": 9}\n'
    assert read_figure(text, "a.b.c d.1") == 3.5
    for path in ("a", "e", "f", "a.b", "a.b.c d", "a.b.c d.2", ""):
        with pytest.raises(MeasurementError, match=r"a\.b\.c d\.0, a\.b\.c d\.1"):
            read_figure(text, path)
    with pytest.raises(MeasurementError, match="2 numbers"):
        read_figure('{"a.b": 1, "a": {"b": 2}}', "a.b")
    with pytest.raises(MeasurementError, match="no line"):
        read_figure("a: 1\n[1]\n", "a")


def test_one_command_in_two_folders_is_compared_and_held_against_a_bar(tmp_path: Path, run: Run) -> None:
    folders = [tmp_path / "before", tmp_path / "after"]
    for folder, figure in zip(folders, ("4", "5"), strict=True):
        folder.mkdir()
        (folder / "figure.py").write_text(FIGURE % figure)
    output = tmp_path / "new" / "result.json"
    words = (f"{PYTHON} figure.py", "--in-a", folders[0], "--in-b", folders[1], "--figure", "1 rows.arranged_ms")
    words += ("--pairs", 3, "--warm-up", 0)
    status, printed, _ = run(*words, "--bar", 1.25, "--at-least", "--output", output)
    assert status == 0
    for line in (
        "1 rows.arranged_ms, 3 pairs; medians of ratios, with 95 % intervals",
        "A       4",
        "B       5",
        "B / A   1.250 [1.250, 1.250]",
        "A' / A  1.000 [1.000, 1.000], half width 0.000, up to 0.000 from 1; "
        "10th to 90th percentile of pairs 1.000 to 1.000",
        "bar     at least 1.25, tolerance 0.02: met",
    ):
        assert line in printed.splitlines()
    report = json.loads(output.read_text())
    assert report["b_over_a"] == {"median": 1.25, "low": 1.25, "high": 1.25}
    assert (report["figures_of_b"], report["verdict"]) == ([5.0] * 3, "met")
    assert str(folders[0]) in report["a"]
    assert str(folders[1]) in report["b"]

    status, printed, _ = run(*words, "--bar", 1.2, "--at-most", "--no-spread")
    assert status == 1
    assert printed.endswith("A' / A  not measured\nbar     at most 1.2, tolerance 0.02: missed\n")

    # A figure that A itself does not keep: nothing is decided, and why is printed beside it.
    counter = "import os\nwith open('runs', 'a') as file: file.write('x')\nsize = os.path.getsize('runs')\n"
    for folder in folders:
        (folder / "figure.py").write_text(counter + FIGURE.replace("%s", "size"))
    status, printed, _ = run(*words, "--bar", 1.0, "--at-least")
    assert status == 3
    assert "at least 1, tolerance 0.02: not decided\n" in printed
    assert "tighter than what equal runs differ by: 0.02 beside " in printed


def test_figure_of_b_may_have_another_name(tmp_path: Path, run: Run) -> None:
    (tmp_path / "figures.py").write_text('print(\'{"plain": 4, "speculation": 6}\')')
    command = f"{PYTHON} {tmp_path / 'figures.py'}"
    words = (command, command, "--figure", "plain", "--figure-b", "speculation", "--pairs", 3, "--warm-up", 0)
    status, printed, _ = run(*words)
    report, _ = json.JSONDecoder().raw_decode(printed)
    assert (status, report["figure"]) == (0, "speculation over plain")
    assert (report["b_over_a"]["median"], report["a_again_over_a"]["ratio"]["median"]) == (1.5, 1.0)
    status, _, errors = run(command, command, "--figure-b", "speculation")
    assert (status, "needs --figure" in errors) == (2, True)


def test_wall_time_is_the_figure_unless_another_is_named(run: Run) -> None:
    status, printed, _ = run("true", "sleep 0.15", "--pairs", 3, "--warm-up", 0, "--no-spread")
    report, _ = json.JSONDecoder().raw_decode(printed)
    assert (status, report["figure"]) == (0, "wall seconds")
    assert report["median_b"] >= 0.15
    assert report["b_over_a"]["low"] <= report["b_over_a"]["median"] <= report["b_over_a"]["high"]


def test_command_that_fails_ends_the_comparison_with_what_it_wrote(tmp_path: Path, run: Run) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys\nfor line in range(50): print('line', line, file=sys.stderr)\nsys.exit(7)\n")
    status, printed, errors = run("true", f"{PYTHON} {script}")
    assert (status, printed) == (2, "")
    assert "exited 7" in errors
    assert errors.splitlines()[1:] == [f"line {line}" for line in range(30, 50)]
    for command, reason in ((tmp_path / "none", "does not start"), ("echo 0", "no line")):
        status, _, errors = run(command, "true", "--figure", "a")
        assert (status, reason in errors) == (2, True)
    for figure in ("0", "-1", "float('nan')"):
        script.write_text(FIGURE % figure)
        status, _, errors = run(f"{PYTHON} {script}", "true", "--figure", "1 rows.arranged_ms", "--warm-up", 0)
        assert (status, "positive and finite" in errors) == (2, True)


def test_command_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    command = Command(("sh", "-c", "echo started >&2; (sleep 0.8; echo > survived) & sleep 60"), tmp_path, 0.5)
    started = time.perf_counter()
    with pytest.raises(MeasurementError, match=r"took longer than 0\.5 s\nstarted"):
        command.measure()
    assert time.perf_counter() - started < 30.0
    time.sleep(0.6)
    assert not (tmp_path / "survived").exists()


def test_bad_arguments_are_refused_before_anything_runs(tmp_path: Path, run: Run) -> None:
    trace = tmp_path / "ran"
    command = f"touch {trace}"
    for words, reason in (
        ([command], "B, --in-a or --in-b"),
        ([command, "--in-b", "."], "B, --in-a or --in-b"),
        ([command, ""], "empty"),
        ([command, "echo '"], "no command"),
        ([command, "true", "--pairs", 2], "--pairs"),
        ([command, "true", "--warm-up", -1], "--warm-up"),
        ([command, "true", "--timeout-s", 0], "--timeout-s"),
        ([command, "true", "--timeout-s", "nan"], "--timeout-s"),
        ([command, "--in-b", tmp_path / "none"], "no folder"),
        ([command, "true", "--bar", 1], "--at-least or --at-most"),
        ([command, "true", "--at-most"], "--at-least or --at-most"),
        ([command, "true", "--bar", -1, "--at-most"], "positive"),
        ([command, "true", "--bar", 1, "--at-most", "--tolerance", -1], "tolerance"),
    ):
        status, _, errors = run(*words)
        assert (status, reason in errors) == (2, True), (words, errors)
    assert not trace.exists()
    with pytest.raises(ValueError, match="at least 3 pairs"):
        paired_ratios(lambda: 1.0, lambda: 1.0, 2, np.random.default_rng(0))
