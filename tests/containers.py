"""Containers, by the command line of the engine. `DOCKER` names the client, where it is not `docker`."""

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCKER = os.environ.get("DOCKER", "docker")
SECONDS = 60


def docker(*arguments: str, timeout_s: float = SECONDS, **environment: str) -> str:
    """Runs the client and returns what it prints."""
    result = subprocess.run(
        [DOCKER, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, f"docker {' '.join(arguments)}: {result.stderr}"
    return result.stdout


@cache
def what_is_missing() -> str:
    """Returns why containers cannot be run here; empty if they can."""
    for arguments in (["info"], ["compose", "version"]):
        try:
            docker(*arguments)
        except (OSError, AssertionError, subprocess.TimeoutExpired) as error:
            return str(error).strip()
    return ""


def inspect(name: str) -> dict[str, Any]:
    (found,) = json.loads(docker("inspect", name))
    return dict(found)
