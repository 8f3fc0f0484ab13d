"""Predicts how much drafting pays on a pair of given shapes, before anybody trains it.

    python -m benchmarks.pair_shapes --output benchmarks/results/pair_shapes.json

The time of a forward pass depends on the shape alone, so random weights suffice: passes of every candidate target over
one token and over a draft block with the token before it, and of every candidate drafter over one token. With an
assumed acceptance, block length and time that a round takes beside its passes they give tokens per second, and their
ratio to plain decoding.

A token of a draft is assumed to be accepted with the same probability at every position, so that a round of `k` draft
tokens gives `(1 - a**(k + 1)) / (1 - a)` tokens (Leviathan et al. 2023, equation 1; block verification gives more).
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.decoder import fill, milliseconds
from benchmarks.report import progress, write_report
from draftwire.models.cached_model import CachedModel, Reading
from draftwire.models.decoder import decoder_of

BLOCK_LENGTHS = (2, 3, 4, 5, 6, 8)
ACCEPTANCE = (0.55, 0.65, 0.75, 0.85)
VOCAB_SIZE = 4096
CACHE_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a Llama model, written `LAYERSxWIDTH` or `LAYERSxWIDTHxHEADS`."""

    num_layers: int
    hidden_size: int
    num_heads: int
    """Of 64 dimensions each, with as many KV heads."""

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Reads a shape; raises ValueError."""
        layers, width, *heads = (int(part) for part in text.split("x"))
        return cls(layers, width, heads[0] if heads else max(1, width // 64))

    def __str__(self) -> str:
        return f"{self.num_layers}x{self.hidden_size}x{self.num_heads}"

    def build(self) -> LlamaForCausalLM:
        """Returns a model with random weights."""
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=3 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            head_dim=64,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        model.eval()
        return model


class TimedModel:
    """A model that extends a text of a given length by some tokens, and forgets them again."""

    def __init__(self, shape: Shape, length: int, num_threads: int) -> None:
        network = shape.build()
        self.million_parameters = sum(weight.numel() for weight in network.parameters()) / 1e6
        self._num_threads, self._length = num_threads, length
        torch.set_num_threads(num_threads)
        self._model = CachedModel(decoder_of(network, "lean", consumes=True), CACHE_TOKENS)
        fill(self._model)
        self._text = self._model.cache.open()
        self._model.cache.append(self._text, length)

    @torch.inference_mode()
    def times(self, num_tokens: int, count: int) -> list[float]:
        """Milliseconds of `count` forward passes over `num_tokens` tokens."""
        torch.set_num_threads(self._num_threads)
        ids = [token % 97 for token in range(num_tokens)]

        def step() -> None:
            self._model.read([Reading(self._text, ids, num_tokens)])
            self._model.cache.truncate(self._text, self._length)

        step()
        return milliseconds(step, count)


def tokens_of_a_round(acceptance: float, length: int) -> float:
    """Expected tokens of a round: accepted ones and one from the target."""
    return sum(acceptance**position for position in range(length + 1))


def main() -> None:
    """Measures, predicts, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--targets", nargs="+", type=Shape.parse, default=["8x320", "16x256", "20x256", "24x192"])
    parser.add_argument("--drafters", nargs="+", type=Shape.parse, default=["8x128", "1x256", "2x256", "2x384"])
    parser.add_argument("--threads", type=int, default=2, help="of the target")
    parser.add_argument("--drafter-threads", type=int, default=1)
    parser.add_argument("--length", type=int, default=128, help="tokens of the text that is extended")
    parser.add_argument("--round-ms", type=float, default=6.0, help="time of a round beside its passes")
    parser.add_argument("--plain-ms", type=float, default=1.5, help="time of a plain step beside its pass")
    parser.add_argument("--draw-ms", type=float, default=0.3, help="time of drawing a draft token, beside its pass")
    parser.add_argument("--steps", type=int, default=30, help="per series")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    targets = [Shape.parse(each) if isinstance(each, str) else each for each in arguments.targets]
    drafters = [Shape.parse(each) if isinstance(each, str) else each for each in arguments.drafters]
    models = {f"target {each}": TimedModel(each, arguments.length, arguments.threads) for each in targets}
    models |= {f"drafter {each}": TimedModel(each, arguments.length, arguments.drafter_threads) for each in drafters}
    rows = {name: [1, *(k + 1 for k in BLOCK_LENGTHS)] if name.startswith("target") else [1] for name in models}
    times: dict[tuple[str, int], list[float]] = {(name, count): [] for name in models for count in rows[name]}
    for _ in progress(range(arguments.repetitions), "measuring"):
        for name, count in times:
            times[name, count].append(statistics.median(models[name].times(count, arguments.steps)))
    passes = {key: statistics.median(series) for key, series in times.items()}

    def best(target: str, drafter: str, acceptance: float) -> dict[str, float]:
        plain = 1e3 / (passes[target, 1] + arguments.plain_ms)
        draft_ms = passes[drafter, 1] + arguments.draw_ms
        rates = {
            length: 1e3
            * tokens_of_a_round(acceptance, length)
            / (passes[target, length + 1] + length * draft_ms + arguments.round_ms)
            for length in BLOCK_LENGTHS
        }
        length = max(rates, key=lambda each: rates[each])
        return {"length": length, "tokens_per_s": rates[length], "over_plain": rates[length] / plain}

    write_report(
        arguments,
        {
            "passes_ms": {
                name: {
                    "million_parameters": models[name].million_parameters,
                    **{f"{count} tokens": passes[name, count] for count in rows[name]},
                }
                for name in models
            },
            "predictions": {
                f"{target} with {drafter}": {
                    f"acceptance {acceptance}": best(f"target {target}", f"drafter {drafter}", acceptance)
                    for acceptance in ACCEPTANCE
                }
                for target in targets
                for drafter in drafters
            },
        },
    )


if __name__ == "__main__":
    main()
