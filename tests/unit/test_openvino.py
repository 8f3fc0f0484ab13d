"""Forward passes by OpenVINO: the logits of a fresh pass, whatever was read, shared, rolled back and kept."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cached_subjects import OPENVINO_SUBJECTS, assert_equal, lean_copy, make, network, random_ids, spoil
from test_cached_model import play
from test_token_tree_passes import Planted, path_to, random_parents
from tiny_models import save_tiny_model, tiny_network
from torch import Tensor

from draftwire.engine.model_loading import load_draft_model, load_target
from draftwire.engine.openvino_loading import load_for_openvino
from draftwire.errors import InvalidRequestError
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.models.openvino import kept_weights, runtime
from draftwire.models.openvino.kept_weights import KeptWeights
from draftwire.models.openvino.openvino_engine import MOST_PADDED, PATIENCE, OpenVinoEngine, RowPadding
from draftwire.models.openvino.quantized_weights import LEVELS, QuantizedMatrix
from draftwire.models.openvino.warming import FIRST_ROWS, MOST_ROWS, warm_up
from draftwire.models.sequence_model import FeatureSpan, Reading
from draftwire.models.torch_models import torch_model
from draftwire.options.heads.taps import FeatureSource
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire_drafter.config import DrafterConfig
from draftwire_verifier.config import TensorParallelSettings, VerifierConfig
from draftwire_verifier.engine import TargetEngine
from tests.cache_integrity import check_integrity
from tests.conftest import why_no_openvino

pytestmark = pytest.mark.skipif(bool(why_no_openvino()), reason=why_no_openvino())

NUM_BLOCKS = 18


@pytest.fixture(autouse=True)
def _openvino_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "why_not_here", why_no_openvino)


@pytest.mark.parametrize("name", OPENVINO_SUBJECTS)
def test_any_schedule_gives_the_logits_of_a_fresh_pass(name: str) -> None:
    """Ragged batches, shared prefixes, forks, cuts, and a cache that is full, with NaN in every unused place."""
    subject = make(name, NUM_BLOCKS)
    for seed in range(3):
        play(subject, random.Random(seed), 20)
        for sequence in list(subject.texts):
            subject.close(sequence)


@pytest.mark.parametrize("name", ["llama by openvino", "qwen3 by openvino"])
def test_trees_are_read_at_once_and_their_paths_are_kept(name: str) -> None:
    """Beside texts without one; behind committed tokens of the same pass, as a verifier reads them."""
    subject, generator = make(name), random.Random(7)
    planted = [Planted(subject.model.cache.open(), []) for _ in range(4)]
    for _ in range(8):
        some = generator.sample(planted, generator.randint(1, 4))
        readings = []
        for one in some:
            new, num_nodes = random_ids(generator, generator.choice([1, 1, 2, 30])), generator.choice([0, 1, 5, 20])
            one.text = [*one.text, *new] if len(one.text) < 90 else one.text
            new = one.text[one.sequence.length :] or new
            if len(one.text) < one.sequence.length + len(new):
                one.text = [*one.text, *new]
            one.nodes, one.parents = random_ids(generator, num_nodes), random_parents(generator, num_nodes)
            readings.append(Reading(one.sequence, new + one.nodes, num_nodes + 1, one.parents))
        spoil(subject.model)
        logits = subject.model.read(readings)
        expected = [one.rows(subject)[len(one.text) - 1 :] for one in some]
        assert_equal(logits, torch.cat(expected), subject.tolerance)
        for one in some:
            path = path_to(generator.randint(-1, len(one.nodes) - 1), one.parents)
            subject.model.keep_path(one.sequence, path)
            one.text = one.text + [one.nodes[node] for node in path]
            one.nodes, one.parents = [], ()
            subject.model.cache.publish(one.sequence, one.text)
            check_integrity(subject.model.cache)


def test_tree_that_grows_is_no_pass_of_this_engine() -> None:
    model = make("llama by openvino").model
    sequence = model.cache.open()
    model.read([Reading(sequence, [1, 2], 1, (-1, 0))])
    with pytest.raises(AssertionError, match="read in one pass"):
        model.read([Reading(sequence, [3], 1, (0,))])
    assert sequence.length == 2


def test_features_are_those_of_our_own_decoder() -> None:
    model = network("qwen3")[0]
    layers = (0, 1, model.config.num_hidden_layers)
    source = FeatureSource(layers, lambda features: features)
    engine = OpenVinoEngine(lean_copy(model), threads=1, taps=layers)
    found = []
    own = torch_model(decoder_of(lean_copy(model), "lean"), 512, features=source)
    for each in (CachedModel(engine, 512, source), own):
        first, second = each.cache.open(), each.cache.open()
        each.read([Reading(first, [1, 2, 3], 0), Reading(second, [4], 1)])
        each.read([Reading(first, [5, 6, 7], 1, (-1, -1, 1))])
        each.keep_path(first, [1, 2])
        found.append(each.features([FeatureSpan(first, 1, 5), FeatureSpan(second, 0, 1)]))
        assert each.token_bytes[0] > 0
    assert (found[0] - found[1]).abs().max() < 1e-5 * found[1].abs().max()


def test_warm_up_makes_each_usual_step_and_leaves_nothing() -> None:
    """In a cache of one block too, whose 32 tokens bound it."""

    class Counting(CachedModel):
        sizes: list[int]

        def read(self, readings: Sequence[Reading], fuzzily: bool = False) -> Tensor:
            self.sizes.append(readings[0].keep)
            return super().read(readings, fuzzily)

    engine = OpenVinoEngine(lean_copy(network("llama")[0]), threads=1, packed=KeptWeights())
    for num_blocks, most in ((4, MOST_ROWS), (1, BLOCK_SIZE)):
        model = Counting(engine, num_blocks * BLOCK_SIZE)
        model.sizes = []
        target = TargetEngine(model, 32, None, partial(warm_up, model))
        target.warm_up()
        usual = [*range(1, FIRST_ROWS + 1)]
        assert model.sizes[:FIRST_ROWS] == usual
        model.sizes = usual
        while not target.is_prepared:
            target.prepare()
            assert not model.cache.sequences
        assert model.sizes == [*range(1, most + 1)]


def test_small_steps_have_as_many_rows_as_those_before_them() -> None:
    """Until so many in a row needed fewer; a large step begins anew."""

    def sizes(*numbers: int) -> list[int]:
        padding = RowPadding()
        return [number + padding.rows_beside(number) for number in numbers]

    assert sizes(1, 3, 1, 2, 5, 3) == [1, 3, 3, 3, 5, 5]
    assert sizes(5, *[1] * PATIENCE, 1, 2) == [5, *[5] * PATIENCE, 1, 2]
    assert sizes(5, *[1] * (PATIENCE - 2), 3, 1, 1, 3) == [5, *[5] * PATIENCE, 3, 3]
    assert sizes(5, 1, MOST_PADDED + 1, 1, MOST_PADDED) == [5, 5, MOST_PADDED + 1, 1, MOST_PADDED]


def test_padding_touches_no_text() -> None:
    """The rows beside it, whose block is nobody's, and the kept rows of a step that is padded."""
    engine = OpenVinoEngine(lean_copy(network("llama")[0]), threads=1)
    rows = []
    for padded in (False, True):
        model = CachedModel(engine, 4 * BLOCK_SIZE)
        text, other = model.cache.open(), model.cache.open()
        model.read([Reading(text, [5, 6, 7], 0), Reading(other, [1] * 70, 0)])
        if padded:
            model.read([Reading(other, [2] * 6, 1)])
        rows.append([model.read([Reading(text, [token], 1)]) for token in (3, 4)])
    for plain, beside in zip(*rows, strict=True):
        assert plain.shape == beside.shape
        assert (plain - beside).abs().max() < 1e-4


