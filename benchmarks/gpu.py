"""What is meant for a GPU: are forward passes and decisions right there, and what do steps and rules take?

    python -m benchmarks.gpu --output benchmarks/results/gpu.json
    python -m benchmarks.gpu --device cpu --size tiny      # the same code without a GPU

Models have random weights of real shapes, because a GPU machine need not reach a model hub.
"""

import argparse
import copy
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import write_report
from benchmarks.rules import CASES, Shape, Step, measure
from draftwire.models.cached_model import CachedModel, Reading
from draftwire.models.decoder import decoder_of
from draftwire.randomness import KEY_BYTES, DrawKey, exponentials
from draftwire.sampling import SamplingParams
from draftwire.verification import rule_named
from draftwire.verification.target import Judgement, Judging, judge

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256},
}
HEADS = {"tiny": (4, 2), "1b": (32, 8)}
RULE_SHAPES = {"tiny": Shape(vocab_size=2000), "1b": Shape()}
SESSIONS = (1, 4, 16, 64)
PROMPT_TOKENS = 256


def random_model(size: str, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """Returns a Llama of random weights."""
    heads, kv_heads = HEADS[size]
    config = LlamaConfig(
        **SHAPES[size],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Returns reproducible token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


@torch.inference_mode()
def largest_error(device: str) -> float:
    """Returns how far logits of mixed batches are from those of fresh forward passes, float32, largest difference."""
    own = random_model("tiny", torch.float32, device)
    model = CachedModel(decoder_of(copy.deepcopy(own)), 8192)
    texts = [random_ids(length, 512, length) for length in (3, 40, 41, 200, 700)]
    sequences = [model.cache.open() for _ in texts]
    model.read([Reading(sequence, text[:-3], 0) for sequence, text in zip(sequences, texts, strict=True) if text[:-3]])
    rows = model.read([Reading(sequence, text[-3:], 3) for sequence, text in zip(sequences, texts, strict=True)]).split(
        3
    )
    model.cache.check_integrity()
    fresh = [own(input_ids=torch.tensor([text], device=device)).logits[0, -3:] for text in texts]
    return max(float((row - expected).abs().max()) for row, expected in zip(rows, fresh, strict=True))


def step_ms(model: CachedModel, num_sessions: int, device: str, repetitions: int) -> float:
    """Returns the median time of a plain step for sessions of about 256 tokens each, milliseconds."""
    rule, key = rule_named("block"), DrawKey(bytes(KEY_BYTES), 0, 0)
    texts = [random_ids(PROMPT_TOKENS, model.vocab_size, seed) for seed in range(num_sessions)]
    sequences = [model.cache.open() for _ in texts]
    model.read([Reading(sequence, text[:-1], 0) for sequence, text in zip(sequences, texts, strict=True)])
    times = []
    for _ in range(repetitions + 3):
        started = time.perf_counter()
        step = judge(
            model,
            [
                Judging(sequence, text, [], None, SamplingParams(), rule, key)
                for sequence, text in zip(sequences, texts, strict=True)
            ],
        )
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        for text, outcome in zip(texts, step.outcomes, strict=True):
            assert isinstance(outcome, Judgement)
            text += outcome.token_ids
    for sequence in sequences:
        model.cache.close(sequence)
    return statistics.median(times[3:]) * 1e3


@torch.inference_mode()
def rule_differences(device: str, shape: Shape) -> dict[str, int]:
    """Returns how many of 64 blocks each rule decides otherwise than on the CPU, from the same logits and keys.

    Softmax and sums round differently there, so a number close to a threshold may fall on the other side of it.
    """
    own, reference = Step(shape, 64, device), Step(shape, 64, "cpu")
    differences = {}
    for name, (rule, params) in CASES.items():
        pairs = zip(own.decide_afresh(rule, params), reference.decide_afresh(rule, params), strict=True)
        differences[name] = sum(one != other for one, other in pairs)
    return differences


def noise_error(device: str) -> float:
    """Returns how far the noise of `coupled` is from the CPU's, relative to it: rounding of one logarithm."""
    words, positions = torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, 6])
    expected = exponentials(words, positions, 50_000)
    return float((exponentials(words.to(device), positions.to(device), 50_000).cpu() / expected - 1.0).abs().max())


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    model = CachedModel(decoder_of(random_model(arguments.size, dtype, arguments.device)), 64 * 512)
    milliseconds = {count: step_ms(model, count, arguments.device, arguments.repetitions) for count in SESSIONS}
    results: dict[str, Any] = {
        "device": arguments.device if arguments.device == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "largest_error": largest_error(arguments.device),
        "step_ms": milliseconds,
        "noise_error": noise_error(arguments.device),
        "rule_differences": rule_differences(arguments.device, RULE_SHAPES[arguments.size]),
        "rules": {
            f"batch_{count}": measure(RULE_SHAPES[arguments.size], count, arguments.device, arguments.repetitions)
            for count in (1, 16)
        },
        "tokens_per_second": {count: 1e3 * count / milliseconds[count] for count in SESSIONS},
    }
    write_report(arguments, results)


if __name__ == "__main__":
    main()
