"""Heads of the public formats, with random weights, against their authors' formulas; and what is refused, in words."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig

from draftwire.errors import InvalidRequestError, NoRoomError
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.options.heads.draft_head import DraftHead, HeadState, PairReading
from draftwire.options.heads.head_formats import TargetFacts, required_shapes, shape_of
from draftwire.options.heads.head_loading import build_head, load_head, read_shape
from draftwire.options.heads.head_shape import HeadShape
from tests.head_checkpoints import (
    HIDDEN,
    LAYERS,
    Checkpoint,
    eagle1_of_authors,
    eagle1_outputs,
    eagle3_logits,
    eagle3_of_authors,
    eagle3_of_speculators,
    eagle3_outputs,
    hydra_of_authors,
    medusa_of_authors,
    mtp_of_mimo,
    mtp_outputs,
    normalised,
    with_config,
    with_tensor,
    without,
)
from tests.tiny_models import save_tiny_model

VOCAB, DRAFTED, NUM_LAYERS = 23, 9, 8
TEXTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3], [8, 9, 7, 9, 3]]
"""Tokens of texts; the features of the first are paired with the second, and so on."""
DRAWN = [[2, 11, 0, 5], [7, 7, 1, 3], [22, 4, 9, 0]]
"""What is said to be drawn, whatever is likely."""


@dataclass
class Case:
    """A checkpoint beside its target, and what it computes."""

    checkpoint: Checkpoint
    target: Path
    outputs: Callable[[Tensor, list[int]], Tensor]
    """Of the fused features and tokens of a whole text's pairs, `[count, hidden]`."""
    logits: Callable[[Tensor], Tensor]
    """`[count, vocab]` of outputs."""
    fused: Callable[[Tensor], Tensor]
    """Of features."""
    carried: Callable[[Tensor], Tensor] = lambda rows: rows
    """Of outputs: what is in the place of fused features for the next draft token."""

    def load(self, cache_tokens: int = 256) -> DraftHead:
        return load_head(self.checkpoint.folder, self.target, cache_tokens, torch.float64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), VOCAB, num_layers=NUM_LAYERS)


def weights_of(target: Path) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in load_file(target / "model.safetensors").items()}


def last_norm(target: Path) -> Callable[[Tensor], Tensor]:
    epsilon = json.loads((target / "config.json").read_text())["rms_norm_eps"]
    weight = weights_of(target)["model.norm.weight"]
    return lambda rows: normalised(rows, weight, epsilon)


def eagle3_case(checkpoint: Checkpoint, target: Path) -> Case:
    own = weights_of(target)["model.embed_tokens.weight"]
    tensors = checkpoint.tensors
    embeddings = tensors.get("embed_tokens.weight", own)

    def fused(features: Tensor) -> Tensor:
        if "input_norm.weight" in tensors:
            features = normalised(features, tensors["input_norm.weight"], LAYERS["rms_norm_eps"])
        return features @ tensors["fc.weight"].T

    return Case(
        checkpoint,
        target,
        lambda rows, ids: eagle3_outputs(checkpoint, embeddings, rows, ids),
        lambda rows: eagle3_logits(checkpoint, rows, VOCAB),
        fused,
    )


def eagle1_case(checkpoint: Checkpoint, target: Path) -> Case:
    output = weights_of(target)["lm_head.weight"]
    return Case(
        checkpoint,
        target,
        lambda rows, ids: eagle1_outputs(checkpoint, rows, ids),
        lambda rows: rows @ output.T,
        last_norm(target),
    )


def mtp_case(checkpoint: Checkpoint, target: Path) -> Case:
    weights, norm = weights_of(target), checkpoint.tensors["model.mtp_layers.0.hidden_layernorm.weight"]

    def fused(rows: Tensor) -> Tensor:
        return normalised(rows, norm, LAYERS["rms_norm_eps"])

    return Case(
        checkpoint,
        target,
        lambda rows, ids: mtp_outputs(checkpoint, weights["model.embed_tokens.weight"], rows, ids),
        lambda rows: rows @ weights["lm_head.weight"].T,
        fused,
        carried=fused,
    )