def test_row_depends_on_its_own_text_alone() -> None:
    """To the bit, with weights of eight bits too, whose inputs are rounded row by row."""
    for packed in (None, KeptWeights()):
        model = CachedModel(OpenVinoEngine(lean_copy(network("llama")[0]), threads=1, packed=packed), 1024)
        rows = []
        for others in ([1, 2, 3], [9, 8, 7], [1, 2, 3]):
            sequences = [model.cache.open() for _ in range(2)]
            model.read([Reading(sequences[0], [5, 6, 7], 0), Reading(sequences[1], others, 0)])
            rows.append(model.read([Reading(sequences[1], others[:2], 2), Reading(sequences[0], [3], 1)])[-1])
            for sequence in sequences:
                model.cache.close(sequence)
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0], rows[2])


def test_weights_of_eight_bits_are_the_nearest_levels_of_their_channels() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.1], [1], [3], [0], [1]])
    weight[4] = weight[4].abs() + 1.0  # all on one side: zero is a level all the same
    packed = QuantizedMatrix.of(weight)
    error = torch.from_numpy(packed.dense()) - weight
    assert (error.abs() <= 0.51 * torch.from_numpy(packed.scales)).all()
    assert (packed.levels.max(axis=1) == LEVELS).sum() == 4
    assert not packed.dense()[3].any()


