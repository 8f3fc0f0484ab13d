"""Trains a head for a target on texts, from features that the target's decoder computes as needed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig

from draftwire.errors import InvalidRequestError
from draftwire.method.devices import prepare
from draftwire.models.decoder import Decoder
from draftwire.models.decoders import decoder_of
from draftwire.models.lean_model import STEADY_ROTATIONS, LeanModel, head_size
from draftwire.models.loading import load_lean_model
from draftwire.options.heads.draft_head import HeadConfig
from draftwire.options.heads.head_formats import TargetFacts
from draftwire.options.heads.head_names import HeadKind
from draftwire.options.heads.head_shape import HeadShape
from draftwire.options.heads.tapped_pass import features_and_logits
from draftwire.options.heads.taps import check_taps
from draftwire.training.batches import TrainingBatch, TrainingTexts, batches
from draftwire.training.distillation import head_loss
from draftwire.training.heads.eagle_trainee import EagleTrainee
from draftwire.training.heads.head_acceptance import DraftAcceptance, draft_acceptance
from draftwire.training.heads.head_recipe import HeadRecipe
from draftwire.training.heads.head_saving import save_head
from draftwire.training.heads.mlp_trainee import MlpTrainee
from draftwire.training.muon import fast_type
from draftwire.training.trainer import Trainer

STATE = "training.pt"
"""File in the head's folder from which an interrupted training resumes; removed at its end."""
HELD_OUT_TEXTS = 32
"""Windows that acceptance is measured on, before and after; they are not trained on."""
HELD_OUT_TOKENS = 256
SPREAD = 0.01
"""Standard deviation of the output projections of an EAGLE-3 layer, so that it changes its input little at first."""


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """Acceptance of a head on held-out texts, before training and after it."""

    before: list[DraftAcceptance]
    after: list[DraftAcceptance]