CASES: dict[str, Callable[[Path, Path], Case]] = {
    "authors": lambda folder, target: eagle3_case(eagle3_of_authors(folder, VOCAB, DRAFTED).write(), target),
    "authors' pickle": lambda folder, target: eagle3_case(
        eagle3_of_authors(folder, VOCAB, DRAFTED).write("bin"), target
    ),
    "speculators": lambda folder, target: eagle3_case(
        eagle3_of_speculators(folder, VOCAB, DRAFTED, [1, 3, 6]).write(), target
    ),
    "speculators, normalised": lambda folder, target: eagle3_case(
        eagle3_of_speculators(folder, VOCAB, DRAFTED, [0, 5], norm_before_residual=True, norm_before_fc=True).write(),
        target,
    ),
    "EAGLE-1": lambda folder, target: eagle1_case(eagle1_of_authors(folder, VOCAB).write(), target),
    "EAGLE-1, two layers": lambda folder, target: eagle1_case(
        eagle1_of_authors(folder, VOCAB, layers=2, bias=False).write("bin"), target
    ),
    "MTP": lambda folder, target: mtp_case(mtp_of_mimo(folder, VOCAB, NUM_LAYERS).write(), target),
}


def features_for(head: DraftHead, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = head.config.feature_size
    return [torch.randn(len(text) - 1, size, generator=generator, dtype=torch.float64) for text in TEXTS]


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found.nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0), rtol=1e-5, atol=1e-5)


def reference(case: Case, fused: Tensor, text: list[int], drawn: list[int]) -> list[Tensor]:
    """Returns the logits of each draft token, everything computed anew for each."""
    token_ids = text[1:]
    expected = [case.logits(case.outputs(fused, token_ids)[-1:])[0]]
    for token in drawn:
        fused = torch.cat([fused, case.carried(case.outputs(fused, token_ids)[-1:])])
        token_ids = [*token_ids, token]
        expected.append(case.logits(case.outputs(fused, token_ids)[-1:])[0])
    return expected


@pytest.mark.parametrize("name", CASES)
def test_batched_drafts_equal_the_authors_formulas(name: str, target: Path, tmp_path: Path) -> None:
    """Texts of several lengths in a batch, one of which stops early; two rounds, with drafted pairs taken back."""
    case = CASES[name](tmp_path / "head", target)
    head = case.load()
    fused = [head.fuse(each) for each in features_for(head, 7)]
    for found, features in zip(fused, features_for(head, 7), strict=True):
        torch.testing.assert_close(found, case.fused(features), rtol=1e-9, atol=1e-9)
    sequences = [head.open() for _ in TEXTS]
    for start, end in ((0, 2), (2, 7)):
        members = [row for row, own in enumerate(fused) if len(own) > start]
        state = head.read(
            [PairReading(sequences[row], TEXTS[row][1 + start : 1 + end], fused[row][start:end]) for row in members]
        )
        lengths = {row: sequences[row].length for row in members}
        expected = {row: reference(case, fused[row][:end], TEXTS[row][: 1 + end], DRAWN[row]) for row in members}
        going = members
        for depth in range(1 + len(DRAWN[0])):
            if depth:
                if depth == 2:
                    state, going = state.select(range(1, len(going))), going[1:]
                state = head.extend(state, torch.tensor([DRAWN[row][depth - 1] for row in going]))
            assert state.depth == depth
            for found, row in zip(state.logits, going, strict=True):
                assert_equal(found, expected[row][depth])
        for row in members:
            head.truncate(sequences[row], lengths[row])
    for sequence in sequences:
        head.close(sequence)


def medusa_reference(checkpoint: Checkpoint, feature: Tensor, blocks: int) -> list[Tensor]:
    tensors, logits = checkpoint.tensors, []
    for depth in range(checkpoint.config["medusa_num_heads"]):
        row = feature
        for block in range(blocks):
            name = f"{depth}.{block}.linear"
            row = row + silu(tensors[f"{name}.weight"] @ row + tensors[f"{name}.bias"])
        logits.append(tensors[f"{depth}.{blocks}.weight"] @ row)
    return logits


