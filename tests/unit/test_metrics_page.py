"""docs/metric-list.md lists what the services export."""

import re

from tests.metric_families import OF_MODEL, PAGE, SERVICES, families_of, table_of, tables_of

OF_CACHES = {"kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits"}
LATENCIES = {"time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"}
VLLMS = {
    "gateway": {*LATENCIES, "num_requests_running", "prompt_tokens", "generation_tokens"},
    "verifier": {
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "generation_tokens",
        *OF_CACHES,
    },
    "drafter": OF_CACHES,
}
"""Names that vLLM has, too."""


def test_page_lists_what_services_export_and_every_metric_says_what_it_is() -> None:
    """`python -m tests.metric_families` writes the tables anew."""
    assert dict(tables_of(PAGE.read_text())) == {service: table_of(service) for service in SERVICES}
    for family in (family for service in SERVICES for family in families_of(service)):
        assert family.name.startswith("draftwire:")
        assert re.fullmatch(r"[A-Z].{10,}\.", family.meaning, re.DOTALL), family
        assert family.unit


def test_names_that_vllm_has_carry_its_labels() -> None:
    for service, names in VLLMS.items():
        labels = {family.name.removeprefix("draftwire:"): family.labels for family in families_of(service)}
        assert {labels[name][:2] for name in names} == {OF_MODEL}, service
