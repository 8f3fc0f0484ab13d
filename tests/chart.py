"""The Helm chart as tests see it: rendered with the values that they choose, and taken apart."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from draftwire.services.options import ENTRIES, serve_command

ROOT = Path(__file__).parents[1]
CHART = ROOT / "k8s" / "chart"
VALUES = sorted(path.stem for path in (ROOT / "k8s" / "values").glob("*.yaml"))
"""Names of the sets of values in the repository."""

Manifest = dict[str, Any]

COMPONENT = "app.kubernetes.io/component"
SERVICES = ("gateway", "verifier", "drafter")


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs helm; skips the test where there is none."""
    folders = [os.environ.get("HELM_DIR", ""), os.environ.get("PATH", "")]
    path = shutil.which("helm", path=os.pathsep.join(filter(None, folders)))
    if path is None:
        pytest.skip("helm is neither in the folder that HELM_DIR names nor on PATH")
    return subprocess.run([path, *arguments], capture_output=True, text=True)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What one set of values makes."""

    manifests: tuple[Manifest, ...]

    def all(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def one(self, kind: str, component: str) -> Manifest:
        found = [each for each in self.all(kind) if each["metadata"]["labels"][COMPONENT] == component]
        assert len(found) == 1, f"{len(found)} {kind} of {component}"
        return found[0]

    def workload(self, service: str) -> Manifest:
        kinds = {"gateway": "Deployment", "drafter": "Deployment", "verifier": "StatefulSet"}
        return self.one(kinds[service], service)

    def pods(self) -> list[Manifest]:
        """Returns the templates of all pods, each with "metadata" and "spec"."""
        pods = [self.workload(service)["spec"]["template"] for service in SERVICES if self.has(service)]
        for group in self.all("LeaderWorkerSet"):
            template = group["spec"]["leaderWorkerTemplate"]
            pods += [template["leaderTemplate"], template["workerTemplate"]]
        return pods + self.all("Pod")

    def has(self, service: str) -> bool:
        kinds = ("Deployment", "StatefulSet")
        return any(each["metadata"]["labels"][COMPONENT] == service for kind in kinds for each in self.all(kind))

    def pod(self, service: str) -> Manifest:
        spec: Manifest = self.workload(service)["spec"]["template"]["spec"]
        return spec

    def container(self, service: str) -> Manifest:
        return container_of(self.pod(service))

    def environment(self, service: str) -> dict[str, str]:
        return environment_of(self.container(service))


def container_of(pod: Mapping[str, Any]) -> Manifest:
    (container,) = pod["containers"]
    return dict(container)


def environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that have a value in the manifest itself."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


@functools.cache
def render(values: str, *settings: str) -> Rendered:
    """Renders the chart.

    Args:
        values: the name of a set of values in the repository.
        settings: what to change, as after `--set`, such as "verifier.replicas=3"; a value may be JSON.
    """
    done = template(values, *settings)
    assert done.returncode == 0, done.stderr
    return Rendered(tuple(filter(None, yaml.safe_load_all(done.stdout))))


def template(values: str, *settings: str, release: str = "prod") -> subprocess.CompletedProcess[str]:
    """Runs `helm template` and returns what it says."""
    changes = [part for setting in settings for part in ("--set-json" if is_json(setting) else "--set", setting)]
    file = ROOT / "k8s" / "values" / f"{values}.yaml"
    return run_helm("template", release, str(CHART), "--namespace=llm", f"--values={file}", *changes)


def is_json(setting: str) -> bool:
    try:
        json.loads(setting.partition("=")[2])
    except ValueError:
        return False
    return True


def configure(service: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a service up to where it has its configuration, and returns that."""
    taken: list[Any] = []
    module = ModuleType("draftwire_taken")
    module.serve = lambda config: taken.append(config) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(ENTRIES, service, module.__name__)
    app = typer.Typer()
    app.command()(serve_command(service))
    done = CliRunner().invoke(app, env=environment)
    assert done.exit_code == 0, done.output
    (config,) = taken
    return config
