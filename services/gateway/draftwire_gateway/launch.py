"""Starts a gateway without torch, even if it is installed: a gateway runs no model."""

import os
import sys

from draftwire_gateway.config import GatewayConfig


def serve(config: GatewayConfig) -> int:
    """Runs a gateway until a signal ends it, and returns the process's exit status."""
    if "transformers" not in sys.modules:
        # transformers imports torch if it is installed, for parts that no tokenizer needs, and warns if it is not.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # no import finds it
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from draftwire_gateway.server import serve as serve_here

    return serve_here(config)
