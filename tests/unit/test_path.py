"""The path of one round stays short: numbers that may be lowered, and never raised."""

import json
import os
import subprocess
import sys

import pytest

from tests.imports import is_in, packages, sources
from tests.path import NOT_COUNTED, ROOT, ROOTS, imports_of, lines_of

MOST_LINES = 21_100
"""Of the modules that the roots import, transitively."""
LOADED_SHARE = 1.1
"""Lines that are loaded for a few rounds of a fixed chain, over those that are imported."""
MOST_MODULES_OF = {"draftwire.local_loop": 66, "draftwire_verifier.engine": 105}
"""That a root imports, transitively."""
UNKNOWN_TO_THE_LOOP = (
    *("draftwire_gateway.options", "draftwire_gateway.speculation", "draftwire_gateway.config"),
    *("draftwire.options", "draftwire.drafting", "draftwire.method.ahead_limits", "draftwire.method.tree_limits"),
)
"""Options of the gateway, what chooses for sessions, and what is configured of both."""


def test_path_of_a_round_stays_within_its_budget() -> None:
    found = imports_of(ROOTS)
    print(f"\n{found.num_lines:,} lines in {len(found.modules)} modules")
    assert found.num_lines <= MOST_LINES


@pytest.mark.parametrize("root", MOST_MODULES_OF)
def test_root_imports_few_modules(root: str) -> None:
    found = imports_of([root])
    print(f"\n{root}: {len(found.modules)} modules, {found.num_lines:,} lines")
    assert len(found.modules) <= MOST_MODULES_OF[root]


def test_loop_of_the_gateway_knows_no_option() -> None:
    found = imports_of(["draftwire_gateway.session.loop"]).modules
    assert [name for name in found if any(is_in(name, part) for part in UNKNOWN_TO_THE_LOOP)] == []


def test_rounds_load_hardly_more_than_what_is_imported() -> None:
    command = [sys.executable, "-m", "tests.one_process"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    report = json.loads(done.stdout)
    assert report["drafted_rounds"] > 5
    own = [name for name in report["modules"] if name in sources() and name not in packages()]
    counted = [name for name in own if not any(is_in(name, part) for part in NOT_COUNTED)]
    print(f"\n{lines_of(counted):,} lines in {len(counted)} modules are loaded")
    assert lines_of(counted) <= LOADED_SHARE * imports_of(ROOTS).num_lines
