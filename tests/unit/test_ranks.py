"""Several processes as one service, without any: places, what ends a group, and what does not."""

import asyncio
import math
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from group_fakes import FakeFollowers, FakeParallelModel, guarded

from draftwire.engine.ranks import followers as followers_module
from draftwire.engine.ranks.follower import GOODBYE
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.group_model import join_group
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.place import Place, WantedGroup, find_place
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.engine.torch_thread import TorchThread
from draftwire.errors import GroupLostError, InvalidRequestError, NoRoomError, UnavailableError
from draftwire.options.layer_parallel.layer_settings import LayerParallelSettings
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire.runtime.status import status_of
from draftwire_drafter.config import DrafterConfig
from draftwire_verifier.config import TensorParallelSettings, VerifierConfig

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
ALONE = WantedGroup("verifier", "tensor_parallel_size", 1, 0.2)
TWO = WantedGroup("verifier", "tensor_parallel_size", 2, 0.2)
LAYERS = LayerParallelSettings(4, layer_parallel_ranks=2)


# Places


def test_process_that_is_alone_has_no_group() -> None:
    assert find_place(ALONE, {}) == Place()
    assert find_place(ALONE, {**LAUNCHED, "RANK": "0", "WORLD_SIZE": "1"}) == Place()


def test_process_that_nobody_launched_starts_and_meets_the_others_here() -> None:
    place = find_place(TWO, {})
    assert (place.rank, place.size, place.starts_others) == (0, 2, True)
    assert place.address.startswith("127.0.0.1:")


def test_launched_process_takes_the_place_that_it_is_given() -> None:
    assert find_place(TWO, LAUNCHED) == Place(1, 2, 1, "node-0:29500", setting="tensor_parallel_size")
    assert find_place(TWO, {**LAUNCHED, "MASTER_ADDR": "fe80::1"}).address == "[fe80::1]:29500"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE"),
        ({"MASTER_PORT": ""}, "but not MASTER_PORT"),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK must be a number"),
        ({"RANK": "2"}, "RANK must be below"),
    ],
)
def test_launcher_that_contradicts_the_settings_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        find_place(TWO, LAUNCHED | changes)


@pytest.mark.parametrize("setting", ["tensor_parallel_size", "layer_parallel_ranks"])
def test_several_processes_that_the_settings_do_not_want_are_refused(setting: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"WORLD_SIZE.*{setting} is 1"):
        find_place(WantedGroup("a service", setting, 1, 0.2), LAUNCHED)


def test_each_rank_of_a_machine_takes_a_gpu_of_its_own() -> None:
    place = Place(5, 8, 1, "node-0:1")
    assert place.device("cuda") == place.device("cuda:0") == "cuda:1"
    assert place.device("cpu") == "cpu"
    assert Place().device("cuda:3") == "cuda:3"
    with pytest.raises(InvalidRequestError, match="cuda:1"):
        place.device("cuda:1")


def test_missing_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(InvalidRequestError, match="takes 2 GPUs here; torch sees 1"):
        Place(0, 2, starts_others=True).check_devices("cuda")
    Place(0, 2, starts_others=True).check_devices("cpu")
    Place(1, 2, local_rank=0).check_devices("cuda")


def test_followers_command_line_says_what_rank_0_was_told() -> None:
    config = VerifierConfig(
        ModelSettings("m", dtype="bfloat16"),
        engine=EngineSettings(kv_cache_tokens=32),
        parallel=TensorParallelSettings(2, 0.2),
    )
    rank = RankConfig.of(config, Place(1, 2, 1, "127.0.0.1:7"))
    assert RankConfig.parse(rank.text) == rank
    assert (rank.service, rank.timeout_s, rank.loading.dtype) == ("verifier", 0.2, "bfloat16")
    assert rank.engine == EngineSettings(kv_cache_tokens=32)


def test_drafters_follower_is_told_of_its_layers() -> None:
    rank = RankConfig.of(DrafterConfig(ModelSettings("m"), layers=LAYERS), Place(1, 2, 1, "127.0.0.1:7"))
    assert RankConfig.parse(rank.text) == rank
    assert (rank.service, LayerParallelSettings.parse(rank.loader_settings)) == ("drafter", LAYERS)


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (VerifierConfig(ModelSettings("scripted:"), parallel=TensorParallelSettings(2)), "tensor_parallel_size"),
        (DrafterConfig(ModelSettings("scripted:"), layers=LAYERS), "layer_parallel_ranks"),
    ],
)
def test_scripts_cannot_be_shared(config: VerifierConfig | DrafterConfig, setting: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"scripted model computes nothing that {setting}"):
        join_group(RankConfig.of(config, find_place(config.wanted_group, {})))


# What ends a group


