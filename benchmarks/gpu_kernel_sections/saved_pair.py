"""The pair as services load it, in a folder in memory if there is room."""

import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.gpu_kernel_sections.products import bytes_of_products
from benchmarks.gpu_sections.pair import synthesized
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from tools.synth.synthesis import write_pair

IN_MEMORY = Path("/dev/shm")
TEMPERATURE = 1.0
"""At which the two agree."""
ROOM = 1.5
"""Free bytes that a folder needs, over those that a step of the target reads: embedding and drafter come to them."""


def room_for(plan: Plan) -> Path:
    """Returns a new folder with room for the pair."""
    wanted = ROOM * bytes_of_products(plan.shape, plan.dtype.itemsize)
    is_large = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > wanted
    return Path(tempfile.mkdtemp(prefix="draftwire-pair-", dir=IN_MEMORY if is_large else None))


def save_pair(plan: Plan, folder: Path, findings: Findings, _: Budget) -> None:
    """Runs the section."""
    started = time.perf_counter()
    made = synthesized(plan, TEMPERATURE)
    write_pair(made, folder)
    findings.results |= {"agreement": made.agreement.mean, "seconds_to_save": time.perf_counter() - started}
    findings.rows += [
        Row("agreement at temperature 1", made.agreement.mean),
        Row("making and saving the pair", findings.results["seconds_to_save"], "s"),
    ]
