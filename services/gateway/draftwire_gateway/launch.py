"""Starts a gateway. It computes nothing, so torch stays out of its process, also where it is installed."""

import os
import sys

from draftwire_gateway.config import GatewayConfig


def serve(config: GatewayConfig) -> int:
    """Runs a gateway until a signal ends it, and returns the process's exit status."""
    if "transformers" not in sys.modules:
        # It imports torch wherever it finds it, for parts that no tokenizer needs, and complains where it finds none.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from draftwire_gateway.server import serve as serve_here

    return serve_here(config)
