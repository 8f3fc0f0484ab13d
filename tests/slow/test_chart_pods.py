"""What runs in the pods: options that the services take, as little might as they need, and time to end well."""

import math
from typing import Any

import pytest
from chart import COMPONENT, SERVICES, VALUES, Manifest, configure, container_of, environment_of, render
from typer.testing import CliRunner

from draftwire.cli.__main__ import app
from draftwire.services.options import CLIENT_VARIABLES, PREFIX, unknown_variables
from draftwire.services.ranks.followers import GOODBYE_SECONDS, LEAVE_SECONDS
from draftwire.services.ranks.guard import STOP_SECONDS

DISCOVERY = {"DRAFTWIRE_GATEWAY_DISCOVERY", "DRAFTWIRE_GATEWAY_VERIFIER_SERVICE", "DRAFTWIRE_GATEWAY_DRAFTER_SERVICE"}
SERVER_STOP_SECONDS = 1.0
"""The grace that a service gives its gRPC server; see `draftwire.services.rpc.service`."""


def services_of(values: str, *settings: str) -> list[tuple[str, Manifest]]:
    """Returns the services' pods."""
    pods = render(values, *settings).pods()
    return [(pod["metadata"]["labels"][COMPONENT], pod["spec"]) for pod in pods if pod.get("kind") != "Pod"]


# Options


