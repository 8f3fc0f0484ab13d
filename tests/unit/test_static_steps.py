"""Graphs are recorded only where there is a GPU; here a fake one shows in which order things are asked of it."""

from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from draftwire.models.static_steps import Recorder


class FakeGpu:
    """Stands in for `torch.cuda` and remembers what is captured in which pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[Any] = []
        self.streams: list[Any] = []
        self.is_broken = False
        self.is_capturing = False
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: MagicMock())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: MagicMock())
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any) -> Any:
        self.pools.append(pool)
        self.streams.append(stream)
        self.is_capturing = True
        yield
        self.is_capturing = False
        if self.is_broken:
            raise RuntimeError("capture failed")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def test_work_runs_once_before_recording_and_the_recorded_is_returned(gpu: FakeGpu) -> None:
    done = []

    def work() -> Tensor:
        done.append(gpu.is_capturing)
        return torch.tensor(float(gpu.is_capturing))

    _, result = Recorder(torch.device("cpu")).record(work)
    assert done == [False, True]
    assert result == 1.0


def test_all_graphs_share_the_memory_of_the_first_and_the_stream(gpu: FakeGpu) -> None:
    recorder = Recorder(torch.device("cpu"))
    first, _ = recorder.record(lambda: torch.zeros(1))
    for _ in range(2):
        recorder.record(lambda: torch.zeros(1))
    assert gpu.pools == [None, first.pool(), first.pool()]
    assert len(set(map(id, gpu.streams))) == 1


def test_graph_whose_capture_failed_is_neither_kept_nor_shared(gpu: FakeGpu) -> None:
    recorder = Recorder(torch.device("cpu"))
    gpu.is_broken = True
    with pytest.raises(RuntimeError, match="capture failed"):
        recorder.record(lambda: torch.zeros(1))
    gpu.is_broken = False
    first, _ = recorder.record(lambda: torch.zeros(1))
    recorder.record(lambda: torch.zeros(1))
    assert gpu.pools == [None, None, first.pool()]