def hydra_reference(checkpoint: Checkpoint, embeddings: Tensor, feature: Tensor, tokens: list[int]) -> list[Tensor]:
    tensors, logits = checkpoint.tensors, []
    for depth in range(checkpoint.config["hydra_num_heads"]):
        row = torch.cat([feature, *(embeddings[token] for token in tokens[: depth + 1])])
        for block in range(checkpoint.config["hydra_num_layers"]):
            name = f"hydra_mlp.{depth}.{1 + 2 * block}"
            inner = silu(tensors[f"{name}.linear.weight"] @ row + tensors[f"{name}.linear.bias"])
            if not block:
                row = tensors[f"{name}.res_connection.weight"] @ row + tensors[f"{name}.res_connection.bias"]
            row = row + inner
        name = f"hydra_lm_head.{depth}.1"
        logits.append(tensors[f"{name}.weight"] @ row + tensors[f"{name}.bias"])
    return logits


def drafted(head: DraftHead, features: list[Tensor]) -> list[list[Tensor]]:
    """Returns the logits of each draft token of each text, as many as the head can make."""
    sequences = [head.open() for _ in TEXTS]
    fused = [head.fuse(each) for each in features]
    readings = [PairReading(*each) for each in zip(sequences, (text[1:] for text in TEXTS), fused, strict=True)]
    state: HeadState = head.read(readings)
    rows = [[row] for row in state.logits]
    for depth in range((head.config.most_tokens or 1) - 1):
        state = head.extend(state, torch.tensor([tokens[depth] for tokens in DRAWN]))
        for known, row in zip(rows, state.logits, strict=True):
            known.append(row)
    return rows


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_medusa_equals_its_authors_formula(blocks: int, suffix: str, target: Path, tmp_path: Path) -> None:
    checkpoint = medusa_of_authors(tmp_path / "head", VOCAB, blocks=blocks).write(suffix)
    head = load_head(checkpoint.folder, target, 4 * BLOCK_SIZE, torch.float64)
    features = features_for(head, 8)
    for found, own in zip(drafted(head, features), features, strict=True):
        expected = medusa_reference(checkpoint, last_norm(target)(own[-1]), blocks)
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_hydra_equals_its_authors_formula(target: Path, tmp_path: Path) -> None:
    checkpoint = hydra_of_authors(tmp_path / "head", VOCAB).write("pt")
    head = load_head(checkpoint.folder, target, 4 * BLOCK_SIZE, torch.float64)
    features = features_for(head, 9)
    embeddings = weights_of(target)["model.embed_tokens.weight"]
    for found, own, text, tokens in zip(drafted(head, features), features, TEXTS, DRAWN, strict=True):
        expected = hydra_reference(checkpoint, embeddings, last_norm(target)(own[-1]), [text[-1], *tokens])
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_medusa_in_the_speculators_format_shares_the_targets_output(target: Path, tmp_path: Path) -> None:
    own = medusa_of_authors(tmp_path / "head", VOCAB)
    own.tensors = {
        f"blocks.{depth}.layers.0.{kind}": own.tensors[f"{depth}.0.linear.{kind}"]
        for depth in range(3)
        for kind in ("weight", "bias")
    }
    own.config = {
        "speculators_model_type": "medusa",
        "num_heads": 3,
        "num_hidden_layers": 1,
        "medusa_hidden_size": HIDDEN,
        "medusa_vocab_size": VOCAB,
        "original_lm_head": True,
    }
    head = load_head(own.write().folder, target, 4 * BLOCK_SIZE, torch.float64)
    output = weights_of(target)["lm_head.weight"]
    features = features_for(head, 10)
    for found, each in zip(drafted(head, features), features, strict=True):
        row = last_norm(target)(each[-1])
        for depth, logits in enumerate(found):
            name = f"blocks.{depth}.layers.0"
            inner = row + silu(own.tensors[f"{name}.weight"] @ row + own.tensors[f"{name}.bias"])
            torch.testing.assert_close(logits, output @ inner, rtol=1e-5, atol=1e-5)


