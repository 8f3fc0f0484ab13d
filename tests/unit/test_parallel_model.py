"""A model over two or four processes says what it says in one, and a group that lost a member says so."""

import functools
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from observing import wait_until
from ranks import START_SECONDS, Ranks, Worker, free_address
from tiny_models import (
    FAMILY_SHAPE,
    FAMILY_WINDOW,
    LLAMA3,
    family_network,
    ragged_reads,
    save_tiny_model,
    tiny_network,
)
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from draftwire.errors import InvalidRequestError, NoRoomError, UnavailableError
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE, CachedSequence
from draftwire.models.lean_decoder import LeanDecoder
from draftwire.models.loading import load_model
from draftwire.models.parallel import sharded_loading
from draftwire.models.parallel.process_group import GroupSettings, ProcessGroup
from draftwire.models.parallel.sharded_loading import Checkpoint, ModelSource, Part, load_parallel_target
from draftwire.models.parallel.spread_decoder import HEAD, SpreadTransformersDecoder
from draftwire.models.parallel.step_plan import (
    PLAN_SIZE,
    CopyPlan,
    ReadPlan,
    Signal,
    StepPlan,
    decode,
    encode,
)
from draftwire.models.parallel.tensor_parallel import ParallelModel, check_divides, follow
from draftwire.models.sequence_model import FeatureSpan, Reading, Segment
from draftwire.models.static_steps import StaticSteps
from draftwire.models.torch_engine import TorchEngine
from draftwire.models.torch_models import torch_model
from draftwire.options.heads.taps import FeatureSource
from draftwire.options.layer_parallel.layer_groups import LayerParallelism
from draftwire.options.layer_parallel.layer_parallel import LayerParallelDecoder
from draftwire.options.layer_parallel.layer_parallel_loading import load_layer_parallel
from tests.cache_integrity import check_integrity

torch.set_num_threads(1)

VOCAB_SIZE = 97
"""Neither two nor four divide it."""
CACHE_TOKENS = 4096
EMBEDDED = Path(__file__).parents[2] / "models"
SHAPE = FAMILY_SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 4}
FEW_KEYS, ONE_KEY = SHAPE | {"num_key_value_heads": 2}, SHAPE | {"num_key_value_heads": 1}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with all biases": ("llama", SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1, tied, one key": ("llama", ONE_KEY | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", SHAPE | {"sliding_window": 24}),
    "qwen2, in several files": ("qwen2", SHAPE | FAMILY_WINDOW),
    "qwen3, few keys": ("qwen3", FEW_KEYS | FAMILY_WINDOW | {"head_dim": 12}),
}
NAMES = [*MODELS, "target", "drafter"]
LAYERS: dict[str, Any] = SHAPE | FAMILY_WINDOW | {"num_hidden_layers": 8}
"""Of a drafter whose layers run together."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints by name."""
    root = tmp_path_factory.mktemp("models")
    found = {name: str(EMBEDDED / name) for name in ("target", "drafter", "drafter-8-layers")}
    for name in MODELS:
        folder = save_tiny_model(root / name.replace(" ", "_").replace(",", ""), VOCAB_SIZE)  # for its tokenizer
        (folder / "model.safetensors").unlink()
        architecture, shape = MODELS[name]
        family_network(architecture, **shape).save_pretrained(
            folder, max_shard_size="40KB" if "files" in name else "1GB"
        )
        assert (folder / "model.safetensors.index.json").exists() == ("files" in name)
        found[name] = str(folder)
    found["layers"] = str(save_tiny_model(root / "layers", VOCAB_SIZE))
    family_network("qwen2", **LAYERS).save_pretrained(found["layers"])
    for name in ("gemma2", "granite", "gpt2"):
        folder = save_tiny_model(root / name, VOCAB_SIZE)
        tiny_network(name, VOCAB_SIZE, dtype=torch.float32).save_pretrained(folder)
        found[name] = str(folder)
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


# What is done with a model; the same with one process and with several.


