"""Alerts fire when they should, and not otherwise: on series made up for a day, one scrape a minute."""

from collections.abc import Callable, Mapping

import pytest
import yaml

from tests.metric_families import PAGE, SERVICES, families_of
from tests.promql import NAME, Binary, Selector, Series, evaluate, parse, parts_of

(GROUP,) = yaml.safe_load((PAGE.parents[1] / "k8s" / "chart" / "files" / "alerts.yml").read_text())["groups"]
RULES = {rule["alert"]: rule for rule in GROUP["rules"]}
HOUR_S = 3600.0
NOW = 26 * HOUR_S
CHANGE = NOW - HOUR_S
"""When something changes, if it does."""

Shape = Callable[[float], float]


def series(service: str, name: str, shape: Shape, **labels: str) -> Series:
    """Makes a series whose value is a function of time, scraped every minute."""
    name = name if name == "up" else f"draftwire:{name}"
    given = {NAME: name, "namespace": "compose", "job": f"draftwire-{service}", "pod": service}
    return Series(given | labels, [(60.0 * minute, shape(60.0 * minute)) for minute in range(int(NOW / 60) + 1)])


def steady(per_second: float) -> Shape:
    """A counter that always grows alike, from some value on that it had before."""
    return lambda time_s: 1e6 + per_second * time_s


def changing(before: float, after: float) -> Shape:
    """A counter that grows otherwise in the last hour."""
    return lambda time_s: before * min(time_s, CHANGE) + after * max(0.0, time_s - CHANGE)


def burst(count: float) -> Shape:
    """A counter that grows by so much within a minute, an hour ago, and never else."""
    return lambda time_s: count * (time_s > CHANGE)


def always(value: float) -> Shape:
    return lambda time_s: value


def fires(alert: str, *given: Series, now: float = NOW) -> bool:
    return bool(evaluate(parse(RULES[alert]["expr"]), given, now))


def requests(**per_second: float) -> list[Series]:
    return [series("gateway", "requests_total", steady(rate), result=result) for result, rate in per_second.items()]


def rounds(**per_second: float) -> list[Series]:
    return [series("gateway", "rounds_total", steady(rate), reason=reason) for reason, rate in per_second.items()]


def acceptance(before: float, after: float, drafted: float = 100.0) -> list[Series]:
    return [
        series("verifier", "spec_decode_num_draft_tokens_total", steady(drafted)),
        series("verifier", "spec_decode_num_accepted_tokens_total", changing(drafted * before, drafted * after)),
    ]


def first_tokens(quick: float, slow: float) -> list[Series]:
    """Time to first token below 1 s, or between 5.6 and 10 s: so many a second."""
    name = "time_to_first_token_seconds_bucket"
    counts: Mapping[str, float] = {"1.0": quick, "5.6": quick, "10.0": quick + slow, "+Inf": quick + slow}
    return [series("gateway", name, steady(count), le=bound) for bound, count in counts.items()]


def round_time(before: float, after: float, rate: float = 10.0, *, part: str = "verify") -> list[Series]:
    return [
        series("gateway", "rounds_total", steady(rate), kind="plain", reason="no_drafter"),
        series("gateway", "round_seconds_sum", changing(before * rate, after * rate), part=part),
        series("gateway", "round_seconds_sum", steady(0.001 * rate), part="wire"),
    ]


def idle_verifiers(share: float, num_sessions: float) -> list[Series]:
    return [
        series("verifier", "engine_waiting_for_drafts_seconds_total", steady(share)),
        series("verifier", "num_sessions", always(num_sessions)),
    ]


def peers(role: str, state: str, count: float) -> Series:
    return series("gateway", "num_peers", always(count), role=role, state=state)


def of_gateway(name: str, shape: Shape, **labels: str) -> Series:
    return series("gateway", name, shape, **labels)


def of_verifier(name: str, shape: Shape, **labels: str) -> Series:
    return series("verifier", name, shape, **labels)


