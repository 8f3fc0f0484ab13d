"""Makes verifiers slow. Python loads this file in processes whose path has its folder."""

import os
import time
from pathlib import Path

STEP_SECONDS = float(os.environ.get("SLOW_STEP_SECONDS", "0.03"))

if "serve\0verifier" in Path("/proc/self/cmdline").read_text():
    from draftwire.engine.target_session import Step, StepResult
    from draftwire_verifier.engine import TargetEngine

    step_at_once = TargetEngine.step

    def step(self: TargetEngine, step: Step) -> StepResult:
        time.sleep(STEP_SECONDS)
        return step_at_once(self, step)

    TargetEngine.step = step  # type: ignore[method-assign]
