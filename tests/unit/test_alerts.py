"""Alerts and the dashboard ask services for what they export, and docs/metrics.md says what to do about each alert."""

import re
from pathlib import Path

import promql_parser
import pytest

from tests.queries import FILES, alerts_of_compose, expressions_of, faults_of, queries_of_dashboard

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
RULES = alerts_of_compose()
COMPARISONS = {"==", "<", ">", ">="}


def test_every_query_asks_for_series_and_labels_that_there_are() -> None:
    queries = [rule["expr"] for rule in RULES] + queries_of_dashboard((FILES / "dashboard.json").read_text())
    assert len(queries) > 80
    assert [fault for query in queries for fault in faults_of(query)] == []


def test_query_that_asks_for_what_there_is_not_is_found() -> None:
    """So the test above can fail."""
    job = 'job="draftwire-verifier"'
    faulty = {
        "1 + 2": "asks for nothing",
        f"sum(draftwire:num_sesions{{{job}}})": "exports no draftwire:num_sesions",
        f"sum(draftwire:requests_total{{{job}}})": "verifier exports no draftwire:requests_total",
        f'sum(draftwire:blocks_refused_total{{{job},violaton="weights"}})': "has no violaton",
        f"sum by (violaton) (draftwire:blocks_refused_total{{{job}}})": "nothing has violaton",
    }
    for query, said in faulty.items():
        (fault,) = faults_of(query)
        assert said in fault
    for text in ("sum(", "a b", "a{pod=x}", "a[5m", "rate(a)", "sum(a) by pod", "nosuch(a)", ""):
        with pytest.raises(ValueError, match=r"\w"):
            expressions_of(text)
    with pytest.raises(KeyError):
        list(faults_of("draftwire:requests_total"))


def test_alert_fires_upon_a_comparison_and_says_what_to_do() -> None:
    """Without a comparison it would fire whenever its series are there."""
    sections = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=\n\n###|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    assert list(sections) == [rule["alert"] for rule in RULES], "every alert has its place on the page"
    for rule in RULES:
        query = promql_parser.parse(rule["expr"])
        compared = [query.lhs, query.rhs] if str(query.op) == "and" else [query]
        assert {str(part.op) for part in compared} <= COMPARISONS, rule["alert"]
        notes = rule["annotations"]
        assert notes["docs"] == f"docs/metrics.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert notes["summary"], rule["alert"]
        assert re.fullmatch(r".{41,}", notes["runbook"]), rule["alert"]
        assert len(sections[rule["alert"]]) > 100, rule["alert"]