@pytest.mark.parametrize("values", VALUES)
def test_services_take_what_they_are_given(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for service, pod in services_of(values):
        environment = environment_of(container_of(pod))
        ours = {name for name in environment if name.startswith(PREFIX)}
        assert unknown_variables(environment) == []
        assert not ours & CLIENT_VARIABLES
        configure(service, environment, monkeypatch)


def test_options_reach_the_service_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(
        "tp8",
        "verifier.options.max_message_bytes=268435456",
        "verifier.options.cuda_graphs=false",
        "verifier.options.watchdog_s=0.5",
        "drafter.options.draft_mass=1",
        'drafter.options.layer_groups="0 1-3 4-7 8"',
        "gateway.options.rejection_sample_method=coupled",
        "maxAddedLatencyMs=250",
    )
    configs = {service: configure(service, rendered.environment(service), monkeypatch) for service in SERVICES}
    verifier, drafter = configs["verifier"], configs["drafter"]
    assert verifier.connections.max_message_bytes == 2**28
    assert verifier.loading.cuda_graphs is False
    assert (verifier.engine.watchdog_s, drafter.drafts.draft_mass) == (0.5, 1.0)
    assert drafter.layers.layer_groups == "0 1-3 4-7 8"
    assert configs["gateway"].rejection_sample_method == "coupled"
    assert verifier.engine.max_added_latency_ms == drafter.engine.max_added_latency_ms == 250.0


def test_further_variables_come_last_and_as_they_are() -> None:
    value = {"name": "NCCL_DEBUG", "valueFrom": {"configMapKeyRef": {"name": "nccl", "key": "debug"}}}
    rendered = render(
        "tp8",
        'verifier.extraEnv=[{"name":"NCCL_DEBUG","valueFrom":{"configMapKeyRef":{"name":"nccl","key":"debug"}}}]',
    )
    assert rendered.container("verifier")["env"][-1] == value


@pytest.mark.parametrize("service", SERVICES)
def test_services_are_started_by_the_command_line(service: str) -> None:
    assert render("tp8").container(service)["command"] == ["draftwire", "serve", service]


def test_gateway_is_told_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = render("tp8").environment("gateway")
    services = {name: render("tp8").one("Service", name)["metadata"]["name"] for name in ("verifier", "drafter")}
    assert watching["DRAFTWIRE_GATEWAY_DISCOVERY"] == "kubernetes"
    assert watching["DRAFTWIRE_GATEWAY_VERIFIER_SERVICE"] == services["verifier"]
    assert watching["DRAFTWIRE_GATEWAY_DRAFTER_SERVICE"] == services["drafter"]
    listed = configure("gateway", render("hpa-off").environment("gateway"), monkeypatch)
    assert listed.verifiers == (f"dns:///{services['verifier']}:50052",)
    assert listed.drafters == (f"dns:///{services['drafter']}:50053",)
    assert not DISCOVERY & set(render("hpa-off").environment("gateway"))


def test_gateway_waits_as_long_as_models_may_load() -> None:
    rendered = render("tp8", "verifier.startupSeconds=3000", "drafter.startupSeconds=400")
    assert rendered.environment("gateway")["DRAFTWIRE_GATEWAY_STARTUP_TIMEOUT_S"] == "3000"
    patience = {service: probe_seconds(rendered.container(service)["startupProbe"]) for service in SERVICES}
    assert (patience["verifier"], patience["drafter"]) == (3000, 400)
    assert patience["gateway"] > 3000 + 400
    for service in ("gateway", "drafter"):
        assert rendered.workload(service)["spec"]["progressDeadlineSeconds"] > patience[service]


def probe_seconds(probe: Manifest) -> int:
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def test_tokens_are_read_from_a_folder_that_follows_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render("mtls")
    config = configure("gateway", rendered.environment("gateway"), monkeypatch)
    assert str(config.tokens_file) == "/etc/draftwire/tokens/tokens.toml"
    mount = mounts(rendered.container("gateway"))["tokens"]
    assert mount == {"name": "tokens", "mountPath": "/etc/draftwire/tokens", "readOnly": True}  # subPath would not
    assert volumes(rendered.pod("gateway"))["tokens"]["secret"]["secretName"] == "draftwire-tokens"
    assert "tokens" not in volumes(rendered.pod("verifier"))
    assert "DRAFTWIRE_GATEWAY_TOKENS_FILE" not in render("tp8").environment("gateway")


def mounts(container: Manifest) -> dict[str, Any]:
    return {mount["name"]: mount for mount in container["volumeMounts"]}


def volumes(pod: Manifest) -> dict[str, Any]:
    return {volume["name"]: volume for volume in pod["volumes"]}


# Models and devices


def test_models_come_from_a_volume_that_is_only_read() -> None:
    rendered = render("tp8")
    for service in ("verifier", "drafter"):
        assert mounts(rendered.container(service))["models"] == {
            "name": "models",
            "mountPath": "/models",
            "readOnly": True,
        }
        volume = volumes(rendered.pod(service))["models"]
        assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
        assert rendered.environment(service)["HF_HUB_OFFLINE"] == "1"
    assert "models" not in volumes(rendered.pod("gateway"))


def test_models_come_from_the_hub_with_a_token_that_is_in_no_manifest() -> None:
    rendered = render("single-gpu")
    for service in ("verifier", "drafter"):
        container = rendered.container(service)
        environment = environment_of(container)
        assert "HF_HUB_OFFLINE" not in environment
        assert environment["HF_HOME"] == mounts(container)["hub"]["mountPath"]
        token = next(each for each in container["env"] if each["name"] == "HF_TOKEN")
        assert token["valueFrom"] == {"secretKeyRef": {"name": "hub-token", "key": "token"}}
        assert volumes(rendered.pod(service))["hub"]["persistentVolumeClaim"] == {"claimName": "hub-cache"}
    fresh = render("tp8", "models.hub.enabled=true")
    assert volumes(fresh.pod("verifier"))["hub"]["emptyDir"] == {}


@pytest.mark.parametrize(
    ("values", "service", "device", "gpus"),
    [
        ("tp8", "verifier", "cuda", 8),
        ("tp8", "drafter", "cuda:0", 1),
        ("llama-70b", "drafter", "cuda", 2),
        ("single-gpu", "verifier", "cuda:0", 1),
        ("cpu-demo", "verifier", "cpu", None),
        ("cpu-demo", "drafter", "cpu", None),
        ("tp8", "gateway", None, None),
    ],
)
def test_pod_has_as_many_gpus_as_ranks(values: str, service: str, device: str | None, gpus: int | None) -> None:
    container = render(values).container(service)
    assert environment_of(container).get(f"DRAFTWIRE_{service.upper()}_DEVICE") == device
    assert container["resources"].get("limits", {}).get("nvidia.com/gpu") == gpus


def test_gpus_may_have_another_name() -> None:
    limits = render("tp8", "gpuResource=nvidia.com/mig-3g.40gb").container("verifier")["resources"]["limits"]
    assert limits == {"nvidia.com/mig-3g.40gb": 8}


@pytest.mark.parametrize(
    ("values", "service", "size"), [("tp8", "verifier", "8Gi"), ("llama-70b", "drafter", "1Gi"), ("tp8", "drafter", "")]
)
def test_ranks_share_memory(values: str, service: str, size: str) -> None:
    rendered = render(values)
    volume, mount = volumes(rendered.pod(service)).get("shm"), mounts(rendered.container(service)).get("shm")
    assert (volume is not None, mount is not None) == (bool(size), bool(size))
    if volume is not None and mount is not None:
        assert (volume["emptyDir"], mount["mountPath"]) == ({"medium": "Memory", "sizeLimit": size}, "/dev/shm")


@pytest.mark.parametrize("service", SERVICES)
def test_pods_are_placed_as_values_say(service: str) -> None:
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    pod = render(
        "cpu-demo",
        f"{service}.nodeSelector.pool=a",
        f'{service}.tolerations=[{{"key":"gpu","operator":"Exists"}}]',
        f'{service}.affinity={{"nodeAffinity":{{"preferredDuringSchedulingIgnoredDuringExecution":[]}}}}',
        f"{service}.priorityClassName=high",
        f'{service}.topologySpreadConstraints=[{{"maxSkew":1,"topologyKey":"z","whenUnsatisfiable":"DoNotSchedule"}}]',
        f"{service}.podLabels.team=a",
        f"{service}.podAnnotations.note=b",
    ).workload(service)["spec"]["template"]
    spec = pod["spec"]
    assert spec["nodeSelector"] == {"pool": "a"}
    assert (spec["tolerations"], spec["affinity"]) == ([{"key": "gpu", "operator": "Exists"}], affinity)
    assert spec["priorityClassName"] == "high"
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"][COMPONENT] == service
    assert (spread["whenUnsatisfiable"], pod["metadata"]["labels"]["team"]) == ("DoNotSchedule", "a")
    assert pod["metadata"]["annotations"] == {"note": "b"}


def test_new_version_of_the_chart_alone_restarts_no_pod() -> None:
    for service, _ in services_of("tp8"):
        labels = render("tp8").workload(service)["spec"]["template"]["metadata"]["labels"]
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels)


