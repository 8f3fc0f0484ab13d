"""Starts a drafter: one process, or several. Little is imported here: see `draftwire.engine.ranks.launch`."""

from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.launch import launch
from draftwire.engine.ranks.place import Place
from draftwire_drafter.config import DrafterConfig


def serve(config: DrafterConfig) -> int:
    """Runs a drafter until a signal ends it, and returns the process's exit status; see `launch`."""

    def serve_here(place: Place, followers: Followers) -> int:
        from draftwire_drafter.server import serve

        return serve(config, place, followers)

    return launch(config, serve_here)
