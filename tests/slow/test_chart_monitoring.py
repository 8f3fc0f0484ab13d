"""Dashboard, alerts and scaling ask for metrics that there are."""

import json
import re
from typing import Any
from unittest.mock import ANY

from chart import COMPONENT, EVERYTHING, SERVICES, Rendered, render

from tests.metric_families import families_of
from tests.queries import alerts_of_compose, faults_of, queries_of_dashboard, selectors_of


def dashboard() -> str:
    return str(render("tp8").at("ConfigMap/monitoring.data")["draftwire.json"])


def rules(rendered: Rendered) -> list[dict[str, Any]]:
    (group,) = rendered.at("PrometheusRule/monitoring.spec.groups")
    return list(group["rules"])


def test_queries_ask_services_for_what_they_export() -> None:
    scaled = [render(EVERYTHING).at(f"ScaledObject/{service}.spec.triggers") for service in ("drafter", "verifier")]
    triggers = [trigger for triggers in scaled for trigger in triggers]
    queries = {
        "dashboard": queries_of_dashboard(dashboard()),
        "rules": [rule["expr"] for rule in rules(render("llama-70b"))],
        "scaling": [trigger["metadata"]["query"] for trigger in triggers],
    }
    assert all(queries.values())
    assert [fault for asked in queries.values() for query in asked for fault in faults_of(query)] == []


def test_dashboard_variables_query_what_exists_and_panels_have_titles() -> None:
    board = json.loads(dashboard())
    names = set(re.findall(r"draftwire:\w+", json.dumps(board["templating"]["list"])))
    assert names
    assert names <= {name for family in families_of("verifier") for name in family.series}
    panels = board["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels})
    assert len(places) == len(panels)


def test_monitor_finds_the_metrics_of_all_services() -> None:
    rendered = render("drafter-autoscaling")
    monitor = rendered.one("ServiceMonitor", "monitoring")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"] == {
        "selector": ANY,
        "namespaceSelector": {"matchNames": ["llm"]},
        "endpoints": [{"port": "metrics", "interval": "15s", "relabelings": [ANY]}],
    }
    found = [
        service["metadata"]["labels"][COMPONENT]
        for service in rendered.all("Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        and "metrics" in {port["name"] for port in service["spec"]["ports"]}
    ]
    assert sorted(name.removesuffix("-metrics") for name in found) == sorted(SERVICES)
    assert "gateway" not in found, "the gateway's Service may be open to the world"
    (relabeling,) = monitor["spec"]["endpoints"][0]["relabelings"]
    assert relabeling == {
        "sourceLabels": ["job"],
        "regex": "(.+-gateway)-metrics",
        "targetLabel": "job",
        "replacement": "$1",
    }
    jobs = [
        re.sub(f"^(?:{relabeling['regex']})$", r"\1", service["metadata"]["name"])
        for service in rendered.all("Service")
    ]
    assert set(jobs) == {f"prod-draftwire-{service}" for service in SERVICES}, (
        "jobs are called as dashboard and alerts do"
    )


def test_alerts_are_those_of_compose_with_the_releases_namespace_and_jobs() -> None:
    """Prometheus calls a job by the Service that it was found through."""
    rendered, ours = render("llama-70b"), alerts_of_compose()
    names = {service["metadata"]["name"] for service in rendered.all("Service")}
    labels = re.compile(r'namespace="[^"]*",job="[^"]*-(\w+)"')
    assert len(rules(rendered)) == len(ours) > 10
    for our, their in zip(ours, rules(rendered), strict=True):
        assert their | {"expr": ""} == our | {"expr": ""}
        assert labels.sub(r"\1", their["expr"]) == labels.sub(r"\1", our["expr"])
        matchers = [dict(selector.matchers) for selector in selectors_of(their["expr"])]
        assert {each["namespace"] for each in matchers} == {"llm"}, their["alert"]
        assert {each["job"] for each in matchers} <= names, their["alert"]
        assert {dict(selector.matchers)["namespace"] for selector in selectors_of(our["expr"])} == {"compose"}


def test_nothing_is_left_of_monitoring_where_it_is_off() -> None:
    rendered = render("prometheus-off")
    kinds = {manifest["kind"] for manifest in rendered.manifests}
    assert not kinds & {"ServiceMonitor", "PrometheusRule", "ConfigMap"}
    for service in SERVICES:
        served = ["grpc", "http"] if service == "gateway" else ["grpc"]
        assert [port["name"] for port in rendered.at(f"Service/{service}.spec.ports")] == served
        names = [port["name"] for port in rendered.at(f"container/{service}.ports")]
        assert names == [*served, "metrics"], "which the kubelet probes"


def test_what_needs_an_operator_is_made_only_where_asked_for() -> None:
    kinds = {manifest["kind"] for manifest in render("tp8").manifests}
    assert kinds & {"ServiceMonitor", "PrometheusRule", "ConfigMap"} == {"ConfigMap"}
    assert not render("tp8", "monitoring.dashboard.enabled=false").all("ConfigMap")
