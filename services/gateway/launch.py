"""Starts a gateway. It computes nothing, so torch stays out of its process, also where it is installed."""

import sys

from draftwire.services.gateway.config import GatewayConfig


def serve(config: GatewayConfig) -> int:
    """Runs a gateway until it is told to stop, and returns its exit status; see `draftwire.services.gateway.server`."""
    # transformers imports torch wherever it finds it, for parts that no tokenizer needs.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from draftwire.services.gateway import server

    return server.serve(config)
