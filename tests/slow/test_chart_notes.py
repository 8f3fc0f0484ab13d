"""What an installation prints: who may call the gateway, and a command that does."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from certificates import NAME, write_identity
from chart import EVERYTHING, arguments_of, run_helm

from tests.in_process import InProcessStack

SCRIPT = "scripted:verify_ms=1"
KUBECTL = """#!/usr/bin/env bash
case "$*" in
  *" get secret prod-draftwire-gateway-tls "*ca*) base64 -w0 "$CA" ;;
  *" get service prod-draftwire-gateway "*ingress*) echo 127.0.0.1 ;;
  *" get service prod-draftwire-gateway "*nodePort*) echo "$PORT" ;;
  "get nodes "*) echo 127.0.0.1 ;;
  *" port-forward service/prod-draftwire-gateway 8000") ;;
  *) echo "kubectl: what is $*?" >&2; exit 1 ;;
esac
"""
"""Answers what the notes ask; the gateway is on this machine already."""


def notes(values: str, *settings: str) -> str:
    done = run_helm("install", "prod", *arguments_of(values, *settings), "--dry-run=client")
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


@pytest.mark.parametrize(
    ("values", "settings", "said"),
    [
        (
            "cpu-demo",
            (),
            ["all pods of namespace llm, if the network plugin", "anyone: see tokens.secret", "prompts and texts are"],
        ),
        (
            "mtls",
            ('gateway.service.loadBalancerSourceRanges=["203.0.113.0/24"]',),
            [
                "addresses 203.0.113.0/24, if the network plugin enforces policies",
                "; by the load balancer 203.0.113.0/24",
                "callers with a bearer token of Secret draftwire-tokens",
                "callers with a certificate of the issuer in Secret prod-draftwire-gateway-tls",
                '-H "authorization: Bearer $TOKEN"',
                "--cert user.pem --key user.key",
            ],
        ),
        ("no-network-policy", (), ["whatever reaches this cluster's network, verifiers and drafters too"]),
        ("tp8", ("networkPolicy.clients=[]",), ["nobody: networkPolicy.clients is empty", "on, without certificates"]),
        (
            "two-targets",
            (),
            [
                'all pods of namespaces with {"matchLabels":{"kubernetes.io/metadata.name":"gateways"}}',
                "prod-draftwire-gateway.llm, port 50051",
                "prod-draftwire-coder-gateway.llm, port 50051",
                'curl "https://chat.llm.example.com/v1/completions"',
                'curl "https://coder.llm.example.com/v1/completions"',
                '"model":"Qwen2.5-Coder-7B-Instruct"',
            ],
        ),
        (
            EVERYTHING,
            (),
            ['curl "http://coder.example.com/v1/completions"', "Who forwards to the gateway has to use TLS"],
        ),
    ],
)
def test_notes_say_who_is_let_in(values: str, settings: tuple[str, ...], said: list[str]) -> None:
    printed = notes(values, *settings)
    assert [text for text in said if text not in printed] == [], printed


TLS = ("tls.enabled=true", "tls.allowPlaintext=false")
OUTSIDE = 'networkPolicy.clients=[{"ipBlock":{"cidr":"0.0.0.0/0"}}]'


@pytest.fixture(scope="module", params=["plaintext", "TLS"])
def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[InProcessStack, tuple[str, ...], Path]]:
    """Yields a stack, settings of a chart that has one like it, and the file with its issuer."""
    folder, has_tls = tmp_path_factory.mktemp("notes"), request.param == "TLS"
    ca = trustme.CA()
    roles = {name: write_identity(folder / name, ca, role=name) if has_tls else {} for name in ("gateway", "verifier")}
    named = {"tls_target_name": NAME, "http_allowed_hosts": "other"} if has_tls else {}
    options = {"verifier": {"model": SCRIPT, **roles["verifier"]}, "gateway": {**named, **roles["gateway"]}}
    with InProcessStack(options) as stack:
        settings = (*TLS, "gateway.options.http_allowed_hosts=other") if has_tls else ()
        yield stack, settings, folder / "gateway" / "ca.pem"


@pytest.mark.parametrize("kind", ["ClusterIP", "LoadBalancer", "NodePort"])
def test_printed_command_completes_a_prompt(
    gateway: tuple[InProcessStack, tuple[str, ...], Path], kind: str, tmp_path: Path
) -> None:
    stack, settings, ca = gateway
    printed = notes("cpu-demo", f"gateway.service.type={kind}", OUTSIDE, *settings)
    port = stack.http_address.rpartition(":")[2]
    script = "set -e\n" + printed.split("\n\n")[1].replace(":8000", f":{port}")
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CA": str(ca), "PORT": port}
    command = ["bash", "-c", script]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, script + done.stderr
    assert len(json.loads(done.stdout)["choices"][0]["text"]) > 0, done.stdout