def everything_else(model: CachedModel) -> list[Tensor]:
    """Long prompts, beginnings taken over, tokens that the host does not know, paths through trees, a full cache."""
    generator = random.Random(4)
    ids = [generator.randrange(model.vocab_size) for _ in range(PLAN_SIZE + 300)]
    long = model.cache.open()
    keep = min(PLAN_SIZE + 100, 2**18 // model.vocab_size)
    rows = [model.read([Reading(long, ids, keep)])]
    model.cache.publish(long, ids)
    shared = model.cache.open(ids[: 5 * BLOCK_SIZE + 3])
    assert shared.num_reused == 5 * BLOCK_SIZE
    rows.append(model.read([Reading(shared, ids[shared.length : 5 * BLOCK_SIZE + 3], 1)]))
    rows.append(model.extend([shared, long], torch.tensor([7, 8])))
    rows.append(model.extend([long, shared], torch.tensor([[9, 1], [10, 1]])[:, 0]))  # not contiguous
    rows.append(model.read([Reading(shared, [1, 2, 3, 4], 4, (-1, 0, -1)), Reading(long, [5], 1)]))
    rows.append(model.extend([shared, long], torch.tensor([6, 7, 8, 9]), [(0, 2, 3), ()]))
    model.keep_path(shared, [0, 3, 5])
    rows.append(model.read([Reading(shared, [11], 1), Reading(long, [12, 13], 0)]))
    with pytest.raises(NoRoomError):
        model.read([Reading(long, ids * 4, 1)])
    rows.append(model.read([Reading(shared, [14], 1)]))
    if isinstance(model, ParallelModel):
        model.heartbeat()
    rows.append(model.read([Reading(long, [15], 0)]))
    rows.append(model.read([Reading(long, [16], 1)]))
    return [row.clone() for row in rows]


def driven(model: CachedModel) -> list[Tensor]:
    return [rows for _, rows in ragged_reads(model)] + everything_else(model)


# What ranks do.


def load(group: ProcessGroup, path: str) -> ParallelModel:
    decoder = load_parallel_target(ModelSource(path, "float32"), group).decoder
    return ParallelModel(TorchEngine(decoder), CACHE_TOKENS, group=group)


def logits(group: ProcessGroup, path: str, dtype: str = "float32") -> list[Tensor]:
    """Returns on rank 0 what `driven` does, plain and in static shapes; on the others nothing."""
    decoder = load_parallel_target(ModelSource(path, dtype), group).decoder
    results: list[Tensor] = []
    for is_static in (False, True):
        model = ParallelModel(TorchEngine(decoder, StaticSteps if is_static else None), CACHE_TOKENS, group=group)
        if group.rank:
            follow(model)
        else:
            results += driven(model)
            model.stop()
    return results


@functools.cache
def expected(path: str, dtype: str = "float32") -> list[Tensor]:
    """Returns what rank 0 is to return."""
    decoder = decoder_of(load_model(path, dtype).model)
    return [row for is_static in (False, True) for row in driven(torch_model(decoder, CACHE_TOKENS, is_static))]


QUICK = [("llama 3.1, tied, one key", 2)]
"""The model and the number of ranks that stand for all: there are too few heads to share out."""


def compare(parallel: list[Tensor], single: list[Tensor], tolerance: float) -> float:
    largest = 0.0
    for own, other in zip(parallel, single, strict=True):
        assert own.shape == other.shape
        assert own.is_contiguous()
        if other.numel():
            assert other.std() > 0.1, "logits that say something"
            largest = max(largest, float((own - other).abs().max()))
    assert largest <= tolerance
    return largest


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[] if (name, size) in QUICK else pytest.mark.slow)
        for name in NAMES
        for size in (2, 4)
    ],
)
def test_logits_are_those_of_one_process(name: str, size: int, ranks: Ranks, folders: dict[str, str]) -> None:
    """In float32: at most 1e-4 apart, and not the same to the bit, or nothing was summed in another order."""
    own, *others = ranks.run(size, logits, folders[name])
    assert others == [[]] * (size - 1)
    assert compare(own, expected(folders[name]), 1e-4) > 0.0


@pytest.mark.slow
def test_lower_precision_differs_by_rounding_alone(ranks: Ranks, folders: dict[str, str]) -> None:
    path = folders["qwen3, few keys"]
    exact, single = expected(path), expected(path, "bfloat16")
    own = ranks.run(2, logits, path, "bfloat16")[0]

    def distance(results: list[Tensor]) -> float:
        pairs = zip(results, exact, strict=True)
        return float(torch.cat([(rows.float() - other).abs().flatten() for rows, other in pairs]).mean())

    assert distance(own) <= 1.3 * distance(single)


