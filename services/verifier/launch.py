"""Starts a verifier: this process, and the other ranks where there are several and nobody else starts them.

Little is imported here, so that all ranks import torch at the same time; and new processes are started before gRPC is
there, whose threads do not go well with that.
"""

import os
from dataclasses import replace
from typing import NoReturn

from draftwire.services.verifier.config import VerifierConfig
from draftwire.services.verifier.follower import RankConfig, run_follower
from draftwire.services.verifier.followers import Followers
from draftwire.services.verifier.group import Place, end_process, find_place


def serve(config: VerifierConfig) -> int:
    """Runs a verifier until a signal ends it, and returns the process's exit status.

    One of several ranks does not return: it ends the process.
    """
    place = find_place(config.parallel, os.environ)
    if place.size > 1:
        place.device(config.loading.device)  # refused before anything is started
        _run_rank(config, place)
    from draftwire.services.verifier.server import serve as serve_alone

    return serve_alone(config)


def _run_rank(config: VerifierConfig, place: Place) -> NoReturn:
    if place.rank:
        end_process(run_follower(RankConfig.of(config, place)))
    if place.starts_others:  # what the ranks of one machine say is nobody else's business
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
    others = [replace(place, rank=rank, local_rank=rank) for rank in range(1, place.size) if place.starts_others]
    followers = Followers([RankConfig.of(config, other) for other in others])
    status = 1
    try:
        place.check_devices(config.loading.device)
        from draftwire.services.verifier.server import serve as serve_group

        status = serve_group(config, place, followers)
    finally:
        status = followers.stop(status)
    end_process(status)
