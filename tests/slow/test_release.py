"""`make release` into a registry on this machine; what it pushed runs by digest, and what it refuses is one line.

Skipped where a container engine, helm or a registry (`docker-registry` of Debian) is missing.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from containers import DOCKER, ROOT, docker, what_is_missing
from observing import wait_until

from benchmarks.compose import SERVICES, Project
from benchmarks.relay import free_port
from draftwire import __version__
from draftwire.client import Client

SECONDS = 900.0
BASE = "python:3.11-slim"
REGISTRIES = ("docker-registry", "registry")

pytestmark = pytest.mark.timeout(2 * SECONDS)


@dataclass(frozen=True, slots=True)
class ReleasePlace:
    """A checkout that is a commit, and where its release goes."""

    checkout: Path
    registry: str
    helm: str
    base_image: str

    def make(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs what `make release` runs."""
        own = {"REGISTRY": f"{self.registry}/team", "BASE_IMAGE": self.base_image, "DOCKER": DOCKER}
        folders = {"HELM_DIR": str(Path(self.helm).parent)}
        return subprocess.run(
            [sys.executable, "deploy/release.py"],
            cwd=self.checkout,
            env={**os.environ, **own, **folders, **variables},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def refusal(self, **variables: str) -> str:
        """Returns the one line that a release which is refused says."""
        done = self.make(**variables)
        assert done.returncode == 2, done.stderr[-2000:]
        (line,) = done.stderr.splitlines()
        return line.removeprefix("release: ")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReleasePlace]:
    if what_is_missing():
        pytest.skip(f"no containers here: {what_is_missing()}")
    folders = filter(None, (os.environ.get("HELM_DIR"), os.environ["PATH"]))
    helm = shutil.which("helm", path=os.pathsep.join(folders))
    server = next(filter(None, map(shutil.which, REGISTRIES)), None)
    if helm is None or server is None:
        pytest.skip("there is no helm, or no docker-registry, on this machine")
    folder = tmp_path_factory.mktemp("release")
    address = f"127.0.0.1:{free_port()}"
    settings = {"version": "0.1", "log": {"level": "error"}, "http": {"addr": address}}
    storage = {"filesystem": {"rootdirectory": str(folder / "registry")}}
    (folder / "registry.yml").write_text(json.dumps({**settings, "storage": storage}))
    serve, silent = [server, "serve", str(folder / "registry.yml")], subprocess.DEVNULL
    with subprocess.Popen(serve, stdout=silent, stderr=silent) as running:
        try:
            wait_until(lambda: is_listening(address), "the registry listens")
            yield ReleasePlace(checkout(folder), address, helm, pushed_base(address))
        finally:
            running.terminate()


def is_listening(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as connecting:
        return connecting.connect_ex((host, int(port))) == 0


def checkout(folder: Path) -> Path:
    """Returns a clone of what is committed, with the wheels that are fetched already."""
    clone = folder / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
    for wheel in sorted((ROOT / "wheels").glob("*.whl")):
        os.link(wheel, clone / "wheels" / wheel.name)
    for stamp in (ROOT / "wheels").glob("fetched-*"):
        (clone / "wheels" / stamp.name).touch()
    if (ROOT / "build" / "release").is_dir():
        shutil.copytree(ROOT / "build" / "release", clone / "build" / "release", symlinks=True)
    return clone


def pushed_base(registry: str) -> str:
    """Pushes this machine's base image, so that it has a digest whatever it is, and returns its name with that."""
    name = f"{registry}/python:3.11-slim"
    docker("tag", BASE, name)
    docker("push", name, timeout_s=SECONDS)
    (digest,) = [one for one in json.loads(docker("inspect", name))[0]["RepoDigests"] if one.startswith(registry)]
    docker("rmi", name)
    return f"{name}@{digest.partition('@')[2]}"


@pytest.fixture(scope="module")
def released(place: ReleasePlace) -> dict[str, Any]:
    started_at = time.monotonic()
    done = place.make()
    print(f"released in {time.monotonic() - started_at:.0f} s: {done.stdout}")
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert said == json.loads((place.checkout / "dist" / "release.json").read_text())
    return dict(said)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"REGISTRY": ""}, "REGISTRY is not set"),
        ({"DOCKER": "/nowhere/docker"}, "/nowhere/docker does not work here"),
        ({"HELM_DIR": "/nowhere", "PATH": "/usr/bin:/bin"}, "helm is neither on PATH"),
        ({"REGISTRY": f"127.0.0.1:{free_port()}/team"}, "no registry answers at http://127.0.0.1:"),
    ],
)
def test_what_is_missing_is_said_in_one_line(place: ReleasePlace, variables: dict[str, str], line: str) -> None:
    if "HELM_DIR" in variables and shutil.which("helm", path=variables["PATH"]):
        pytest.skip("helm is where every machine has its programs")
    assert line in place.refusal(**variables)