@pytest.mark.parametrize(
    ("name", "size"), [("granite", 2), *(pytest.param("gemma2", size, marks=pytest.mark.slow) for size in (2, 4))]
)
def test_other_models_are_spread_by_transformers(name: str, size: int, ranks: Ranks, folders: dict[str, str]) -> None:
    own = ranks.run(size, logits, folders[name])[0]
    assert compare(own, expected(folders[name]), 5e-4) > 0.0, "float32 rounding of logits of about 10"


# Features


def summed(features: Tensor) -> Tensor:
    return features.unflatten(1, (3, -1)).sum(1)


FEATURES = FeatureSource((2, 0, 1), summed)


def featured(model: CachedModel) -> Tensor:
    """Reads texts in parts, forgets, moves and shares some, and returns the features of all."""
    first, ids = model.cache.open(), [(7 * place) % VOCAB_SIZE for place in range(3 * BLOCK_SIZE)]
    model.read([Reading(first, ids, 1)])
    model.cache.publish(first, ids)
    second = model.cache.open(ids)
    nodes = (-1, 0, -1, 2)
    model.read([Reading(second, [*ids[second.length :], 1, 2, 3, 4], 1, nodes), Reading(first, [5], 0)])
    model.keep_path(second, [2, 3])
    return model.features([FeatureSpan(second, 0, len(ids) + 2), FeatureSpan(first, len(ids) - 8, len(ids) + 1)])


def features_of_group(group: ProcessGroup, path: str) -> Tensor | None:
    """Returns on rank 0 what `featured` does; the others keep none."""
    decoder = load_parallel_target(ModelSource(path, "float32"), group).decoder
    model = ParallelModel(TorchEngine(decoder), CACHE_TOKENS, features=None if group.rank else FEATURES, group=group)
    if group.rank:
        follow(model)
        return None
    rows = featured(model)
    model.stop()
    return rows.clone()


@pytest.mark.parametrize("name", ["llama with all biases", "granite"])  # by the lean decoder and by transformers
def test_features_are_whole_on_rank_0_alone(name: str, ranks: Ranks, folders: dict[str, str]) -> None:
    own, other = ranks.run(2, features_of_group, folders[name])
    decoder = decoder_of(load_model(folders[name], "float32").model)
    expected_rows = featured(torch_model(decoder, CACHE_TOKENS, features=FEATURES))
    assert other is None
    assert own.shape == expected_rows.shape == (3 * BLOCK_SIZE + 2 + 9, decoder.hidden_size)
    assert (own - expected_rows).abs().max() <= 1e-4 * expected_rows.std()


# Size of the cache


def fitted(group: ProcessGroup, path: str, counts: list[int]) -> Any:
    """Returns the blocks of each rank's cache, and on rank 0 its size and logits; a count of 0 is no room."""

    def count(_model: CachedModel) -> int:
        if not counts[group.rank]:
            raise InvalidRequestError("no room")
        return counts[group.rank]

    decoder = load_parallel_target(ModelSource(path, "float32"), group).decoder
    model = ParallelModel(TorchEngine(decoder), 64, group=group, count=count)
    if group.rank:
        follow(model)
        return model.cache.num_blocks
    model.read([Reading(model.cache.open(), [1, 2], 1)])
    num_tokens = model.fit(count)
    logits = model.read([Reading(model.cache.open(), [1, 2, 3], 1)])
    model.stop()
    return model.cache.num_blocks, num_tokens, logits.clone()


@pytest.mark.parametrize("counts", [[6 * BLOCK_SIZE, 3 * BLOCK_SIZE], [3 * BLOCK_SIZE, 6 * BLOCK_SIZE]])
def test_all_ranks_take_what_fits_on_each(counts: list[int], ranks: Ranks, folders: dict[str, str]) -> None:
    path = folders["llama with all biases"]
    (num_blocks, num_tokens, logits), other = ranks.run(2, fitted, path, counts)
    assert (num_blocks, num_tokens, other) == (3, 3 * BLOCK_SIZE, 3)
    whole = torch_model(decoder_of(load_model(path, "float32").model), 64)
    assert (logits - whole.read([Reading(whole.cache.open(), [1, 2, 3], 1)])).abs().max() < 1e-4