def test_layers_are_those_that_the_head_names(target: Path, tmp_path: Path) -> None:
    """By default those of the EAGLE authors; in an `eagle_config` those whose outputs are read."""
    checkpoint = eagle3_of_authors(tmp_path / "head", VOCAB, DRAFTED).write()
    assert read_shape(checkpoint.folder, target).config.taps == (2, 4, 5)
    checkpoint.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    assert read_shape(checkpoint.write().folder, target).config.taps == (1, 3, 6)
    checkpoint.config["eagle_aux_hidden_state_layer_ids"] = [0, 2, 5]
    assert read_shape(checkpoint.write().folder, target).config.taps == (0, 2, 5)


def test_drafted_ids_are_known_by_either_tensor(target: Path, tmp_path: Path) -> None:
    checkpoint = eagle3_of_authors(tmp_path / "head", VOCAB, DRAFTED)
    finite = []
    for missing in ("t2d", "d2t"):
        kept = {name: tensor for name, tensor in checkpoint.tensors.items() if name != missing}
        head = load_head(replace(checkpoint, tensors=kept).write().folder, target, 4 * BLOCK_SIZE, torch.float64)
        finite.append(drafted(head, features_for(head, 1))[0][0].isfinite())
    assert torch.equal(finite[0], checkpoint.tensors["t2d"])
    assert torch.equal(finite[1], checkpoint.tensors["t2d"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_config(target_hidden_size=32), "reads hidden states of 32, and those of its target are 16 wide"),
        (with_config(vocab_size=24), "vocabulary of 24 tokens, and its target has 23"),
        (with_config(eagle_aux_hidden_state_layer_ids=[1, 9]), "at layers 1, 9 of a target that has 8"),
        (with_config(eagle_aux_hidden_state_layer_ids=[2, 2]), "at layers 2, 2 of a target that has 8"),
        (with_config(eagle_aux_hidden_state_layer_ids=[1, 2]), "fc.weight of .* is 16 x 48, not 16 x 32"),
        (with_config(hidden_act="gelu"), "activation .* is gelu"),
        (with_config(model_type="gemma2"), "layers of type gemma2"),
        (with_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "of kind dynamic"),
        (with_config(speculators_model_type="dflash"), "drafts whole blocks from masks"),
        (with_config(speculators_model_type="mtp"), "of kind 'mtp'; supported: eagle3, medusa, hydra"),
        (without("fc.weight"), "lacks fc.weight"),
        (without("d2t", "t2d"), "drafts 9 of 23 tokens, and has neither d2t nor t2d"),
        (with_tensor("d2t", torch.zeros(9, dtype=torch.int64)), "name different tokens"),
        (with_tensor("d2t", torch.full((9,), 20)), "does not name 9 different tokens"),
        (with_tensor("midlayer.extra", torch.zeros(1)), "layers.0.extra, which heads of its kind do not have"),
        (with_tensor("lm_head.bias", torch.zeros(9)), "lm_head.bias, which heads of its kind do not have"),
        (with_tensor("norm.bias", torch.zeros(16)), "norm.bias, which heads of its kind do not have"),
        (with_tensor("midlayer.mlp.up_proj.bias", torch.zeros(24)), "mlp.up_proj.bias, and lacks .*mlp.gate_proj.bias"),
        (with_tensor("fc.bias", torch.zeros(4)), "fc.bias of .* is 4, not 16"),
        (with_config(attention_bias=True), "lacks layers.0.self_attn.k_proj.bias, .* and more"),
        (with_config(mlp_bias=True), "lacks layers.0.mlp.down_proj.bias"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    change: Callable[[Checkpoint], None], words: str, target: Path, tmp_path: Path
) -> None:
    checkpoint = eagle3_of_authors(tmp_path / "head", VOCAB, DRAFTED)
    change(checkpoint)
    with pytest.raises(InvalidRequestError, match=words):
        load_head(checkpoint.write().folder, target, 64)


def test_vocabularies_are_compared_by_their_strings(target: Path, tmp_path: Path) -> None:
    checkpoint = eagle3_of_authors(tmp_path / "head", VOCAB, DRAFTED).write()
    other = save_tiny_model(tmp_path / "other", VOCAB, tokens=[f"u{index}" for index in range(VOCAB)])
    (checkpoint.folder / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidRequestError, match=r"another vocabulary .* token '[tu]0' differs"):
        load_head(checkpoint.folder, target, 64)
    (checkpoint.folder / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    load_head(checkpoint.folder, target, 64)


def test_pickles_run_no_code(target: Path, tmp_path: Path) -> None:
    checkpoint = eagle3_of_authors(tmp_path / "head", VOCAB, DRAFTED).write("bin")

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "touched").touch, ())

    torch.save({"fc.weight": Evil()}, checkpoint.folder / "pytorch_model.bin")
    with pytest.raises(InvalidRequestError, match="cannot be read as tensors alone"):
        load_head(checkpoint.folder, target, 64)
    assert not (tmp_path / "touched").exists()


