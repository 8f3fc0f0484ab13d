"""Starts a drafter: one process, or several. Little is imported here: see `draftwire.engine.ranks.rank_launch`."""

from draftwire.engine.ranks.rank_launch import MakeService, launch
from draftwire.options.model_free.names import are_text_drafters
from draftwire.runtime.torch_free import leave_torch_alone
from draftwire_drafter.config import DrafterConfig


def serve(config: DrafterConfig) -> int:
    """Runs a drafter until a signal ends it, and returns the process's exit status."""
    if are_text_drafters(config.drafts.strategy):
        leave_torch_alone()
    return launch(config, _import_server)


def _import_server() -> MakeService:
    from draftwire_drafter.server import make_service

    return make_service