@pytest.mark.parametrize("counts", [[0, 48], [48, 0]])
def test_rank_without_room_ends_the_group_and_says_so(counts: list[int], ranks: Ranks, folders: dict[str, str]) -> None:
    workers = ranks.begin(fitted, [(folders["llama with all biases"], counts)] * 2)
    without = counts.index(0)
    with pytest.raises(InvalidRequestError, match="no room"):
        workers[without].answer()
    with pytest.raises(UnavailableError):
        workers[1 - without].answer()


# Loading


def described(group: ProcessGroup, paths: list[str]) -> Any:
    shards = [load_parallel_target(ModelSource(path, "auto"), group, "auto") for path in paths]
    return [(shard.card.description, type(shard.decoder)) for shard in shards]


@pytest.mark.parametrize("names", [["qwen2, in several files", "gemma2"], pytest.param(NAMES, marks=pytest.mark.slow)])
def test_description_is_that_of_the_unsharded_model(names: list[str], ranks: Ranks, folders: dict[str, str]) -> None:
    shards = ranks.run(2, described, [folders[name] for name in names])
    for name, (first, kind), (second, _) in zip(names, *shards, strict=True):
        whole = load_model(folders[name]).description
        assert first == whole, name
        assert second == replace(whole, weights_fingerprint=b""), name
        assert kind is (SpreadTransformersDecoder if name == "gemma2" else LeanDecoder)


class Counted:
    """A safetensors file that counts what is read of it."""

    num_bytes = 0

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> "Counted":
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> "CountedSlice":
        return CountedSlice(self._file.get_slice(name))


@dataclass
class CountedSlice:
    stored: Any

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def __getitem__(self, index: Any) -> Tensor:
        result = self.stored[index]
        Counted.num_bytes += result.nbytes
        return result


