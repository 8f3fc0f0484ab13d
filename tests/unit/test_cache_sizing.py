"""The KV cache of `kv_cache_tokens auto` takes what fits into memory, and no more."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from session_specs import draft_spec, target_spec
from strategy_loading import load_drafter
from structlog.testing import capture_logs
from tiny_models import save_tiny_model

from draftwire.engine import cache_sizing
from draftwire.engine.admission import Room
from draftwire.engine.cache_sizing import GATHERED_LAYERS, MOST_SESSIONS, cache_size, run_largest, size_while_loading
from draftwire.engine.memory import CPU_SHARE, CpuMeter, FreeMemory, GpuMeter
from draftwire.engine.model_loading import load_target
from draftwire.engine.prefill import LARGEST_CHUNK
from draftwire.engine.ranks.guard import GroupGuard
from draftwire.engine.ranks.place import Place
from draftwire.errors import InvalidRequestError
from draftwire.method.tree_limits import num_read_nodes
from draftwire.models.cached_model import CachedModel
from draftwire.models.kv_cache import BLOCK_SIZE, blocks_for
from draftwire.models.script import Script
from draftwire.models.sequence_model import Reading
from draftwire.options.layer_parallel.layer_settings import LayerParallelSettings
from draftwire.options.trees.session_trees import SessionTrees
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire_drafter.config import DrafterConfig
from draftwire_drafter.strategy_context import ConfiguredContext
from draftwire_verifier.config import VerifierConfig
from draftwire_verifier.core import VerifierCore
from draftwire_verifier.engine import TargetEngine

GIB, MIB = 2**30, 2**20
KIB = 1024
AVAILABLE, CONTAINER = "the memory that is available", "the container's memory limit"

torch.set_num_threads(1)


# The machine, and its containers


def machine(root: Path, available: int, *, peak: int = 0, now: int = 0, cgroup: str = "") -> Path:
    """Writes what Linux says of memory, bytes, and of control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable:   {available // KIB} kB\n")
    (root / "proc/self/status").write_text(f"VmHWM:\t{peak // KIB} kB\nVmRSS:\t{now // KIB} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group_of(folder: Path, names: tuple[str, str, str], limit: int | str, usage: int, files: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {files}\nactive_file 5\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_of(root: Path, **options: int) -> FreeMemory:
    meter = CpuMeter(root=root, **options)
    meter.begin()
    return meter.free(1)


def test_without_a_container_a_share_of_what_is_available_is_taken(tmp_path: Path) -> None:
    root = machine(tmp_path, 10 * GIB)
    assert free_of(root) == FreeMemory(int(CPU_SHARE * 10 * GIB), AVAILABLE)
    assert (root / "proc/self/clear_refs").read_text() == "5", "the peak before the step is forgotten"
    assert free_of(root, num_sharers=4).num_bytes == int(CPU_SHARE * 10 * GIB) // 4
    assert 2 * CPU_SHARE < 1.0, "drafter and verifier that start at once fit into one machine"


def test_what_the_largest_step_held_for_a_while_is_kept_back(tmp_path: Path) -> None:
    root = machine(tmp_path, 10 * GIB, peak=3 * GIB, now=GIB)
    assert free_of(root).num_bytes == int(CPU_SHARE * 8 * GIB)


@pytest.mark.parametrize(
    ("path", "folder"),
    [("/", ""), ("/kubepods/pod1/c1", "kubepods/pod1/c1"), ("/kubepods/pod1/c1", "kubepods"), ("/of/the/host", "")],
    ids=["namespace", "own", "around", "not there"],
)
@pytest.mark.parametrize("version", [1, 2])
def test_container_limit_excludes_memory_in_use_that_cannot_be_reclaimed(
    tmp_path: Path, version: int, path: str, folder: str
) -> None:
    line = f"0::{path}\n" if version == 2 else f"9:cpu,memory:{path}\n3:cpuset:/x\n"
    root = machine(tmp_path, 10 * GIB, cgroup=line)
    mount = root / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    group_of(mount / folder, V2 if version == 2 else V1, 4 * GIB, 3 * GIB, files=GIB)
    assert free_of(root) == FreeMemory(int(CPU_SHARE * 2 * GIB), CONTAINER)
    group_of(mount / folder, V2 if version == 2 else V1, 90 * GIB, 3 * GIB)
    assert free_of(root).bound == AVAILABLE


@pytest.mark.parametrize(("line", "names", "limit"), [("0::/", V2, "max"), ("9:memory:/", V1, 0x7FFFFFFFFFFFF000)])
def test_container_without_a_limit_is_bounded_by_the_machine(
    tmp_path: Path, line: str, names: tuple[str, str, str], limit: int | str
) -> None:
    root = machine(tmp_path, 10 * GIB, cgroup=line)
    group_of(root / "sys/fs/cgroup" / ("memory" if names is V1 else ""), names, limit, GIB)
    assert free_of(root) == FreeMemory(int(CPU_SHARE * 10 * GIB), AVAILABLE)


def test_smallest_of_nested_limits_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, 10 * GIB, cgroup="0::/a/b")
    for folder, limit in (("a/b", 6 * GIB), ("a", 3 * GIB), ("", 8 * GIB)):
        group_of(root / "sys/fs/cgroup" / folder, V2, limit, GIB)
    assert free_of(root).num_bytes == int(CPU_SHARE * 2 * GIB)


def test_system_that_does_not_say_what_is_available_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="kv_cache_tokens auto"):
        CpuMeter(root=tmp_path).free(1)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(InvalidRequestError, match="MemAvailable"):
        CpuMeter(root=tmp_path).free(1)