def test_weights_of_eight_bits_are_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the model's files or its weights are others, the file is broken, or the disk has no room."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_weights, "LEAST_BYTES", 0)
    folder = save_tiny_model(tmp_path / "model", 64)
    weights = {str(seed): torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)}

    def made(fingerprint: bytes = b"a") -> int:
        """Returns how many matrices a start makes."""
        kept = KeptWeights.of_model(folder, fingerprint)
        for name, weight in weights.items():
            assert np.array_equal(kept.matrix(name, weight).dense(), QuantizedMatrix.of(weight).dense())
        kept.keep()
        return len(kept._made)

    assert [made(), made(), made(b"b")] == [3, 0, 3]
    (folder / "model.safetensors").touch()
    assert [made(), made()] == [3, 0]
    for file in (tmp_path / "cache").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    assert [made(), made()] == [3, 0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=0))
    assert [made(b"c"), made(b"c")] == [3, 3]
    assert not [*(tmp_path / "cache").rglob("unfinished-*")]


def test_small_models_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = KeptWeights.of_model(save_tiny_model(tmp_path / "model", 64), b"a")
    kept.matrix("a", torch.randn(8, 64))
    kept.keep()
    assert not (tmp_path / "cache").exists()


def test_eight_bits_change_the_law_a_little() -> None:
    lean = lean_copy(tiny_network("llama", 64, 128, seed=5))
    engine = OpenVinoEngine(lean, threads=1, packed=KeptWeights())
    ids = random.Random(3).choices(range(64), k=100)
    models = CachedModel(engine, 256), torch_model(decoder_of(lean, "lean"), 256)
    probs = [model.read([Reading(model.cache.open(), ids, 100)]).softmax(dim=1) for model in models]
    distance = (probs[0] - probs[1]).abs().sum(dim=1) / 2
    assert 0.0 < distance.mean() < 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama", 64)


def test_models_say_by_what_they_are_run(folder: Path) -> None:
    """What peers compare: between other numerics, no session moves."""
    engine = EngineSettings(kv_cache_tokens=256)
    cards = [
        load_target(ModelSettings(str(folder), engine=name, weights=weights), engine).card.description
        for name, weights in (("auto", "auto"), ("openvino", "f32"), ("openvino", "u8"), ("draftwire", "auto"))
    ]
    assert [card.dtype for card in cards] == ["float32/openvino", "float32/openvino", "u8/openvino", "float32"]
    assert len({card.weights_fingerprint for card in cards}) == 3
    assert cards[0] == cards[1]
    assert len({card.vocabulary_fingerprint for card in cards}) == 1


def test_drafters_use_it_too_unless_they_grow_trees(folder: Path) -> None:
    settings = ModelSettings(str(folder), weights="u8")
    assert load_draft_model(settings, EngineSettings(kv_cache_tokens=256)).card.description.dtype == "u8/openvino"
    growing = EngineSettings(kv_cache_tokens=256, max_tree_nodes=4)
    grown = load_draft_model(ModelSettings(str(folder)), growing)
    assert grown.card.description.dtype == "float32"
    with pytest.raises(InvalidRequestError, match="max_tree_nodes of a drafter needs engine draftwire"):
        DrafterConfig(settings, engine=growing)


