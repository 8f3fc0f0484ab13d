"""`helm test`: the pod that generates a few tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chart import container_of, environment_of, expect, render

from draftwire.cli.local_stack import LocalStack

REPOSITORY = Path(__file__).parents[2]


STACK: dict[str, dict[str, object]] = {
    "verifier": {"model": "scripted:verify_ms=5", "port": 0, "metrics-port": 0},
    "drafter": {"model": "scripted:", "port": 0, "metrics-port": 0},
    "gateway": {"port": 0},
}


def run(address: str, *settings: str) -> subprocess.CompletedProcess[str]:
    """Runs what the pod runs, against another gateway."""
    container = container_of(render("cpu-demo", *settings).at("Pod/test.spec"))
    python, *rest = container["command"]
    assert python == "python"
    environment = os.environ | environment_of(container) | {"DRAFTWIRE_ADDRESS": address}
    return subprocess.run([sys.executable, *rest], env=environment, cwd=REPOSITORY, capture_output=True, text=True)


def test_pod_succeeds_where_all_services_take_part_and_only_there() -> None:
    with LocalStack(STACK) as stack:
        done = run(stack.address)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("32 tokens in ")
        drafter = stack.services["drafter"].process
        drafter.kill()
        drafter.wait()
        done = run(stack.address)
        assert done.returncode == 1
        assert "no drafter took part" in done.stderr
        assert run(stack.address, "drafter.enabled=false").returncode == 0


@pytest.mark.parametrize("values", ["cpu-demo", "tp8"])
def test_pod_runs_when_asked_once_and_calls_the_gateways_service(values: str) -> None:
    expect(
        values,
        {
            "Pod/test.metadata.annotations": {
                "helm.sh/hook": "test",
                "helm.sh/hook-delete-policy": "before-hook-creation",
            },
            "Pod/test.spec.restartPolicy": "Never",
            "Pod/test.spec.containers.generate.env.DRAFTWIRE_ADDRESS.value": "prod-draftwire-gateway:50051",
            "Service/gateway.metadata.name": "prod-draftwire-gateway",
        },
    )


def test_pod_shows_the_token_of_a_secret() -> None:
    token = "Pod/test.spec.containers.generate.env.DRAFTWIRE_TOKEN"
    expect("mtls", {f"{token}.valueFrom": {"secretKeyRef": {"name": "draftwire-test-token", "key": "token"}}})
    expect("tp8", {token: None})