def test_this_machine_says_how_much_is_free() -> None:
    assert free_of(Path("/")).num_bytes > 64 * MIB


# A GPU


class Cuda:
    """What torch says of a GPU of 80 GiB."""

    def __init__(self) -> None:
        self.used = {"weights": 0, "others": 0}
        self.allocated = self.peak = 0
        self.num_emptied = 0

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return 80 * GIB - sum(self.used.values()), 80 * GIB

    def memory_allocated(self, device: str) -> int:
        return self.allocated

    def max_memory_allocated(self, device: str) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: str) -> None:
        self.peak = self.allocated

    def empty_cache(self) -> None:
        self.num_emptied += 1

    def synchronize(self, device: str) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    for name in ("mem_get_info", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    return fake


def after_loading(cuda: Cuda, utilization: float, weights: int, transient: int) -> GpuMeter:
    meter = GpuMeter("cuda:0", utilization)
    cuda.used["weights"] += weights
    cuda.allocated += weights
    cuda.peak = 70 * GIB  # of loading, which does not count
    meter.begin()
    cuda.peak += transient
    return meter


def test_gpu_is_shared_as_vllm_does_it(cuda: Cuda) -> None:
    meter = after_loading(cuda, 0.9, 30 * GIB, 2 * GIB)
    bound = "gpu_memory_utilization 0.9"
    assert meter.free(1) == FreeMemory(72 * GIB - 30 * GIB - 2 * GIB, bound)
    assert meter.free(2) == FreeMemory(72 * GIB - 30 * GIB - 4 * GIB, bound), "once more for CUDA graphs"
    assert cuda.num_emptied >= 2


def test_processes_on_one_gpu_take_a_share_each(cuda: Cuda) -> None:
    """What was there before this process does not count as its own, and what is not free is not taken."""
    cuda.used["others"] = 36 * GIB
    meter = after_loading(cuda, 0.45, 10 * GIB, GIB)
    assert meter.free(1).num_bytes == 36 * GIB - 10 * GIB - GIB
    greedy = after_loading(cuda, 0.9, 10 * GIB, GIB)
    assert greedy.free(1) == FreeMemory((80 - 36 - 20 - 1) * GIB, "the GPU's memory that is free")


def test_gpu_without_room_leaves_less_than_nothing(cuda: Cuda) -> None:
    assert after_loading(cuda, 0.5, 41 * GIB, 0).free(1).num_bytes == -GIB


# Tokens


@given(st.integers(0, 80 * GIB), st.integers(1, 64), st.integers(16, 8192), st.integers(1, 10**7))
def test_cache_fits_with_what_attention_gathers_and_uses_what_there_is(
    free: int, num_layers: int, layer_bytes: int, most: int
) -> None:
    token_bytes = num_layers * layer_bytes
    of_a_token = token_bytes + GATHERED_LAYERS * layer_bytes
    if free < 2 * BLOCK_SIZE * of_a_token:
        with pytest.raises(InvalidRequestError, match=AVAILABLE):
            cache_size(FreeMemory(free, AVAILABLE), token_bytes, layer_bytes, most)
        return
    size = cache_size(FreeMemory(free, AVAILABLE), token_bytes, layer_bytes, most)
    assert size.num_tokens % BLOCK_SIZE == 0
    assert size.num_tokens >= BLOCK_SIZE
    assert (size.num_tokens + BLOCK_SIZE) * of_a_token <= free, "the block for padding included"
    if size.bound == MOST_SESSIONS:
        assert 0 <= size.num_tokens - most < BLOCK_SIZE
    else:
        assert size.num_tokens < most
        assert (size.num_tokens + 2 * BLOCK_SIZE) * of_a_token > free, "another block would not fit"


def test_too_little_memory_is_refused_in_one_line_with_what_to_do() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        cache_size(FreeMemory(-5 * MIB, "gpu_memory_utilization 0.5"), 28 * 4096, 4096, 10**6)
    assert str(refused.value) == (
        "kv_cache_tokens auto: gpu_memory_utilization 0.5 leaves -5 MiB for the KV cache, of which a token takes 128 "
        "KiB; lower max_sessions or max_draft_tokens, or give it more memory"
    )


def test_step_for_which_a_gpu_has_no_memory_is_refused() -> None:
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InvalidRequestError, match="64 sessions with 16 draft tokens"):
        run_largest(run, EngineSettings())


