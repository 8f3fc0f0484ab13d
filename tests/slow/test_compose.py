"""The images, and `docker compose up` on them: what they hold, what they may do, and what a user sees when parts break.

Skipped where there is no container engine. `DOCKER` names the client, where it is not `docker`.
"""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from containers import DOCKER, SECONDS, docker, inspect, what_is_missing
from observing import wait_until

from benchmarks.compose import measure
from benchmarks.relay import free_port
from draftwire.client import Client, Completion
from draftwire.errors import GENERATED_KEY, DraftwireError
from draftwire.v1 import gateway_pb2, gateway_pb2_grpc, session_pb2

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "verifier", "drafter")
PACKAGES = "/opt/draftwire"
MOST_BYTES = {"gateway": 400e6, "verifier": 1.5e9, "drafter": 1.5e9}
PROMPT = "def merge_sorted(a, b):"

BUILD_SECONDS, UP_SECONDS = 900, 240
LOSS_SECONDS = 90
"""Keep-alive of 20 s, failover of 30 s, and time to spare."""

pytestmark = pytest.mark.timeout(BUILD_SECONDS + 2 * UP_SECONDS)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    if what_is_missing():
        pytest.skip(f"no containers here: {what_is_missing()}")


@pytest.fixture(scope="module")
def images(engine: None) -> dict[str, dict[str, Any]]:
    """Builds all images and returns what the engine says of them, by service."""
    environment = {**os.environ, "PYTHON": sys.executable, "DOCKER": DOCKER, "TAG": "local", "TORCH_BUILD": "cpu"}
    built = subprocess.run(
        ["deploy/build_images.sh"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    return {service: inspect(f"draftwire-{service}:local") for service in SERVICES}


# The images


@pytest.mark.parametrize("service", SERVICES)
def test_image_is_small_runs_as_nobody_in_particular_and_says_what_it_is(
    images: dict[str, dict[str, Any]], service: str
) -> None:
    image, config = images[service], images[service]["Config"]
    print(f"{service}: {image['Size'] / 1e6:.0f} MB")
    assert image["Size"] < MOST_BYTES[service]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["draftwire", "serve", service], "a shell would keep SIGTERM to itself"
    assert config["StopSignal"] == "SIGTERM"
    port = {"gateway": "9051", "verifier": "9052", "drafter": "9053"}[service]
    assert config["Healthcheck"]["Test"] == ["CMD", "ready.sh", f"DRAFTWIRE_{service.upper()}_METRICS_PORT", port, "10"]
    labels = {name.rpartition(".")[2]: text for name, text in config["Labels"].items()}
    assert labels["title"] == f"draftwire-{service}"
    assert labels["licenses"] == "Apache-2.0"
    assert labels["version"] == docker("run", "--rm", "--entrypoint=draftwire", image["Id"], "--version").strip()
    assert len(labels["revision"]) == 40


def listed(image: str, script: str) -> list[str]:
    """Returns the lines that a shell script prints in a container, as the image's own user."""
    return docker("run", "--rm", "--network=none", "--entrypoint=sh", image, "-c", script).split()


@pytest.mark.parametrize("service", SERVICES)
def test_image_holds_what_runs_and_nothing_that_builds(images: dict[str, dict[str, Any]], service: str) -> None:
    image = images[service]["Id"]
    assert listed(image, "for tool in cc gcc g++ clang ld make git; do command -v $tool; done; true") == []
    assert listed(image, "ls -d /src /wheels /root/.cache 2>/dev/null; true") == [], "what builds leave behind"
    assert listed(image, f"find {PACKAGES} /models ! -readable -o -writable ! -type l 2>/dev/null; true") == []
    package = f"$(dirname $(find {PACKAGES} -path '*/draftwire/errors.py'))"
    assert len(listed(image, f"find {package} -name '*.py'")) > 50
    assert len(listed(image, f"find {package} -name '*.py'")) == len(listed(image, f"find {package} -name '*.pyc'"))
    models = {"gateway": [], "verifier": ["target"], "drafter": ["drafter"]}
    assert listed(image, "test -d /models && ls /models; true") == models[service]


def test_gateway_comes_without_torch(images: dict[str, dict[str, Any]]) -> None:
    script = f"find {PACKAGES} -maxdepth 5 -name torch"
    assert listed(images["gateway"]["Id"], script) == []
    assert len(listed(images["verifier"]["Id"], script)) == 1


def test_gateway_holds_what_discovery_in_kubernetes_needs(images: dict[str, dict[str, Any]]) -> None:
    script = "python -c 'import kubernetes.aio.client, kubernetes.aio.config; print(1)'"
    assert listed(images["gateway"]["Id"], script) == ["1"]


# All of them together


@dataclass(frozen=True, slots=True)
class Stack:
    """A running project."""

    project: str
    port: int
    http_port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def compose(self, *arguments: str, timeout_s: float = SECONDS) -> str:
        ports = {"GATEWAY_PORT": str(self.port), "HTTP_PORT": str(self.http_port)}
        project = ("compose", "--project-name", self.project, *arguments)
        return docker(*project, timeout_s=timeout_s, DRAIN_SECONDS="30", **ports)

    def container(self, service: str) -> str:
        return f"{self.project}-{service}-1"

    def left_over(self) -> list[str]:
        """Containers, networks and volumes of the project."""
        label = f"label=com.docker.compose.project={self.project}"
        commands = (["ps", "--all"], ["network", "ls"], ["volume", "ls"])
        return [line for command in commands for line in docker(*command, "--quiet", "--filter", label).split()]


@pytest.fixture(scope="module")
def stack(images: dict[str, dict[str, Any]]) -> Iterator[Stack]:
    stack = Stack(f"draftwire-test-{secrets.token_hex(4)}", free_port(), free_port())
    try:
        try:
            wait = ("--wait", "--wait-timeout", str(UP_SECONDS))
            stack.compose("up", "--detach", "--no-build", *wait, timeout_s=UP_SECONDS + SECONDS)
        except AssertionError:
            print(stack.compose("logs"))
            raise
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "10", timeout_s=2 * SECONDS)
        assert stack.left_over() == []


@contextmanager
def killed(container: str) -> Iterator[None]:
    """Kills a container, and starts it again afterwards."""
    docker("kill", container)
    try:
        yield
    finally:
        docker("start", container)


@contextmanager
def unplugged(container: str, network: str, alias: str) -> Iterator[None]:
    """Takes a container off a network, without closing any connection, and puts it back afterwards."""
    docker("network", "disconnect", network, container)
    try:
        yield
    finally:
        docker("network", "connect", "--alias", alias, network, container)


def generate(stack: Stack) -> Completion:
    with Client(stack.address) as connected:
        return connected.generate(PROMPT, max_tokens=64, temperature=0.0, timeout_s=SECONDS)


def speculates(stack: Stack) -> bool:
    try:
        return generate(stack).num_draft_tokens > 0
    except DraftwireError:
        return False


def test_everything_is_locked_down_and_the_gateway_published_locally_alone(stack: Stack) -> None:
    for service in SERVICES:
        host = inspect(stack.container(service))["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert host["SecurityOpt"] == ["no-new-privileges:true"], service
        written = docker(
            "exec", stack.container(service), "sh", "-c", "echo a > /tmp/a && cat /tmp/a; echo b > /cache/b; true"
        )
        assert written == "a\n", service
    published = {service: inspect(stack.container(service))["HostConfig"]["PortBindings"] for service in SERVICES}
    ports = {"50051/tcp": stack.port, "8000/tcp": stack.http_port}
    addresses = {name: [{"HostIp": "127.0.0.1", "HostPort": str(port)}] for name, port in ports.items()}
    assert published == {"gateway": addresses, "verifier": {}, "drafter": {}}


def test_gateway_answers_over_http(stack: Stack) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.http_port}/health", timeout=SECONDS) as answer:
        assert json.load(answer) == {"status": "ok"}


def is_healthy(container: str) -> bool:
    return bool(inspect(container)["State"]["Health"]["Status"] == "healthy")


def test_services_are_well_by_their_own_account_and_in_time(stack: Stack) -> None:
    for service in SERVICES:
        started_at = time.monotonic()
        assert "is serving" in docker("exec", stack.container(service), "draftwire", "health", service)
        print(f"draftwire health {service}: {time.monotonic() - started_at:.2f} s, starting it included")
        wait_until(partial(is_healthy, stack.container(service)), f"{service} is healthy", SECONDS)


def test_text_comes_to_a_client_on_the_host_and_most_of_it_is_drafted(stack: Stack) -> None:
    completion = generate(stack)
    assert completion.drafter_error == ""
    assert completion.num_accepted_draft_tokens > 0.3 * len(completion.token_ids) > 0
    assert completion.text == generate(stack).text


def test_stream_outlives_a_killed_drafter_and_drafts_come_back_with_it(stack: Stack) -> None:
    with Client(stack.address) as connected:
        stream = connected.stream(PROMPT, max_tokens=1500, min_tokens=1500, temperature=1.0, timeout_s=2 * SECONDS)
        pieces = iter(stream)
        num_tokens = 0
        while num_tokens < 300:  # the first ones come while the drafter reads the prompt
            num_tokens += len(next(pieces).token_ids)
        with killed(stack.container("drafter")):
            assert stream.completion is None, "the stream was over before the drafter was killed"
            num_tokens += sum(len(piece.token_ids) for piece in pieces)
            assert generate(stack).num_draft_tokens == 0
    assert num_tokens == 1500
    assert stream.completion is not None
    assert stream.completion.drafter_error
    assert stream.completion.num_draft_tokens > 0
    wait_until(lambda: speculates(stack), "completions are speculative", SECONDS)


def blocks_sent(container: str) -> float:
    """Reads a drafter's own count."""
    url = "http://127.0.0.1:9053/metrics"
    script = f"from urllib.request import urlopen; print(urlopen({url!r}, timeout=5).read().decode())"
    text = docker("exec", container, "python", "-c", script)
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith("draftwire:blocks_sent_total"))


