"""Starts the services and runs the tests of other projects' clients, in environments of their own.

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
ENVIRONMENTS = {
    "requirements": ["instructor", "langchain_openai", "litellm", "llm", "openai_agents"],
    "requirements_newest": ["open_webui", "openai", "pydantic_ai"],
    "requirements_openai_2": ["llama_index"],
}
"""Clients whose tests run with some requirements: no release of the openai package suits all."""
FEATURES = ("text", "streaming", "tools", "streamed tools", "schema", "responses")
PASSED, FAILED, NOT_THERE = "yes", "no", ""


def environment(name: str) -> Path:
    """Returns the Python of an environment, made anew if its requirements changed."""
    folder = BUILD / name
    python, stamp = folder / "venv" / "bin" / "python", folder / "requirements.txt"
    wanted = (FOLDER / f"{name}.txt").read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder / "venv", clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", FOLDER / f"{name}.txt"], check=True)
        stamp.write_text(wanted)
    return python


def table() -> str:
    """Returns what was tried, as Markdown."""
    found: dict[str, dict[str, str]] = {}
    for case in (case for name in ENVIRONMENTS for case in ElementTree.parse(report(name)).iter("testcase")):
        client = case.get("classname", "").rpartition(".")[2].removeprefix("test_").replace("_", "-")
        feature = case.get("name", "").removeprefix("test_").replace("_", " ")
        has_failed = any(child.tag in ("failure", "error") for child in case)
        found.setdefault(client, {})[feature] = FAILED if has_failed else PASSED
    lines = [f"| client | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|"]
    for client, features in sorted(found.items()):
        lines.append(f"| {client} | {' | '.join(features.get(name, NOT_THERE) for name in FEATURES)} |")
    return "\n".join(lines)


def report(name: str) -> Path:
    """Returns the file with what passed in an environment."""
    return BUILD / name / "report.xml"


def main() -> int:
    """Runs the tests, and returns the exit status of the first environment's whose tests failed."""
    pythons = {name: environment(name) for name in ENVIRONMENTS}
    options = stack_options(embedded_model("target"), embedded_model("drafter"), 8)
    statuses = []
    with LocalStack(options) as stack:
        variables = {
            **os.environ,
            "DRAFTWIRE_URL": f"{stack.http_address}/v1",
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        alone = ["-p", "no:cacheprovider", "-c", os.devnull, "--confcutdir", CASES]
        for name, python in pythons.items():
            cases = [CASES / f"test_{client}.py" for client in ENVIRONMENTS[name]]
            command = [python, "-m", "pytest", "-q", *alone, *cases, f"--junitxml={report(name)}"]
            statuses.append(subprocess.run([*command, *sys.argv[1:]], env=variables, check=False).returncode)
    print(table())
    return next(filter(None, statuses), 0)


if __name__ == "__main__":
    sys.exit(main())
