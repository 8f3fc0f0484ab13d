"""Starts a gateway without torch, even if it is installed: a gateway runs no model."""

from draftwire.runtime.torch_free import leave_torch_alone
from draftwire_gateway.config import GatewayConfig


def serve(config: GatewayConfig) -> int:
    """Runs a gateway until a signal ends it, and returns the process's exit status."""
    leave_torch_alone()
    from draftwire_gateway.server import serve as serve_here

    return serve_here(config)