def head_shape(recipe: HeadRecipe, target: Any) -> HeadShape:
    """Returns the shape of a new head for a target's configuration.

    Raises:
        InvalidRequestError: the target has no such layers, or its vocabulary is smaller than the head's.
    """
    facts = TargetFacts.of(target)
    drafted = recipe.draft_vocab_size or facts.vocab_size
    if drafted > facts.vocab_size:
        raise InvalidRequestError(f"a head cannot draft {drafted:,} of {facts.vocab_size:,} tokens")
    is_eagle3 = recipe.kind is HeadKind.EAGLE3
    authors = tuple(sorted({2, facts.num_layers // 2, max(0, facts.num_layers - 3)}))  # fewer of a shallow target
    taps = recipe.taps or authors if is_eagle3 else (facts.num_layers,)
    check_taps(taps, facts.num_layers)
    config = HeadConfig(
        recipe.kind,
        taps,
        facts.hidden_size,
        facts.hidden_size,
        facts.vocab_size,
        drafted if is_eagle3 else facts.vocab_size,
        None if is_eagle3 else recipe.num_steps,
        reads_history=is_eagle3,
    )
    if not is_eagle3:
        return HeadShape(config, target_epsilon=facts.epsilon)
    rope = target.rope_parameters
    layers = LlamaConfig(
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=recipe.intermediate_size or target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=head_size(target),
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=facts.epsilon,
        rope_parameters=rope if rope["rope_type"] in STEADY_ROTATIONS else None,
    )
    # The hidden states of a target are tens to thousands large, and differ much from token to token: a layer that adds
    # to them without a norm hardly changes the drafts.
    return HeadShape(
        config,
        layers,
        norm_before_residual=True,
        norm_before_fusion=True,
        num_positions=facts.num_positions,
        target_epsilon=facts.epsilon,
    )


def frequent_ids(sources: Sequence[TrainingTexts], count: int, vocab_size: int) -> Tensor | None:
    """Returns the `count` ids that are most frequent in texts, ascending; None if that is all."""
    if count >= vocab_size:
        return None
    counts = sum(np.bincount(each.ids, minlength=vocab_size) * each.share / len(each.ids) for each in sources)
    order = np.argsort(-np.asarray(counts), kind="stable")[:count]
    return torch.from_numpy(np.sort(order))


@torch.no_grad()
def start_from(trainee: EagleTrainee | MlpTrainee, target: Any, draft_ids: Tensor | None, seed: int) -> None:
    """Initialises the weights of a head, in place: with the target's embeddings, output layer and norm.

    The projections of EAGLE-3 start at random and keep the size of normalised rows. The target's own layers would not
    help: they read and write states of another size.

    The target is as `load_lean_model` returns it. `draft_ids` is `[draft_vocab_size] int64`; None if the head drafts
    all ids.
    """
    trainee.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    output = target.lm_head.weight
    trainee.lm_head.weight.copy_(output if draft_ids is None else output[draft_ids])
    if isinstance(trainee, MlpTrainee):
        trainee.target_norm.weight.copy_(target.model.norm.weight)
        return
    trainee.norm.weight.copy_(target.model.norm.weight)
    generator = torch.Generator().manual_seed(seed)
    for name, module in trainee.named_modules():
        if isinstance(module, nn.Linear) and module is not trainee.lm_head:
            spread = SPREAD if name.endswith(("o_proj", "down_proj")) else module.in_features**-0.5
            module.weight.normal_(0.0, spread, generator=generator)


def streamed_lessons(
    decoder: Decoder,
    taps: tuple[int, ...],
    texts: Callable[[int], Iterator[TrainingBatch]],
    num_steps: Callable[[int], int],
    pass_tokens: int,
) -> Callable[[int], Iterator[TrainingBatch]]:
    """Returns a source of training batches for `head_loss`.

    Args:
        decoder: of the target, the one that serves it.
        taps: ids of its layers; see `HeadConfig.taps`.
        texts: yields batches of token ids alone, from a step on.
        num_steps: returns the number of draft tokens in a row that a training step is about.
        pass_tokens: tokens of one pass of the target, rounded up to whole texts.

    Returns:
        A function of the first step that yields ids `[batch, length] int64`, features
        `[batch, length - num_steps, len(taps) * hidden]` and logits `[batch, length, vocab]` in the target's type.
    """

    def lessons(first_step: int) -> Iterator[TrainingBatch]:
        for step, (ids,) in enumerate(texts(first_step), first_step):
            passes = ids.to(decoder.device).split(-(-pass_tokens // ids.shape[1]))
            parts = [features_and_logits(decoder, rows, taps) for rows in passes]
            features, logits = (torch.cat(each) for each in zip(*parts, strict=True))
            yield ids.to(features.device), features[:, : ids.shape[1] - num_steps(step)], logits

    return lessons


def train_head(
    target: Path,
    sources: Sequence[TrainingTexts],
    held_out: NDArray[np.integer[Any]],
    recipe: HeadRecipe,
    out: Path,
    compiled: bool = False,
    device: str = "cpu",
    report: Callable[[str], None] = print,
) -> TrainedHead:
    """Trains a head and saves it. An interrupted training resumes where it was, with the same recipe.

    The target is of the Llama family. Acceptance is measured on `held_out`, ids of other texts, and reported line by
    line. The order of the texts does not depend on the device.

    Raises:
        InvalidRequestError: the device is missing, the target cannot be loaded, or the texts are too short.
        ValueError: an interrupted training had another recipe.
    """
    prepare(device)
    is_mixed = fast_type(torch.device(device)) is torch.bfloat16
    loaded = load_lean_model(str(target), "bfloat16" if is_mixed else "float32")
    if loaded is None:
        raise InvalidRequestError(f"heads are trained for models of the Llama family alone, which {target} is not")
    model = cast(LeanModel, loaded.model)
    shape = head_shape(recipe, model.config)
    config = shape.config
    draft_ids = frequent_ids(sources, config.draft_vocab_size, config.vocab_size)
    head: EagleTrainee | MlpTrainee
    head = EagleTrainee(shape, recipe.trains_output) if recipe.kind is HeadKind.EAGLE3 else MlpTrainee(shape)
    start_from(head, model, draft_ids, recipe.seed)
    head.to(device)
    draft_ids = None if draft_ids is None else draft_ids.to(device)
    decoder = decoder_of(model.to(device))
    lessons_of = partial(streamed_lessons, decoder, config.taps, pass_tokens=recipe.batch_tokens)

    def measured(when: str) -> list[DraftAcceptance]:
        texts = ((part,) for part in _windows(held_out).split(8))
        lessons = lessons_of(texts=lambda _: texts, num_steps=lambda _: recipe.num_steps)
        found = draft_acceptance(head, draft_ids, lessons(0))
        for each in found:
            report(f"{when}: {each}")
        return found

    before = measured("before")
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(head, recipe.plan(), out / STATE, compiled)
    trainer.run(
        lessons_of(texts=partial(batches, sources, recipe.plan()), num_steps=recipe.num_steps_at),
        head_loss(draft_ids),
        recipe.kind.value,
    )
    after = measured("after")
    save_head(head, shape, target, out, draft_ids, torch.bfloat16)
    (out / STATE).unlink()
    return TrainedHead(before, after)


def _windows(ids: NDArray[np.integer[Any]]) -> Tensor:
    """Returns the windows that acceptance is measured on, `[windows, HELD_OUT_TOKENS] int64`.

    Raises:
        InvalidRequestError: there are too few ids.
    """
    most = len(ids) // HELD_OUT_TOKENS
    if most < 2:
        raise InvalidRequestError(f"texts to measure acceptance on have {len(ids):,} tokens, of {2 * HELD_OUT_TOKENS}")
    count = min(most, HELD_OUT_TEXTS)
    starts = np.linspace(0, len(ids) - HELD_OUT_TOKENS, count).astype(np.int64)
    windows = np.stack([ids[start : start + HELD_OUT_TOKENS] for start in starts.tolist()])
    return torch.from_numpy(windows.astype(np.int64))