def test_cache_of_the_largest_step_has_room_for_every_session_and_a_prompt() -> None:
    assert size_while_loading(EngineSettings(kv_cache_tokens=48)) == 48
    engine = EngineSettings(kv_cache_tokens="auto", max_sessions=3, max_draft_tokens=20)
    assert size_while_loading(engine) == 4 * 32 + LARGEST_CHUNK
    assert size_while_loading(replace(engine, max_tree_nodes=8)) == 4 * 192 + LARGEST_CHUNK, "10 nodes of 19 depths"


# Models

AUTO = EngineSettings(kv_cache_tokens="auto", max_sessions=3, max_draft_tokens=4)
ROOM = MIB


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with little memory."""
    root = machine(tmp_path / "root", int(ROOM / CPU_SHARE) + KIB)
    monkeypatch.setattr(cache_sizing, "CpuMeter", lambda num_ranks: CpuMeter(num_ranks, root))


def loaded_core(model: str, engine: EngineSettings) -> VerifierCore:
    core = VerifierCore(VerifierConfig(ModelSettings(model), engine=engine))
    core.card, core._engine = core._load_engine()
    return core


@pytest.mark.usefixtures("little_memory")
def test_verifier_takes_what_fits_and_can_fill_it(tmp_path: Path) -> None:
    path = str(save_tiny_model(tmp_path / "model", 20, context_length=4096))
    with capture_logs() as lines:
        core = loaded_core(path, AUTO)
    (line,) = [line for line in lines if line["event"] == "models.cache_sized"]
    assert (line["bound"], line["num_tokens"]) == (AVAILABLE, core.kv_cache_tokens)
    assert line["num_bytes"] == line["num_tokens"] * line["token_bytes"] <= line["free_bytes"] <= ROOM + KIB
    assert BLOCK_SIZE < core.kv_cache_tokens < AUTO.max_sessions * 4096
    assert core.description.context_length == min(4096, core.kv_cache_tokens)
    engine: Any = core._engine
    model: CachedModel = engine.model
    assert not model.cache.sequences, "the trial left nothing"
    sequence, left = model.cache.open(), core.kv_cache_tokens
    while left:
        now = min(left, 512)
        model.read([Reading(sequence, [1] * now, 0)])
        left -= now
    assert model.cache.num_free_blocks == 0
    stored = sum(tensor.nbytes for layer in model._storage._layers.values() for tensor in layer)
    assert stored == (core.kv_cache_tokens + BLOCK_SIZE) * line["token_bytes"]


def test_small_model_on_a_large_machine_takes_what_its_sessions_can_use(tmp_path: Path) -> None:
    path = str(save_tiny_model(tmp_path, 20, context_length=64))
    core = loaded_core(path, AUTO)
    assert (core.kv_cache_tokens, core.description.context_length) == (3 * 64, 64)


def test_number_stays_what_it_is_to_the_token(tmp_path: Path) -> None:
    path = str(save_tiny_model(tmp_path, 20, context_length=64))
    core = loaded_core(path, EngineSettings(kv_cache_tokens=50))
    assert (core.kv_cache_tokens, core.description.context_length) == (50, 50)


@pytest.mark.parametrize("kv_cache_tokens", [100, 90, "auto"])
async def test_text_as_long_as_the_stated_context_is_admitted_with_its_trees(kv_cache_tokens: Any) -> None:
    """As requests without max_tokens ask for. With `auto` of as many sessions as may be open."""
    settings = EngineSettings(3, 4, max_tree_nodes=8, kv_cache_tokens=kv_cache_tokens)
    model = ModelSettings("scripted:context_length=98")
    is_auto = kv_cache_tokens == "auto"
    core = VerifierCore(VerifierConfig(model, engine=settings))
    await core.start()
    assert core.description.context_length == (98 if is_auto else kv_cache_tokens - 8)
    changes = {"max_len": core.description.context_length, "max_tree_nodes": 8, "rule": "coupled"}
    for number in range(3 if is_auto else 1):
        lease_id, _ = core.open_lease()
        core.open_session(target_spec(token_ids=[1], session_id=number, max_draft_tokens=4, **changes), lease_id)
    core.stop()

    drafter = DrafterConfig(model, engine=settings)
    context = ConfiguredContext(drafter, cast(GroupGuard, SimpleNamespace(place=Place())))
    card = context.limited(Script.parse(model.model).card())
    room = Room(3, context.kv_cache_tokens)
    for number in range(3 if is_auto else 1):
        spec = draft_spec(token_ids=[1], max_len=card.description.context_length, max_tree_nodes=8, max_draft_tokens=4)
        room.reserve((number, 0), spec.max_len + SessionTrees(8).num_spare(spec))


def test_cache_that_holds_a_tree_and_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no room for a text beside 64 of a tree"):
        loaded_core("scripted:", EngineSettings(max_tree_nodes=64, kv_cache_tokens=64))


def test_scripted_target_has_room_for_every_session_to_fill_its_context() -> None:
    core = loaded_core("scripted:context_length=100", AUTO)
    num_tokens = blocks_for(AUTO.max_sessions * 100) * BLOCK_SIZE
    assert (core.kv_cache_tokens, core.description.context_length) == (num_tokens, 100), "whole blocks"


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    ("layers", "nodes"),
    [(LayerParallelSettings(), 0), (LayerParallelSettings(), 12), (LayerParallelSettings(layer_groups="0-1"), 0)],
)
def test_drafter_takes_what_fits_and_drafts(tmp_path: Path, layers: LayerParallelSettings, nodes: int) -> None:
    path = str(save_tiny_model(tmp_path / "model", 20, context_length=4096))
    with capture_logs() as lines:
        loaded = load_drafter(ModelSettings(path), replace(AUTO, max_tree_nodes=nodes), layers=layers)
    (line,) = [line for line in lines if line["event"] == "models.cache_sized"]
    strategy: Any = loaded.strategy
    assert strategy.model.cache.num_blocks * BLOCK_SIZE == line["num_tokens"] < 3 * 4096
    spare = num_read_nodes(nodes, AUTO.max_draft_tokens)
    assert loaded.card.description.context_length == min(4096, line["num_tokens"] - spare)
    assert not strategy.model.cache.sequences


@pytest.mark.parametrize(("model", "strategy"), [("scripted:context_length=100", "scripted"), ("", "suffix")])
def test_drafts_without_weights_are_counted_only(tmp_path: Path, model: str, strategy: str) -> None:
    path = model or str(save_tiny_model(tmp_path, 20, context_length=100))
    assert load_drafter(ModelSettings(path), AUTO, strategy=strategy).card.description.context_length == 100


def test_step_is_as_large_as_any(tmp_path: Path) -> None:
    """Of the verifier: rows of logits for a block of every session and a prompt's last token."""
    loaded = load_target(ModelSettings(str(save_tiny_model(tmp_path, 20, context_length=4096))), AUTO)
    reads: list[list[Reading]] = []
    model: Any = loaded.model
    read = model.read
    model.read = lambda readings: reads.append(list(readings)) or read(readings)
    TargetEngine(model, 4096).run_largest(AUTO.max_sessions, AUTO.max_draft_tokens)
    (readings,) = reads
    assert [(len(one.token_ids), one.keep) for one in readings] == [(5, 5)] * 3 + [(LARGEST_CHUNK, 1)]


# Settings


@pytest.mark.parametrize("config", [VerifierConfig, DrafterConfig])
@pytest.mark.parametrize(
    ("engine", "device"),
    [
        ({"kv_cache_tokens": "all"}, "cpu"),
        ({"kv_cache_tokens": 15}, "cpu"),
        ({"kv_cache_tokens": 1.5}, "cpu"),
        ({"gpu_memory_utilization": 0.5}, "cuda"),
        ({"gpu_memory_utilization": 0.5, "kv_cache_tokens": "auto"}, "cpu"),
        *(({"gpu_memory_utilization": share, "kv_cache_tokens": "auto"}, "cuda") for share in (0.0, -0.1, 1.01)),
    ],
)
def test_bad_value_is_refused(config: Any, engine: dict[str, Any], device: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"kv_cache_tokens|gpu_memory_utilization"):
        config(ModelSettings("m", device=device), engine=EngineSettings(**engine))


def test_share_of_a_gpu_is_taken() -> None:
    engine = EngineSettings(kv_cache_tokens="auto", gpu_memory_utilization=0.45)
    config = VerifierConfig(ModelSettings("m", device="cuda:1"), engine=engine)
    assert config.engine.gpu_memory_utilization == 0.45