def test_full_cache_leaves_the_sequences_as_they_were(target: Path, tmp_path: Path) -> None:
    head = CASES["speculators"](tmp_path / "head", target).load(cache_tokens=BLOCK_SIZE)
    first, second = head.open(), head.open()
    state = head.read([PairReading(first, [1] * BLOCK_SIZE, torch.zeros(BLOCK_SIZE, HIDDEN, dtype=torch.float64))])
    with pytest.raises(NoRoomError):
        head.extend(state, torch.tensor([1]))
    with pytest.raises(NoRoomError):
        head.read([PairReading(second, [1], torch.zeros(1, HIDDEN, dtype=torch.float64))])
    assert (first.length, second.length) == (BLOCK_SIZE, 0)


EAGLE3 = {"vocab_size": 128256, "draft_vocab_size": 32000}
PUBLISHED: dict[str, tuple[dict[str, Any], TargetFacts, tuple[int, ...], int]] = {
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": (
        {
            **EAGLE3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        TargetFacts(4096, 32, 128256, 1e-5, 131072),
        (2, 16, 29),
        8192,
    ),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": (
        {
            **EAGLE3,
            "hidden_size": 6144,
            "target_hidden_size": 8192,
            "intermediate_size": 16384,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
        },
        TargetFacts(8192, 80, 128256, 1e-5, 131072),
        (2, 40, 77),
        12288,
    ),
    "XiaomiMiMo/MiMo-7B-RL": (
        {
            "model_type": "mimo",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 36,
            "num_nextn_predict_layers": 1,
            "vocab_size": 151680,
        },
        TargetFacts(4096, 36, 151680, 1e-5, 32768),
        (36,),
        8192,
    ),
}
"""Shapes as their configurations state them, with the layers read and bytes that travel for a token in bfloat16."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_of_published_heads_fit_without_their_weights(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    values, target, taps, num_bytes = PUBLISHED[name]
    shape: HeadShape = shape_of(name, {**LAYERS, "head_dim": 128, **values}, target)
    tensors = {
        each: torch.empty(size, dtype=torch.int64 if each == "d2t" else torch.bfloat16, device="meta")
        for each, size in required_shapes(shape).items()
    }
    head = build_head(shape, tensors, 16)
    features = torch.empty(1, shape.config.feature_size, dtype=torch.bfloat16, device="meta")
    travels = head.fuse(features).nbytes
    with capsys.disabled():
        print(
            f"\n{name}: features of a token are {features.nbytes:,} bytes, fused {travels:,}, in fp8 {travels // 2:,}"
        )
    assert shape.config.taps == taps
    assert travels == num_bytes


def test_facts_of_a_target_are_those_of_its_text_model(target: Path) -> None:
    facts = TargetFacts.of(AutoConfig.from_pretrained(target))
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (HIDDEN, NUM_LAYERS, VOCAB)