def test_every_drafter_of_a_scaled_service_is_used_and_none_is_missed(stack: Stack) -> None:
    wait = ("--wait", "--wait-timeout", str(UP_SECONDS))
    up = ("up", "--detach", "--no-build", "--no-recreate", *wait)
    stack.compose(*up, "--scale", "drafter=2", timeout_s=UP_SECONDS + SECONDS)
    second = f"{stack.project}-drafter-2"

    def second_is_used() -> bool:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda _: bool(generate(stack).token_ids), range(4)))
        return blocks_sent(second) > 0

    wait_until(second_is_used, "the second drafter is used", SECONDS)
    stack.compose(*up, "--scale", "drafter=1", timeout_s=UP_SECONDS + SECONDS)
    wait_until(lambda: speculates(stack), "completions are speculative", SECONDS)


def test_stream_ends_with_how_to_resume_it_if_the_verifier_is_out_of_reach(stack: Stack) -> None:
    network, verifier = f"{stack.project}_services", stack.container("verifier")
    request = gateway_pb2.GenerateRequest(
        text=PROMPT,
        max_tokens=1500,
        sampling=session_pb2.SamplingParameters(temperature=1.0, min_tokens=1500),
    )
    with grpc.insecure_channel(stack.address) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, timeout=LOSS_SECONDS)
        token_ids = list(next(call).delta.token_ids)
        with unplugged(verifier, network, alias="verifier"), pytest.raises(grpc.RpcError) as interrupted:
            token_ids.extend(token_id for response in call for token_id in response.delta.token_ids)
    assert interrupted.value.code() is grpc.StatusCode.UNAVAILABLE, interrupted.value.details()
    trailing = {item.key: item.value for item in interrupted.value.trailing_metadata()}
    assert 0 < int(trailing[GENERATED_KEY]) == len(token_ids) < 1500
    wait_until(lambda: speculates(stack), "completions are speculative", SECONDS)


