"""The chart as a whole: every set of values makes manifests that Kubernetes takes."""

import json

import kubernetes_validate
import pytest
import yaml
from chart import (
    CHART,
    COMPONENT,
    EVERYTHING,
    VALUES,
    Manifest,
    configure,
    container_of,
    expect,
    render,
    run_helm,
    template,
    values_file,
)

from draftwire import __version__

OLDEST, NEWEST = "1.30", "1.37"
"""The oldest version that Chart.yaml allows, and the newest whose schemas are known here."""

CUSTOM = {
    "Certificate": "cert-manager.io/v1",
    "GRPCRoute": "gateway.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
}
"""Kinds that are none of Kubernetes' own. Other tests look at what is in them."""


def test_helm_finds_no_fault_in_the_defaults_and_in_any_set_of_values() -> None:
    for files in ((), *([f"--values={values_file(values)}"] for values in [*VALUES, EVERYTHING])):
        done = run_helm("lint", "--strict", str(CHART), *files)
        assert done.returncode == 0, (files, done.stdout + done.stderr)
        assert not files or "[WARNING]" not in done.stdout, (files, done.stdout)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("values", [*VALUES, EVERYTHING])
def test_every_manifest_is_as_kubernetes_defines_it(values: str, version: str) -> None:
    manifests = render(values).manifests
    assert len(manifests) > 10
    for manifest in manifests:
        if manifest["kind"] in CUSTOM:
            assert manifest["apiVersion"] == CUSTOM[manifest["kind"]]
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_pods_of_groups_are_as_kubernetes_defines_them(version: str) -> None:
    templates = render("multi-node-tp").at("LeaderWorkerSet/verifier.spec.leaderWorkerTemplate")
    for name in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": templates[name]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_chart_is_for_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"


def test_all_objects_are_in_the_namespace_of_the_release() -> None:
    for values in VALUES:
        for manifest in render(values).manifests:
            assert manifest["metadata"]["namespace"] == "llm", manifest["kind"]


HASH = "-0123456789"
"""What controllers add to a name for a label, which has 63 characters at most."""


def test_longest_names_fit_and_longer_ones_are_refused() -> None:
    """A LeaderWorkerSet names the workers' sets after the pods of leaders."""
    done = template("multi-node-tp", "verifier.replicas=10", release="r" * 24)
    assert done.returncode == 0, done.stderr
    for manifest in yaml.safe_load_all(done.stdout):
        own = manifest["metadata"]["name"]
        added = f"-99{HASH}" if manifest["kind"] == "LeaderWorkerSet" else "-9-15"
        assert len(own) + len(added) <= 63, own
    done = template("multi-node-tp", release="r" * 25)
    assert "fullnameOverride: names would begin with 35 characters; LeaderWorkerSets, whose" in done.stderr
    assert template("tp8", release="r" * 30).returncode == 0
    assert (
        "fullnameOverride: names would begin with 41 characters, of 40 at most"
        in template("tp8", release="r" * 31).stderr
    )
    assert template("tp8", "fullnameOverride=short", release="r" * 53).returncode == 0


@pytest.mark.parametrize("release", ["my.release", "1demo"])
def test_release_whose_objects_cannot_be_named_after_it_is_refused(release: str) -> None:
    assert f"fullnameOverride: {release}-draftwire is no name of a Service" in template("tp8", release=release).stderr
    assert template("tp8", "fullnameOverride=demo", release=release).returncode == 0


PORTS = {"gateway": (50051, 9051), "verifier": (50052, 9052), "drafter": (50053, 9053)}


def test_selectors_find_their_own_pods_and_no_others() -> None:
    rendered = render("tp8")
    for service in PORTS:
        selector = rendered.workload(service)["spec"]["selector"]["matchLabels"]
        paths = (f"PodDisruptionBudget/{service}.spec.selector.matchLabels", f"Service/{service}.spec.selector")
        expect("tp8", dict.fromkeys(paths, selector))
        labels = {name: rendered.at(f"template/{name}.metadata.labels") for name in PORTS}
        assert [name for name in PORTS if selector.items() <= labels[name].items()] == [service]


@pytest.mark.parametrize(("service", "ports"), PORTS.items())
def test_services_lead_to_the_ports_that_pods_listen_on(service: str, ports: tuple[int, int]) -> None:
    http = {"http": 8000} if service == "gateway" else {}
    expected = {"grpc": ports[0], "metrics": ports[1], **http}
    found = render("tp8").at(f"container/{service}.ports")
    assert {port["name"]: port["containerPort"] for port in found} == expected
    leads = render("tp8").at(f"Service/{service}.spec.ports")
    if service == "gateway":  # whose own Service may be open to the world
        leads = [*leads, *render("tp8").at("Service/gateway-metrics.spec.ports")]
    assert {port["name"]: (port["port"], port["targetPort"]) for port in leads} == {
        name: (port, name) for name, port in expected.items()
    }
    variable = f"environment/{service}.DRAFTWIRE_{service.upper()}_"
    expect(
        "tp8",
        {
            f"{variable}PORT": str(ports[0]),
            f"{variable}METRICS_PORT": str(ports[1]),
            f"{variable}HTTP_PORT": "8000" if http else None,
            f"{variable}HOST": "0.0.0.0",
        },
    )


