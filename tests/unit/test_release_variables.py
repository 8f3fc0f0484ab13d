"""What `make release` takes, before it looks at tools, the checkout or a registry."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from draftwire import __version__

ROOT = Path(__file__).parents[2]
DIGEST = f"sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def release() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / "deploy" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"REGISTRY": ""}, "REGISTRY is not set: make release REGISTRY=registry.example.com/team"),
        ({"REGISTRY": "https://registry.example.com/team"}, "without a scheme"),
        ({"REGISTRY": "team"}, "must be host"),
        ({"REGISTRY": "registry.example.com/Team"}, "in small letters"),
        ({"VERSION": "9.9.9"}, f"that of the sources, {__version__}, or such as {__version__}-rc.1, not '9.9.9'"),
        ({"VERSION": f"{__version__}+local"}, "VERSION must be"),
        ({"BASE_IMAGE": "python:3.11-slim"}, "must end with @sha256:"),
        ({"BASE_IMAGE": "python@sha256:12"}, "must end with @sha256:"),
        ({"TORCH_BUILDS": "cpu rocm"}, "must be of cpu, cuda, not 'cpu rocm'"),
        ({"TORCH_BUILDS": " "}, "must be of cpu, cuda"),
    ],
)
def test_wrong_variable_is_refused_in_one_line(
    release: Any, variables: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main({"REGISTRY": "127.0.0.1:1/team", **variables}) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


@pytest.mark.parametrize(
    "registry", ["localhost", "localhost:5000", "127.0.0.1:5000/team", "ghcr.io/team/sub-team", "registry.example.com"]
)
def test_registries_and_versions_are_taken_as_far_as_the_tools(release: Any, registry: str) -> None:
    for version in ("", __version__, f"{__version__}-rc.1", f"{__version__}-20261126.abc"):
        variables = {"REGISTRY": registry, "VERSION": version, "DOCKER": "/nowhere/docker"}
        with pytest.raises(release.ReleaseError, match=r"/nowhere/docker does not work|working tree is not a commit"):
            release.checked(variables)


def test_images_of_both_builds_share_the_gateway(release: Any) -> None:
    both = release.Release("r.io/t", "1.0.0", "abc", 0, f"b@{DIGEST}", ("cpu", "cuda"), "docker", "helm", False)
    models = [(service, tag) for service in ("verifier", "drafter") for tag in ("1.0.0", "1.0.0-cuda")]
    assert both.images == [("gateway", "1.0.0"), *models]


def test_base_of_releases_is_pinned(release: Any) -> None:
    name, _, digest = release.pinned_base().partition("@sha256:")
    assert (name, len(digest)) == ("python:3.11-slim", 64)