def test_gateway_that_is_stopped_lets_its_streams_end(stack: Stack) -> None:
    """Compose sends the image's stop signal. A shell in between, or a signal that is not handled, would cut them."""
    with Client(stack.address) as connected:
        stream = connected.stream(PROMPT, max_tokens=400, min_tokens=400, temperature=1.0, resume_s=0.0)
        pieces = iter(stream)
        next(pieces)
        with subprocess.Popen(
            [DOCKER, "stop", "--time=30", stack.container("gateway")], stdout=subprocess.DEVNULL
        ) as stop:
            for _ in pieces:
                pass
            assert stream.completion is not None
            assert stop.wait(SECONDS) == 0
    assert inspect(stack.container("gateway"))["State"]["ExitCode"] == 0


def test_containers_cost_little_at_rest_and_end_soon(images: dict[str, dict[str, Any]]) -> None:
    """Twice the times that docs/containers.md has, for a machine that does other things too."""
    measured = measure(["docker-compose.yml"], seconds=20.0)
    print(measured)
    assert max(measured.cpu_percent_at_rest.values()) < 1.5
    assert measured.down_at_rest_s < 6.0
    assert measured.down_with_stream_s < 16.0


@pytest.mark.parametrize(
    "files",
    [
        ["--profile=metrics"],
        ["--file=docker-compose.yml", "--file=docker-compose.gpu.yml"],
        ["--file=docker-compose.yml", "--file=docker-compose.gpu.yml", "--file=docker-compose.vllm.yml"],
    ],
)
def test_other_ways_to_compose_are_well_formed_and_pin_what_they_run(engine: None, files: list[str]) -> None:
    config = json.loads(docker("compose", *files, "config", "--format=json"))
    assert len(config["services"]) >= len(SERVICES)
    for name, service in config["services"].items():
        image, _, tag = service["image"].rpartition(":")
        assert image, name
        assert tag != "latest", name
        assert all(port.get("host_ip") == "127.0.0.1" for port in service.get("ports", [])), name
