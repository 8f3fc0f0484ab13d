"""OpenVINO's Runtime: imported without its telemetry, in the one release whose paged attention this package knows.

That operation is private to OpenVINO: its inputs were 13, 17, 21, 25 and 28 in two years.
"""

import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from draftwire.errors import InvalidRequestError

RELEASE = "2026.4.1"
INSTRUCTIONS = "avx2"
"""Instructions of the CPUs that this has been run on, as Linux names them."""
CPU_INFORMATION = Path("/proc/cpuinfo")
TELEMETRY = "openvino_telemetry"


def why_not_here() -> str:
    """Returns the reason why OpenVINO cannot be used on this machine; empty if it can. It is not imported for that."""
    try:
        installed = version("openvino")
    except PackageNotFoundError:
        return "OpenVINO is not installed: pip install 'draftwire[openvino]'"
    if not installed.startswith(RELEASE):
        return f"OpenVINO {installed} is installed, and {RELEASE} is needed: pip install openvino=={RELEASE}"
    machine = platform.machine()
    if machine != "x86_64" or not CPU_INFORMATION.is_file():
        return f"it needs Linux on x86-64, and this is {platform.system()} on {machine}"
    has_them = INSTRUCTIONS in CPU_INFORMATION.read_text(encoding="utf-8", errors="replace").split()
    return "" if has_them else f"it needs a CPU with {INSTRUCTIONS}, which this one has not"


def import_openvino() -> Any:
    """Returns the module `openvino`.

    Its import would make an id of the user in `~/intel` and send an event over the network; without the package that
    does so, it uses a stub of its own.

    Raises:
        InvalidRequestError: it cannot be used here; the message says why.
    """
    if reason := why_not_here():
        raise InvalidRequestError(f"engine openvino: {reason}")
    sys.modules.setdefault(TELEMETRY, None)  # type: ignore[arg-type]  # which makes its import fail
    import openvino

    return openvino


@cache
def core() -> Any:
    """Returns the one `openvino.Core` of this process, which is never let go: its CPU plugin gives the thread another
    stack for signals, and of several plugins the last one to go leaves a stack that is freed.
    """
    return import_openvino().Core()
