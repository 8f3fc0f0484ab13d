"""Where the services of the chart send their spans."""

import pytest
from chart import SERVICES, VALUES, configure, container_of, environment_of, expect, refuse, render

ENDPOINT = "http://collector.tracing:4317"
COLLECTOR = 'networkPolicy.traces.to=[{"namespaceSelector":{"matchLabels":{"name":"tracing"}}}]'


@pytest.mark.parametrize("values", VALUES)
def test_nothing_is_traced_unless_values_say_where_spans_go(values: str) -> None:
    for pod in render(values).pods():
        environment = environment_of(container_of(pod["spec"]))
        assert not [name for name in environment if "OTLP" in name or "TRACE" in name]


def test_all_services_send_their_spans_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render("single-gpu", f"tracing.endpoint={ENDPOINT}", "tracing.sampleRatio=0.05", COLLECTOR)
    for service in SERVICES:
        environment = rendered.environment(service)
        assert environment[f"DRAFTWIRE_{service.upper()}_OTLP_ENDPOINT"] == ENDPOINT
        config = configure(service, environment, monkeypatch)
        assert config.tracing.otlp_endpoint == ENDPOINT
        assert getattr(config, "trace_sample_ratio", 0.05) == 0.05
    ratio = [name for service in SERVICES for name in rendered.environment(service) if "SAMPLE_RATIO" in name]
    assert ratio == ["DRAFTWIRE_GATEWAY_TRACE_SAMPLE_RATIO"]


def test_ratio_of_none_is_none() -> None:
    settings = (f"tracing.endpoint={ENDPOINT}", "tracing.sampleRatio=0", COLLECTOR)
    expect("single-gpu", {"environment/gateway.DRAFTWIRE_GATEWAY_TRACE_SAMPLE_RATIO": "0"}, *settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((f"tracing.endpoint={ENDPOINT}",), "networkPolicy.traces.to lets nobody through"),
        (("tracing.endpoint=http://collector:4318", COLLECTOR), "port is not among networkPolicy.traces.ports"),
        (("tracing.sampleRatio=0.5",), "tracing.sampleRatio: says which requests are traced"),
        ((f"tracing.endpoint={ENDPOINT}", "tracing.sampleRatio=1.5", COLLECTOR), "/tracing/sampleRatio"),
        (("tracing.endpoint=collector:4317", COLLECTOR), "/tracing/endpoint"),
        (("tracing.endpoint=http://collector", COLLECTOR), "/tracing/endpoint"),
        ((f"tracing.endpoint={ENDPOINT}/v1/traces", COLLECTOR), "/tracing/endpoint"),
    ],
)
def test_values_that_trace_nothing_are_refused(settings: tuple[str, ...], message: str) -> None:
    refuse("single-gpu", message, *settings)


@pytest.mark.parametrize(
    ("endpoint", "settings"),
    [
        ("https://collector:14317", ("networkPolicy.traces.ports=[4317,14317]", COLLECTOR)),
        (ENDPOINT, ("networkPolicy.enabled=false",)),
        ("http://collector:4318", ("networkPolicy.enabled=false",)),
    ],
)
def test_collector_is_reached_on_ports_that_policies_allow_or_without_them(
    endpoint: str, settings: tuple[str, ...]
) -> None:
    expected = {"environment/drafter.DRAFTWIRE_DRAFTER_OTLP_ENDPOINT": endpoint}
    expect("single-gpu", expected, f"tracing.endpoint={endpoint}", *settings)
