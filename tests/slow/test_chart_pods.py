"""What runs in the pods: options that the services take, as little might as they need, and time to end well."""

import json
import math
from operator import attrgetter
from typing import Any

import pytest
from chart import SERVICES, VALUES, Manifest, Rendered, configure, container_of, environment_of, expect, refuse, render

from draftwire.cli.options import CLIENT_VARIABLES, PREFIX, unknown_variables
from draftwire.engine.ranks.followers import GOODBYE_SECONDS, LEAVE_SECONDS
from draftwire.engine.ranks.guard import STOP_SECONDS
from draftwire_verifier.vllm.arguments import engine_arguments

DISCOVERY = {"DRAFTWIRE_GATEWAY_DISCOVERY", "DRAFTWIRE_GATEWAY_VERIFIER_SERVICE", "DRAFTWIRE_GATEWAY_DRAFTER_SERVICE"}
SERVER_STOP_SECONDS = 1.0
"""The grace that a service gives its gRPC server; see `draftwire.runtime.service`."""


def services_of(values: str, *settings: str) -> list[tuple[str, Manifest]]:
    """Returns the pods of the services, of all targets, each with the name of its service."""
    pods = [pod["spec"] for pod in render(values, *settings).pods() if pod.get("kind") != "Pod"]
    return [(container_of(pod)["name"], pod) for pod in pods]


# Options


