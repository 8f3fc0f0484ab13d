"""Starts a service: this process, and the other ranks where there are several and nobody else starts them.

Little is imported here, so that all ranks import torch at the same time; and new processes are started before gRPC is
there, whose threads do not go well with that.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from draftwire.engine.ranks.follower import run_follower
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.place import Place, end_process, find_place
from draftwire.engine.ranks.rank_config import RankConfig, ServiceConfig

Serve = Callable[[Place, Followers], int]
"""Imports the server and runs it, as rank 0 or alone, until a signal ends it; returns the exit status."""


def launch(config: ServiceConfig, serve: Serve) -> int:
    """Runs a service and returns the process's exit status.

    One of several ranks does not return: it ends the process.
    """
    place = find_place(config.wanted_group, os.environ)
    if place.size > 1:
        place.device(config.loading.device)  # refused before anything is started
        _run_rank(config, place, serve)
    return serve(place, Followers())


def _run_rank(config: ServiceConfig, place: Place, serve: Serve) -> NoReturn:
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
        status = serve(place, followers)
    finally:
        status = followers.stop(status)
    end_process(status)
