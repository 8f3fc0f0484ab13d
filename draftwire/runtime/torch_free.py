"""Processes without torch, even where it is installed."""

import os
import sys


def leave_torch_alone() -> None:
    """Lets no import find torch: it takes seconds and hundreds of megabytes. To be called before transformers is
    imported, which imports torch if it is installed, for parts that no tokenizer needs, and warns if it is not.
    """
    if "transformers" not in sys.modules:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # no import finds it
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
