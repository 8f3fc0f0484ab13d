"""Starts the services and runs the tests of other projects' clients, in an environment of their own.

    make test-clients

Prints a table of client by feature, as docs/clients.md has it; a feature counts where its test passed.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path
from xml.etree import ElementTree

from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import embedded_model
from draftwire.cli.stack_options import stack_options

FOLDER = Path(__file__).parent
CASES = FOLDER / "cases"
BUILD = FOLDER.parents[1] / "build" / "clients"
REPORT = BUILD / "report.xml"
FEATURES = ("text", "streaming", "tools", "streamed tools", "schema", "responses")
PASSED, FAILED, NOT_THERE = "yes", "no", ""


def environment() -> Path:
    """Returns the Python of the clients' environment, made anew if the requirements changed."""
    python, stamp = BUILD / "venv" / "bin" / "python", BUILD / "requirements.txt"
    wanted = (FOLDER / "requirements.txt").read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(BUILD / "venv", clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", FOLDER / "requirements.txt"], check=True)
        stamp.write_text(wanted)
    return python


def table() -> str:
    """Returns what was tried, as Markdown."""
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(REPORT).iter("testcase"):
        client = case.get("classname", "").rpartition(".")[2].removeprefix("test_").replace("_", "-")
        feature = case.get("name", "").removeprefix("test_").replace("_", " ")
        has_failed = any(child.tag in ("failure", "error") for child in case)
        found.setdefault(client, {})[feature] = FAILED if has_failed else PASSED
    lines = [f"| client | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|"]
    for client, features in sorted(found.items()):
        lines.append(f"| {client} | {' | '.join(features.get(name, NOT_THERE) for name in FEATURES)} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the tests, and returns pytest's exit status."""
    python = environment()
    options = stack_options(embedded_model("target"), embedded_model("drafter"), 8)
    with LocalStack(options) as stack:
        variables = {
            **os.environ,
            "DRAFTWIRE_URL": f"{stack.http_address}/v1",
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--confcutdir",
            CASES,
            CASES,
        ]
        status = subprocess.run([*command, f"--junitxml={REPORT}", *sys.argv[1:]], env=variables, check=False)
    print(table())
    return status.returncode


if __name__ == "__main__":
    sys.exit(main())
