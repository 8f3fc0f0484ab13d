"""The query language that alerts and panels are judged by in these tests, against values worked out by hand."""

import math

import pytest

from tests.promql import NAME, Series, Value, evaluate, parse

A = Series({NAME: "a", "pod": "x"}, [(0.0, 0.0), (60.0, 30.0), (120.0, 90.0)])
B = Series({NAME: "a", "pod": "y"}, [(0.0, 100.0), (60.0, 5.0), (120.0, 35.0)])  # began anew
C = Series({NAME: "c", "pod": "x", "kind": "k"}, [(120.0, 4.0)])
OLD = Series({NAME: "old"}, [(-300.0, 1.0)])
BUCKETS = [
    Series({NAME: "h", "le": bound}, [(120.0, count)])
    for bound, count in (("1.0", 10.0), ("2.0", 30.0), ("+Inf", 40.0))
]


def shown(text: str) -> Value:
    found = evaluate(parse(text), [A, B, C, OLD, *BUCKETS], 120.0)
    if isinstance(found, float):
        return found
    return {frozenset(pair for pair in labels if pair[0] != NAME): value for labels, value in found.items()}


def of(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", {of(pod="x"): 90.0, of(pod="y"): 35.0}),
        ('a{pod="x"}', {of(pod="x"): 90.0}),
        ('a{pod!="x"}', {of(pod="y"): 35.0}),
        ('a{pod=~"x|z"}', {of(pod="x"): 90.0}),
        ('a{pod!~"x|z"}', {of(pod="y"): 35.0}),
        ('a{pod="x",kind=""}', {of(pod="x"): 90.0}),
        ("a offset 1m", {of(pod="x"): 30.0, of(pod="y"): 5.0}),
        ("old", {}),
        ("rate(a[2m])", {of(pod="x"): 0.75, of(pod="y"): 35.0 / 120.0}),
        ("rate(a[1m])", {of(pod="x"): 1.0, of(pod="y"): 0.5}),
        ("increase(a[1m])", {of(pod="x"): 60.0, of(pod="y"): 30.0}),
        ("rate(c[2m])", {}),
        ("sum(a)", {of(): 125.0}),
        ("sum by (pod) (a)", {of(pod="x"): 90.0, of(pod="y"): 35.0}),
        ("max(a) by (kind)", {of(): 90.0}),
        ("min(a)", {of(): 35.0}),
        ("avg(a)", {of(): 62.5}),
        ("count(a)", {of(): 2.0}),
        ("sum(nothing)", {}),
        ("sum(nothing) or vector(0)", {of(): 0.0}),
        ("(sum(nothing) or vector(0)) == 0", {of(): 0.0}),
        ("a > 50", {of(pod="x"): 90.0}),
        ("a < 50 or a > 50", {of(pod="x"): 90.0, of(pod="y"): 35.0}),
        ("sum by (pod) (a) / sum by (pod) (c)", {of(pod="x"): 22.5}),
        ("sum by (pod) (a) and sum by (pod) (c)", {of(pod="x"): 90.0}),
        ("sum by (pod) (a) unless sum by (pod) (c)", {of(pod="y"): 35.0}),
        ("1 + 2 * 3", 7.0),
        ("10 - 2 - 3", 5.0),
        ("1 + sum(c) / 2", {of(): 3.0}),
        ("sum(a) > 2 * (sum(c) * 10)", {of(): 125.0}),
        ("sum(a) > 100 and sum(c) > 100", {}),
        ("histogram_quantile(0.5, h)", {of(): 1.5}),
        ("histogram_quantile(0.95, sum by (le) (h))", {of(): 2.0}),
    ],
)
def test_query_gives_what_prometheus_does(text: str, expected: Value) -> None:
    assert shown(text) == pytest.approx(expected)


def test_nothing_over_nothing_is_no_number_and_fires_nothing() -> None:
    value = shown("sum(c * 0) / sum(c * 0)")
    assert isinstance(value, dict)
    assert math.isnan(value[of()])
    assert shown("sum(c * 0) / sum(c * 0) > 0.5") == {}


@pytest.mark.parametrize(
    "text", ["sum(", "a b", "a{pod=x}", "a[5m", "a ~ b", "topk(3, a)", "sum(a) by pod", "rate(a)", "a[5m]", ""]
)
def test_what_cannot_be_judged_is_refused(text: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        evaluate(parse(text), [A], 120.0)
