"""Dashboard and alerts ask a running stack for series that it has, and it exports nothing that no page lists."""

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from observing import read_metric
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.law import stack_options
from benchmarks.relay import free_port
from draftwire.client import Client
from tests.dishonest_drafter import CORRUPTED_TEMPERATURE, corrupt, lying
from tests.in_process import InProcessStack
from tests.metric_families import OF_PROCESS, PAGE, SERVICES, families_of
from tests.queries import FILES, OF_TARGETS, alerts_of_compose, queries_of_dashboard, selectors_of

PROMPT = [0, 2, 1, 1]
EXPIRY = "draftwire:certificate_expiry_timestamp_seconds"
"""Of which there are series with TLS alone; see `tests/served/test_secure.py`."""


def scrape(port: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the names and labels of what a service exports."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    for family in text_string_to_metric_families(text):
        yield from ((sample.name, sample.labels) for sample in family.samples)


def use(stack: InProcessStack) -> None:
    """Sends what makes every series move: speculation, none, a lossy rule, and a drafter whose blocks are refused."""
    with Client(stack.address) as client:
        for seed in range(3):
            client.generate(PROMPT, max_tokens=40, seed=seed, num_speculative_tokens=4)
        client.generate(PROMPT, max_tokens=10, num_speculative_tokens=0)
        client.generate(PROMPT, max_tokens=20, num_speculative_tokens=4, rejection_sample_method="typical")
        client.generate(PROMPT, max_tokens=20, temperature=CORRUPTED_TEMPERATURE, num_speculative_tokens=4)


@pytest.fixture(scope="module")
def scraped(pair: tuple[Path, Path]) -> dict[str, list[tuple[str, dict[str, str]]]]:
    """What each service of a stack exports after some traffic."""
    options, port = stack_options(*pair), free_port()
    options["drafter"]["port"], options["gateway"]["drafter"] = port, f"dns:///127.0.0.1:{port}"
    with lying(corrupt), InProcessStack(options) as stack:
        use(stack)
        return {name: list(scrape(running.metrics_port)) for name, running in stack.services.items()}


def test_every_series_that_dashboard_and_alerts_ask_for_is_there(
    scraped: dict[str, list[tuple[str, dict[str, str]]]],
) -> None:
    """By name and labels; `tests/unit/test_metrics_page.py` compares with what services could export."""
    queries = queries_of_dashboard((FILES / "dashboard.json").read_text())
    asked = {
        one for query in [*queries, *(rule["expr"] for rule in alerts_of_compose())] for one in selectors_of(query)
    }
    assert len(asked) > 50
    missing = [
        selector
        for selector in asked
        if selector.name not in ("up", EXPIRY)
        and not any(
            name == selector.name and {label for label, _ in selector.matchers} <= {*labels, *OF_TARGETS}
            for name, labels in scraped[selector.service]
        )
    ]
    assert not missing


def test_page_lists_all_that_running_services_export(scraped: dict[str, list[tuple[str, dict[str, str]]]]) -> None:
    page = PAGE.read_text()
    for service in SERVICES:
        families = {series: family for family in families_of(service) for series in family.series}
        assert len(scraped[service]) > 50
        for name, labels in scraped[service]:
            if name.endswith("_created") or name.startswith(OF_PROCESS):
                continue
            assert name in families, f"{service} exports {name}, which docs/metrics.md does not list"
            assert set(labels) - {"le"} == set(families[name].labels), name
            assert families[name].row in page, name


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


def test_verifier_is_busy_or_waits_for_drafts_while_it_serves_a_session(stack: InProcessStack, client: Client) -> None:
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