def read_bytes(group: ProcessGroup, path: str) -> Any:
    """Returns the bytes that were read, and those that were reported."""
    plain = sharded_loading.safe_open
    reports: list[tuple[int, int]] = []
    Counted.num_bytes = 0
    sharded_loading.safe_open = lambda *args, **options: Counted(plain(*args, **options))  # type: ignore[assignment]
    try:
        load_parallel_target(ModelSource(path, "float32"), group, on_progress=lambda *report: reports.append(report))
    finally:
        sharded_loading.safe_open = plain
    return Counted.num_bytes, reports


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama with all biases", 2),
        ("llama 3.1, tied, one key", 2),
        *(
            pytest.param(name, 4, marks=pytest.mark.slow)
            for name in ("llama with all biases", "qwen3, few keys", "target")
        ),
    ],
)
def test_each_rank_reads_its_part_of_the_files_and_no_more(
    name: str, size: int, ranks: Ranks, folders: dict[str, str]
) -> None:
    loaded = load_model(folders[name], "bfloat16" if name == "target" else "float32")
    weights = loaded.model.state_dict()
    config = loaded.model.config
    for rank, (num_bytes, reports) in enumerate(ranks.run(size, read_bytes, folders[name])):
        own = 0
        for key, tensor in weights.items():
            if key == HEAD:  # 97 rows are 25, 25, 25 and 22, or 49 and 48
                share = -(-len(tensor) // size)
                count = min(share, len(tensor) - rank * share)
                own += 0 if config.tie_word_embeddings else count * tensor[0].nbytes
            elif "norm" in key or "embed" in key:
                own += tensor.nbytes
            elif key.endswith(("o_proj.bias", "down_proj.bias")):
                own += 0 if rank else tensor.nbytes
            elif ".k_proj" in key or ".v_proj" in key:
                own += tensor.nbytes // min(size, config.num_key_value_heads)
            else:
                own += tensor.nbytes // size
        assert reports[-1] == (own, own)
        assert [done for done, _ in reports] == sorted(done for done, _ in reports)
        for_fingerprint = num_bytes - own
        assert 0 < for_fingerprint <= 64 * 4 * len(weights) if rank == 0 else for_fingerprint == 0


def refusal(group: ProcessGroup, path: str, decoder: str = "auto", dtype: str = "float32") -> str:
    with pytest.raises(InvalidRequestError) as caught:
        load_parallel_target(ModelSource(path, dtype), group, decoder)
    with pytest.raises(UnavailableError, match="was not loaded"):
        group.meet()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "size", "arguments", "reason"),
    [
        pytest.param("qwen2, in several files", 3, (), "over 1, 2, 4, 8 it can", marks=pytest.mark.slow),
        ("gpt2", 2, (), "transformers has no plan"),
        ("gemma2", 2, ("lean",), "of type gemma2"),
        ("mistral", 2, ("fast",), "one of auto, lean, transformers"),
        ("mistral", 2, ("auto", "fp8"), "known: auto, float32"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_all_ranks(
    name: str, size: int, arguments: tuple[str, ...], reason: str, ranks: Ranks, folders: dict[str, str]
) -> None:
    assert all(reason in message for message in ranks.run(size, refusal, folders[name], *arguments))


def test_checkpoint_of_another_shape_or_without_a_weight_is_refused(folders: dict[str, str]) -> None:
    with Checkpoint.find(folders["mistral"], None) as checkpoint:
        with pytest.raises(InvalidRequestError, match=r"no weight of the name model\.extra"):
            checkpoint.weight("model.extra", (1,))
        with pytest.raises(InvalidRequestError, match=r"not \[97, 47\]"):
            checkpoint.weight(HEAD, (97, 47))
    with pytest.raises(InvalidRequestError, match="no weights in safetensors"):
        Checkpoint.find(str(Path(folders["mistral"]).parent), None)


def test_missing_head_is_the_embedding_only_if_the_configuration_states_it(folders: dict[str, str]) -> None:
    tied, untied = (AutoConfig.from_pretrained(folders[name]) for name in ("target", "mistral"))
    with Checkpoint.find(folders["target"], None) as checkpoint:
        assert checkpoint.ties_head(tied)
        assert not checkpoint.ties_head(untied)
    with Checkpoint.find(folders["mistral"], None) as checkpoint:
        assert not checkpoint.ties_head(tied)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "possible"),
    [
        (8, 4, 80, [1, 2, 4, 8]),
        (8, 2, 80, [1, 2, 4, 8]),
        (8, 8, 12, [1, 2, 4]),
        (6, 2, 80, [1, 2]),
        (12, 3, 96, [1, 3, 6, 12]),
        (12, 6, 96, [1, 2, 3, 6, 12]),
        (7, 7, 96, [1]),
    ],
)
def test_sizes_that_divide_are_named(heads: int, kv_heads: int, inner: int, possible: list[int]) -> None:
    config = LlamaConfig(
        hidden_size=heads * 4, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner
    )
    for size in range(1, 20):
        if size in possible:
            check_divides(config, size)
            owners = min(size, kv_heads)
            for head in range(heads):  # the rank that has a query head has its key head
                rank, key_head = head * size // heads, head * kv_heads // heads
                part = Part.of("k_proj.weight", (kv_heads, 1), config, Member(rank, size))  # type: ignore[arg-type]
                assert part.start <= key_head < part.stop
                assert part.size == kv_heads // owners
        else:
            with pytest.raises(
                InvalidRequestError, match=f"over {size} processes; over {', '.join(map(str, possible))} it"
            ):
                check_divides(config, size)


@dataclass
class Member:
    rank: int
    size: int


# Plans


