"""Dashboard and alerts ask a running stack for series that it has, and it exports nothing that no page lists."""

import json
import math
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from observing import read_metric
from prometheus_client.parser import text_string_to_metric_families
from test_honesty import free_port, stack_with

from draftwire.client import Client
from tests.dishonest_drafter import CORRUPTED_TEMPERATURE
from tests.in_process import InProcessStack
from tests.metric_families import PAGE, SERVICES, families_of
from tests.promql import NAME, Call, Selector, Series, evaluate, parse, parts_of

FILES = PAGE.parents[1] / "k8s" / "chart" / "files"
PROMPT = [0, 2, 1, 1]
SCRAPED_APART_S = 15.0
"""What the two scrapes are dated apart."""
TARGET_LABELS = {"namespace", "job", "pod"}
"""Prometheus gives them, and no service."""


def scrape(port: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def use(stack: InProcessStack) -> None:
    """Sends what makes every series move: speculation, none, a lossy rule, and a drafter whose blocks are refused."""
    with Client(stack.address) as client:
        for seed in range(3):
            client.generate(PROMPT, max_tokens=40, seed=seed, num_speculative_tokens=4)
        client.generate(PROMPT, max_tokens=10, num_speculative_tokens=0)
        client.generate(PROMPT, max_tokens=20, num_speculative_tokens=4, rejection_sample_method="typical")
        client.generate(PROMPT, max_tokens=20, temperature=CORRUPTED_TEMPERATURE, num_speculative_tokens=4)


@pytest.fixture(scope="module")
def scraped(pair: tuple[Path, Path]) -> Iterator[list[Series]]:
    """What Prometheus has of a stack after two scrapes, with some traffic before each."""
    port = free_port()
    with stack_with(pair, "corrupt", [], metrics_port=port, address="dns:///127.0.0.1:{port}") as stack:
        ports = {name: running.metrics_port for name, running in stack.services.items()} | {"drafter": port}
        found: dict[tuple[str, str, frozenset[tuple[str, str]]], list[tuple[float, float]]] = {}
        for time_s in (0.0, SCRAPED_APART_S):
            use(stack)
            for service in SERVICES:
                for (name, labels), value in scrape(ports[service]).items():
                    found.setdefault((service, name, labels), []).append((time_s, value))
                found.setdefault((service, "up", frozenset()), []).append((time_s, 1.0))
        yield [
            Series(
                {**dict(labels), NAME: name, "namespace": "compose", "job": f"draftwire-{service}", "pod": service},
                samples,
            )
            for (service, name, labels), samples in found.items()
        ]


def queries_of_dashboard() -> Iterator[str]:
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "1m")
            yield text.replace("$namespace", "compose").replace("$deployment", "draftwire")


def queries_of_alerts() -> Iterator[str]:
    (group,) = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        yield rule["expr"]


@pytest.mark.parametrize("text", [*queries_of_dashboard(), *queries_of_alerts()])
def test_every_series_that_is_asked_for_is_there(scraped: list[Series], text: str) -> None:
    query = parse(text)
    selectors = [part for part in parts_of(query) if isinstance(part, Selector)]
    assert selectors
    known: set[str] = set(TARGET_LABELS)
    for selector in selectors:
        found = [series for series in scraped if selector.matches(series.labels)]
        assert found, f"no service exports {selector}"
        known.update(*(series.labels for series in found))
        for label, _, _ in selector.matchers:
            assert any(label in series.labels for series in found), f"{selector.name} has no label {label}"
    for part in parts_of(query):
        if isinstance(part, Call):
            assert set(part.by) <= known, f"nothing has one of the labels {part.by}"


@pytest.mark.parametrize("text", [*queries_of_dashboard()])
def test_every_panel_shows_something(scraped: list[Series], text: str) -> None:
    shown = evaluate(parse(text), scraped, SCRAPED_APART_S)
    assert isinstance(shown, dict)
    assert shown, text
    assert any(not math.isnan(value) for value in shown.values()), text


def test_no_alert_fires_but_those_of_the_drafter_that_breaks_the_protocol(scraped: list[Series]) -> None:
    (group,) = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]
    fires = {rule["alert"] for rule in group["rules"] if evaluate(parse(rule["expr"]), scraped, SCRAPED_APART_S)}
    assert fires - {"DraftwirePlainDecoding"} == {"DraftwireBlocksRefused"}, "completions are too short for blocks"


@pytest.mark.parametrize("service", SERVICES)
def test_page_lists_all_that_a_running_service_exports(scraped: list[Series], service: str) -> None:
    families = {series: family for family in families_of(service) for series in family.series}
    exported = [series for series in scraped if series.labels["job"] == f"draftwire-{service}"]
    assert len(exported) > 50
    for series in exported:
        name = series.labels[NAME]
        if name == "up" or name.endswith("_created"):
            continue
        assert name in families, f"{service} exports {name}, which docs/metrics.md does not list"
        own = set(series.labels) - TARGET_LABELS - {NAME, "le"}
        assert own == set(families[name].labels), name
        assert families[name].row in PAGE.read_text(), name


def test_parts_of_rounds_explain_the_time_of_completions(stack: InProcessStack, client: Client) -> None:
    parts = ("lost", "prefill", "draft", "wire", "queue", "verify", "gateway")

    def read() -> tuple[float, float]:
        spent = sum(read_metric(stack, "gateway", f'round_seconds_sum{{part="{part}"}}') for part in parts)
        return spent, read_metric(stack, "gateway", "e2e_request_latency_seconds_sum")

    spent, waited = read()
    started = time.perf_counter()
    for seed in range(4):
        client.generate(PROMPT, max_tokens=60, seed=seed, num_speculative_tokens=4)
    whole = time.perf_counter() - started
    spent, waited = (after - before for after, before in zip(read(), (spent, waited), strict=True))
    assert spent <= waited <= whole
    assert spent > 0.9 * waited
    assert read_metric(stack, "gateway", 'rounds_total{kind="speculative"}') > 20


def test_a_verifier_is_busy_or_waits_for_drafts_while_it_serves_one_session(
    stack: InProcessStack, client: Client
) -> None:
    names = ("engine_busy_seconds_total", "engine_waiting_for_drafts_seconds_total")
    before = [read_metric(stack, "verifier", name) for name in names]
    started = time.perf_counter()
    client.generate(PROMPT, max_tokens=60, num_speculative_tokens=4)
    whole = time.perf_counter() - started
    busy, waiting = (read_metric(stack, "verifier", name) - value for name, value in zip(names, before, strict=True))
    assert min(busy, waiting) > 0.05 * whole
    assert 0.5 * whole < busy + waiting < whole


def test_drafter_and_verifier_count_the_same_bytes(stack: InProcessStack, client: Client) -> None:
    names = {"drafter": "draft_bytes_sent", "verifier": "spec_decode_num_draft_bytes"}
    before = {service: read_metric(stack, service, name) for service, name in names.items()}
    client.generate(PROMPT, max_tokens=50, num_speculative_tokens=4)
    sent, received = (read_metric(stack, service, name) - before[service] for service, name in names.items())
    assert sent == received > 100