@pytest.mark.parametrize("values", VALUES)
def test_services_take_what_they_are_given(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for service, pod in services_of(values):
        environment = environment_of(container_of(pod))
        ours = {name for name in environment if name.startswith(PREFIX)}
        assert unknown_variables(environment) == []
        assert not ours & CLIENT_VARIABLES
        configure(service, environment, monkeypatch)


def test_verifier_on_vllm_has_all_gpus_of_its_ranks_in_one_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM starts its ranks itself, and they exchange tensors in shared memory."""
    pod = dict(services_of("vllm"))["verifier"]
    container = container_of(pod)
    config = configure("verifier", environment_of(container), monkeypatch)
    assert (config.loading.engine, config.vllm.arguments) == ("vllm", {"quantization": "fp8"})
    assert config.parallel.tensor_parallel_size == container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert engine_arguments(config, 131_072)["tensor_parallel_size"] == 4
    alone = dict(services_of("vllm", "verifier.tensorParallel.size=1"))["verifier"]
    assert configure("verifier", environment_of(container_of(alone)), monkeypatch).loading.device == "cuda"


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
    expected: dict[str, dict[str, object]] = {
        "verifier": {
            "connections.max_message_bytes": 2**28,
            "loading.cuda_graphs": False,
            "engine.watchdog_s": 0.5,
            "engine.max_added_latency_ms": 250.0,
        },
        "drafter": {
            "drafts.draft_mass": 1.0,
            "layers.layer_groups": "0 1-3 4-7 8",
            "engine.max_added_latency_ms": 250.0,
        },
        "gateway": {"rejection_sample_method": "coupled"},
    }
    for service, options in expected.items():
        config = configure(service, rendered.environment(service), monkeypatch)
        assert {option: attrgetter(option)(config) for option in options} == options


def test_further_variables_come_last_and_as_they_are() -> None:
    value = {"name": "NCCL_DEBUG", "valueFrom": {"configMapKeyRef": {"name": "nccl", "key": "debug"}}}
    assert render("tp8", f"verifier.extraEnv={json.dumps([value])}").container("verifier")["env"][-1] == value


@pytest.mark.parametrize("service", SERVICES)
def test_services_are_started_by_the_command_line(service: str) -> None:
    expect("tp8", {f"container/{service}.command": ["draftwire", "serve", service]})


def test_gateway_is_told_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    expect(
        "tp8",
        {
            "environment/gateway.DRAFTWIRE_GATEWAY_DISCOVERY": "kubernetes",
            "environment/gateway.DRAFTWIRE_GATEWAY_VERIFIER_SERVICE": "prod-draftwire-verifier",
            "environment/gateway.DRAFTWIRE_GATEWAY_DRAFTER_SERVICE": "prod-draftwire-drafter",
            "Service/verifier.metadata.name": "prod-draftwire-verifier",
            "Service/drafter.metadata.name": "prod-draftwire-drafter",
        },
    )
    environment = render("hpa-off").environment("gateway")
    listed = configure("gateway", environment, monkeypatch)
    assert listed.verifiers == ("dns:///prod-draftwire-verifier:50052",)
    assert listed.drafters == ("dns:///prod-draftwire-drafter:50053",)
    assert not DISCOVERY & set(environment)


def test_gateway_waits_as_long_as_models_may_load() -> None:
    rendered = render("tp8", "verifier.startupSeconds=3000", "drafter.startupSeconds=400")
    assert rendered.at("environment/gateway.DRAFTWIRE_GATEWAY_STARTUP_TIMEOUT_S") == "3000"
    patience = {service: probe_seconds(rendered.at(f"container/{service}.startupProbe")) for service in SERVICES}
    assert (patience["verifier"], patience["drafter"]) == (3000, 400)
    assert patience["gateway"] > 3000 + 400
    for service in ("gateway", "drafter"):
        assert rendered.at(f"Deployment/{service}.spec.progressDeadlineSeconds") > patience[service]


def probe_seconds(probe: Manifest) -> int:
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def test_tokens_are_read_from_a_folder_that_follows_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a subPath it would not follow."""
    config = configure("gateway", render("mtls").environment("gateway"), monkeypatch)
    assert str(config.tokens_file) == "/etc/draftwire/tokens/tokens.toml"
    mount = {"name": "tokens", "mountPath": "/etc/draftwire/tokens", "readOnly": True}
    expect(
        "mtls",
        {
            "container/gateway.volumeMounts.tokens": mount,
            "template/gateway.spec.volumes.tokens.secret.secretName": "draftwire-tokens",
            "template/verifier.spec.volumes.tokens": None,
        },
    )
    expect("tp8", {"environment/gateway.DRAFTWIRE_GATEWAY_TOKENS_FILE": None})


# Models and devices


def test_models_come_from_a_volume_that_is_only_read() -> None:
    mount = {"name": "models", "mountPath": "/models", "readOnly": True}
    for service in ("verifier", "drafter"):
        expect(
            "tp8",
            {
                f"container/{service}.volumeMounts.models": mount,
                f"template/{service}.spec.volumes.models.persistentVolumeClaim": {
                    "claimName": "models",
                    "readOnly": True,
                },
                f"environment/{service}.HF_HUB_OFFLINE": "1",
            },
        )
    expect("tp8", {"template/gateway.spec.volumes.models": None})


def test_models_come_from_the_hub_with_a_token_that_is_in_no_manifest() -> None:
    folder = render("single-gpu").at("container/verifier.volumeMounts.hub.mountPath")
    for service in ("verifier", "drafter"):
        expect(
            "single-gpu",
            {
                f"environment/{service}.HF_HUB_OFFLINE": None,
                f"environment/{service}.HF_HOME": folder,
                f"container/{service}.volumeMounts.hub.mountPath": folder,
                f"container/{service}.env.HF_TOKEN.valueFrom": {"secretKeyRef": {"name": "hub-token", "key": "token"}},
                f"template/{service}.spec.volumes.hub.persistentVolumeClaim": {"claimName": "hub-cache"},
            },
        )
    expect("tp8", {"template/verifier.spec.volumes.hub.emptyDir": {}}, "models.hub.enabled=true")


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
    expect(values, {f"environment/{service}.DRAFTWIRE_{service.upper()}_DEVICE": device})
    assert (render(values).at(f"container/{service}.resources.limits") or {}).get("nvidia.com/gpu") == gpus


def test_gpus_may_have_another_name() -> None:
    limits = {"nvidia.com/mig-3g.40gb": 8}
    expect("tp8", {"container/verifier.resources.limits": limits}, "gpuResource=nvidia.com/mig-3g.40gb")


@pytest.mark.parametrize(
    ("values", "service", "size"),
    [("tp8", "verifier", "8Gi"), ("llama-70b", "drafter", "1Gi"), ("tp8", "drafter", None)],
)
def test_ranks_share_memory(values: str, service: str, size: str | None) -> None:
    expected = {
        f"template/{service}.spec.volumes.shm.emptyDir": {"medium": "Memory", "sizeLimit": size},
        f"container/{service}.volumeMounts.shm.mountPath": "/dev/shm",
    }
    expect(values, expected if size else dict.fromkeys(expected))


@pytest.mark.parametrize("service", SERVICES)
def test_pods_are_placed_as_values_say(service: str) -> None:
    placed: dict[str, Any] = {
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "high",
    }
    spread = {"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}
    described = {"topologySpreadConstraints": [spread], "podLabels": {"team": "a"}, "podAnnotations": {"note": "b"}}
    settings = [f"{service}.{name}={json.dumps(value)}" for name, value in (placed | described).items()]
    own = {"matchLabels": render("cpu-demo").at(f"Service/{service}.spec.selector")}
    settings.append("drafter.nearVerifiers.topologyKey=")
    expect(
        "cpu-demo",
        {f"template/{service}.spec.{name}": value for name, value in placed.items()}
        | {
            f"template/{service}.spec.topologySpreadConstraints": [{**spread, "labelSelector": own}],
            f"template/{service}.metadata.labels.team": "a",
            f"template/{service}.metadata.annotations": {"note": "b"},
        },
        *settings,
    )


def test_new_version_of_the_chart_alone_restarts_no_pod() -> None:
    for service in SERVICES:
        labels = render("tp8").at(f"template/{service}.metadata.labels")
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels)


# Security


@pytest.mark.parametrize("values", VALUES)
def test_every_pod_is_as_restricted_as_kubernetes_knows(values: str) -> None:
    for pod in (each["spec"] for each in render(values).pods()):
        assert pod["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 10001}.items()
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in (container_of(pod), *pod.get("initContainers", ())):
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
        assert {"name": "tmp", "mountPath": "/tmp"} in container_of(pod)["volumeMounts"]
        assert {"name": "tmp", "emptyDir": {}} in pod["volumes"]
        assert service == "gateway" or environment_of(container_of(pod))["HOME"] == "/tmp"


@pytest.mark.parametrize("values", VALUES)
def test_only_a_gateway_that_watches_has_rights(values: str) -> None:
    rendered = render(values)
    watches = values != "hpa-off"
    assert all(each["automountServiceAccountToken"] is False for each in rendered.all("ServiceAccount"))
    accounts = {account["metadata"]["name"] for account in rendered.all("ServiceAccount")}
    gateways = []
    for service, pod in services_of(values):
        assert pod["automountServiceAccountToken"] is (watches and service == "gateway")
        assert pod["serviceAccountName"] in accounts
        gateways += [pod["serviceAccountName"]] * (service == "gateway")
    assert all(pod["spec"]["automountServiceAccountToken"] is False for pod in rendered.all("Pod"))
    roles = {role["metadata"]["name"]: role["rules"] for role in rendered.all("Role")}
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    assert roles == ({account: [slices] for account in gateways} if watches else {})
    bindings = {binding["metadata"]["name"]: binding for binding in rendered.all("RoleBinding")}
    assert bindings.keys() == roles.keys()
    for account, binding in bindings.items():
        assert binding["roleRef"]["name"] == account
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "llm"}]
    assert not rendered.all("ClusterRole") + rendered.all("ClusterRoleBinding")


