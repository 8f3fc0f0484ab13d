"""Evaluation of the pair: loss on held-out files, and acceptance rate of the drafter's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import DraftingStrategy
from draftwire.local_loop import LocalRun, speculate
from draftwire.models.decoders import decoder_of
from draftwire.models.torch_models import torch_model
from draftwire.options.heads.draft_head import DraftHead
from draftwire.options.heads.head_drafter import HeadDrafter
from draftwire.options.heads.taps import FeatureSource
from draftwire.requests.parameters import SamplingParams
from tools.embedded_pair.head_strategy import HeadStrategy


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokens: NDArray[np.uint16], sequence_length: int = 512) -> float:
    """Returns the mean loss of the next token over all windows of `tokens`, nats."""
    count = (len(tokens) - 1) // sequence_length
    total = 0.0
    for start in range(0, count * sequence_length, sequence_length):
        ids = torch.from_numpy(tokens[start : start + sequence_length + 1].astype(np.int64)).unsqueeze(0)
        logits = model(input_ids=ids[:, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
    return total / count


@torch.inference_mode()
def share_repeated(
    model: LlamaForCausalLM, texts: Sequence[Sequence[int]], separator: int, lead: int = 300, length: int = 100
) -> float:
    """Returns which share of a text's tokens the model gives again, after the text and the beginning of its copy.

    Texts have more than `lead + length` ids; what is beyond is not used. The model is given `lead` tokens of the copy,
    behind a separator, and writes `length`, each time the likeliest one.
    """
    same = 0
    for text in texts:
        whole = list(text[: lead + length])
        prompt = torch.tensor([[*whole, separator, *whole[:lead]]])
        limits = {"min_new_tokens": length, "max_new_tokens": length}
        written = cast(Any, model).generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **limits)
        same += int((written[0, prompt.shape[1] :] == torch.tensor(whole[lead:])).sum())
    return same / (length * len(texts))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance rate and block efficiency for a rule, a temperature and a block length."""

    rule: str
    temperature: float
    block_length: int
    acceptance_rate: float
    """Accepted draft tokens over draft tokens."""
    block_efficiency: float
    """Tokens per forward pass of the target."""
    by_position: list[float]
    """Share of the rounds with a token at a position of the draft, in which it was accepted."""
    accepted_per_round: float
    """Draft tokens accepted in a round that drafted."""
    accepted_margin: float
    """Half the width of a 95 % interval of it, over prompts."""
    draft_ms: float
    """Drafting, for each draft token, the median of the rounds that drafted whole blocks; milliseconds."""


def measure_acceptance(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM | DraftHead,
    prompts: list[list[int]],
    rule: str,
    temperature: float,
    block_length: int,
) -> Acceptance:
    """Measures acceptance over 128 generated tokens per prompt, in one process."""
    context_length = int(target.config.max_position_embeddings)
    strategy: DraftingStrategy
    if isinstance(drafter, LlamaForCausalLM):
        cached_target = torch_model(decoder_of(target), context_length)
        strategy = LanguageModelDrafter(torch_model(decoder_of(drafter), context_length), context_length)
    else:
        features = FeatureSource(drafter.config.taps, drafter.fuse)
        cached_target = torch_model(decoder_of(target), context_length, features=features)
        strategy = HeadStrategy(HeadDrafter(drafter, cached_target), cached_target, context_length)
    drafted, accepted = [0] * block_length, [0] * block_length
    rounds = emitted = 0
    by_prompt: list[float] = []
    times: list[float] = []
    for seed, prompt in enumerate(prompts):
        run = LocalRun(SamplingParams(temperature), 128, block_length, rule, seed)
        own: list[int] = []
        for done in speculate(cached_target, strategy, prompt, run):
            length = int(done.blocks.lengths[0])
            for position in range(length):
                drafted[position] += 1
                accepted[position] += position < done.num_accepted
            if length:
                own.append(done.num_accepted)
            if length == block_length:
                times.append(1e3 * done.draft_s / length)
            emitted += len(done.token_ids)
            rounds += 1
        by_prompt.append(float(np.mean(own)))
    by_position = [kept / tried for kept, tried in zip(accepted, drafted, strict=True)]
    margin = 1.96 * float(np.std(by_prompt)) / len(by_prompt) ** 0.5
    return Acceptance(
        rule,
        temperature,
        block_length,
        sum(accepted) / sum(drafted),
        emitted / rounds,
        by_position,
        float(np.mean(by_prompt)),
        margin,
        float(np.median(times)),
    )