# Security


@pytest.mark.parametrize("values", VALUES)
def test_every_pod_is_as_restricted_as_kubernetes_knows(values: str) -> None:
    for pod in (each["spec"] for each in render(values).pods()):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        container = container_of(pod)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("values", VALUES)
def test_variables_come_from_the_manifest_alone(values: str) -> None:
    """A link to the gateway's Service would set DRAFTWIRE_GATEWAY_PORT=tcp://..., and no service would start."""
    assert all(each["spec"]["enableServiceLinks"] is False for each in render(values).pods())


@pytest.mark.parametrize("values", VALUES)
def test_services_can_write_to_a_folder_for_temporary_files(values: str) -> None:
    for service, pod in services_of(values):
        assert mounts(container_of(pod))["tmp"]["mountPath"] == "/tmp"
        assert volumes(pod)["tmp"] == {"name": "tmp", "emptyDir": {}}
        if service != "gateway":
            assert environment_of(container_of(pod))["HOME"] == "/tmp"


@pytest.mark.parametrize("values", VALUES)
def test_only_a_gateway_that_watches_has_rights(values: str) -> None:
    rendered = render(values)
    watches = values != "hpa-off"
    assert all(each["automountServiceAccountToken"] is False for each in rendered.all("ServiceAccount"))
    for service, pod in services_of(values):
        assert pod["automountServiceAccountToken"] is (watches and service == "gateway")
        assert rendered.one("ServiceAccount", service)["metadata"]["name"] == pod["serviceAccountName"]
    (test,) = rendered.all("Pod")
    assert test["spec"]["automountServiceAccountToken"] is False
    assert [role["rules"] for role in rendered.all("Role")] == watches * [
        [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}]
    ]
    for binding in rendered.all("RoleBinding"):
        account = rendered.one("ServiceAccount", "gateway")["metadata"]
        assert binding["roleRef"]["name"] == rendered.one("Role", "gateway")["metadata"]["name"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["name"], "namespace": "llm"}]
    assert not rendered.all("ClusterRole") + rendered.all("ClusterRoleBinding")


