"""What a head learns from: texts, with the target's features and logits of every token, made as they are needed."""

from collections.abc import Callable, Iterator

import torch

from draftwire.models.decoder import Decoder
from draftwire.models.tapped_pass import features_and_logits
from draftwire.training.batches import TrainingBatch


def streamed_lessons(
    decoder: Decoder, taps: tuple[int, ...], texts: Callable[[int], Iterator[TrainingBatch]], pass_tokens: int
) -> Callable[[int], Iterator[TrainingBatch]]:
    """Returns batches of texts as `head_loss` takes them.

    Args:
        decoder: of the target, the one that serves it.
        taps: ids of its layers; see `HeadConfig.taps`.
        texts: yields batches of token ids alone, from a step on.
        pass_tokens: tokens of one pass of the target, rounded up to whole texts.

    Returns:
        Yields ids `[batch, length] int64`, features `[batch, length, len(taps) * hidden]` and logits `[batch, length,
        vocab]` in the target's type.
    """

    def lessons(first_step: int) -> Iterator[TrainingBatch]:
        for (ids,) in texts(first_step):
            passes = ids.to(decoder.device).split(-(-pass_tokens // ids.shape[1]))
            parts = [features_and_logits(decoder, rows, taps) for rows in passes]
            features, logits = (torch.cat(each) for each in zip(*parts, strict=True))
            yield ids.to(features.device), features, logits

    return lessons
