"""How many pods there are, and who says so."""

import pytest
from chart import expect, render


def test_gateways_are_counted_by_their_autoscaler_alone() -> None:
    """Helm applies on the server's side: a field that is in the chart would be reset at each upgrade."""
    slowly = {"stabilizationWindowSeconds": 600, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}]}
    usage = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}
    expect(
        "tp8",
        {
            "Deployment/gateway.spec.replicas": None,
            "HorizontalPodAutoscaler/gateway.spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "prod-draftwire-gateway"},
                "minReplicas": 2,
                "maxReplicas": 8,
                "metrics": [{"type": "Resource", "resource": usage}],
                "behavior": {"scaleDown": slowly},
            },
            "Deployment/gateway.metadata.name": "prod-draftwire-gateway",
        },
    )
    assert render("tp8").at("container/gateway.resources.requests.cpu")  # of which the utilization is a share


def test_gateways_are_counted_by_values_without_an_autoscaler() -> None:
    expect("hpa-off", {"Deployment/gateway.spec.replicas": 3})
    assert not render("hpa-off").all("HorizontalPodAutoscaler")


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
    expect("prometheus-off", {"Deployment/drafter.spec.replicas": drafters}, *settings)


WAITS = 'sum(rate(draftwire:draft_wait_seconds_total{namespace="llm",job="prod-draftwire-verifier"}[2m]))'


@pytest.mark.parametrize(
    ("setting", "threshold", "query"),
    [
        ("drafter.autoscaling.waitingSessions=12.5", "12.5", WAITS),
        ('drafter.autoscaling.query="vector(1)"', "8", "vector(1)"),
    ],
)
def test_drafters_scale_with_sessions_waiting_for_drafts_or_another_query(
    setting: str, threshold: str, query: str
) -> None:
    """An average value of all drafters is a sum of the query."""
    address = "http://prometheus-operated.monitoring:9090"
    slowly = {"scaleDown": {"stabilizationWindowSeconds": 600}}
    asked = {"serverAddress": address, "threshold": threshold, "query": query}
    expect(
        "drafter-autoscaling",
        {
            "Deployment/drafter.spec.replicas": None,
            "Deployment/drafter.metadata.name": "prod-draftwire-drafter",
            "ScaledObject/drafter.spec": {
                "scaleTargetRef": {"name": "prod-draftwire-drafter"},
                "minReplicaCount": 2,
                "maxReplicaCount": 6,
                "advanced": {"horizontalPodAutoscalerConfig": {"behavior": slowly}},
                "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": asked}],
            },
        },
        setting,
    )


def test_drafters_are_not_scaled_unless_asked() -> None:
    assert not render("tp8").all("ScaledObject")


def test_upgrades_keep_gateways_and_need_no_gpu_more() -> None:
    expect(
        "tp8",
        {
            "Deployment/gateway.spec.strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "Deployment/drafter.spec.strategy": {"rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
            "StatefulSet/verifier.spec.podManagementPolicy": "Parallel",
            "StatefulSet/verifier.spec.serviceName": "prod-draftwire-verifier",
            "Service/verifier.metadata.name": "prod-draftwire-verifier",
            "StatefulSet/verifier.spec.replicas": 2,
        },
    )
