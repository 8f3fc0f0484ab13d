"""What can be seen of the Dockerfile and the compose files without a container engine."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftwire.cli.options import unknown_variables

ROOT = Path(__file__).parents[2]
LAYER = "/layer/"
"""Where a stage has what it hands to an image."""
COMPOSE_FILES = sorted(ROOT.glob("docker-compose*.yml"))


def stages(dockerfile: str) -> dict[str, str]:
    """Returns the instructions of each stage, by name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", dockerfile, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def misplaced_copies(dockerfile: str) -> list[str]:
    """Returns the copies out of stages that do not come before, or do not put the content where it is taken from."""
    wrong, known = [], dict[str, str]()
    for name, instructions in stages(dockerfile).items():
        for line in re.findall(r"^COPY --from=.*$", instructions, re.MULTILINE):
            source, path = re.fullmatch(r"COPY --from=(\S+) (\S+) \S+", line).groups()  # type: ignore[union-attr]
            if LAYER.rstrip("/") not in known.get(source, "") or path != LAYER:
                wrong.append(line)
        known[name] = instructions
    return wrong


def test_images_take_what_earlier_stages_hand_out() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert {"gateway", "verifier", "drafter", "verifier-vllm"} <= stages(text).keys()
    assert misplaced_copies(text) == []


@pytest.mark.parametrize(
    "line", ["COPY --from=two /layer/ /", "COPY --from=one /opt/x /opt/x", "COPY --from=no /layer/ /"]
)
def test_misplaced_copy_is_seen(line: str) -> None:
    text = f"FROM base AS one\nRUN mkdir /layer\nFROM one AS two\nUSER 1\nFROM two AS three\n{line}\n"
    assert misplaced_copies(text) == [line]
    assert misplaced_copies(text.replace(line, "COPY --from=one /layer/ /")) == []


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_compose_files_build_existing_targets_and_set_known_variables(path: Path) -> None:
    services: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
    targets = stages((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    for name, service in services.items():
        target = (service.get("build") or {}).get("target")
        assert target is None or target in targets, name
        assert unknown_variables(service.get("environment") or {}) == [], name
