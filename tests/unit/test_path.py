"""The path of one round stays short: numbers that may be lowered, and never raised."""

import json
import os
import subprocess
import sys

import pytest

from tests.imports import is_in, packages, sources
from tests.path import NOT_COUNTED, ROOT, ROOTS, files_of_a_round, imports_of, lines_of

MOST_LINES = 11_600
"""Of the modules that the roots import, transitively."""
MOST_LINES_OF_A_ROUND = 8_600
"""Of the files that docs/round.md lists."""
LOADED_SHARE = 1.1
"""Lines that are loaded for a few rounds of a fixed chain, over those that are imported."""
MOST_MODULES_OF = {"draftwire.local_loop": 29, "draftwire_verifier.engine": 38}
"""That a root imports, transitively."""


def test_path_of_a_round_stays_within_its_budget() -> None:
    found = imports_of(ROOTS)
    print(f"\n{found.num_lines:,} lines in {len(found.modules)} modules")
    assert found.num_lines <= MOST_LINES


@pytest.mark.parametrize("root", MOST_MODULES_OF)
def test_root_imports_few_modules(root: str) -> None:
    found = imports_of([root])
    print(f"\n{root}: {len(found.modules)} modules, {found.num_lines:,} lines")
    assert len(found.modules) <= MOST_MODULES_OF[root]


def test_page_of_a_round_lists_files_of_the_path_alone() -> None:
    listed = files_of_a_round()
    print(f"\n{lines_of(listed):,} lines in the {len(listed)} files of docs/round.md")
    assert len(listed) > 30
    assert set(listed) <= set(imports_of(ROOTS).modules)
    assert lines_of(listed) <= MOST_LINES_OF_A_ROUND


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
