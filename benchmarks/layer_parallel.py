"""Acceptance, similarity and speed of layer-parallel drafting.

    python -m benchmarks.layer_parallel --places --output benchmarks/results/layer_parallel.json
    python -m benchmarks.layer_parallel --parts acceptance --sizes 1 --temperatures 1 --output ..._places.json
    python -m benchmarks.layer_parallel --parts acceptance --rules coupled --temperatures 1 --output ..._coupled.json
    python -m benchmarks.layer_parallel --parts steps --models embedded --output ..._steps_embedded.json

acceptance: prompts are continued by the embedded pair in one process with groups of N = 1 to 5 layers, with and without
    bonus calibration, and with one group at different places. Drafts are as `draftwire up` makes them; a prompt has the
    same seed in all settings. N = 1 is the ordinary drafter. `of_position` is the share of blocks whose draft token i
    was accepted among those whose earlier ones were. Intervals are 95 %, by bootstrap over prompts; that of the
    difference from N = 1 is paired. At temperature 0, and with rule `coupled` at any, all settings continue a prompt by
    the same text, so that small differences show; with others texts part, which is noise.
cosine: cosine similarity of the drafter's approximate to its exact activations for the next token of a text, both
    with an exact cache before it: outputs of layers and of attention, queries, keys (positions applied) and values, all
    heads of a token together. The mean is over tokens and over all layers of groups of more than one layer. The first
    layer of such a group is among them; where only layers that are alone come before it, it is exact.
steps: time of a step; see `benchmarks.layer_parallel_steps`.
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoTokenizer
from typing_extensions import override

from benchmarks.block_efficiency import Counts, acceptance_rate, block_efficiency, estimate
from benchmarks.layer_parallel_steps import (
    BLOCK_LENGTH,
    EIGHT_LAYERS,
    MODELS,
    WAYS,
    cached,
    measure_steps,
    with_compared,
)
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.named_models import EMBEDDED, embedded_model
from draftwire.cli.stack_options import stack_options
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.local_loop import LocalRun, speculate
from draftwire.method.quantization import Quantization
from draftwire.models.decoders import decoder_of
from draftwire.models.lean_decoder import LeanDecoder, Rotation
from draftwire.models.loading import load_model
from draftwire.models.paged_attention import AttentionShape, PackedStep
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from draftwire.options.layer_parallel.layer_groups import LayerGroups, groups_of_size, runs_in_parallel, written
from draftwire.options.layer_parallel.layer_parallel import LayerParallelDecoder
from draftwire.requests.parameters import SamplingParams

PARTS = ("acceptance", "cosine", "steps")
LAWFUL = ("block", "token", "coupled")
"""Lossless rules."""


# Acceptance


@dataclass(frozen=True, slots=True)
class Setting:
    """Layer groups of a drafter, with or without calibration."""

    size: int
    """Layers of the largest group."""
    groups: LayerGroups
    calibrates: bool = True

    @property
    def name(self) -> str:
        """For the table."""
        return f"N = {self.size}{'' if self.calibrates else ', uncalibrated'}: {written(self.groups)}"


def settings_of_sizes(sizes: Sequence[int], num_layers: int) -> list[Setting]:
    """Returns the groups of each size, with and without calibration; once where all layers are exact."""
    settings = []
    for size in sizes:
        groups = groups_of_size(size, num_layers)
        ways = (True, False) if runs_in_parallel(groups) else (True,)
        settings += [Setting(size, groups, calibrates) for calibrates in ways]
    return settings


def settings_of_places(sizes: Sequence[int], num_layers: int) -> list[Setting]:
    """Returns one group of each size at the beginning, after the first layer, in the middle, and likewise at the end.

    All other layers are alone.
    """
    settings = []
    for size in sizes:
        places = {0, 1, (num_layers - size) // 2, num_layers - size - 1, num_layers - size}
        for start in sorted(place for place in places if place >= 0):
            before, after = range(start), range(start + size, num_layers)
            groups = (*((index,) for index in before), tuple(range(start, start + size)), *((one,) for one in after))
            settings.append(Setting(size, groups))
    return settings


@dataclass(frozen=True, slots=True)
class Blocks:
    """Counts of drafted and accepted tokens of each prompt."""

    counts: Counts
    positions: NDArray[np.float64]
    """`[prompts, 2, BLOCK_LENGTH]`: draft tokens whose earlier ones were accepted, and those of them that were too."""

    def report(self, setting: Setting, baseline: "Blocks") -> dict[str, Any]:
        """Returns a row of the table; prints it."""
        rate = estimate(acceptance_rate, self.counts)
        lost = estimate(_difference, np.hstack([self.counts, baseline.counts]))
        tokens = estimate(block_efficiency, self.counts)
        reached, passed = self.positions.sum(axis=0)
        of_position = (passed / reached).tolist()
        shown = " ".join(f"{share:.3f}" for share in of_position)
        print(
            f"  {setting.name:<44} {rate}, from N = 1 {lost}, tokens per pass {tokens}, by position {shown}", flush=True
        )
        return {
            "size": setting.size,
            "groups": written(setting.groups),
            "calibrates": setting.calibrates,
            "acceptance_rate": rate,
            "difference_from_1": lost,
            "tokens_per_target_pass": tokens,
            "of_position": of_position,
        }


def _difference(both: Counts) -> float:
    return acceptance_rate(both[:, :3]) - acceptance_rate(both[:, 3:])


class Pair:
    """The embedded target and its drafter of eight layers in this process."""

    def __init__(self) -> None:
        """Loads it."""
        options = stack_options(EMBEDDED, embedded_model(EIGHT_LAYERS), BLOCK_LENGTH)
        target, drafter = load_model(options["verifier"]["model"]), load_model(options["drafter"]["model"])
        self.context_length = drafter.description.context_length
        self.tokenizer = AutoTokenizer.from_pretrained(options["verifier"]["model"])
        self.target = torch_model(decoder_of(target.model), self.context_length)
        self.drafter_model = drafter.model
        self.base = LeanDecoder(drafter.model)
        self._quantization = Quantization(
            mass=options["drafter"]["draft_mass"], max_support=options["drafter"]["draft_max_support"]
        )

    def drafter(self, setting: Setting) -> LanguageModelDrafter:
        """Returns a drafter with an empty cache."""
        model = cached(self.base, setting.groups, self.context_length)
        return LanguageModelDrafter(
            model, self.context_length, quantization=self._quantization, calibrates=setting.calibrates
        )

    def blocks(self, prompts: list[list[int]], setting: Setting, run: LocalRun) -> Blocks:
        """Continues prompts; the index of a prompt is its seed."""
        counts = np.zeros((len(prompts), 3))
        positions = np.zeros((len(prompts), 2, BLOCK_LENGTH))
        drafter = self.drafter(setting)
        for seed, prompt in enumerate(prompts):
            for done in speculate(self.target, drafter, prompt, replace(run, seed=seed)):
                if length := int(done.blocks.lengths[0]):
                    counts[seed] += done.num_accepted, 1, length
                    positions[seed, 0, : min(length, done.num_accepted + 1)] += 1
                    positions[seed, 1, : done.num_accepted] += 1
        return Blocks(counts, positions)


def measure_acceptance(pair: Pair, arguments: argparse.Namespace) -> dict[str, Any]:
    """Continues the prompts in all settings."""
    prompts = [pair.tokenizer(prompt)["input_ids"] for prompt in load_prompts()[: arguments.prompts]]
    num_layers = pair.base.num_layers
    kinds = {
        "sizes": settings_of_sizes(arguments.sizes, num_layers),
        "places": settings_of_places(arguments.places, num_layers),
    }
    report: dict[str, Any] = {}
    for rule, temperature in itertools.product(arguments.rules, arguments.temperatures):
        run = LocalRun(SamplingParams(temperature), arguments.max_tokens, BLOCK_LENGTH, rule, 0)
        baseline = pair.blocks(prompts, kinds["sizes"][0], run)
        for kind, settings in kinds.items():
            if not settings or (kind == "places" and temperature == 0.0):
                continue
            title = f"{kind}, rule {rule}, T={temperature:g}"
            print(title, flush=True)
            report[title] = []
            for setting in settings:
                blocks = baseline if setting.size == 1 else pair.blocks(prompts, setting, run)
                report[title].append(blocks.report(setting, baseline))
    return report


# Cosine


HIDDEN, ATTENTION, QUERY, KEY, VALUE = "hidden state", "attention output", "query", "key", "value"
Seen = dict[tuple[str, int], Tensor]
"""`[tokens, any]` by kind and layer."""


@dataclass(frozen=True)
class WatchedStep(PackedStep):
    """Records queries, keys and values of each layer."""

    seen: Seen = field(kw_only=True)

    @classmethod
    def of(cls, step: PackedStep, seen: Seen) -> "WatchedStep":
        """Wraps a step."""
        return cls(**{own.name: getattr(step, own.name) for own in fields(step)}, seen=seen)

    @override
    def attend(
        self, layer: int, shape: AttentionShape, queries: Tensor, new_keys: Tensor, new_values: Tensor
    ) -> Tensor:
        self._keep(layer, queries, new_keys, new_values)
        return super().attend(layer, shape, queries, new_keys, new_values)

    @override
    def attend_together(
        self, layers: tuple[int, ...], shape: AttentionShape, queries: Tensor, new_keys: Tensor, new_values: Tensor
    ) -> Tensor:
        for place, layer in enumerate(layers):
            self._keep(layer, queries[:, place], new_keys[:, place], new_values[:, place])
        return super().attend_together(layers, shape, queries, new_keys, new_values)

    def _keep(self, layer: int, *heads: Tensor) -> None:
        for kind, own in zip((QUERY, KEY, VALUE), heads, strict=True):
            self.seen[kind, layer] = own.flatten(1).clone()


class WatchedDecoder(LeanDecoder):
    """Records outputs of its layers, also when a `WatchedDrafter` runs them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: Seen = {}
        self._read = torch.empty(0)  # input of the next layer

    @override
    def logits(self, token_ids: Tensor, step: PackedStep, kept: Tensor) -> Tensor:
        return super().logits(token_ids, WatchedStep.of(step, self.seen), kept)

    @override
    def embed(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        hidden, rotation = super().embed(token_ids, positions)
        self._read = hidden.clone()
        return hidden, rotation

    @override
    def mlp(self, index: int, hidden: Tensor) -> Tensor:
        added = super().mlp(index, hidden)
        self.seen[ATTENTION, index] = hidden - self._read
        self.seen[HIDDEN, index] = self._read = hidden + added
        return added


class WatchedDrafter(LayerParallelDecoder):
    """Records outputs of its layers in the records of its decoder."""

    def __init__(self, base: WatchedDecoder, groups: LayerGroups) -> None:
        super().__init__(base, groups)
        self._seen = base.seen

    @override
    def logits(self, token_ids: Tensor, step: PackedStep, kept: Tensor) -> Tensor:
        return super().logits(token_ids, WatchedStep.of(step, self._seen), kept)


def measure_cosine(pair: Pair, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compares along texts of the target."""
    prompts = [pair.tokenizer(prompt)["input_ids"] for prompt in load_prompts()[: arguments.texts]]
    drafter = pair.drafter(Setting(1, groups_of_size(1, pair.base.num_layers)))
    continuations = []
    for seed, prompt in progress(list(enumerate(prompts)), "texts"):
        run = LocalRun(SamplingParams(), arguments.text_tokens, BLOCK_LENGTH, "block", seed)
        continuations.append(
            [token for done in speculate(pair.target, drafter, prompt, run) for token in done.token_ids]
        )
    base = WatchedDecoder(pair.drafter_model)
    rows = []
    for size in arguments.sizes:
        groups = groups_of_size(size, base.num_layers)
        if not runs_in_parallel(groups):
            continue
        similarities = similarities_of(base, groups, prompts, continuations)
        layers = [(index, index - group[0]) for group in groups if len(group) > 1 for index in group]
        kinds = sorted({kind for kind, _ in similarities})
        mean = {kind: float(np.mean([similarities[kind, index] for index, _ in layers])) for kind in kinds}
        by_layer = {kind: {str(index): similarities[kind, index] for index, _ in layers} for kind in kinds}
        rows.append({"size": size, "groups": written(groups), "mean": mean, "by_layer": by_layer})
        print(f"N = {size}: {written(groups)}", *(f"{kind} {value:.4f}" for kind, value in mean.items()), sep="  ")
    return {"cosine": rows}


def similarities_of(
    base: WatchedDecoder, groups: LayerGroups, prompts: list[list[int]], continuations: list[list[int]]
) -> dict[tuple[str, int], float]:
    """Returns the mean cosine similarity to exact activations, by kind and layer, over all continuation tokens."""
    num_tokens = min(map(len, continuations))
    room = sum(len(prompt) + num_tokens + 32 for prompt in prompts)
    model = torch_model(base, room, drafting=WatchedDrafter(base, groups))
    sequences = [model.cache.open() for _ in prompts]
    model.read([Reading(sequence, prompt, 0) for sequence, prompt in zip(sequences, prompts, strict=True)])
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for place in range(num_tokens):
        readings = [
            Reading(sequence, [text[place]], 0) for sequence, text in zip(sequences, continuations, strict=True)
        ]
        model.read(readings, fuzzily=True)
        fuzzy = dict(base.seen)
        for sequence in sequences:
            model.cache.truncate(sequence, sequence.length - 1)
        model.read(readings)
        own = slice(len(readings))  # a step of few tokens may repeat them
        for name, exact in base.seen.items():
            found[name].append(float(cosine_similarity(fuzzy[name][own], exact[own], dim=-1).mean()))
    return {name: float(np.mean(values)) for name, values in found.items()}


def main() -> None:
    """Measures, prints tables, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["acceptance", "cosine"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="N; 1 is always among them")
    parser.add_argument("--rules", nargs="+", choices=LAWFUL, default=["block"], help="for acceptance")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="for acceptance")
    parser.add_argument("--prompts", type=int, default=80, help="for acceptance")
    parser.add_argument("--max-tokens", type=int, default=96, help="for acceptance")
    parser.add_argument("--places", type=int, nargs="*", default=[2, 3, 4], help="sizes of one group at many places")
    parser.add_argument("--texts", type=int, default=32, help="for cosine")
    parser.add_argument("--text-tokens", type=int, default=64, help="for cosine")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["embedded", "qwen2.5-0.5b"], help="for steps")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="for steps")
    parser.add_argument("--repetitions", type=int, default=7, help="for steps")
    parser.add_argument("--seconds", type=float, default=0.2, help="for steps: of one kind, in each repetition")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.sizes = sorted({1, *arguments.sizes})
    arguments.ways = with_compared(arguments.ways)
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    if {"acceptance", "cosine"} & {*arguments.parts}:
        pair = Pair()
        if "acceptance" in arguments.parts:
            report |= measure_acceptance(pair, arguments)
        if "cosine" in arguments.parts:
            report |= measure_cosine(pair, arguments)
    if "steps" in arguments.parts:
        for name in arguments.models:
            report |= measure_steps(name, arguments)
    write_report(arguments, report)


if __name__ == "__main__":
    main()
