"""The llm command, with a model of a configuration file, as its documentation says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PERSON, check_person


@pytest.fixture(scope="module")
def configured(url: str, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {model}\n  api_base: {url}\n  api_key_name: none\n"
        "  supports_tools: true\n  supports_schema: true\n"
    )
    return {**os.environ, "LLM_USER_PATH": str(folder)}


def ask(variables: dict, *arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "llm"), "-m", "here", "--key", "none", "Who is it?", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


def test_text(configured: dict) -> None:
    assert ask(configured, "--no-stream", "-o", "max_tokens", "16").strip()


def test_streaming(configured: dict) -> None:
    assert ask(configured, "-o", "max_tokens", "16").strip()


def test_schema(configured: dict) -> None:
    check_person(json.loads(ask(configured, "--schema", json.dumps(PERSON))))