def test_tree_that_is_no_commit_is_refused(place: ReleasePlace) -> None:
    changed = place.checkout / "README.md"
    text = changed.read_text()
    changed.write_text(text + "\n")
    try:
        assert "the working tree is not a commit, 1 files differ" in place.refusal()
    finally:
        changed.write_text(text)


def test_version_that_exists_is_refused(place: ReleasePlace, released: dict[str, Any]) -> None:
    assert f"{place.registry}/team/draftwire-gateway:{__version__} exists already" in place.refusal()


def test_images_say_what_they_are_and_come_with_bills_of_what_they_hold(
    place: ReleasePlace, released: dict[str, Any]
) -> None:
    for service in SERVICES:
        image = released["images"][service]
        docker("pull", image["reference"], timeout_s=SECONDS)
        (found,) = json.loads(docker("inspect", image["reference"]))
        labels = found["Config"]["Labels"]
        assert labels["org.opencontainers.image.revision"] == released["revision"]
        assert labels["org.opencontainers.image.base.name"] == place.base_image == released["base_image"]
        assert found["Created"].startswith(released["date"].removesuffix("Z")), "of the commit"
        bill = json.loads((place.checkout / "dist" / image["bill_of_materials"]["file"]).read_text())
        assert bill["spdxVersion"].startswith("SPDX-2")
        versions = {one["name"]: one.get("versionInfo") for one in bill["packages"]}
        assert versions["draftwire"] == __version__
        assert {"grpcio", "libc6"} <= set(versions), "of Python and of Debian"
        assert ("torch" in versions) == (service != "gateway")


def test_released_images_generate_by_digest(released: dict[str, Any], tmp_path: Path) -> None:
    services = {service: {"image": released["images"][service]["reference"]} for service in SERVICES}
    (tmp_path / "released.json").write_text(json.dumps({"services": services}))
    project = Project(("docker-compose.yml", str(tmp_path / "released.json")))
    try:
        project.up()
        with Client(f"127.0.0.1:{project.port}") as client:
            completion = client.generate("def merge_sorted(a, b):", max_tokens=32, temperature=0.0)
        assert completion.num_accepted_draft_tokens > 0
        running = json.loads(docker("inspect", f"{project.name}-gateway-1"))[0]["Config"]["Image"]
        assert running == services["gateway"]["image"]
    finally:
        project.compose("down", "--timeout", "1")


def test_chart_is_pulled_by_digest_and_names_the_released_images(
    place: ReleasePlace, released: dict[str, Any], tmp_path: Path
) -> None:
    subprocess.run(
        [place.helm, "pull", released["chart"]["reference"], "--plain-http", "--destination", str(tmp_path)],
        check=True,
        capture_output=True,
    )
    (chart,) = tmp_path.glob("*.tgz")
    values = place.checkout / "dist" / released["values"]["cpu"]
    demo = ROOT / "k8s" / "values" / "cpu-demo.yaml"
    rendered = subprocess.run(
        [place.helm, "template", "demo", str(chart), "--values", str(demo), "--values", str(values)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for service in SERVICES:
        _, digest = released["images"][service]["reference"].split("@")
        assert f"image: {place.registry}/team/draftwire-{service}:{__version__}@{digest}" in rendered
