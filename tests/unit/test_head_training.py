"""Training of heads: steps in a row are those of drafting, training helps, and what is written loads."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from draftwire.errors import InvalidRequestError
from draftwire.local_loop import LocalRun, speculate
from draftwire.models.decoders import decoder_of
from draftwire.models.loading import load_lean_model
from draftwire.models.torch_models import torch_model
from draftwire.options.heads.draft_head import HeadConfig, PairReading
from draftwire.options.heads.head_drafter import HeadDrafter
from draftwire.options.heads.head_loading import load_head
from draftwire.options.heads.head_names import HeadKind
from draftwire.options.heads.head_shape import HeadShape
from draftwire.options.heads.tapped_pass import features_and_logits
from draftwire.options.heads.taps import FeatureSource
from draftwire.requests.parameters import SamplingParams
from draftwire.training.batches import TrainingTexts
from draftwire.training.distillation import head_loss
from draftwire.training.heads.eagle_trainee import EagleTrainee
from draftwire.training.heads.head_recipe import HeadRecipe
from draftwire.training.heads.head_saving import save_head
from draftwire.training.heads.head_training import STATE, head_shape, start_from, streamed_lessons, train_head
from draftwire.training.heads.mlp_trainee import MlpTrainee
from draftwire.training.plan import Phase
from draftwire.training.trainer import Trainer
from tests.cache_integrity import check_integrity
from tests.tiny_models import save_tiny_model
from tools.embedded_pair.head_strategy import HeadStrategy

VOCAB, STEPS = 23, 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), VOCAB, num_layers=4, context_length=512)


def untrained(
    kind: HeadKind, target: Path, draft_ids: torch.Tensor | None, trains_output: bool = True
) -> tuple[HeadShape, torch.nn.Module]:
    """Returns a head whose weights are all random, but for what it shares with its target."""
    loaded = load_lean_model(str(target), "float32")
    assert loaded is not None
    recipe = HeadRecipe(kind, 1, STEPS, taps=(1, 2, 4) if kind is HeadKind.EAGLE3 else None)
    if draft_ids is not None:
        recipe = HeadRecipe(kind, 1, STEPS, (1, 2, 4), len(draft_ids))
    shape = head_shape(recipe, loaded.model.config)
    head = EagleTrainee(shape, trains_output) if kind is HeadKind.EAGLE3 else MlpTrainee(shape)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        head.embed_tokens.weight.copy_(loaded.model.model.embed_tokens.weight)
        if not head.lm_head.weight.requires_grad:
            output = loaded.model.lm_head.weight
            head.lm_head.weight.copy_(output if draft_ids is None else output[draft_ids])
        if isinstance(head, MlpTrainee):
            head.target_norm.weight.copy_(loaded.model.model.norm.weight)
    return shape, head


@pytest.mark.parametrize(
    ("kind", "drafts_all", "trains_output"),
    [
        (HeadKind.EAGLE3, True, True),
        (HeadKind.EAGLE3, False, True),
        (HeadKind.EAGLE3, False, False),
        (HeadKind.MEDUSA, True, False),
        (HeadKind.HYDRA, True, False),
    ],
)
def test_steps_of_training_are_those_of_drafting(
    kind: HeadKind, drafts_all: bool, trains_output: bool, target: Path, tmp_path: Path
) -> None:
    """What training computes for every place at once is what the written head drafts after it, token by token."""
    draft_ids = None if drafts_all else torch.tensor([0, 2, 3, 7, 11, 20])
    shape, trainee = untrained(kind, target, draft_ids, trains_output)
    save_head(trainee, shape, target, tmp_path / "head", draft_ids, torch.float32)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert not [name for name in stored if name.startswith("embed_tokens")]
    assert ("lm_head.weight" in stored) == trains_output
    head = load_head(tmp_path / "head", target, 256)
    assert head.config == shape.config
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(0, VOCAB, (2, 140), generator=generator)  # more than a chunk of attention
    features = torch.randn(2, 140, head.config.feature_size, generator=generator)
    count = 140 - STEPS
    with torch.no_grad():
        trained = trainee(features[:, :count], token_ids)
    for text, place in ((0, 0), (0, 9), (1, 131)):
        sequence = head.open()
        fused = head.fuse(features[text, : place + 1])
        state = head.read([PairReading(sequence, token_ids[text, 1 : place + 2].tolist(), fused)])
        for step in range(STEPS):
            drafted = state.logits[0] if draft_ids is None else state.logits[0][draft_ids]
            torch.testing.assert_close(drafted, trained[step][text, place], rtol=2e-4, atol=2e-4)
            if step + 1 < STEPS:
                state = head.extend(state, token_ids[text, place + 2 + step : place + 3 + step])
        head.close(sequence)


@pytest.mark.parametrize("kind", [HeadKind.EAGLE3, HeadKind.MEDUSA, HeadKind.HYDRA])
def test_training_makes_no_tensor_on_another_device(
    kind: HeadKind, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, which has shapes alone, an operation with a tensor of the CPU fails, as on a GPU."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # has no meta device
    draft_ids = torch.tensor([0, 2, 3, 7, 11, 20]) if kind is HeadKind.EAGLE3 else None
    shape, head = untrained(kind, target, draft_ids)
    loaded = load_lean_model(str(target), "float32")
    assert loaded is not None
    decoder = decoder_of(loaded.model.to("meta"))
    token_ids = torch.zeros(2, 140, dtype=torch.int64)
    lessons = streamed_lessons(decoder, shape.config.taps, lambda _: iter([(token_ids,)]), lambda _: STEPS, 140)
    batch = next(lessons(0))
    on_device = None if draft_ids is None else draft_ids.to("meta")
    loss = head_loss(on_device)(head.to("meta"), *batch)
    loss.backward()
    trained = [each.grad for each in head.parameters() if each.requires_grad]
    assert {each.device.type for each in (*batch, loss, *trained)} == {"meta"}


def test_device_that_is_not_there_is_refused(target: Path, tmp_path: Path) -> None:
    ids = np.zeros(2048, np.uint16)
    recipe = HeadRecipe(HeadKind.MEDUSA, 1)
    with pytest.raises(InvalidRequestError, match="device 'cuda:99' cannot be used"):
        train_head(target, [TrainingTexts(ids, 1.0)], ids, recipe, tmp_path / "head", device="cuda:99")
    assert not (tmp_path / "head").exists()


def texts_of(target: Path) -> np.ndarray:
    """Returns what the target writes greedily, which a head can learn."""
    loaded = load_lean_model(str(target), "float32")
    assert loaded is not None
    decoder = decoder_of(loaded.model)
    ids = torch.randint(0, VOCAB, (48, 4), generator=torch.Generator().manual_seed(1))
    while ids.shape[1] < 64:
        logits = features_and_logits(decoder, ids, (4,))[1]
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids.flatten().numpy().astype(np.uint16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "hydra"])
def test_training_raises_acceptance_and_the_head_loads(kind: str, target: Path, tmp_path: Path) -> None:
    ids = texts_of(target)
    recipe = HeadRecipe(HeadKind(kind), 24_000, 2, batch_tokens=1024, phases=(Phase(1.0, 64),))
    lines: list[str] = []
    found = train_head(
        target, [TrainingTexts(ids[:-512], 1.0)], ids[-512:], recipe, tmp_path / "head", report=lines.append
    )
    assert len(lines) == 4
    assert found.after[1].means[0] > found.before[1].means[0] + 0.02
    assert load_head(tmp_path / "head", target, 64).config.kind is HeadKind(kind)
    assert not (tmp_path / "head" / STATE).exists()


def test_interrupted_training_goes_on_where_it_was(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = texts_of(target)
    recipe = HeadRecipe(HeadKind.MEDUSA, 6_144, 2, batch_tokens=1024, phases=(Phase(1.0, 64),))
    texts = [TrainingTexts(ids[:-512], 1.0)]
    whole = train_head(target, texts, ids[-512:], recipe, tmp_path / "whole", report=lambda _: None)
    monkeypatch.setattr(Trainer, "CHECKPOINT_SECONDS", 0.0)
    step = Trainer._train_step
    calls: list[int] = []

    def interrupted(self: Trainer, *batch: object) -> float:
        calls.append(self.step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *batch)

    monkeypatch.setattr(Trainer, "_train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_head(target, texts, ids[-512:], recipe, tmp_path / "parts", report=lambda _: None)
    parts = train_head(target, texts, ids[-512:], recipe, tmp_path / "parts", report=lambda _: None)
    assert calls == [0, 1, 2, 3, 3, 4, 5]
    assert parts.after == whole.after


def test_what_cannot_be_trained_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot draft 24 of 23 tokens"):
        head_shape(HeadRecipe(HeadKind.EAGLE3, 1, draft_vocab_size=24), LlamaConfig.from_pretrained(target))
    ids = np.zeros(300, np.uint16)
    with pytest.raises(InvalidRequestError, match="300 tokens"):
        train_head(target, [TrainingTexts(ids, 1.0)], ids, HeadRecipe(HeadKind.EAGLE3, 1), tmp_path / "head")


def test_shape_is_that_of_the_targets_layers(target: Path) -> None:
    shape = head_shape(HeadRecipe(HeadKind.EAGLE3, 1), LlamaConfig.from_pretrained(target))
    assert shape.config == HeadConfig(HeadKind.EAGLE3, (1, 2), 16, 16, VOCAB, VOCAB)
    assert (shape.layers.num_hidden_layers, shape.layers.head_dim) == (1, 8)
    assert (shape.norm_before_fusion, shape.norm_before_residual) == (True, True)  # states and outputs of any size


@pytest.mark.parametrize("width", [7, 40])
def test_mlp_may_have_another_width(width: int, target: Path, tmp_path: Path) -> None:
    loaded = load_lean_model(str(target), "float32")
    assert loaded is not None
    shape = head_shape(HeadRecipe(HeadKind.EAGLE3, 1, STEPS, intermediate_size=width), loaded.model.config)
    head = EagleTrainee(shape)
    start_from(head, loaded.model, None, 0)
    assert len(head.layers[0].mlp.gate_proj.weight) == width
    save_head(head, shape, target, tmp_path, None, torch.float32)
    assert load_head(tmp_path, target, 64).config == shape.config


def test_a_new_head_begins_without_regard_to_how_large_states_are(target: Path) -> None:
    """States of a deep target are hundreds large; what a head's layer adds has to count all the same."""
    loaded = load_lean_model(str(target), "float32")
    assert loaded is not None
    shape = head_shape(HeadRecipe(HeadKind.EAGLE3, 1, STEPS), loaded.model.config)
    head = EagleTrainee(shape)
    start_from(head, loaded.model, None, 0)
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, VOCAB, (1, 9), generator=generator)
    features = torch.randn(1, 7, shape.config.feature_size, generator=generator)
    with torch.no_grad():
        found, of_larger = head(features, token_ids), head(300.0 * features, token_ids)
    torch.testing.assert_close(found, of_larger, rtol=1e-3, atol=1e-3)


