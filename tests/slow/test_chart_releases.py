"""Helm installs, upgrades, rolls back and uninstalls the chart, at a server that refuses what Kubernetes refuses."""

import json
import subprocess
from collections.abc import Iterator

import pytest
from chart import EVERYTHING, Rendered, arguments_of, render, run_helm
from kubernetes_objects import Json, ObjectServer, plural_of

KEPT = ("persistentvolumeclaims", "llm-dw-hub")


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


def helm(server: ObjectServer, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    address = f"http://127.0.0.1:{server.port}"
    done = run_helm(verb, "prod", *arguments, "--namespace=llm", f"--kube-apiserver={address}")
    assert server.refusals == []
    assert done.returncode == 0, done.stderr
    return done


def deploy(server: ObjectServer, verb: str, values: str, *settings: str) -> subprocess.CompletedProcess[str]:
    """Installs the chart, or upgrades a release."""
    # The server checks objects itself, and has no description of its schemas to send.
    return helm(server, verb, *arguments_of(values, *settings), "--disable-openapi-validation")


def specs(rendered: Rendered) -> dict[tuple[str, str], Json]:
    """Returns what is rendered for a release, without the pods of `helm test`, as `ObjectServer.specs` does."""
    return {
        (plural_of(each["kind"]), each["metadata"]["name"]): {
            name: value for name, value in each.items() if name != "metadata"
        }
        for each in rendered.manifests
        if each["kind"] != "Pod"
    }


SCALED = (
    ("Deployment", "llm-dw-gateway"),
    ("Deployment", "llm-dw-drafter"),
    ("StatefulSet", "llm-dw-verifier"),
    ("LeaderWorkerSet", "llm-dw-big-verifier-group"),
)
FIXED = ("StatefulSet", "llm-dw-small-verifier")


def test_release_follows_its_values_at_each_step_and_leaves_only_downloads(
    server: ObjectServer,
) -> None:
    """How many pods there are is left to autoscalers."""
    deploy(server, "install", EVERYTHING)
    first = specs(render(EVERYTHING))
    assert server.specs() == first
    assert len(first) > 70
    assert label(server, "team") == "inference"

    for kind, name in (*SCALED, FIXED):
        scale(server, kind, name, 5)
    changes = ("commonLabels.team=platform", 'image.tag="2"', "targets.big=null", "gateway.httpRoute.enabled=false")
    deploy(server, "upgrade", EVERYTHING, *changes)
    assert [server.object(kind, name)["spec"].pop("replicas") for kind, name in SCALED[:-1]] == [5, 5, 5]
    assert server.object(*FIXED)["spec"]["replicas"] == 3
    assert server.specs() == specs(render(EVERYTHING, *changes))
    assert not [name for _, name in server.specs() if "big" in name]
    assert label(server, "team") == "platform"

    helm(server, "rollback", "1")
    assert server.specs() == first

    for kind, name in SCALED:
        scale(server, kind, name, 7)
    deploy(server, "upgrade", EVERYTHING)
    assert [server.object(kind, name)["spec"].pop("replicas") for kind, name in SCALED] == [7, 7, 7, 7]
    assert server.specs() == first

    helm(server, "uninstall")
    assert set(server.specs()) == {KEPT}
    deploy(server, "install", EVERYTHING)  # which takes the claim over
    assert server.specs() == first


def scale(server: ObjectServer, kind: str, name: str, number: int) -> None:
    """Sets a number of pods as an autoscaler does, which the object records."""
    item = server.object(kind, name)
    item["spec"]["replicas"] = number
    by_whom = {"manager": "kube-controller-manager", "operation": "Update", "subresource": "scale"}
    item["metadata"]["managedFields"] = [{**by_whom, "fieldsV1": {"f:spec": {"f:replicas": {}}}}]


def test_autoscaler_that_is_turned_on_begins_with_the_pods_that_run(server: ObjectServer) -> None:
    fixed = ("gateway.autoscaling.enabled=false", "gateway.replicas=4")
    deploy(server, "install", EVERYTHING, *fixed)
    gateway = ("Deployment", "llm-dw-gateway")
    assert server.object(*gateway)["spec"]["replicas"] == 4
    for _ in range(2):  # the autoscaler found the number right, and has set none
        deploy(server, "upgrade", EVERYTHING)
        assert server.object(*gateway)["spec"]["replicas"] == 4
    scale(server, *gateway, 6)
    deploy(server, "upgrade", EVERYTHING)
    assert server.object(*gateway)["spec"]["replicas"] == 6


def label(server: ObjectServer, name: str) -> str:
    return str(server.object("StatefulSet", "llm-dw-verifier")["metadata"]["labels"][name])


def test_server_refuses_what_kubernetes_refuses(server: ObjectServer) -> None:
    """Else the test above would show nothing."""
    deploy(server, "install", "object-storage")
    with pytest.raises(AssertionError, match=r"spec\.volumeClaimTemplates: field is immutable"):
        deploy(server, "upgrade", "object-storage", "models.claim.size=300Gi")
    server.refusals.clear()
    with pytest.raises(AssertionError, match="installed with draftwire, and another would replace all of it"):
        deploy(server, "upgrade", "object-storage", "nameOverride=other", "fullnameOverride=prod-draftwire")
    server.refusals.clear()
    with pytest.raises(
        AssertionError, match="podManagementPolicy: the StatefulSet has Parallel, which cannot be changed"
    ):
        deploy(server, "upgrade", "object-storage", "verifier.podManagementPolicy=OrderedReady")
    server.refusals.clear()
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"image": "a"}]}}
    with pytest.raises(AssertionError, match="Pod a: 'name' is a required property"):
        deploy(server, "upgrade", "object-storage", f"extraObjects={json.dumps([pod])}")
