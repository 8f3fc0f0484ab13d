"""How many pods there are, and who says so."""

import pytest
from chart import SERVICES, render


def test_gateways_are_counted_by_their_autoscaler_alone() -> None:
    """Helm applies on the server's side: a field that is in the chart would be reset at each upgrade."""
    rendered = render("tp8")
    gateway, scaler = rendered.workload("gateway"), rendered.one("HorizontalPodAutoscaler", "gateway")["spec"]
    assert "replicas" not in gateway["spec"]
    assert scaler["scaleTargetRef"] == {
        "apiVersion": gateway["apiVersion"],
        "kind": gateway["kind"],
        "name": gateway["metadata"]["name"],
    }
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 8)
    (metric,) = scaler["metrics"]
    assert metric["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}
    assert "cpu" in rendered.container("gateway")["resources"]["requests"]  # of which the utilization is a share


def test_gateways_are_counted_by_values_without_an_autoscaler() -> None:
    rendered = render("hpa-off")
    assert rendered.workload("gateway")["spec"]["replicas"] == 3
    assert not rendered.all("HorizontalPodAutoscaler")


@pytest.mark.parametrize(
    ("verifiers", "per_verifier", "replicas", "drafters"),
    [
        (1, 1, "null", 1),
        (4, 0.5, "null", 2),
        (3, 0.58, "null", 2),
        (2, 1.5, "null", 3),
        (5, 0.2, "null", 1),
        (2, 3, 1, 1),
    ],
)
def test_there_are_as_many_drafters_as_verifiers_need(
    verifiers: int, per_verifier: float, replicas: object, drafters: int
) -> None:
    settings = (f"verifier.replicas={verifiers}", f"drafter.perVerifier={per_verifier}", f"drafter.replicas={replicas}")
    assert render("prometheus-off", *settings).workload("drafter")["spec"]["replicas"] == drafters


def test_drafters_follow_how_many_sessions_wait_for_drafts() -> None:
    rendered = render("drafter-autoscaling", "drafter.autoscaling.waitingSessions=12.5")
    assert "replicas" not in rendered.workload("drafter")["spec"]
    spec = rendered.one("ScaledObject", "drafter")["spec"]
    assert spec["scaleTargetRef"] == {"name": rendered.workload("drafter")["metadata"]["name"]}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 6)
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")  # of all drafters: a sum
    of_verifiers = '{namespace="llm",job="prod-draftwire-verifier"}[2m]'
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus-operated.monitoring:9090",
        "threshold": "12.5",
        "query": f"sum(rate(draftwire:draft_wait_seconds_total{of_verifiers}))",
    }


def test_drafters_may_follow_another_query() -> None:
    rendered = render("drafter-autoscaling", 'drafter.autoscaling.query="vector(1)"')
    (trigger,) = rendered.one("ScaledObject", "drafter")["spec"]["triggers"]
    assert trigger["metadata"]["query"] == "vector(1)"


def test_drafters_are_not_scaled_unless_asked() -> None:
    assert not render("tp8").all("ScaledObject")


def test_upgrades_keep_gateways_and_need_no_gpu_more() -> None:
    rendered = render("tp8")
    strategies = {service: rendered.workload(service)["spec"].get("strategy") for service in SERVICES}
    assert strategies["gateway"] == {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    assert strategies["drafter"] == {"rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    verifier = rendered.workload("verifier")["spec"]
    assert verifier["podManagementPolicy"] == "Parallel"
    assert verifier["serviceName"] == rendered.one("Service", "verifier")["metadata"]["name"]
    assert verifier["replicas"] == 2
