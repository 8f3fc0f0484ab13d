"""docs/metrics.md lists what the services export, and what to do about each alert."""

import re

import pytest
import yaml

from tests.metric_families import PAGE, SERVICES, families_of, table_of, tables_of

ALERTS = PAGE.parents[1] / "k8s" / "chart" / "files" / "alerts.yml"


@pytest.mark.parametrize("service", SERVICES)
def test_page_lists_what_a_service_exports(service: str) -> None:
    """`python -m tests.metric_families` writes the tables anew."""
    assert dict(tables_of(PAGE.read_text())).get(service) == table_of(service)


@pytest.mark.parametrize("service", SERVICES)
def test_every_metric_says_what_it_is(service: str) -> None:
    for family in families_of(service):
        assert family.name.startswith("draftwire:")
        assert re.fullmatch(r"[A-Z].{10,}\.", family.meaning, re.DOTALL), family
        assert family.unit


def test_names_that_vllm_has_carry_its_labels() -> None:
    shared = {
        "gateway": {
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
            "num_requests_running",
            "prompt_tokens",
            "generation_tokens",
        },
        "verifier": {
            "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "spec_decode_num_accepted_tokens_per_pos",
            "generation_tokens",
            "kv_cache_usage_perc",
            "prefix_cache_queries",
            "prefix_cache_hits",
        },
        "drafter": {"kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits"},
    }
    for service, names in shared.items():
        labels = {family.name.removeprefix("draftwire:"): family.labels for family in families_of(service)}
        assert all(labels[name][:2] == ("model_name", "engine") for name in names), service


def test_every_alert_has_its_place_on_the_page_and_every_place_its_alert() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = [rule["alert"] for rule in group["rules"]]
    page = PAGE.read_text()
    sections = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=\n\n###|\Z)", page, re.DOTALL | re.MULTILINE))
    assert list(sections) == alerts
    assert all(len(text) > 100 for text in sections.values())
    for rule in group["rules"]:
        assert rule["annotations"]["docs"] == f"docs/metrics.md#{rule['alert'].lower()}"
        assert "\n" not in rule["annotations"]["runbook"]