def test_first_token_is_learned_alone_before_several_in_a_row(target: Path) -> None:
    recipe = HeadRecipe(HeadKind.EAGLE3, 10 * 2_048)
    assert [recipe.num_steps_at(step) for step in range(10)] == [1] * 6 + [4] * 4
    assert {HeadRecipe(HeadKind.MEDUSA, 10 * 2_048).num_steps_at(step) for step in range(10)} == {4}
    loaded = load_lean_model(str(target), "float32")
    assert loaded is not None
    texts = [(torch.zeros(2, 12, dtype=torch.int64),)] * 10
    lessons = streamed_lessons(
        decoder_of(loaded.model), (1, 2), lambda first: iter(texts[first:]), recipe.num_steps_at, 24
    )
    assert [batch[1].shape[1] for batch in lessons(4)] == [11, 11, 8, 8, 8, 8]


def test_head_speculates_in_one_process_without_changing_the_greedy_text(target: Path, tmp_path: Path) -> None:
    ids = texts_of(target)
    recipe = HeadRecipe(HeadKind.EAGLE3, 24_000, 3, batch_tokens=1024, phases=(Phase(1.0, 64),))
    train_head(target, [TrainingTexts(ids[:-512], 1.0)], ids[-512:], recipe, tmp_path, report=lambda _: None)
    head = load_head(tmp_path, target, 256, torch.float32)
    loaded = load_lean_model(str(target), "float32")
    assert loaded is not None
    prompt, written = ids[:6].tolist(), []
    features = FeatureSource(head.config.taps, head.fuse)
    model = torch_model(decoder_of(loaded.model), 256, features=features)
    drafter = HeadStrategy(HeadDrafter(head, model), model, 256)
    rounds = list(speculate(model, drafter, prompt, LocalRun(SamplingParams(0.0), 40, 3, "token", 1)))
    for done in rounds:
        written += done.token_ids
    assert written == greedy_after(loaded.model, prompt, len(written))
    assert not rounds[0].num_accepted
    assert sum(done.num_accepted for done in rounds) > 2
    check_integrity(head.cache)


def greedy_after(model: object, prompt: list[int], count: int) -> list[int]:
    decoder = decoder_of(model)
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, features_and_logits(decoder, ids, (4,))[1][:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()
