"""Attention of a step as it is computed now: keys and values are gathered, then attended to, at long texts too."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_kernel_sections.inferred import GATHERS_MS, LONG_TEXT_MS
from benchmarks.gpu_kernel_sections.recording import recorded, recorder_of
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.timer import Timer
from draftwire.models.kv_cache import BLOCK_SIZE, NULL_BLOCK
from draftwire.models.kv_storage import KvStorage
from draftwire.models.paged_attention import AttentionShape, Masks, PackedStep, SegmentGroup
from tools.synth.synthesis import ModelShape

KEYS, TINY_KEYS = (512, 2048, 8192), (64, 256)
TEXTS, TINY_TEXTS = (1, 4, 16, 64), (1, 4)
QUERIES = (1, 5, 9, 65)
"""Plain decoding, chains of 4 and of 8, a tree of 64."""
SHOWN_QUERIES = 5
MOST_OF_MANY, MOST_TEXTS = 9, 4
"""More queries than this only with so many texts."""
LAYERS = 4
"""Whose keys and values are read in turn: far more than a cache holds."""
STUDIED_TEXTS = 64
"""Texts of 512 tokens, for which the time of gathering was inferred."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A step whose attention is timed."""

    texts: int
    keys: int
    queries: int

    @property
    def name(self) -> str:
        """What it is called."""
        texts, queries = (f"{count} {word}{'s' if count > 1 else ''}" for count, word in self._counts)
        return f"{texts} of {self.keys} keys, {queries} each"

    @property
    def _counts(self) -> tuple[tuple[int, str], tuple[int, str]]:
        return (self.texts, "text"), (self.queries, "token")


class LayerAttention:
    """Texts in a cache of a few layers, in blocks that lie in any order, and a step over their last tokens."""

    def __init__(self, shape: ModelShape, setting: Setting, plan: Plan) -> None:
        """Fills the cache."""
        rows, keys, queries = setting.texts, setting.keys, setting.queries
        generator = torch.Generator().manual_seed(keys)
        num_blocks = rows * keys // BLOCK_SIZE
        blocks = torch.randperm(num_blocks, generator=generator) + NULL_BLOCK + 1
        table = (blocks.unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(rows, keys).to(plan.device)
        positions = torch.arange(keys - queries, keys, device=plan.device).expand(rows, queries)
        self._storage = KvStorage((num_blocks + NULL_BLOCK + 1) * BLOCK_SIZE)
        masks = Masks(positions, keys, sees_all=False)
        tokens = torch.arange(rows * queries, device=plan.device).view(rows, queries)
        self._group = SegmentGroup(tokens, None, table, masks)
        slots = table[:, -queries:].flatten()
        self._step = PackedStep(self._storage, slots, positions.flatten(), [self._group])
        self._shape = AttentionShape(shape.head_dim**-0.5)
        sizes = {"queries": shape.num_heads, "keys": shape.num_kv_heads, "values": shape.num_kv_heads}
        self._new = [
            torch.empty(rows * queries, heads, shape.head_dim, dtype=plan.dtype, device=plan.device).normal_()
            for heads in sizes.values()
        ]
        for layer in range(LAYERS):
            for tensor in self._storage.layer(layer, *self._new[1:]):
                tensor.normal_()

    def attend(self) -> Tensor:
        """Stores the new keys and values of each layer and attends to all of them."""
        for layer in range(LAYERS):
            result = self._step.attend(layer, self._shape, *self._new)
        return result

    def gather(self) -> Tensor:
        """Gathers the keys and values of each layer."""
        for layer in range(LAYERS):
            keys, values = self._storage.layer(layer, *self._new[1:])
            gathered = *self._group.parts(keys, "keys"), *self._group.parts(values, "values")
        return gathered[0]


@torch.inference_mode()
def attention(plan: Plan, findings: Findings, budget: Budget) -> None:
    """Runs the section."""
    findings.results["settings"] = found = {}
    for setting in settings(plan):
        if budget.is_nearly_spent:
            findings.results.setdefault("left_out", []).append(setting.name)
            continue
        try:
            found[setting.name] = times = times_ms(setting, plan)
        except torch.OutOfMemoryError:
            findings.lacks(setting.name, "the device has not enough memory")
            continue
        if setting.queries == SHOWN_QUERIES:
            is_studied = setting.texts == STUDIED_TEXTS and setting.keys == KEYS[0]
            inferred = GATHERS_MS if is_studied else None
            findings.rows.append(Row(f"a step's attention, {setting.name}", times["step_ms"], "ms"))
            findings.rows.append(Row("  of it gathering", times["gathering_ms"], "ms", inferred=inferred))
    few, *_, most = TINY_KEYS if plan.is_tiny else KEYS
    short, long = (found.get(Setting(1, keys, SHOWN_QUERIES).name) for keys in (few, most))
    if short is not None and long is not None:
        added = findings.results["long_text_ms"] = long["step_ms"] - short["step_ms"]
        label = f"what {most} keys add to a step of one text, over {few}"
        findings.rows.append(Row(label, added, "ms", inferred=LONG_TEXT_MS))


def settings(plan: Plan) -> list[Setting]:
    """Returns the steps that are timed, those that are shown first."""
    all_keys, all_texts = (TINY_KEYS, TINY_TEXTS) if plan.is_tiny else (KEYS, TEXTS)
    found = [
        Setting(texts, keys, queries)
        for queries in QUERIES
        for texts in all_texts
        for keys in all_keys
        if (queries <= MOST_OF_MANY or texts <= MOST_TEXTS) and queries < keys
    ]
    return sorted(found, key=lambda setting: setting.queries != SHOWN_QUERIES)


def times_ms(setting: Setting, plan: Plan) -> dict[str, float]:
    """Returns the time that all layers of a step of the target take, and of it that of gathering."""
    layers, timer, recorder = LayerAttention(plan.shape, setting, plan), Timer(plan.device), recorder_of(plan.device)

    def step_ms(work: Callable[[], Tensor]) -> float:
        milliseconds = timer.median_ms(recorded(work, recorder), min(10, plan.repetitions))
        return milliseconds / LAYERS * plan.shape.num_layers

    return {"step_ms": step_ms(layers.attend), "gathering_ms": step_ms(layers.gather)}
