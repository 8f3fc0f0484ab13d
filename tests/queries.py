"""What the queries of dashboards and alerts ask for, by Prometheus's own grammar."""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser
import yaml

from tests.metric_families import PAGE, PROCESS_SERIES, SERVICES, families_of

FILES = PAGE.parents[1] / "k8s" / "chart" / "files"
OF_TARGETS = {"namespace", "job", "pod"}
"""Labels that Prometheus gives, and no service."""


@dataclass(frozen=True, slots=True)
class Selector:
    """Asks one service for series."""

    service: str
    name: str
    matchers: tuple[tuple[str, str], ...]
    """Labels and values, whatever the sign between them."""


def expressions_of(text: str) -> list[Any]:
    """Returns a query and all queries inside it.

    Raises:
        ValueError: it is no PromQL; a function of an argument of the wrong type is none either.
    """
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(text), found.append)
    return found


def selectors_of(text: str) -> list[Selector]:
    """Returns whom a query asks for what; each of its selectors has to name a job, whose service is its last word."""
    asked = [part for part in expressions_of(text) if isinstance(part, promql_parser.VectorSelector)]
    matchers = [tuple((matcher.name, matcher.value) for matcher in part.matchers.matchers) for part in asked]
    jobs = [dict(pairs)["job"] for pairs in matchers]
    return [
        Selector(job.rpartition("-")[2], part.name, pairs)
        for part, job, pairs in zip(asked, jobs, matchers, strict=True)
    ]


def grouping_of(text: str) -> set[str]:
    """Returns the labels that a query groups by."""
    modifiers = [getattr(part, "modifier", None) for part in expressions_of(text)]
    return {label for modifier in modifiers for label in getattr(modifier, "labels", ())}


@functools.cache
def exported() -> dict[tuple[str, str], set[str]]:
    """Returns the labels of all series, by service and name; `up` is Prometheus's own, others are of any process."""
    of_services = {
        (service, name): {*family.labels, "le", *OF_TARGETS}
        for service in SERVICES
        for family in families_of(service)
        for name in family.series
    }
    of_all = {"up", *PROCESS_SERIES}
    return of_services | {(service, name): OF_TARGETS for service in SERVICES for name in of_all}


def faults_of(text: str) -> Iterator[str]:
    """Yields what a query asks for that no service exports."""
    selectors = selectors_of(text)
    known = [exported().get((selector.service, selector.name)) for selector in selectors]
    if not selectors:
        yield f"{text} asks for nothing"
    for selector, labels in zip(selectors, known, strict=True):
        if labels is None:
            yield f"{selector.service} exports no {selector.name}"
        else:
            yield from (f"{selector.name} has no {label}" for label, _ in selector.matchers if label not in labels)
    unknown = grouping_of(text).difference(*filter(None, known))
    yield from (f"nothing has {label}: {text}" for label in unknown)


def queries_of_dashboard(text: str) -> list[str]:
    """Returns the queries of all panels, with values in the place of the dashboard's variables."""
    targets = [target for panel in json.loads(text)["panels"] for target in panel.get("targets", ())]
    values = {"$__rate_interval": "1m", "$namespace": "compose", "$deployment": "draftwire"}
    return [
        functools.reduce(lambda query, name: query.replace(name, values[name]), values, str(target["expr"]))
        for target in targets
    ]


def alerts_of_compose() -> list[dict[str, Any]]:
    """Returns the rules of alerts.yml."""
    (group,) = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules
