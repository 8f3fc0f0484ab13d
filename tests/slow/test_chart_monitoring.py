"""Dashboard, alerts and scaling ask for metrics that there are."""

import json
import re
from collections.abc import Callable, Iterator

import pytest
import yaml
from chart import CHART, COMPONENT, SERVICES, Rendered, render

from tests.metric_families import families_of


def series_of(service: str) -> set[str]:
    return {name for family in families_of(service) for name in family.series}


def asked(query: str) -> Iterator[tuple[str, str]]:
    """Yields the series that a query asks for, each with the service that it asks."""
    for name, labels in re.findall(r"(draftwire:\w+)(\{[^}]*\})?", query):
        job = re.search(r'job="[^"]*-(\w+)"', labels)
        assert job, f"{name} is asked of all services: {query}"
        yield name, job[1]


def queries_of_dashboard() -> list[str]:
    (board,) = render("tp8").all("ConfigMap")
    dashboard = json.loads(board["data"]["draftwire.json"])
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def queries_of_rules() -> list[str]:
    return [rule["expr"] for rule in rules(render("llama-70b"))]


def queries_of_scaling() -> list[str]:
    (scaled,) = render("drafter-autoscaling").all("ScaledObject")
    return [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]


def rules(rendered: Rendered) -> list[dict[str, str]]:
    (rule,) = rendered.all("PrometheusRule")
    (group,) = rule["spec"]["groups"]
    found: list[dict[str, str]] = group["rules"]
    return found


@pytest.mark.parametrize("queries", [queries_of_dashboard, queries_of_rules, queries_of_scaling])
def test_queries_ask_services_for_what_they_export(queries: Callable[[], list[str]]) -> None:
    series = {service: series_of(service) for service in SERVICES}
    found = [(query, name, service) for query in queries() for name, service in asked(query)]
    assert found
    for query, name, service in found:
        assert name in series[service], f"{service} exports no {name}: {query}"


def test_variables_of_the_dashboard_ask_for_what_there_is() -> None:
    (board,) = render("tp8").all("ConfigMap")
    variables = json.loads(board["data"]["draftwire.json"])["templating"]["list"]
    names = re.findall(r"draftwire:\w+", json.dumps(variables))
    assert names
    assert set(names) <= series_of("verifier")


def test_panels_have_a_title_and_a_place_each() -> None:
    (board,) = render("tp8").all("ConfigMap")
    panels = json.loads(board["data"]["draftwire.json"])["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels})
    assert len(places) == len(panels)


def test_every_alert_says_what_to_do() -> None:
    for rule in rules(render("llama-70b")):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert len(rule["annotations"]["runbook"]) > 40


def test_monitor_finds_the_metrics_of_all_services() -> None:
    rendered = render("drafter-autoscaling")
    (monitor,) = rendered.all("ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    spec = monitor["spec"]
    assert set(spec) == {"selector", "namespaceSelector", "endpoints"}
    assert spec["namespaceSelector"] == {"matchNames": ["llm"]}
    (endpoint,) = spec["endpoints"]
    assert endpoint == {"port": "metrics", "interval": "15s"}
    found = [
        service["metadata"]["labels"][COMPONENT]
        for service in rendered.all("Service")
        if spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        and endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    ]
    assert sorted(found) == sorted(SERVICES)


def test_jobs_in_queries_are_the_names_of_services() -> None:
    """Prometheus calls a job by the Service that it was found through."""
    rendered = render("llama-70b")
    names = {service["metadata"]["name"] for service in rendered.all("Service")}
    jobs = {job for rule in rules(rendered) for job in re.findall(r'job="([^"]*)"', rule["expr"])}
    assert jobs
    assert jobs <= names


def test_alerts_are_those_of_compose_with_another_namespace_and_other_jobs() -> None:
    (group,) = yaml.safe_load((CHART / "files" / "alerts.yml").read_text())["groups"]
    rendered = rules(render("llama-70b"))
    assert len(rendered) == len(group["rules"]) > 10
    labels = re.compile(r'namespace="[^"]*",job="[^"]*-(\w+)"')
    for ours, theirs in zip(group["rules"], rendered, strict=True):
        assert 'namespace="compose"' in ours["expr"]
        assert "compose" not in theirs["expr"]
        assert theirs | {"expr": ""} == ours | {"expr": ""}
        assert labels.sub(r"\1", theirs["expr"]) == labels.sub(r"\1", ours["expr"])


def test_every_selector_of_an_alert_names_namespace_and_job() -> None:
    for rule in rules(render("llama-70b")):
        selectors = re.findall(r"(?:draftwire:\w+|\bup)(\{[^}]*\})?", rule["expr"])
        assert selectors
        assert all(re.match(r'\{namespace="[^"]+",job="[^"]+"[,}]', selector) for selector in selectors), rule["alert"]


def test_nothing_is_left_of_monitoring_where_it_is_off() -> None:
    rendered = render("prometheus-off")
    kinds = {manifest["kind"] for manifest in rendered.manifests}
    assert not kinds & {"ServiceMonitor", "PrometheusRule", "ConfigMap"}
    for service in SERVICES:
        names = ["grpc", "http"] if service == "gateway" else ["grpc"]
        assert [port["name"] for port in rendered.container(service)["ports"]] == names
        assert [port["name"] for port in rendered.one("Service", service)["spec"]["ports"]] == names
    assert "DRAFTWIRE_GATEWAY_METRICS_PORT" not in rendered.environment("gateway")


def test_what_needs_an_operator_is_made_only_where_asked_for() -> None:
    kinds = {manifest["kind"] for manifest in render("tp8").manifests}
    assert not kinds & {"ServiceMonitor", "PrometheusRule"}
    assert "ConfigMap" in kinds
    assert not render("tp8", "monitoring.dashboard.enabled=false").all("ConfigMap")