@pytest.mark.parametrize("service", ["verifier", "drafter"])
def test_services_whose_clients_balance_have_no_address_of_their_own(service: str) -> None:
    """And who still loads is not called."""
    spec = f"Service/{service}.spec"
    expect("tp8", {f"{spec}.clusterIP": "None", f"{spec}.publishNotReadyAddresses": None})


def test_gateways_service_is_as_values_say() -> None:
    expect("tp8", {"Service/gateway.spec.type": "ClusterIP"})
    open_ports = [port["name"] for port in render("mtls").at("Service/gateway.spec.ports")]
    expect("mtls", {"Service/gateway.spec.type": "LoadBalancer", "Service/gateway-metrics.spec.clusterIP": "None"})
    assert open_ports == ["grpc", "http"], "metrics are plain and need no token"
    annotations = 'gateway.service.annotations={"a.b/c":"d"}'
    expect("tp8", {"Service/gateway.metadata.annotations": {"a.b/c": "d"}}, annotations)


@pytest.mark.parametrize("service", PORTS)
def test_nodes_can_be_drained_pod_by_pod_even_of_pods_that_never_get_ready(service: str) -> None:
    spec = f"PodDisruptionBudget/{service}.spec"
    expect("tp8", {f"{spec}.maxUnavailable": 1, f"{spec}.unhealthyPodEvictionPolicy": "AlwaysAllow"})


@pytest.mark.parametrize(("values", "said"), [("mtls", None), ("hpa-off", "none")])
def test_without_drafters_nothing_of_theirs_is_left(
    values: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = render(values, "drafter.enabled=false")
    components = {manifest["metadata"]["labels"][COMPONENT] for manifest in rendered.manifests}
    assert components - {"monitoring", "gateway-metrics"} == {"gateway", "verifier", "test"}
    environment = rendered.environment("gateway")
    assert environment.get("DRAFTWIRE_GATEWAY_DRAFTER") == said
    assert "DRAFTWIRE_GATEWAY_DRAFTER_SERVICE" not in environment
    configure("gateway", environment, monkeypatch)


@pytest.mark.parametrize(
    ("settings", "registry", "tag", "secrets"),
    [
        ((), "", __version__, None),
        (
            ("image.registry=example.com/team", 'image.tag="1.2"', 'image.pullSecrets=["one"]'),
            *("example.com/team/", "1.2", [{"name": "one"}]),
        ),
    ],
)
def test_images_are_those_of_the_values(
    settings: tuple[str, ...], registry: str, tag: str, secrets: list[Manifest] | None
) -> None:
    pods = [pod["spec"] for pod in render("tp8", *settings).pods()]
    images = {container_of(pod)["image"] for pod in pods}
    builds = {"gateway": "", "verifier": "-cuda", "drafter": "-cuda"}
    assert images == {f"{registry}draftwire-{service}:{tag}{build}" for service, build in builds.items()}
    assert [pod.get("imagePullSecrets") for pod in pods] == [secrets] * len(pods)


def test_digests_pin_what_a_tag_names() -> None:
    digests = {service: f"sha256:{number}{'0' * 63}" for number, service in enumerate(PORTS)}
    pods = render("tp8", f"image.digests={json.dumps(digests)}").pods()
    images = {container_of(pod["spec"])["image"] for pod in pods}
    builds = {"gateway": "", "verifier": "-cuda", "drafter": "-cuda"}
    assert images == {f"draftwire-{name}:{__version__}{builds[name]}@{digest}" for name, digest in digests.items()}


@pytest.mark.parametrize(
    ("values", "settings", "tags"),
    [
        ("cpu-demo", (), (__version__, __version__, __version__)),
        ("single-gpu", ('image.tag="1-cuda"',), ("1-cuda", "1-cuda", "1-cuda")),  # which the gateway has too
        ("single-gpu", ("drafter.device=cpu",), (__version__, f"{__version__}-cuda", __version__)),
        ("single-gpu", ("image.cudaSuffix=",), (__version__, __version__, __version__)),
    ],
)
def test_images_with_torch_for_gpus_are_where_gpus_are(values: str, settings: tuple[str, ...], tags: list[str]) -> None:
    expect(
        values,
        {f"container/{service}.image": f"draftwire-{service}:{tag}" for service, tag in zip(PORTS, tags, strict=True)},
        *settings,
    )