def plan(num_segments: int, num_tokens: int) -> ReadPlan:
    generator = random.Random(num_segments)
    segments = []
    for _ in range(num_segments):
        length = num_tokens + generator.randrange(100)
        blocks = generator.sample(range(1, 10_000), -(-length // BLOCK_SIZE))
        segments.append(Segment(CachedSequence(b"", blocks, length), num_tokens))
    total = num_segments * num_tokens
    return ReadPlan(segments, np.arange(total), list(range(0, total, 3)))


def with_trees(plain_plan: ReadPlan) -> ReadPlan:
    """Returns a plan whose sequences end in trees, but for the second."""
    for segment, parents in zip(plain_plan.segments, [(-1, 0, 0), (), (-1,)], strict=False):
        segment.sequence.parents = parents
    return plain_plan


PLANS: list[StepPlan] = [
    plan(1, 1),
    plan(5, 7),
    plan(3, 2000),
    ReadPlan(plan(4, 1).segments, None, [0, 1, 2, 3]),
    ReadPlan(plan(4, 1).segments, np.arange(4), []),
    replace(plan(5, 7), fuzzily=True),
    with_trees(plan(3, 7)),
    with_trees(plan(1, 1)),
    CopyPlan(np.array([5, 6]), np.array([1, 2])),
    CopyPlan(np.array([], dtype=np.int64), np.array([], dtype=np.int64)),
    *Signal,
]


def plain(value: Any) -> str:
    with np.printoptions(threshold=100_000):
        return repr(value)


def test_plan_arrives_as_it_was() -> None:
    for sent in PLANS:
        numbers = encode(sent)
        assert numbers.dtype == np.int64
        assert numbers[1] == len(numbers)
        assert plain(decode(numbers)) == plain(sent)


def mix_up(group: ProcessGroup) -> None:
    model = ParallelModel(TorchEngine(Nothing()), 64, group=group)  # type: ignore[arg-type]
    if group.rank:
        follow(model)
    else:
        group.broadcast(torch.zeros(PLAN_SIZE, dtype=torch.int64))


class Nothing:
    vocab_size = 1
    device = torch.device("cpu")


def test_message_that_is_no_plan_ends_the_group(ranks: Ranks) -> None:
    first, second = ranks.begin(mix_up, [()] * 2)
    assert first.answer() is None
    with pytest.raises(UnavailableError, match="no plan"):
        second.answer()


# Groups


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2},
        {"rank": -1},
        {"size": 0},
        {"address": "localhost"},
        {"address": ":80"},
        {"address": "host:port"},
        {"address": "host:70000"},
        {"device": "cuda"},
        {"device": "cuda:x"},
        {"device": "mps"},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
    ],
)
def test_settings_that_make_no_group_are_refused(change: dict[str, Any]) -> None:
    good = GroupSettings(1, 2, "[::1]:80", "cuda:1")
    assert (good.host, good.port) == ("::1", 80)
    with pytest.raises(InvalidRequestError):
        replace(good, **change)


