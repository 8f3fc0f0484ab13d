"""Ranks that are not there: what a service has to do with, where several processes are one."""

from types import SimpleNamespace
from typing import Any

import torch

from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.group_model import GroupModel
from draftwire.models.kv_cache import KvCache


class FakeParallelModel:
    """Fails as it is told."""

    vocab_size = 3
    device = torch.device("cpu")
    extends_exactly = False

    def __init__(self) -> None:
        self.cache = KvCache(64)
        self.error: BaseException | None = None
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None:
            raise self.error

    def read(self, readings: Any, fuzzily: bool = False) -> tuple[Any, bool]:
        self._call("read")
        return readings, fuzzily

    def extend(self, sequences: Any, token_ids: Any, parents: Any = ()) -> tuple[Any, Any, Any]:
        self._call("extend")
        return sequences, token_ids, parents

    def keep_path(self, sequence: Any, path: Any) -> None:
        self._call("keep_path")
        self.kept = sequence, path

    def heartbeat(self) -> None:
        self._call("heartbeat")

    def stop(self) -> None:
        self._call("stop")


def guarded(fake: Any, service: str = "verifier") -> GroupModel:
    rank: Any = SimpleNamespace(model=fake, group=SimpleNamespace(leave=lambda: None))
    return GroupModel(rank, service)


class FakeFollowers(Followers):
    """Processes that end when a test says so."""

    end = ""

    @property
    def fault(self) -> str:
        return self.end
