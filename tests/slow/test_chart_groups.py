"""Verifiers whose ranks are on several nodes."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import ANY

from chart import container_of, environment_of, render

from benchmarks.relay import free_port

START_SECONDS = 80.0
REPOSITORY = Path(__file__).parents[2]
GROUP = "LeaderWorkerSet/verifier.spec"


def test_group_lives_and_dies_as_a_whole() -> None:
    """The leader is ready when the workers have come, and not before."""
    assert render("multi-node-tp", "verifier.replicas=3").at(GROUP) == {
        "replicas": 3,
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
        },
        "leaderWorkerTemplate": {
            "size": 2,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": ANY,
            "workerTemplate": ANY,
        },
    }


def test_all_pods_of_a_group_run_the_same() -> None:
    template = render("multi-node-tp").at(GROUP)["leaderWorkerTemplate"]
    leader, worker = (container_of(template[name]["spec"]) for name in ("leaderTemplate", "workerTemplate"))
    assert leader == worker | dict.fromkeys(("ports", "startupProbe", "readinessProbe", "livenessProbe"), ANY)
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & set(worker)
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert environment_of(worker)["DRAFTWIRE_VERIFIER_TENSOR_PARALLEL_SIZE"] == "16"
    assert "/dev/shm" in {mount["mountPath"] for mount in worker["volumeMounts"]}


def test_only_leaders_are_called() -> None:
    rendered, set_by_controller = render("multi-node-tp"), {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    labels = rendered.at(f"{GROUP}.leaderWorkerTemplate.leaderTemplate.metadata.labels") | set_by_controller
    selector = rendered.at("Service/verifier.spec.selector")
    assert set_by_controller.items() <= selector.items() <= labels.items()


def test_group_and_service_do_not_share_a_name() -> None:
    """The controller makes a Service of the group's name, in which pods have to be before they are ready."""
    rendered = render("multi-node-tp")
    names = [manifest["metadata"]["name"] for manifest in rendered.all("LeaderWorkerSet") + rendered.all("Service")]
    assert len(names) == len(set(names)) == 5
    assert not rendered.all("StatefulSet")


def test_gateway_looks_up_the_name_of_the_leaders_alone() -> None:
    rendered = render("multi-node-tp", "discovery=dns", "verifier.replicas=2")
    name = rendered.at("Service/verifier.metadata.name")
    assert rendered.at("environment/gateway.DRAFTWIRE_GATEWAY_VERIFIER") == f"dns:///{name}:50052"


def test_command_starts_the_ranks_of_all_pods() -> None:
    """Runs two pods as processes, with the variables that the controller sets: rank 0, the leader's, serves."""
    group = render("multi-node-tp", "verifier.tensorParallel.size=2").at(GROUP)
    command = container_of(group["leaderWorkerTemplate"]["leaderTemplate"]["spec"])["command"]
    port, options = free_port(), {"MODEL": "models/target", "PORT": "0", "METRICS_PORT": "0", "LOG_FORMAT": "json"}
    options |= {"TENSOR_PARALLEL_SIZE": "2", "KV_CACHE_TOKENS": "4096"}
    pods = []
    for index in ("0", "1"):
        variables = {"LWS_LEADER_ADDRESS": "localhost", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": index}
        known = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], part) for part in command]  # noqa: B023
        program = [sys.executable, *known[1:]]
        assert program.count("--master-port=29500") == 1
        program[program.index("--master-port=29500")] = f"--master-port={port}"
        environment = os.environ | {f"DRAFTWIRE_VERIFIER_{name}": value for name, value in options.items()}
        pods.append(subprocess.Popen(program, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True))
    watch = threading.Timer(START_SECONDS, lambda: [pod.kill() for pod in pods])
    watch.start()
    try:
        leader, worker = pods
        assert leader.stderr is not None
        assert worker.stderr is not None
        assert any("verifier.server_started" in line for line in leader.stderr), "the group did not come up"
        for pod in pods:
            pod.send_signal(signal.SIGTERM)
        said = worker.stderr.read()
        assert "verifier.follower_ready" in said
        assert "verifier.follower_stopped" in said
        assert "verifier.server_stopped" in leader.stderr.read()
    finally:
        watch.cancel()
        for pod in pods:
            pod.kill()
            pod.wait()