def test_group_on_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no cuda:99"):
        ProcessGroup.join(GroupSettings(0, 1, free_address(), "cuda:99"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_others_that_do_not_come_are_waited_for_in_vain(rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=f"rank {rank} of 2 found no group"):
        ProcessGroup.join(GroupSettings(rank, 2, free_address(), "cpu", timeout_s=0.1))
    assert time.monotonic() - started < 10.0
    assert not torch.distributed.is_initialized()


def collectives(group: ProcessGroup) -> Any:
    results = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        part = torch.full((3, 2), 10.0**group.rank, dtype=dtype)
        gathered = group.gather_columns(part + torch.arange(3, dtype=dtype)[:, None])
        group.all_reduce(part)
        results.append((part.float().tolist(), gathered.float().tolist()))
    ids = torch.arange(3) * (group.rank == 0)
    group.broadcast(ids)
    with pytest.raises(InvalidRequestError, match="already"):
        ProcessGroup.join(GroupSettings(0, 1, free_address(), "cpu"))
    group.meet()
    group.leave()
    group.leave()
    for work in (group.all_reduce, group.broadcast, group.gather_columns):
        with pytest.raises(UnavailableError, match=f"rank {group.rank} of {group.size} has left"):
            work(ids)
    return results, ids.tolist()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_collectives_give_sums_columns_and_messages_in_every_precision(ranks: Ranks, size: int) -> None:
    each = [10.0**rank for rank in range(size)]
    for rank, (results, ids) in enumerate(ranks.run(size, collectives)):
        assert ids == [0, 1, 2]
        for summed, gathered in results:
            assert summed == [[sum(each)] * 2] * 3
            parts = each if rank == 0 else each[rank : rank + 1]
            assert gathered == [[part + row for part in parts for _ in range(2)] for row in range(3)]


def come_late(group: ProcessGroup) -> None:
    time.sleep(1.2 * group.rank)  # longer than the group waits for a step
    group.meet(20.0)
    time.sleep(1.2 * group.rank)
    with pytest.raises(UnavailableError, match=f"rank {group.rank} of 2: the meeting of all ranks failed"):
        group.meet()


@pytest.mark.slow
def test_ranks_that_load_for_long_are_waited_for(ranks: Ranks) -> None:
    ranks.run(2, come_late, timeout_s=1.0)


# Layers of a drafter that run together, shared out among ranks.


def load_layers(group: ProcessGroup, path: str, layers: LayerParallelism) -> ParallelModel:
    loaded = load_layer_parallel(path, "float32", "cpu", None, layers, group)
    return ParallelModel(TorchEngine(loaded.exact, drafting=loaded.drafting), CACHE_TOKENS, group=group)


def shared_layers(group: ProcessGroup, path: str, layers: LayerParallelism) -> tuple[list[int], list[Tensor]]:
    """Returns which layers' attention a rank has, and on rank 0 what `driven` and `drafting` do."""
    model = load_layers(group, path, layers)
    attentions: Any = model._exact._decoder._base.attentions  # type: ignore[attr-defined]
    held = [index for index, attention in enumerate(attentions) if attention is not None]
    if group.rank:
        follow(model)
        return held, []
    results = driven(model) + drafting(model)
    model.stop()
    return held, results


def drafting(model: CachedModel) -> list[Tensor]:
    """Extends texts of different lengths, forgets what was drafted, reads it exactly, and reads a little fuzzily."""
    generator = random.Random(6)
    sequences = [model.cache.open() for _ in range(3)]
    lengths, rows = [3, 20, 70], []
    texts = [[generator.randrange(model.vocab_size) for _ in range(length)] for length in lengths]
    rows.append(model.read([Reading(own, text, 1) for own, text in zip(sequences, texts, strict=True)]))
    for _ in range(3):
        for members in ([0, 1, 2], [2, 0], [1]):
            ids = torch.tensor([generator.randrange(model.vocab_size) for _ in members])
            rows.append(model.extend([sequences[member] for member in members], ids))
        for index, own in enumerate(sequences):
            model.cache.truncate(own, lengths[index])
            lengths[index] += 1
        rows.append(model.read([Reading(own, [5], 1) for own in sequences]))
    rows.append(model.read([Reading(sequences[1], [5, 6, 7], 3), Reading(sequences[0], [8], 1)], fuzzily=True))
    return [row.clone() for row in rows]


SHARED_OUT = [
    (2, LayerParallelism(4), [[0, 1, 3, 4, 6, 7], [0, 2, 5, 7]]),
    (2, LayerParallelism(groups="0-7"), [[0, 2, 4, 6], [1, 3, 5, 7]]),
    (3, LayerParallelism(5), [[0, 1, 4, 5, 7], [0, 2, 6, 7], [0, 3, 7]]),  # a group smaller than the ranks
]


@pytest.mark.parametrize(
    ("name", "shared_out"),
    [
        ("layers", SHARED_OUT[:1]),
        pytest.param("layers", SHARED_OUT[1:], marks=pytest.mark.slow),
        pytest.param("drafter-8-layers", SHARED_OUT, marks=pytest.mark.slow),
    ],
)
def test_layers_shared_out_among_ranks_say_what_they_say_in_one_process(
    name: str, shared_out: list[tuple[int, LayerParallelism, list[list[int]]]], ranks: Ranks, folders: dict[str, str]
) -> None:
    """Read exactly as well as fuzzily; in float32, at most 1e-4 apart."""
    base = LeanDecoder(load_model(folders[name], "float32").model)
    for size, layers, held in shared_out:
        alone = torch_model(base, CACHE_TOKENS, drafting=LayerParallelDecoder(base, layers.of(base.num_layers)))
        expected_rows = driven(alone) + drafting(alone)
        found = ranks.run(size, shared_layers, folders[name], layers)
        assert [own for own, _ in found] == held
        for own, expected_row in zip(found[0][1], expected_rows, strict=True):
            torch.testing.assert_close(own, expected_row, atol=1e-4, rtol=0.0)
        assert not any(rows for _, rows in found[1:])


@pytest.mark.parametrize(
    ("size", "name", "layers", "reason"),
    [
        (2, "layers", LayerParallelism(groups="0 1-3 4-9"), "must name all 8"),
        (2, "gpt2", LayerParallelism(4), "layers of their own"),
        pytest.param(
            *(3, "layers", LayerParallelism(2), "3 ranks cannot share groups of at most 2 layers"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_that_cannot_be_shared_out_are_refused_on_all_ranks(
    size: int, name: str, layers: LayerParallelism, reason: str, ranks: Ranks, folders: dict[str, str]
) -> None:
    for worker in ranks.begin(load_layers, [(folders[name], layers)] * size):
        with pytest.raises(InvalidRequestError, match=reason):
            worker.answer()


# Loss


def abandon(group: ProcessGroup, signs: str) -> float:
    """Returns how long a sum over four ranks takes to fail when one of them goes, which is not next to rank 0."""
    group.meet()
    if group.rank == 2:
        group.leave()
    started = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        group.all_reduce(torch.zeros(1000))
    taken = time.monotonic() - started
    assert caught.value.__cause__ is not None or group.rank == 2  # known while the others learn of it
    (Path(signs) / str(group.rank)).touch()
    wait_until(lambda: len(list(Path(signs).iterdir())) == 4, "all four have noticed it", START_SECONDS)
    return taken


@pytest.mark.slow
def test_loss_is_noticed_at_once_by_ranks_unconnected_to_the_lost_one(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks.run(4, abandon, str(tmp_path))) < 2.0


def lose(group: ProcessGroup, path: str, signs: str) -> tuple[float, str]:
    """Returns how long it took until a step, or following, failed, and why. Waits in between until it may go on."""
    model = load(group, path)
    folder = Path(signs)
    if group.rank:
        started = time.monotonic()
        with pytest.raises(UnavailableError) as caught:
            follow(model)
        return time.monotonic() - started, str(caught.value)
    sequence = model.cache.open()
    model.read([Reading(sequence, [1, 2, 3], 1)])
    (folder / "ready").touch()
    wait_until((folder / "go").exists, "the test says so", START_SECONDS)
    started = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        model.read([Reading(sequence, [4, 5], 1)])
    taken = time.monotonic() - started
    assert sequence.length == 3
    for _ in range(2):
        with pytest.raises(UnavailableError):
            model.read([Reading(sequence, [4, 5], 1)])
        with pytest.raises(UnavailableError):
            model.heartbeat()
    check_integrity(model.cache)
    return taken, str(caught.value)


def begin_to_lose(ranks: Ranks, size: int, path: str, signs: Path, timeout_s: float) -> list[Worker]:
    workers = ranks.begin(lose, [(path, str(signs))] * size, timeout_s)
    wait_until((signs / "ready").exists, "the other process is ready", START_SECONDS)
    return workers


@pytest.mark.slow
def test_stopped_follower_fails_the_step_after_the_timeout(
    ranks: Ranks, folders: dict[str, str], tmp_path: Path
) -> None:
    first, second = begin_to_lose(ranks, 2, folders["mistral"], tmp_path, 2.0)
    second.signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    taken, message = first.answer()
    second.signal(signal.SIGCONT)
    assert "rank 0 of 2" in message
    assert 1.5 < taken < 6.0
    assert "rank 1 of 2" in second.answer()[1]


@pytest.mark.slow
def test_silent_rank_0_ends_following_after_the_timeout(ranks: Ranks, folders: dict[str, str], tmp_path: Path) -> None:
    first, second = begin_to_lose(ranks, 2, folders["mistral"], tmp_path, 2.0)
    first.signal(signal.SIGSTOP)
    taken, message = second.answer()
    first.signal(signal.SIGCONT)
    assert "rank 1 of 2" in message
    assert taken < 6.0
    (tmp_path / "go").touch()
    first.answer()


def fail_inside(group: ProcessGroup, path: str) -> None:
    model = load(group, path)
    if group.rank:
        follow(model)
    sequence = model.cache.open()
    with pytest.raises(IndexError):
        model.read([Reading(sequence, [10**6], 1)])
    with pytest.raises(UnavailableError, match="IndexError"):
        model.read([Reading(sequence, [1], 1)])


def test_step_that_fails_ends_the_group(ranks: Ranks, folders: dict[str, str]) -> None:
    first, second = ranks.begin(fail_inside, [(folders["mistral"],)] * 2)
    assert first.answer() is None
    with pytest.raises((IndexError, UnavailableError)):
        second.answer()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_follower_fails_the_next_step_at_once_on_all_ranks(
    ranks: Ranks, folders: dict[str, str], tmp_path: Path, size: int
) -> None:
    workers = begin_to_lose(ranks, size, folders["mistral"], tmp_path, 60.0)
    workers.pop(size // 2).end()
    (tmp_path / "go").touch()
    taken, message = workers[0].answer()
    assert f"rank 0 of {size}" in message
    assert taken < 5.0
    for worker in workers[1:]:
        assert f"of {size}" in worker.answer()[1]


@pytest.mark.slow
def test_killed_rank_0_ends_following_at_once(ranks: Ranks, folders: dict[str, str], tmp_path: Path) -> None:
    first, second = begin_to_lose(ranks, 2, folders["mistral"], tmp_path, 60.0)
    started = time.monotonic()
    first.end()
    assert "rank 1 of 2" in second.answer()[1]
    assert time.monotonic() - started < 5.0
