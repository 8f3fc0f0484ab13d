"""Launches a service: this process and, unless torchrun does, the other ranks.

Little is imported here, so that all ranks import torch at the same time, and processes are started before gRPC, whose
threads are not safe to fork with.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from draftwire.engine.ranks.follower import run_follower
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.place import Place, end_process, find_place
from draftwire.engine.ranks.rank_config import RankConfig, ServiceConfig
from draftwire.runtime.logging import configure_logging

if TYPE_CHECKING:
    from draftwire.runtime.service import Service


MakeService = Callable[..., "Service"]
"""Makes a service from its configuration, this process's place and its followers; see `make_service` of a server."""


def launch(config: ServiceConfig, import_server: Callable[[], MakeService]) -> int:
    """Runs a service and returns the process's exit status. In a group of several ranks, exits instead of returning.
    Rank 0 alone calls `import_server`.
    """
    place = find_place(config.wanted_group, os.environ)
    if place.size > 1:
        place.device(config.loading.device)  # refuses a bad device before any process is started
        _run_rank(config, place, import_server)
    return _serve(config, import_server, place, Followers())


def _serve(config: ServiceConfig, import_server: Callable[[], MakeService], place: Place, followers: Followers) -> int:
    """Runs rank 0, or the only process, until a signal stops it; returns the exit status."""
    make_service = import_server()
    from draftwire.runtime.process import run_service

    async def run() -> int:
        return await run_service(make_service(config, place, followers))

    configure_logging(config.server.log_format, config.wanted_group.service)
    return asyncio.run(run())


def _run_rank(config: ServiceConfig, place: Place, import_server: Callable[[], MakeService]) -> NoReturn:
    if place.rank:
        end_process(run_follower(RankConfig.of(config, place)))
    if place.starts_others:  # traffic between ranks of one machine stays on its loopback interface
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
    others = [replace(place, rank=rank, local_rank=rank) for rank in range(1, place.size) if place.starts_others]
    followers = Followers([RankConfig.of(config, other) for other in others])
    status = 1
    try:
        place.check_devices(config.loading.device)
        status = _serve(config, import_server, place, followers)
    finally:
        status = followers.stop(status)
    end_process(status)