# Life cycle


@pytest.mark.parametrize("service", SERVICES)
def test_pod_has_time_to_drain_and_to_end_its_ranks(service: str) -> None:
    rendered = render("tp8", f"{service}.drainSeconds=90.5")
    assert float(rendered.environment(service)[f"DRAFTWIRE_{service.upper()}_DRAIN_SECONDS"]) == 90.5
    waits_s = rendered.at(f"container/{service}.lifecycle.preStop.sleep.seconds") or 0
    ends_s = SERVER_STOP_SECONDS + STOP_SECONDS + LEAVE_SECONDS + GOODBYE_SECONDS
    period_s = rendered.at(f"template/{service}.spec.terminationGracePeriodSeconds")
    assert period_s >= math.ceil(waits_s + 90.5 + ends_s)
    refuse(
        "tp8",
        f"{service}.terminationGracePeriodSeconds: {period_s - 1} s are less than the {period_s} s that",
        *(f"{service}.drainSeconds=90.5", f"{service}.terminationGracePeriodSeconds={period_s - 1}"),
    )


def test_requests_have_minutes_to_end_and_drafters_less() -> None:
    """Not every HTTP client resumes."""
    drains = {service: drain_of(render("tp8"), service) for service in SERVICES}
    assert drains["gateway"] >= 300.0
    assert drains["verifier"] >= 120.0
    assert drains["drafter"] <= 30.0


def drain_of(rendered: Rendered, service: str) -> float:
    return float(rendered.environment(service)[f"DRAFTWIRE_{service.upper()}_DRAIN_SECONDS"])


def test_torchrun_lets_ranks_drain_and_ends_before_the_kubelet() -> None:
    templates = render("multi-node-tp", "verifier.drainSeconds=400").at("LeaderWorkerSet/verifier.spec")
    pod = templates["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    (limit,) = [part for part in container_of(pod)["command"] if part.startswith("--shutdown-timeout=")]
    ends_s = SERVER_STOP_SECONDS + STOP_SECONDS + LEAVE_SECONDS + GOODBYE_SECONDS
    assert 400 + ends_s <= int(limit.partition("=")[2]) < pod["terminationGracePeriodSeconds"]


def test_gateway_is_out_of_its_service_before_it_refuses_requests() -> None:
    sleep = {"preStop": {"sleep": {"seconds": 5}}}
    expect("tp8", {"container/gateway.lifecycle": sleep, "container/verifier.lifecycle": None})
    expect("tp8", {"container/gateway.lifecycle": None}, "gateway.preStopSeconds=0")


@pytest.mark.parametrize("values", ["cpu-demo", "tp8"])
@pytest.mark.parametrize("service", SERVICES)
def test_kubelet_asks_over_plain_http_whether_there_is_tls_or_not(service: str, values: str) -> None:
    """So nothing is started in a container for it."""
    ready, live = ({"path": path, "port": "metrics"} for path in ("/readyz", "/livez"))
    rendered = render(values)
    port = rendered.at(f"container/{service}.ports.metrics.containerPort")
    assert rendered.environment(service)[f"DRAFTWIRE_{service.upper()}_METRICS_PORT"] == str(port)
    expect(
        values,
        {
            f"container/{service}.startupProbe.httpGet": ready,
            f"container/{service}.readinessProbe.httpGet": ready,
            f"container/{service}.livenessProbe.httpGet": live,
        },
    )
