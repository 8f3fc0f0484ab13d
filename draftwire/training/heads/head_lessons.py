"""Training batches of a head: texts, with the target's features and logits of every token, computed as needed."""

from collections.abc import Callable, Iterator

import torch

from draftwire.models.decoder import Decoder
from draftwire.options.heads.tapped_pass import features_and_logits
from draftwire.training.batches import TrainingBatch


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