@pytest.fixture
def fake() -> FakeParallelModel:
    return FakeParallelModel()


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "heartbeat": (),
    "stop": (),
    "read": ([],),
    "extend": ([], []),
    "keep_path": (None, []),
}
"""Of the methods of a `GroupModel`."""


@pytest.mark.parametrize("error", [UnavailableError("rank 1 is lost"), MemoryError(), ValueError("t1 t2")])
@pytest.mark.parametrize("call", ARGUMENTS)
def test_whatever_fails_in_a_step_of_the_group_ends_it_and_quotes_nothing(
    fake: FakeParallelModel, error: Exception, call: str
) -> None:
    fake.error = error
    method = getattr(guarded(fake), call)
    with pytest.raises(GroupLostError, match="the verifier's group") as lost:
        method(*ARGUMENTS[call])
    assert lost.value.__cause__ is error
    assert "t1" not in str(lost.value)
    assert status_of(lost.value)[0].name == "UNAVAILABLE"


@pytest.mark.parametrize("call", ["read", "extend"])
def test_full_cache_does_not_end_the_group(fake: FakeParallelModel, call: str) -> None:
    fake.error = NoRoomError("full")
    model = guarded(fake)
    with pytest.raises(NoRoomError):
        getattr(model, call)(*ARGUMENTS[call])
    assert model.spoke_at == -math.inf, "the others were not told of a step"


def test_model_of_a_group_reads_and_extends_as_what_it_guards(fake: FakeParallelModel) -> None:
    model = guarded(fake)
    readings: Any = ["reading"]
    assert model.read(readings) == (readings, False)
    assert model.read(readings, fuzzily=True) == (readings, True)
    assert model.extend(readings, torch.ones(1)) == (readings, torch.ones(1), ())
    assert model.extend(readings, torch.ones(1), [(-1,)]) == (readings, torch.ones(1), [(-1,)])
    sequence: Any = "sequence"
    model.keep_path(sequence, [0, 2])
    assert fake.kept == (sequence, [0, 2])
    assert (model.vocab_size, model.device, model.cache) == (fake.vocab_size, fake.device, fake.cache)
    assert not model.extends_exactly


async def test_heartbeat_that_is_due_is_not_put_off_by_work(fake: FakeParallelModel) -> None:
    thread, work = TorchThread(), asyncio.Event()
    guard = GroupGuard(TWO, thread)
    guard.take(guarded(fake))
    work.set()
    await guard.wait(work)
    assert fake.calls == ["heartbeat"]
    thread.stop()


async def test_work_is_awaited_for_a_limited_time(fake: FakeParallelModel) -> None:
    thread, work = TorchThread(), asyncio.Event()
    alone, guard = GroupGuard(ALONE, thread), GroupGuard(TWO, thread)
    guard.take(guarded(fake))
    for waiting in (alone, guard):
        async with asyncio.timeout(5.0):
            await waiting.wait(work, 0.01)
    thread.stop()


async def test_own_reason_is_better_than_that_another_rank_ended() -> None:
    followers, thread = FakeFollowers(), TorchThread()
    guard = GroupGuard(TWO, thread, Place(0, 2), followers)
    followers.end = "rank 1 ended with status 2"

    async def load() -> None:
        await asyncio.sleep(0.3)
        raise InvalidRequestError("it cannot be shared")

    with pytest.raises(InvalidRequestError, match="cannot be shared"):
        await guard.start(load())
    with pytest.raises(GroupLostError, match="status 2"):
        await guard.while_it_lasts(asyncio.sleep(5.0))
    thread.stop()


# The other processes

WAITS = "import sys; said = sys.stdin.buffer.read(); sys.exit(0 if said == b'stop' else 1)"
HANGS = "import time; time.sleep(60)"


def start(monkeypatch: pytest.MonkeyPatch, *programs: str, goodbye_s: float = 10.0) -> Followers:
    texts = iter(programs)

    def popen(_config: RankConfig) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", next(texts)], stdin=subprocess.PIPE)

    monkeypatch.setattr(followers_module, "_start", popen)
    monkeypatch.setattr(followers_module, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(followers_module, "GOODBYE_SECONDS", goodbye_s)
    config = VerifierConfig(ModelSettings("m"), parallel=TensorParallelSettings(3))
    return Followers([RankConfig.of(config, Place(rank, 3)) for rank in range(1, len(programs) + 1)])


def test_goodbye_of_rank_0_lets_the_others_end_with_status_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GOODBYE == b"stop"
    followers = start(monkeypatch, WAITS, WAITS)
    assert followers.fault == ""
    assert followers.stop(0) == 0


def test_rank_that_does_not_end_is_killed_and_the_group_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, WAITS, HANGS, goodbye_s=0.3).stop(0) == 1


def test_after_a_failure_the_others_are_killed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    followers = start(monkeypatch, HANGS, HANGS)
    started = time.monotonic()
    assert followers.stop(2) == 2
    assert time.monotonic() - started < 5.0