def test_what_our_own_decoder_computes_in_bfloat16_stays_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwire.engine.openvino_loading.dtype_on_cpu", lambda _: torch.bfloat16)
    assert load_for_openvino(ModelSettings(str(folder))) is None
    assert load_for_openvino(ModelSettings(str(folder), engine="openvino")) is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"device": "cuda:0"}, "runs on CPUs, not on cuda:0"),
        ({"dtype": "bfloat16"}, "computes in float32, not in bfloat16"),
        ({"decoder": "transformers"}, "decoder transformers is of engine draftwire"),
    ],
)
def test_what_it_cannot_do_is_refused_in_words(more: dict[str, str], message: str, folder: Path) -> None:
    settings = ModelSettings(str(folder), **more)  # type: ignore[arg-type]
    assert load_for_openvino(settings) is None
    with pytest.raises(InvalidRequestError, match=f"engine openvino: .*{message}"):
        load_for_openvino(replace(settings, engine="openvino"))
    with pytest.raises(InvalidRequestError, match=f"weights u8: .*{message}"):
        load_for_openvino(replace(settings, weights="u8"))


def test_other_families_are_refused_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwire.engine.openvino_loading.load_lean_model", lambda *_: pytest.fail("read"))
    folders = {}
    for architecture in ("gpt2", "mistral", "qwen2"):
        folders[architecture] = save_tiny_model(tmp_path / architecture, 64)
        tiny_network(architecture, 64).config.save_pretrained(folders[architecture])
    with pytest.raises(InvalidRequestError, match=r"openvino: it runs models of the Llama family alone, and .*gpt2"):
        load_for_openvino(ModelSettings(str(folders["gpt2"]), engine="openvino"))
    with pytest.raises(InvalidRequestError, match="weights of a folder: huggingface-cli download some/name"):
        load_for_openvino(ModelSettings("some/name", engine="openvino"))
    for architecture in ("mistral", "qwen2"):  # the plugin counts a window's tokens by place, not by position
        with pytest.raises(InvalidRequestError, match="no token trees with sliding windows"):
            load_for_openvino(ModelSettings(str(folders[architecture]), engine="openvino"), reads_trees=True)


def test_settings_that_contradict_it_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="weights u8 are of engine openvino, not of draftwire"):
        ModelSettings("x", engine="draftwire", weights="u8")
    with pytest.raises(InvalidRequestError, match="engine openvino runs a target in one process"):
        VerifierConfig(ModelSettings("x", engine="openvino"), parallel=TensorParallelSettings(2))
    with pytest.raises(InvalidRequestError, match="engine vllm runs targets"):
        DrafterConfig(ModelSettings("x", engine="vllm"))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    information = tmp_path / "cpuinfo"
    information.write_text("flags : sse2 avx avx2\n")
    monkeypatch.setattr(runtime, "CPU_INFORMATION", information)
    monkeypatch.setattr(runtime, "version", lambda _: runtime.RELEASE)
    return information


def test_machine_that_it_was_not_tried_on_is_refused_in_words(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not why_no_openvino()
    elsewhere.write_text("flags : sse2 avx\n")
    assert why_no_openvino() == "it needs a CPU with avx2, which this one has not"
    monkeypatch.setattr(runtime.platform, "machine", lambda: "aarch64")
    assert why_no_openvino() == "it needs Linux on x86-64, and this is Linux on aarch64"
    monkeypatch.setattr(runtime, "version", lambda _: "2026.3.0-1")
    assert why_no_openvino().startswith(f"OpenVINO 2026.3.0-1 is installed, and {runtime.RELEASE} is needed: pip")


def test_signals_arrive_where_models_have_come_and_gone() -> None:
    """In a process of its own: a stack for signals that is gone would end it."""
    code = """
import gc, signal, sys
sys.path[:0] = ["tests", "tests/unit"]
from cached_subjects import make
models = [make("llama by openvino") for _ in range(3)]
while models:  # the first one first
    del models[0]
    gc.collect()
signal.signal(signal.SIGTERM, lambda *_: print("arrived"))
signal.raise_signal(signal.SIGTERM)
"""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["arrived"])


def test_nothing_is_sent_and_nothing_is_written_at_home(tmp_path: Path) -> None:
    """The package would make an id of the user and report its own import."""
    code = """
import os, socket, sys
class Closed(socket.socket):
    def __init__(self, *_, **__): raise SystemExit("a socket was opened")
socket.socket = Closed
from draftwire.models.openvino.runtime import import_openvino
import_openvino().Core().compile_model
assert "openvino" in sys.modules and not any(name.startswith("openvino_telemetry.") for name in sys.modules)
"""
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60, cwd=Path.cwd())
    assert not list(tmp_path.iterdir())
