"""Several processes as one service, without any: places, what ends a group, and what does not."""

import asyncio
import math
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwire.engine.leases import SessionFailed
from draftwire.engine.ranks import followers as followers_module
from draftwire.engine.ranks.follower import GOODBYE
from draftwire.engine.ranks.followers import Followers
from draftwire.engine.ranks.group_model import GroupModel, join_group
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.place import Place, WantedGroup, find_place
from draftwire.engine.ranks.rank_config import RankConfig
from draftwire.engine.torch_thread import TorchThread
from draftwire.errors import GroupLostError, InvalidRequestError, NoRoomError, UnavailableError
from draftwire.models.kv_cache import KvCache
from draftwire.runtime.settings import EngineSettings, LayerParallelSettings, ModelSettings
from draftwire.runtime.status import status_of
from draftwire_drafter.config import DrafterConfig
from draftwire_verifier.config import TensorParallelSettings, VerifierConfig
from draftwire_verifier.core import VerifierCore
from tests.unit.test_verifier_core import events_of, open_session

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
ALONE = WantedGroup("verifier", "tensor_parallel_size", 1, 0.2)
TWO = WantedGroup("verifier", "tensor_parallel_size", 2, 0.2)
LAYERS = LayerParallelSettings(4, layer_parallel_ranks=2)


# Places


def test_process_that_is_alone_has_no_group() -> None:
    assert find_place(ALONE, {}) == Place()
    assert find_place(ALONE, {**LAUNCHED, "RANK": "0", "WORLD_SIZE": "1"}) == Place()


def test_process_that_nobody_launched_starts_the_others_and_meets_them_on_this_machine() -> None:
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
    assert (rank.service, rank.cache_tokens, rank.timeout_s, rank.loading.dtype) == ("verifier", 32, 0.2, "bfloat16")


def test_drafters_follower_is_told_of_its_layers() -> None:
    rank = RankConfig.of(DrafterConfig(ModelSettings("m"), layers=LAYERS), Place(1, 2, 1, "127.0.0.1:7"))
    assert RankConfig.parse(rank.text) == rank
    assert (rank.service, rank.layers) == ("drafter", LAYERS)


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

    def extend(self, sequences: Any, token_ids: Any) -> tuple[Any, Any]:
        self._call("extend")
        return sequences, token_ids

    def heartbeat(self) -> None:
        self._call("heartbeat")

    def stop(self) -> None:
        self._call("stop")


@pytest.fixture
def fake() -> FakeParallelModel:
    return FakeParallelModel()


ARGUMENTS: dict[str, tuple[Any, ...]] = {"heartbeat": (), "stop": (), "read": ([],), "extend": ([], [])}
"""Of the methods of a `GroupModel`."""


def guarded(fake: Any, service: str = "verifier") -> GroupModel:
    rank: Any = SimpleNamespace(model=fake, group=SimpleNamespace(leave=lambda: None))
    return GroupModel(rank, service)


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
    assert model.extend(readings, torch.ones(1)) == (readings, torch.ones(1))
    assert (model.vocab_size, model.device, model.cache) == (fake.vocab_size, fake.device, fake.cache)
    assert not model.extends_exactly


class FakeFollowers(Followers):
    """Processes that end when a test says so."""

    end = ""

    @property
    def fault(self) -> str:
        return self.end


async def core_of(fake: FakeParallelModel, followers: Followers) -> VerifierCore:
    """Returns rank 0 of two with a scripted model, and a fake for what keeps the ranks together."""
    config = VerifierConfig(ModelSettings("scripted:verify_ms=1"), parallel=TensorParallelSettings(2, 0.2))
    core = VerifierCore(config)
    await core.start()
    core.group = GroupGuard(TWO, core._torch, Place(0, 2), followers)
    core.group.take(guarded(fake))
    return core


@pytest.mark.parametrize("has_messages", [False, True])
async def test_group_without_steps_hears_of_rank_0_more_often_than_it_times_out(
    fake: FakeParallelModel, has_messages: bool
) -> None:
    """While it is idle, and while messages come that make no step."""
    core = await core_of(fake, FakeFollowers())
    running = asyncio.ensure_future(core.run())
    for _ in range(70):
        if has_messages:
            core.push_blocks([])
        await asyncio.sleep(0.005)
    assert fake.calls.count("heartbeat") >= 3
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert fake.calls[-1] == "stop", "the others are let go"
    assert not core.group.is_lost
    core.stop()


async def test_heartbeat_that_is_due_is_not_put_off_by_work(fake: FakeParallelModel) -> None:
    thread, work = TorchThread(), asyncio.Event()
    guard = GroupGuard(TWO, thread)
    guard.take(guarded(fake))
    work.set()
    await guard.wait(work)
    assert fake.calls == ["heartbeat"]
    thread.stop()


@pytest.mark.parametrize("how", ["ended", "silent"])
async def test_lost_rank_is_told_to_every_session_and_ends_the_run(fake: FakeParallelModel, how: str) -> None:
    followers = FakeFollowers()
    core = await core_of(fake, followers)
    lease, outbox = core.open_lease()
    open_session(core, 1, lease)
    open_session(core, 2, lease)
    running = asyncio.ensure_future(core.run())
    await asyncio.sleep(0)
    if how == "ended":
        followers.end = "rank 1 ended with status -9"
    else:
        fake.error = UnavailableError("rank 1 is silent")
    with pytest.raises(GroupLostError, match=r"rank 1"):
        await asyncio.wait_for(running, 5.0)
    assert core.group.is_lost
    assert core.num_sessions == 0
    failures = [event for event in events_of(outbox) if isinstance(event, SessionFailed)]
    assert [failure.session_id for failure in failures] == [1, 2]
    assert all(isinstance(failure.error, UnavailableError) for failure in failures)
    core.stop()


async def test_group_that_is_stuck_in_a_step_ends(fake: FakeParallelModel) -> None:
    core = await core_of(fake, FakeFollowers())
    core.config = VerifierConfig(ModelSettings("scripted:"), engine=EngineSettings(watchdog_s=0.1))
    core._torch.post(time.sleep, 1.0)
    with pytest.raises(GroupLostError, match=r"a step takes longer than 0\.1 s"):
        await asyncio.wait_for(core.run(), 5.0)
    core.stop()


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
