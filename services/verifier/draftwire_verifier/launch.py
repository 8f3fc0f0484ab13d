"""Starts a verifier: one process, or several. Little is imported here: see `draftwire.engine.ranks.rank_launch`."""

from draftwire.engine.ranks.rank_launch import MakeService, launch
from draftwire_verifier.config import VerifierConfig


def serve(config: VerifierConfig) -> int:
    """Runs a verifier until a signal ends it, and returns the process's exit status."""
    return launch(config, _import_server)


def _import_server() -> MakeService:
    from draftwire_verifier.server import make_service

    return make_service