# Life cycle


@pytest.mark.parametrize("service", SERVICES)
def test_pod_has_time_to_drain_and_to_end_its_ranks(service: str) -> None:
    rendered = render("tp8", f"{service}.drainSeconds=90.5")
    pod, container = rendered.pod(service), rendered.container(service)
    drain_s = float(environment_of(container)[f"DRAFTWIRE_{service.upper()}_DRAIN_SECONDS"])
    assert drain_s == 90.5
    waits_s = container.get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})["preStop"]["sleep"]["seconds"]
    ends_s = SERVER_STOP_SECONDS + STOP_SECONDS + LEAVE_SECONDS + GOODBYE_SECONDS
    assert pod["terminationGracePeriodSeconds"] >= math.ceil(waits_s + drain_s + ends_s)


def test_gateway_is_out_of_its_service_before_it_refuses_requests() -> None:
    assert render("tp8").container("gateway")["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert "lifecycle" not in render("tp8", "gateway.preStopSeconds=0").container("gateway")
    assert "lifecycle" not in render("tp8").container("verifier")


@pytest.mark.parametrize("service", SERVICES)
def test_kubelet_asks_itself_where_there_is_no_tls(service: str) -> None:
    container = render("cpu-demo").container(service)
    (port,) = (port["containerPort"] for port in container["ports"] if port["name"] == "grpc")
    named = {"port": port, "service": f"draftwire.v1.{service.title()}Service"}
    assert container["startupProbe"]["grpc"] == container["readinessProbe"]["grpc"] == named
    assert container["livenessProbe"]["grpc"] == {"port": port}


@pytest.mark.parametrize("service", SERVICES)
def test_command_asks_with_the_certificate_of_the_service_where_there_is_tls(service: str) -> None:
    rendered = render("tp8")
    container = rendered.container(service)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]
        assert "grpc" not in probe
        command = probe["exec"]["command"]
        assert command[:3] == ["draftwire", "health", service]
        assert ("--live" in command) is (name == "livenessProbe")
        options = dict(option.removeprefix("--").split("=", 1) for option in command[3:] if option != "--live")
        environment = environment_of(container)
        prefix = f"DRAFTWIRE_{service.upper()}_"
        assert options.pop("address") == f"127.0.0.1:{environment[prefix + 'PORT']}"
        assert float(options.pop("timeout")) < probe["timeoutSeconds"]
        assert options == {
            "tls-ca": environment[prefix + "TLS_CA"],
            "tls-cert": environment[prefix + "TLS_CERT"],
            "tls-key": environment[prefix + "TLS_KEY"],
            "tls-target-name": "draftwire.internal",
        }


@pytest.mark.parametrize("service", SERVICES)
def test_command_is_one_that_the_image_has(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("draftwire.client.health.check_health", lambda *arguments: asked.append(arguments))
    probe = render("tp8").container(service)["readinessProbe"]
    assert CliRunner().invoke(app, probe["exec"]["command"][1:]).exit_code == 0
    assert asked[0][1] == f"draftwire.v1.{service.title()}Service"


def test_health_is_asked_of_services_that_exist() -> None:
    from draftwire.v1 import drafter_pb2, gateway_pb2, verifier_pb2

    names = {
        service: render("cpu-demo").container(service)["readinessProbe"]["grpc"]["service"] for service in SERVICES
    }
    modules = {"gateway": gateway_pb2, "verifier": verifier_pb2, "drafter": drafter_pb2}
    for service, module in modules.items():
        assert names[service] in {each.full_name for each in module.DESCRIPTOR.services_by_name.values()}