REFUSED = "requests_refused_total"
FIRING: list[tuple[str, list[Series]]] = [
    ("DraftwireGatewayDown", []),
    ("DraftwireGatewayDown", [of_gateway("up", always(0))]),
    ("DraftwireNoVerifier", [peers("verifier", "connected", 0), peers("drafter", "connected", 2)]),
    ("DraftwireRequestsFail", requests(stop=0.9, failed=0.1)),
    ("DraftwireRequestsRefused", [*requests(stop=1.0), of_gateway(REFUSED, steady(0.1), by="gateway")]),
    ("DraftwireRequestsRefused", [*requests(stop=1.0, failed=0.1), of_gateway(REFUSED, steady(0.1), by="verifier"),
                                  of_gateway(REFUSED, steady(0.0), by="gateway")]),
    ("DraftwireFirstTokenSlow", first_tokens(quick=0.9, slow=0.1)),
    ("DraftwireRoundsSlow", round_time(0.02, 0.06)),
    ("DraftwireAcceptanceCollapsed", acceptance(0.8, 0.4)),
    ("DraftwirePlainDecoding", rounds(no_drafter=4.0, warming_up=2.0, speculative=4.0)),
    ("DraftwireVerifiersWaitForDrafts", idle_verifiers(0.7, 20)),
    ("DraftwireCacheFull", [of_verifier("kv_cache_usage_perc", always(0.97))]),
    ("DraftwireDrafterQuarantined", [of_verifier("drafter_quarantined", always(1), drafter="a", model_name="m")]),
    ("DraftwireBlocksRefused", [of_verifier("blocks_refused_total", changing(0, 0.001), violation="weights")]),
    ("DraftwireVerifiersLost", [of_gateway("verifiers_lost_total", changing(0, 0.001))]),
    ("DraftwireDraftersLost", [of_gateway("drafters_lost_total", changing(0, 0.2))]),
    ("DraftwirePeersUnreachable", [peers("drafter", "connecting", 1)]),
    ("DraftwirePeersUnfit", [peers("verifier", "unfit", 1)]),
    ("DraftwireDiscoveryStale", [of_gateway("discovery_age_seconds", always(300), role="verifier")]),
]  # fmt: skip
SILENT: list[tuple[str, list[Series]]] = [
    ("DraftwireGatewayDown", [of_gateway("up", always(1)), series("verifier", "up", always(0))]),
    ("DraftwireNoVerifier", [peers("verifier", "connected", 1), peers("drafter", "connected", 0)]),
    ("DraftwireRequestsFail", requests(stop=0.9, cancelled=0.5, failed=0.01)),
    ("DraftwireRequestsFail", requests(stop=0.0, failed=0.0)),
    ("DraftwireRequestsFail", requests(stop=0.9, invalid=0.5, failed=0.0)),
    ("DraftwireRequestsFail", requests(stop=0.001, failed=0.002)),
    ("DraftwireRequestsRefused", [*requests(stop=1.0), of_gateway(REFUSED, steady(0.001), by="gateway")]),
    ("DraftwireFirstTokenSlow", first_tokens(quick=0.99, slow=0.01)),
    ("DraftwireFirstTokenSlow", first_tokens(quick=0.0, slow=0.0)),
    ("DraftwireRoundsSlow", round_time(0.02, 0.03)),
    ("DraftwireRoundsSlow", round_time(0.02, 0.06, rate=0.01)),
    ("DraftwireRoundsSlow", round_time(0.02, 0.06, part="prefill")),
    ("DraftwireRoundsSlow", round_time(0.02, 0.06, part="gateway")),
    ("DraftwireAcceptanceCollapsed", acceptance(0.8, 0.7)),
    ("DraftwireAcceptanceCollapsed", acceptance(0.8, 0.4, drafted=0.1)),
    ("DraftwirePlainDecoding", rounds(no_drafter=1.0, warming_up=1.0, speculative=4.0)),
    ("DraftwirePlainDecoding", rounds(not_asked_for=9.0, no_drafter=0.0, speculative=1.0)),
    ("DraftwireVerifiersWaitForDrafts", idle_verifiers(0.7, 1)),
    ("DraftwireVerifiersWaitForDrafts", idle_verifiers(0.2, 20)),
    ("DraftwireCacheFull", [of_verifier("kv_cache_usage_perc", always(used), pod=pod) for pod, used in
                            (("v-0", 1.0), ("v-1", 0.5))]),
    ("DraftwireDrafterQuarantined", [of_verifier("drafter_quarantined", always(0), drafter="a", model_name="m")]),
    ("DraftwireBlocksRefused", [of_verifier("blocks_refused_total", always(7), violation="weights")]),
    ("DraftwireVerifiersLost", [of_gateway("verifiers_lost_total", always(3))]),
    ("DraftwireDraftersLost", [of_gateway("drafters_lost_total", steady(0.01))]),
    ("DraftwirePeersUnreachable", [peers("drafter", "connecting", 0), peers("drafter", "connected", 1)]),
    ("DraftwirePeersUnfit", [peers("verifier", "unfit", 0)]),
    ("DraftwireDiscoveryStale", [of_gateway("discovery_age_seconds", always(10), role="verifier")]),
]  # fmt: skip


@pytest.mark.parametrize(("alert", "given"), FIRING, ids=[alert for alert, _ in FIRING])
def test_alert_fires(alert: str, given: list[Series]) -> None:
    assert fires(alert, *given)


@pytest.mark.parametrize(("alert", "given"), SILENT, ids=[alert for alert, _ in SILENT])
def test_alert_keeps_silent(alert: str, given: list[Series]) -> None:
    assert not fires(alert, *given)


def test_failures_page_only_while_they_go_on() -> None:
    """A burst is out of the share's range before the alert has been true for long enough."""
    given = [of_gateway("requests_total", burst(100), result="failed"), *requests(stop=0.1)]
    minutes = [minute for minute in range(60) if fires("DraftwireRequestsFail", *given, now=CHANGE + 60.0 * minute)]
    assert RULES["DraftwireRequestsFail"]["for"] == "10m"
    assert 1 <= len(minutes) < 10


def test_every_alert_was_tried_both_ways() -> None:
    assert {alert for alert, _ in FIRING} == {alert for alert, _ in SILENT} == set(RULES)


@pytest.mark.parametrize("alert", RULES)
def test_alert_asks_for_what_services_export(alert: str) -> None:
    exported = {
        (service, name): {*family.labels, "le"}
        for service in SERVICES
        for family in families_of(service)
        for name in family.series
    }
    exported |= {(service, "up"): set() for service in SERVICES}
    selectors = [part for part in parts_of(parse(RULES[alert]["expr"])) if isinstance(part, Selector)]
    assert selectors
    for selector in selectors:
        matchers = {label: value for label, _, value in selector.matchers}
        service = matchers["job"].removeprefix("draftwire-")
        assert (service, selector.name) in exported, f"{service} exports no {selector.name}"
        assert set(matchers) - {"namespace", "job"} <= exported[service, selector.name], selector


@pytest.mark.parametrize("alert", RULES)
def test_alert_ends_in_a_comparison(alert: str) -> None:
    """Else it would fire whenever its series are there."""
    query = parse(RULES[alert]["expr"])
    assert isinstance(query, Binary)
    compared = (query.left, query.right) if query.sign == "and" else (query,)
    assert all(isinstance(part, Binary) and part.sign in ("==", "<", ">", ">=") for part in compared)
