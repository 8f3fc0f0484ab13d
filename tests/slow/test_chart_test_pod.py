"""`helm test`: the pod that generates a few tokens."""

import os
import subprocess
import sys
from pathlib import Path

from chart import Manifest, container_of, environment_of, render

from draftwire.services.local_stack import LocalStack

REPOSITORY = Path(__file__).parents[2]


STACK: dict[str, dict[str, object]] = {
    "verifier": {"model": "scripted:verify_ms=5", "port": 0, "metrics-port": 0},
    "drafter": {"model": "scripted:", "port": 0, "metrics-port": 0},
    "gateway": {"port": 0},
}


def pod_of(values: str, *settings: str) -> Manifest:
    (pod,) = render(values, *settings).all("Pod")
    return dict(pod)


def run(pod: Manifest, address: str) -> subprocess.CompletedProcess[str]:
    """Runs what the pod runs, against another gateway."""
    container = container_of(pod["spec"])
    python, *rest = container["command"]
    assert python == "python"
    environment = os.environ | environment_of(container) | {"DRAFTWIRE_ADDRESS": address}
    return subprocess.run([sys.executable, *rest], env=environment, cwd=REPOSITORY, capture_output=True, text=True)


def test_pod_succeeds_where_all_services_take_part_and_only_there() -> None:
    with LocalStack(STACK) as stack:
        done = run(pod_of("cpu-demo"), stack.address)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("32 tokens in ")
        drafter = stack.services["drafter"].process
        drafter.kill()
        drafter.wait()
        done = run(pod_of("cpu-demo"), stack.address)
        assert done.returncode == 1
        assert "no drafter took part" in done.stderr
        assert run(pod_of("cpu-demo", "drafter.enabled=false"), stack.address).returncode == 0


def test_pod_calls_the_gateways_service() -> None:
    for values in ("cpu-demo", "tp8"):
        name = render(values).one("Service", "gateway")["metadata"]["name"]
        assert environment_of(container_of(pod_of(values)["spec"]))["DRAFTWIRE_ADDRESS"] == f"{name}:50051"


def test_pod_runs_when_asked_and_once() -> None:
    pod = pod_of("tp8")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation"
    assert pod["spec"]["restartPolicy"] == "Never"


def test_pod_shows_the_token_of_a_secret() -> None:
    (token,) = [each for each in container_of(pod_of("mtls")["spec"])["env"] if each["name"] == "DRAFTWIRE_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "draftwire-test-token", "key": "token"}}
    assert "DRAFTWIRE_TOKEN" not in {each["name"] for each in container_of(pod_of("tp8")["spec"])["env"]}
