"""Starts a verifier: one process, or several. Little is imported here: see `draftwire.services.ranks.launch`."""

from draftwire.services.ranks.followers import Followers
from draftwire.services.ranks.launch import launch
from draftwire.services.ranks.place import Place
from draftwire.services.verifier.config import VerifierConfig


def serve(config: VerifierConfig) -> int:
    """Runs a verifier until a signal ends it, and returns the process's exit status; see `launch`."""

    def serve_here(place: Place, followers: Followers) -> int:
        from draftwire.services.verifier.server import serve

        return serve(config, place, followers)

    return launch(config, serve_here)
