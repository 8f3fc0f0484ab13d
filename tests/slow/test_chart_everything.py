"""What a platform team sets: each value is in the objects that it is for. One set of values sets all of them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from chart import (
    CHART,
    COMPONENT,
    EVERYTHING,
    SERVICES,
    Rendered,
    configure,
    container_of,
    expect,
    refuse,
    render,
    template,
)

COMPONENTS = (*SERVICES, "big-gateway", "big-drafter", "small-gateway", "small-verifier")
"""Those whose pods are found by `Rendered.template`."""
VERIFIER = "template/verifier.spec"
LOCKED: dict[str, object] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def everything() -> Rendered:
    return render(EVERYTHING)


# Names and labels


def test_all_objects_have_the_names_and_labels_of_the_values() -> None:
    ours = [each for each in everything().manifests if "app.kubernetes.io/instance" in each["metadata"]["labels"]]
    assert len(ours) == len(everything().manifests) - 2, "all but extraObjects"
    for each in ours:
        assert each["metadata"]["name"].startswith("llm-dw")
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "dw"
        assert (labels["team"], labels["cost-center"]) == ("inference", "42")
    for pod in everything().pods():
        assert pod["metadata"]["labels"]["team"] == "inference"
    monitor = everything().at("ServiceMonitor/monitoring.spec.selector.matchLabels")
    assert monitor == {"app.kubernetes.io/name": "dw", "app.kubernetes.io/instance": "prod"}


def test_labels_of_all_objects_select_nothing() -> None:
    """Selectors cannot be changed, labels can."""
    for each in everything().all("Deployment") + everything().all("StatefulSet"):
        assert set(each["spec"]["selector"]["matchLabels"]) == {
            "app.kubernetes.io/name",
            "app.kubernetes.io/instance",
            COMPONENT,
        }


def test_name_override_replaces_the_chart_in_the_name_of_the_release() -> None:
    expect("cpu-demo", {"Service/gateway.metadata.name": "prod-llm-gateway"}, "nameOverride=llm")


def test_further_objects_are_templates() -> None:
    expect(
        EVERYTHING,
        {"ConfigMap/notes.metadata.name": "prod-notes", "ConfigMap/notes.data.target": "/models/target"}
        | {"ConfigMap/text.metadata.name": "llm-dw-text"},
    )


# Images


def test_each_service_may_have_its_own_image() -> None:
    digest = f"sha256:{1:064d}"
    images = {
        "gateway": f"registry.example.com/team/draftwire-gateway:1.2@{digest}",
        "verifier": "registry.example.com/team/draftwire-verifier:1.2-cuda",
        "drafter": "registry.example.com/other/drafter:1.3",
        "small-verifier": "registry.example.com/team/draftwire-verifier:1.2",  # on a CPU
    }
    expect(EVERYTHING, {f"container/{component}.image": image for component, image in images.items()})


# Pods


def test_pods_are_made_for_the_cluster_that_they_run_in() -> None:
    mount = {"name": "templates", "mountPath": "/templates", "readOnly": True}
    expect(
        EVERYTHING,
        {
            "template/gateway.spec.runtimeClassName": "gvisor",
            "template/gateway.spec.schedulerName": "bin-packer",
            f"{VERIFIER}.runtimeClassName": "nvidia",
            f"{VERIFIER}.schedulerName": "gang",
            "template/drafter.spec.runtimeClassName": "nvidia",
            "template/drafter.spec.schedulerName": "gang",
            "ServiceAccount/gateway.metadata.annotations": {"example.com/role": "gateway"},
            "ServiceAccount/verifier.metadata.annotations": {"example.com/role": "models"},
            "ServiceAccount/drafter.metadata.annotations": {"example.com/role": "drafts"},
            "template/gateway.spec.volumes.templates.configMap": {"name": "templates"},
            "container/gateway.volumeMounts.templates": mount,
            f"{VERIFIER}.volumes.rdma.hostPath": {"path": "/dev/infiniband"},
            "container/verifier.volumeMounts.rdma.mountPath": "/dev/infiniband",
            "template/drafter.spec.volumes.more.emptyDir": {},
            "container/drafter.volumeMounts.more": {"name": "more", "mountPath": "/more", "subPath": "a"},
            "template/gateway.spec.terminationGracePeriodSeconds": 200,
        },
    )
    absent = ("runtimeClassName", "schedulerName", "initContainers", "affinity")
    expect("tp8", {f"template/{service}.spec.{name}": None for service in ("gateway", "verifier") for name in absent})


def test_security_contexts_are_the_charts_with_changes() -> None:
    default = {"type": "RuntimeDefault"}
    local = {"type": "Localhost", "localhostProfile": "rdma.json"}
    always = {"runAsNonRoot": True, "fsGroupChangePolicy": "OnRootMismatch"}
    ours = {"runAsUser": 10001, "runAsGroup": 10001}
    expect(
        EVERYTHING,
        {
            "template/gateway.spec.securityContext": {
                **always,
                "seccompProfile": default,
                "supplementalGroups": [2000],
            },
            f"{VERIFIER}.securityContext": {**always, **ours, "fsGroup": 3000, "seccompProfile": local},
            "template/drafter.spec.securityContext": {**always, **ours, "fsGroup": 10001, "seccompProfile": default}
            | {"supplementalGroups": [4000]},
            "container/gateway.securityContext": LOCKED,
            "container/verifier.securityContext": LOCKED | {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}},
            "container/drafter.securityContext": LOCKED | {"runAsUser": 20002},
        },
    )


def test_init_containers_are_locked_down_unless_they_say_otherwise() -> None:
    expect(
        EVERYTHING,
        {
            "template/gateway.spec.initContainers.wait.securityContext": LOCKED | {"runAsUser": 7},
            "template/drafter.spec.initContainers.warm": {"name": "warm", "image": "registry.example.com/warm:1"}
            | {"securityContext": LOCKED | {"runAsUser": 20002}},
            f"{VERIFIER}.initContainers.fetch.volumeMounts": [{"name": "models", "mountPath": "/models"}],
        },
    )


def test_drafters_are_placed_near_the_verifiers_of_their_target() -> None:
    def near(component: str, key: str) -> dict[str, object]:
        labels = {"app.kubernetes.io/name": "dw", "app.kubernetes.io/instance": "prod", COMPONENT: component}
        return {"topologyKey": key, "labelSelector": {"matchLabels": labels}}

    own = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "cache"}}}}
    for drafter, verifier in (("drafter", "verifier"), ("big-drafter", "big-verifier")):
        assert everything().template(drafter)["spec"]["affinity"]["podAffinity"] == {
            "requiredDuringSchedulingIgnoredDuringExecution": [near(verifier, "topology.kubernetes.io/rack")],
            "preferredDuringSchedulingIgnoredDuringExecution": [own],
        }
    labels = render("tp8").at("template/verifier.metadata.labels")
    soft = {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": {"matchLabels": labels}}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": soft}]}
    expect("tp8", {"template/drafter.spec.affinity": {"podAffinity": preferred}})
    expect("tp8", {"template/drafter.spec.affinity": None}, "drafter.nearVerifiers.topologyKey=")


# Storage


def test_claims_are_of_the_release_or_of_each_pod_whose_model_is_there() -> None:
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "200Gi"}},
    }
    hub = everything().at("PersistentVolumeClaim/hub")
    assert hub["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert hub["spec"] == {
        "accessModes": ["ReadWriteMany", "ReadOnlyMany"],
        "storageClassName": "",
        "resources": {"requests": {"storage": "100Gi"}},
    }
    expect(
        EVERYTHING,
        {
            "StatefulSet/verifier.spec.volumeClaimTemplates": [{"metadata": {"name": "models"}, "spec": claim}],
            "container/verifier.volumeMounts.models.readOnly": True,
            f"{VERIFIER}.volumes.models": None,
            "template/drafter.spec.volumes.models": None,  # its model is on the hub
            "container/drafter.volumeMounts.models": None,
            "template/drafter.spec.volumes.hub.persistentVolumeClaim": {"claimName": hub["metadata"]["name"]},
            f"{VERIFIER}.volumes.hub.persistentVolumeClaim": {"claimName": hub["metadata"]["name"]},
        },
    )
    group = everything().at("LeaderWorkerSet/big-verifier.spec.leaderWorkerTemplate")
    for name in ("leaderTemplate", "workerTemplate"):
        volumes = {volume["name"]: volume for volume in group[name]["spec"]["volumes"]}
        assert volumes["models"]["ephemeral"] == {"volumeClaimTemplate": {"spec": claim}}


def test_downloads_may_have_a_claim_of_each_pod_too_and_models_one_for_all() -> None:
    settings = ("models.hub.claim.size=9Gi", "models.hub.claim.perPod=true", "models.hub.cache=null")
    rendered = render("single-gpu", *settings)
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "9Gi"}}}
    assert rendered.at("StatefulSet/verifier.spec.volumeClaimTemplates") == [
        {"metadata": {"name": "hub"}, "spec": claim}
    ]
    assert rendered.at("template/drafter.spec.volumes.hub.ephemeral") == {"volumeClaimTemplate": {"spec": claim}}
    assert not rendered.all("PersistentVolumeClaim")
    rendered = render("single-gpu", "models.claim.size=1Ti")
    assert rendered.at("PersistentVolumeClaim/models.spec.accessModes") == ["ReadWriteMany"]
    name = rendered.at("PersistentVolumeClaim/models.metadata.name")
    for service in ("verifier", "drafter"):
        assert rendered.at(f"template/{service}.spec.volumes.models.persistentVolumeClaim.claimName") == name


def test_init_containers_may_fetch_models_through_the_policies() -> None:
    rule = {
        "to": [{"ipBlock": {"cidr": "198.51.100.0/24"}}],
        "ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 9000}],
    }
    for component in ("verifier", "drafter", "small-verifier"):
        assert rule in everything().at(f"NetworkPolicy/{component}.spec.egress")
    assert rule not in everything().at("NetworkPolicy/gateway.spec.egress")


# Exposure


def test_service_of_the_gateway_is_as_the_load_balancer_needs_it() -> None:
    expect(
        EVERYTHING,
        {
            "Service/gateway.spec.type": "LoadBalancer",
            "Service/gateway.spec.loadBalancerClass": "example.com/nlb",
            "Service/gateway.spec.loadBalancerSourceRanges": ["203.0.113.0/24", "2001:db8::/32"],
            "Service/big-gateway.spec.loadBalancerSourceRanges": None,
            "Service/big-gateway.spec.type": "ClusterIP",
        },
    )


@pytest.mark.parametrize(
    ("values", "grpc", "http", "internal"),
    [
        (EVERYTHING, "grpc", "https", "https"),
        ("tp8", "https", "https", "https"),
        ("cpu-demo", "kubernetes.io/h2c", "http", "kubernetes.io/h2c"),
    ],
)
def test_ports_say_which_protocol_they_speak(values: str, grpc: str, http: str, internal: str) -> None:
    expect(
        values,
        {
            "Service/gateway.spec.ports.grpc.appProtocol": grpc,
            "Service/gateway.spec.ports.http.appProtocol": http,
            "Service/gateway-metrics.spec.ports.metrics.appProtocol": "http",
        }
        | {f"Service/{name}.spec.ports.grpc.appProtocol": internal for name in ("verifier", "drafter")}
        | {f"Service/{name}.spec.ports.metrics.appProtocol": "http" for name in ("verifier", "drafter")},
    )


def test_ingress_leads_each_host_to_http() -> None:
    backend = {"service": {"name": "llm-dw-gateway", "port": {"name": "http"}}}
    paths = {"http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}
    expect(
        EVERYTHING,
        {
            "Ingress/gateway.metadata.annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"},
            "Ingress/gateway.spec": {
                "ingressClassName": "nginx",
                "tls": [{"hosts": ["llm.example.com"], "secretName": "llm-tls"}],
                "rules": [{"host": host, **paths} for host in ("llm.example.com", "chat.example.com")],
            },
        },
    )


def test_routes_lead_to_the_ports_of_their_protocols() -> None:
    def backend(component: str, port: int) -> list[dict[str, object]]:
        name = everything().at(f"Service/{component}.metadata.name")
        ports = everything().at(f"Service/{component}.spec.ports")
        assert port in {each["port"] for each in ports}
        return [{"name": name, "port": port}]

    header = {"set": [{"name": "x-from", "value": "gateway"}]}
    filters = [{"type": "RequestHeaderModifier", "requestHeaderModifier": header}]
    grpc = {"name": "public", "namespace": "gateways", "sectionName": "grpc"}
    expect(
        EVERYTHING,
        {
            "HTTPRoute/gateway.metadata.annotations": {"example.com/note": "http"},
            "HTTPRoute/gateway.spec": {
                "parentRefs": [{"name": "public", "namespace": "gateways"}],
                "hostnames": ["llm.gw.example.com"],
                "rules": [
                    {
                        "backendRefs": backend("gateway", 8000),
                        "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                        "filters": filters,
                        "timeouts": {"request": "600s"},
                    }
                ],
            },
            "GRPCRoute/gateway.spec": {
                "parentRefs": [grpc],
                "hostnames": ["*.grpc.example.com"],
                "rules": [
                    {
                        "backendRefs": backend("gateway", 50051),
                        "matches": [{"method": {"service": "draftwire.v1.GatewayService"}}],
                        "filters": filters,
                    }
                ],
            },
            "GRPCRoute/big-gateway.spec.hostnames": ["*.grpc.example.com"],
        },
    )
    assert everything().at("GRPCRoute/big-gateway.spec.rules")[0]["backendRefs"] == backend("big-gateway", 50051)
    assert not render("tp8").all("Ingress") + render("tp8").all("HTTPRoute") + render("tp8").all("GRPCRoute")


# Scaling


def test_verifiers_follow_the_requests_that_run_and_wait() -> None:
    def query(gateway: str) -> str:
        labels = f'{{namespace="llm",job="{gateway}"}}'
        return f"sum(draftwire:num_requests_running{labels}) + sum(draftwire:num_requests_waiting{labels})"

    behavior = {
        "scaleDown": {
            "stabilizationWindowSeconds": 600,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 600}],
        }
    }
    metadata = {"serverAddress": "https://thanos.monitoring:9091", "threshold": "40", "authModes": "bearer,tls"}
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "authenticationRef": {"kind": "ClusterTriggerAuthentication", "name": "thanos"},
    }
    for target, kind, group in (("", "StatefulSet", ""), ("big-", "LeaderWorkerSet", "-group")):
        versions = {"StatefulSet": "apps/v1", "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}
        assert everything().at(f"ScaledObject/{target}verifier.spec") == {
            "scaleTargetRef": {
                "apiVersion": versions[kind],
                "kind": kind,
                "name": everything().at(f"{kind}/{target}verifier.metadata.name"),
            },
            "minReplicaCount": 2,
            "maxReplicaCount": 6,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [trigger | {"metadata": metadata | {"query": query(f"llm-dw-{target}gateway")}}],
        }
        assert "replicas" not in everything().one(kind, f"{target}verifier")["spec"]
        assert everything().at(f"{kind}/{target}verifier.metadata.name").endswith(f"verifier{group}")
    assert everything().at("StatefulSet/small-verifier.spec.replicas") == 3


def test_each_group_that_may_be_added_has_a_policy_for_its_ranks() -> None:
    groups = [each for each in everything().all("NetworkPolicy") if "verifier-group" in each["metadata"]["name"]]
    assert len(groups) == 6


def test_keda_authenticates_at_prometheus_for_drafters_too() -> None:
    (trigger,) = everything().at("ScaledObject/drafter.spec.triggers")
    assert trigger["authenticationRef"] == {"kind": "TriggerAuthentication", "name": "thanos"}
    assert trigger["metadata"]["authModes"] == "bearer"
    (trigger,) = render("drafter-autoscaling").at("ScaledObject/drafter.spec.triggers")
    assert "authenticationRef" not in trigger


def test_group_has_the_nodes_of_a_topology_for_itself() -> None:
    annotations = {"leaderworkerset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    expect(EVERYTHING, {"LeaderWorkerSet/big-verifier.metadata.annotations": annotations})
    expect("multi-node-tp", {"LeaderWorkerSet/verifier.metadata.annotations": None})


# Several targets


def test_gateways_of_each_target_find_its_own_verifiers_and_drafters_only() -> None:
    rendered = render("two-targets")
    for target in ("", "coder-"):
        environment = container_of(rendered.template(f"{target}gateway")["spec"])["env"]
        variables = {each["name"]: each.get("value") for each in environment}
        for service in ("verifier", "drafter"):
            name = rendered.at(f"Service/{target}{service}.metadata.name")
            assert variables[f"DRAFTWIRE_GATEWAY_{service.upper()}_SERVICE"] == name
            selector = rendered.at(f"Service/{target}{service}.spec.selector")
            found = [
                pod["metadata"]["labels"][COMPONENT]
                for pod in rendered.pods()
                if selector.items() <= pod["metadata"]["labels"].items()
            ]
            assert found == [f"{target}{service}"]
        callers = rendered.at(f"NetworkPolicy/{target}verifier.spec.ingress")[0]["from"]
        assert {each["podSelector"]["matchLabels"][COMPONENT] for each in callers} == {
            f"{target}gateway",
            f"{target}drafter",
        }


def test_targets_are_the_release_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render("two-targets")
    config = configure("verifier", rendered.environment("coder-verifier"), monkeypatch)
    assert config.loading.model == "/models/Qwen2.5-Coder-7B-Instruct"
    assert config.engine.kv_cache_tokens == 131072, "as in the release"
    expect(
        "two-targets",
        {
            "StatefulSet/verifier.spec.replicas": 2,
            "StatefulSet/coder-verifier.spec.replicas": 1,
            "Deployment/coder-gateway.spec.replicas": 2,
            "Deployment/gateway.spec.replicas": None,
            "HTTPRoute/coder-gateway.spec.hostnames": ["coder.llm.example.com"],
            "Pod/coder-test.spec.containers.generate.env.DRAFTWIRE_ADDRESS.value": "prod-draftwire-coder-gateway:50051",
        },
    )
    assert len(rendered.all("ServiceMonitor")) == 1
    assert len(rendered.all("PrometheusRule")) == 2


def test_first_target_is_what_it_would_be_alone() -> None:
    """So a target can be added to a release without restarting the others."""
    alone = render("two-targets", "targets=null")
    names = {(each["kind"], each["metadata"]["name"]): each for each in render("two-targets").manifests}
    for each in alone.manifests:
        assert names[each["kind"], each["metadata"]["name"]] == each
    assert not [
        name
        for _, name in names.keys() - {(e["kind"], e["metadata"]["name"]) for e in alone.manifests}
        if "coder" not in name
    ]


def test_longest_names_of_targets_fit_and_longer_ones_are_refused() -> None:
    done = template(EVERYTHING, "fullnameOverride=", "nameOverride=", release="r" * 22)
    assert "fullnameOverride: names of the target big would begin with 36 characters" in done.stderr
    done = template(EVERYTHING, "fullnameOverride=", "nameOverride=", release="r" * 18)
    assert done.returncode == 0, done.stderr
    manifests = list(filter(None, yaml.safe_load_all(done.stdout)))
    for manifest in (each for each in manifests if each["metadata"]["labels"][COMPONENT] not in ("notes", "text")):
        assert len(manifest["metadata"]["name"]) + len("-9-15") <= 63, manifest["metadata"]["name"]
    assert len({(each["kind"], each["metadata"]["name"]) for each in manifests}) == len(manifests)


# Refusals

CONTRADICTIONS = [
    ("tp8", 'commonLabels={"app.kubernetes.io/name":"a"}', "commonLabels: app.kubernetes.io/name is set by the chart"),
    ("tp8", 'drafter.podLabels={"helm.sh/chart":"a"}', "drafter.podLabels: helm.sh/chart is set by the chart"),
    ("tp8", "models.claim.size=1Gi", "models.claim: models.volume already says where models are"),
    ("tp8", "models.hub.claim.size=1Gi", "models.hub.claim: nothing is downloaded; set models.hub.enabled"),
    ("single-gpu", "models.hub.claim.size=1Gi", "models.hub.claim: models.hub.cache already says where downloads go"),
    ("tp8", "models.claim.storageClassName=fast", "models.claim: no claim is created without a size"),
    ("object-storage", 'models.claim.accessModes=["ReadWriteMany"]', "a claim of one pod does not need ReadWriteMany"),
    ("object-storage", 'models.hub.claim.accessModes=["ReadWriteOncePod"]', "which ReadWriteOncePod forbids"),
    ("object-storage", "verifier.initContainers=[]", "verifier.initContainers: by models.claim.perPod each pod begins"),
    ("object-storage", "drafter.model=/models/drafter", "drafter.initContainers: by models.claim.perPod"),
    ("tp8", "verifier.tensorParallel.exclusiveTopology=rack", "exclusiveTopology: is for groups of several nodes"),
    ("multi-node-tp", "verifier.podManagementPolicy=OrderedReady", "groups of several nodes are no StatefulSet"),
    ("tp8", "verifier.autoscaling.enabled=true", "drafters cannot follow a number of verifiers that changes"),
    ("drafter-autoscaling", "verifier.autoscaling.enabled=true", "verifier.autoscaling.prometheusAddress: where is"),
    ("drafter-autoscaling", "drafter.autoscaling.authModes=bearer", "authModes and authenticationRef.name need each"),
    ("drafter-autoscaling", "drafter.autoscaling.authenticationRef.name=a", "drafter.autoscaling: authModes and"),
    (
        "drafter-autoscaling",
        "drafter.autoscaling.minReplicas=9",
        "drafter.autoscaling: minReplicas is above maxReplicas",
    ),
    ("tp8", "gateway.autoscaling.minReplicas=9", "gateway.autoscaling: minReplicas is above maxReplicas"),
    (
        "tp8",
        'gateway.service.loadBalancerSourceRanges=["10.0.0.0/8"]',
        "loadBalancerSourceRanges: needs gateway.service.type",
    ),
    ("tp8", "gateway.service.loadBalancerClass=a", "loadBalancerClass: needs gateway.service.type LoadBalancer"),
    ("tp8", "gateway.service.type=NodePort", "gateway.service.type: networkPolicy.clients lets in only pods of this"),
    (
        "two-targets",
        'networkPolicy.clients=[{"podSelector":{}}]',
        "gateway.httpRoute: networkPolicy.clients lets in only",
    ),
    ("mtls", "gateway.ingress.enabled=true", "gateway.ingress.hosts: under which host names is HTTP reached?"),
    ("mtls", 'gateway.ingress.tls=[{"hosts":["a.b"],"secretName":"c"}]', "gateway.ingress.tls: a.b is not among"),
    ("mtls", "gateway.grpcRoute.enabled=true", "gateway.grpcRoute.parentRefs: which Gateway routes here?"),
    ("two-targets", "gateway.options.http_allowed_hosts=a.b", "requests for chat.llm.example.com are routed here"),
    ("two-targets", "targets.coder.verifier.model=", "targets.coder.verifier.model: a folder under /models"),
    ("two-targets", "targets.other.gateway.replicas=2", "targets.other.verifier.model: which target is it?"),
    (
        "two-targets",
        'targets.coder.gateway.httpRoute.hostnames=["chat.llm.example.com"]',
        "targets.coder.gateway.httpRoute: chat.llm.example.com leads to another target already",
    ),
    ("two-targets", "targets.coder.verifier.tensorParallel.nodes=2", "targets.coder.verifier.tensorParallel: size has"),
    (
        "two-targets",
        "targets.coder.gateway.terminationGracePeriodSeconds=60",
        "targets.coder.gateway.terminationGracePeriodSeconds: 60 s are less than the 335 s",
    ),
]


@pytest.mark.parametrize(("values", "setting", "said"), CONTRADICTIONS)
def test_values_that_contradict_each_other_are_refused(values: str, setting: str, said: str) -> None:
    refuse(values, said, setting)


BAD = {
    "nameOverride": ("LLM", "a" * 41, 5),
    "fullnameOverride": ("-a", "a.b"),
    "commonLabels": ({"a": "b c"}, {"a": 1}),
    "extraObjects": ({}, [5]),
    "image.cudaSuffix": (":a", 5),
    "image.repositories.verifier": (5,),
    "image.tags.verifier": ("a b", "a:b"),
    "models.claim.size": ("200 GB", 200),
    "models.claim.storageClassName": (5,),
    "models.claim.accessModes": (["ReadWrite"], "ReadWriteMany"),
    "models.claim.perPod": ("yes",),
    "models.hub.claim.size": ("much",),
    "gateway.service.appProtocols.grpc": (5,),
    "gateway.service.loadBalancerClass": (5,),
    "gateway.service.loadBalancerSourceRanges": (["10.0.0.1"], "10.0.0.0/8"),
    "gateway.ingress.hosts": (["https://a.b"], [""], "a.b"),
    "gateway.ingress.className": ("A B",),
    "gateway.ingress.tls": ([{"hosts": ["a.b"]}],),
    "gateway.httpRoute.parentRefs": ([{"namespace": "a"}], [{"name": "a", "port": 0}]),
    "gateway.httpRoute.matches": ([{}], ["/v1"]),
    "gateway.httpRoute.filters": ([{}],),
    "gateway.httpRoute.requestTimeout": ("10 minutes", 600),
    "gateway.grpcRoute.hostnames": (["a b"],),
    "gateway.terminationGracePeriodSeconds": (0, "5m"),
    "verifier.runtimeClassName": ("NVIDIA", 5),
    "verifier.schedulerName": ("a b",),
    "verifier.serviceAccount.annotations": ({"a": 1},),
    "verifier.podSecurityContext": ({"runAsUser": "root"}, {"privileged": True}),
    "verifier.securityContext": ({"privileged": True}, {"capabilities": {"add": "ALL"}}),
    "verifier.initContainers": ([{"image": "a"}], [{"name": "a"}], "a"),
    "verifier.extraVolumes": ([{"name": "a"}], [{"name": "models", "emptyDir": {}}], [{"emptyDir": {}, "csi": {}}]),
    "verifier.extraVolumeMounts": ([{"name": "a", "mountPath": "b"}], [{"name": "a"}]),
    "verifier.autoscaling.requests": (0, "many"),
    "verifier.autoscaling.authModes": ("token", "basic,"),
    "drafter.autoscaling.authenticationRef": ({"kind": "Secret"},),
    "verifier.tensorParallel.exclusiveTopology": ("a b", 5),
    "verifier.podManagementPolicy": ("Ordered",),
    "drafter.nearVerifiers.topologyKey": ("a b",),
    "drafter.nearVerifiers.required": ("no",),
    "targets": ({"Coder": {}}, {"a" * 16: {}}, {"coder": {"models": {}}}, {"coder": {"verifier": {"replicas": 0}}}),
    "networkPolicy.storage": ({"ports": []}, {"to": [{}]}),
}
"""Settings of no sense, by the place at which the schema refuses them."""


def settings() -> Iterator[dict[str, Any]]:
    """Yields as many sets of values as it takes to have each bad one, with one of each place."""
    for index in range(max(map(len, BAD.values()))):
        values: dict[str, Any] = {}
        for path, bad in BAD.items():
            if index < len(bad):
                *folders, name = path.split(".")
                place = values
                for folder in folders:
                    place = place.setdefault(folder, {})
                place[name] = bad[index]
        yield values


@pytest.mark.parametrize("values", list(settings()), ids=("first", "second", "third", "fourth"))
def test_bad_values_are_refused_by_place(values: dict[str, Any]) -> None:
    done = template("tp8", *(f"{name}={json.dumps(value)}" for name, value in values.items()))
    assert done.returncode != 0
    places = ["/" + path.replace(".", "/") for path, bad in BAD.items() if in_values(values, path.split("."))]
    assert places
    assert [place for place in places if f"at '{place}" not in done.stderr] == []


def in_values(values: Any, path: list[str]) -> bool:
    return not path or (isinstance(values, dict) and path[0] in values and in_values(values[path[0]], path[1:]))


def test_all_new_values_are_described_in_the_schema() -> None:
    """Of those that are not plain to whoever knows Kubernetes."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    for path in BAD:
        names, place, described = path.split("."), schema, False
        for name in names:
            if "$ref" in place:
                place = schema["$defs"][place["$ref"].rpartition("/")[2]]
            place = place["properties"][name]
            described |= "description" in place or "description" in schema["$defs"].get(
                place.get("$ref", "").rpartition("/")[2], {}
            )
        assert described, path
