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
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import typer
import yaml
from typer.testing import CliRunner

from draftwire.cli.options import serve_command

ROOT = Path(__file__).parents[1]
CHART = ROOT / "k8s" / "chart"
VALUES = sorted(path.stem for path in (ROOT / "k8s" / "values").glob("*.yaml"))
"""Names of the sets of values in the repository."""
EVERYTHING = "everything"
"""Another set, for tests alone, which sets every value that can be set beside the others."""

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

    def workload(self, component: str) -> Manifest:
        """Returns the workload of a service, or of a target's: "verifier", "coder-verifier"."""
        kinds = {"gateway": "Deployment", "drafter": "Deployment", "verifier": "StatefulSet"}
        return self.one(kinds[component.rpartition("-")[2]], component)

    def template(self, service: str) -> Manifest:
        template: Manifest = self.workload(service)["spec"]["template"]
        return template

    def pods(self) -> list[Manifest]:
        """Returns the templates of all pods, each with "metadata" and "spec"."""
        pods = [each["spec"]["template"] for kind in ("Deployment", "StatefulSet") for each in self.all(kind)]
        for group in self.all("LeaderWorkerSet"):
            template = group["spec"]["leaderWorkerTemplate"]
            pods += [template["leaderTemplate"], template["workerTemplate"]]
        return pods + self.all("Pod")

    def container(self, service: str) -> Manifest:
        return container_of(self.template(service)["spec"])

    def environment(self, service: str) -> dict[str, str]:
        return environment_of(self.container(service))

    def at(self, path: str) -> Any:
        """Returns what is at a path; None where there is nothing.

        Args:
            path: such as "Service/gateway.spec.type": the kind of a manifest and its component, then keys. Instead of
                a kind, "template", "container" and "environment" are those of a service's pod. Parts of lists are
                found by their names: "container/gateway.volumeMounts.tls.mountPath".
        """
        root, *keys = path.split(".")
        kind, component = root.split("/")
        parts = {"template": self.template, "container": self.container, "environment": self.environment}
        found: Any = parts[kind](component) if kind in parts else self.one(kind, component)
        for key in keys:
            named = {each["name"]: each for each in found} if isinstance(found, list) else found
            found = (named or {}).get(key)
        return found


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
        values: the name of a set of values in the repository, or `EVERYTHING`.
        settings: what to change, as after `--set`, such as "verifier.replicas=3"; a value may be JSON.
    """
    done = template(values, *settings)
    assert done.returncode == 0, done.stderr
    return Rendered(tuple(filter(None, yaml.safe_load_all(done.stdout))))


def expect(values: str, expected: Mapping[str, Any], *settings: str) -> None:
    """Checks what the rendered chart has at some paths; see `Rendered.at`. None stands for nothing."""
    rendered = render(values, *settings)
    found = {path: rendered.at(path) for path in expected}
    assert found == expected, f"found {found}"


def refuse(values: str, message: str, *settings: str) -> None:
    """Checks that the chart is not rendered, and says why."""
    done = template(values, *settings)
    assert done.returncode != 0
    assert message in done.stderr


def template(values: str, *settings: str, release: str = "prod") -> subprocess.CompletedProcess[str]:
    """Runs `helm template` and returns what it says."""
    return run_helm("template", release, *arguments_of(values, *settings))


def arguments_of(values: str, *settings: str) -> list[str]:
    """Returns Helm's arguments for the chart with a set of values and changes to it, in a namespace."""
    changes = [part for setting in settings for part in ("--set-json" if is_json(setting) else "--set", setting)]
    return [str(CHART), "--namespace=llm", f"--values={values_file(values)}", *changes]


def values_file(values: str) -> Path:
    folder = ROOT / "tests" / "chart_values" if values == EVERYTHING else ROOT / "k8s" / "values"
    return folder / f"{values}.yaml"


def is_json(setting: str) -> bool:
    try:
        json.loads(setting.partition("=")[2])
    except ValueError:
        return False
    return True


def configure(service: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a service up to where it has its configuration, and returns that."""
    serve = Mock(return_value=0)
    monkeypatch.setitem(sys.modules, f"draftwire_{service}.launch", SimpleNamespace(serve=serve))
    app = typer.Typer()
    app.command()(serve_command(service))
    done = CliRunner().invoke(app, env=environment)
    assert done.exit_code == 0, done.output
    return serve.call_args.args[0]
