"""Changes modules in all the ways that a tool knows, and shows which changes no test notices: Cosmic Ray, on demand.

    make mutate MODULES=draftwire/verification/token.py TESTS=tests/unit/test_verification.py

It runs in an environment of its own, on a copy of the tree, with some tests, or with the unit tests that import the
module. What survives is printed as a diff: some changes no test can notice, for they change nothing that anybody sees.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.mutants import ROOT
from tests.mutants.__main__ import nearest_tests

REQUIREMENT = "cosmic-ray==8.7.0"
CONFIG = Path(__file__).with_name("cosmic-ray.toml")
BUILD = ROOT / "build" / "cosmic-ray"
TREE = BUILD / "tree"
TEST_SECONDS = 300.0
"""How long the tests may take with one change."""


def environment() -> Path:
    """Returns the folder of the tool's programs, installed anew if another version is wanted."""
    programs, stamp = BUILD / "venv" / "bin", BUILD / "requirement.txt"
    if not stamp.exists() or stamp.read_text() != REQUIREMENT:
        venv.create(BUILD / "venv", clear=True, with_pip=True)
        subprocess.run([programs / "python", "-m", "pip", "install", "-q", REQUIREMENT], check=True)
        stamp.write_text(REQUIREMENT)
    return programs


def copy_tree() -> None:
    """Copies what git knows and what it does not ignore: the tool writes its changes into files."""
    shutil.rmtree(TREE, ignore_errors=True)
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)


def config_of(module: str, tests: Sequence[str]) -> str:
    """Returns the tool's settings for a module."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    settings = {"module-path": module, "timeout": TEST_SECONDS, "test-command": shlex.join(pytest)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(["[cosmic-ray]", *lines, "", CONFIG.read_text()])


def change(programs: Path, module: str, tests: Sequence[str]) -> None:
    """Tries all changes of a module, and prints those that no test noticed, and their share.

    Raises:
        subprocess.CalledProcessError: a test fails without a change, or the tool fails.
    """
    session, config = f"{Path(module).stem}.sqlite", f"{Path(module).stem}.toml"
    (TREE / config).write_text(config_of(module, tests))
    paths = os.pathsep.join(str(path) for path in (TREE, *sorted((TREE / "services").iterdir())))
    # What was compiled is told from what was changed by size and second.
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for command in (
        ["cosmic-ray", "init", config, session],
        ["cosmic-ray", "baseline", config],
        ["cr-filter-operators", session, config],
        ["cosmic-ray", "exec", config, session],
        ["cr-report", "--surviving-only", "--show-diff", session],
    ):
        subprocess.run([programs / command[0], *command[1:]], cwd=TREE, env=variables, check=True)


def main() -> int:
    """Returns the exit status: 1 if the tool or, without a change, a test fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation_tool", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="+", help="source files, relative to the repository")
    parser.add_argument("--tests", nargs="+", default=[], help="files, or functions in files, instead of the nearest")
    arguments = parser.parse_args()
    programs = environment()
    copy_tree()
    for module in arguments.modules:
        tests = arguments.tests or nearest_tests(ROOT, ROOT / module)
        if not tests:
            parser.error(f"no unit test imports {module}: name some with --tests")
        print(module, "with", *tests, flush=True)
        try:
            change(programs, module, tests)
        except subprocess.CalledProcessError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
