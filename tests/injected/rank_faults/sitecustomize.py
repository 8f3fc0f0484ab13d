"""Makes ranks fail when a test asks. Python loads this file in processes whose path has its folder.

The test makes a file in the folder that `RANK_FAULTS` names: `rank_0` or `rank_1` fails that rank in the middle of its
next forward pass, with all others in the same one; `verifier_step` or `drafter_step` fails that service's next step
outside any forward pass, once; `verifier_slow` or `drafter_slow` makes each step take `SLOW_SECONDS` while it is there.
"""

import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SLOW_SECONDS = 0.2

folder = Path(os.environ.get("RANK_FAULTS", "/nonexistent"))


def spoil_model(module: ModuleType) -> None:
    run_whole = module.CachedModel._run

    def run(self: Any, *args: Any) -> Any:
        group = getattr(self, "group", None)
        if group is not None and (folder / f"rank_{group.rank}").exists():
            raise MemoryError
        return run_whole(self, *args)

    module.CachedModel._run = run


def spoil_engine(module: ModuleType) -> None:
    is_verifier = hasattr(module, "TargetEngine")
    engine = module.TargetEngine if is_verifier else module.DraftEngine
    service = "verifier" if is_verifier else "drafter"
    fault, slow = folder / f"{service}_step", folder / f"{service}_slow"
    step_whole = engine.step

    def step(self: Any, *args: Any) -> Any:
        if fault.exists():
            fault.unlink()
            raise ValueError("not the group's fault")
        if slow.exists():
            time.sleep(SLOW_SECONDS)
        return step_whole(self, *args)

    engine.step = step


class Spoiler(MetaPathFinder):
    """Spoils modules when they are imported, and imports nothing itself: ranks are to start as they do otherwise."""

    def __init__(self) -> None:
        self._spoil: dict[str, Callable[[ModuleType], None]] = {
            "draftwire.models.cached_model": spoil_model,
            "draftwire_verifier.engine": spoil_engine,
            "draftwire_drafter.engine": spoil_engine,
        }

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spoil = self._spoil.pop(name, None)
        spec = importlib.util.find_spec(name) if spoil is not None else None
        if spoil is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_spoil(module: ModuleType) -> None:
            execute(module)
            spoil(module)

        spec.loader.exec_module = execute_and_spoil  # type: ignore[method-assign]
        return spec


if re.search(r"draftwire\.cli\0serve|draftwire\.engine\.ranks", Path("/proc/self/cmdline").read_text()):
    sys.meta_path.insert(0, Spoiler())
