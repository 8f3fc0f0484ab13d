"""Correctness and speed of layer-parallel draft steps on one device.

The drafter has the shape of Llama-3.2-1B. On one device, groups of layers save kernel launches, not memory traffic: a
step reads the same weights.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.gpu_sections.batch import random_ids
from benchmarks.gpu_sections.exactness import LARGEST_ERROR, TAMING
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.timer import Timer
from draftwire.models.cached_model import CachedModel
from draftwire.models.kv_cache import CachedSequence
from draftwire.models.lean_decoder import LeanDecoder
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from draftwire.options.layer_parallel.layer_groups import groups_of_size, runs_in_parallel, written
from draftwire.options.layer_parallel.layer_parallel import LayerParallelDecoder
from tools.synth.synthesis import SHAPES, ModelShape, build_target

SHAPE = ModelShape(2048, 8192, 16, 32, 8, 128_256, head_dim=64, tie_word_embeddings=True)
SIZES = (1, 2, 3, 4, 5)
BATCH_SIZES = (1, 16)
BLOCK_LENGTH = 5
CACHE_TOKENS = 16 * 512
COMPARED_SIZE, COMPARED_TEXTS, COMPARED_STEPS = 3, 3, 4
"""Group size, number of texts and tokens per text whose logits are compared with the CPU's."""


def layer_parallel(plan: Plan, findings: Findings, budget: Budget) -> None:
    """Runs the section."""
    findings.results["largest_error"] = error = largest_error(plan)
    findings.rows.append(Row("largest error of float32 logits of layers at once", error, "", LARGEST_ERROR))
    shape = replace(SHAPES["tiny"], num_layers=8) if plan.is_tiny else SHAPE
    base = LeanDecoder(build_target(shape, plan.dtype, str(plan.device), seed=0), consumes=True)
    timer = Timer(plan.device)
    calibration = calibration_ms(plan, drafter(base, 1), timer)
    findings.results["calibration_ms"] = calibration
    findings.rows.append(Row(f"exact pass over {BLOCK_LENGTH + 1} tokens", calibration, "ms"))
    found: dict[int, dict[str, Any]] = {}
    findings.results["sizes"] = found
    for size in SIZES:
        if budget.is_nearly_spent:
            findings.results.setdefault("left_out", []).append(size)
            continue
        model = drafter(base, size)
        times = {f"batch_{count}_ms": step_ms(plan, model, count, timer) for count in BATCH_SIZES}
        found[size] = {"groups": written(groups_of_size(size, base.num_layers)), **times}
        for name, milliseconds in times.items():
            found[size][f"{name.removesuffix('_ms')}_faster_than_1"] = found[1][name] / milliseconds
        phase_ms = calibration + (BLOCK_LENGTH - 1) * times["batch_1_ms"]
        found[size]["draft_phase_faster_than_1"] = BLOCK_LENGTH * found[1]["batch_1_ms"] / phase_ms
        findings.rows += _rows(size, found[size])


def _rows(size: int, found: dict[str, Any]) -> list[Row]:
    name = f"groups of {size}"
    rows = []
    for count in BATCH_SIZES:
        rows.append(Row(f"{name}: draft step, batch {count}", found[f"batch_{count}_ms"], "ms"))
        if size > 1:
            rows.append(Row(f"{name}:   times as fast as of 1", found[f"batch_{count}_faster_than_1"]))
    if size > 1:
        label = f"{name}: draft phase, block of {BLOCK_LENGTH}, times as fast"
        rows.append(Row(label, found["draft_phase_faster_than_1"]))
    return rows


def drafter(base: LeanDecoder, size: int, is_static: bool = True) -> CachedModel:
    """Returns a model that drafts with groups of layers; the ordinary one for groups of 1."""
    groups = groups_of_size(size, base.num_layers)
    drafting = LayerParallelDecoder(base, groups) if runs_in_parallel(groups) else None
    return torch_model(base, CACHE_TOKENS, is_static, drafting)


def step_ms(plan: Plan, model: CachedModel, num_texts: int, timer: Timer) -> float:
    """Returns the median time of a step over one more token of some texts, milliseconds."""
    sequences = _opened(plan, model, num_texts)
    token_ids = torch.arange(num_texts, device=plan.device)

    def extend() -> None:
        for _ in range(BLOCK_LENGTH):
            model.extend(sequences, token_ids)

    milliseconds = timer.median_ms(extend, plan.repetitions, lambda: _forget(plan, model, sequences))
    for sequence in sequences:
        model.cache.close(sequence)
    return milliseconds / BLOCK_LENGTH


def calibration_ms(plan: Plan, model: CachedModel, timer: Timer) -> float:
    """Returns the median time of reading a block and the token after it exactly, milliseconds."""
    sequences = _opened(plan, model, 1)
    reading = Reading(sequences[0], random_ids(BLOCK_LENGTH + 1, model.vocab_size, 1), 1)
    return timer.median_ms(lambda: model.read([reading]), plan.repetitions, lambda: _forget(plan, model, sequences))


def _opened(plan: Plan, model: CachedModel, num_texts: int) -> list[CachedSequence]:
    sequences = [model.cache.open() for _ in range(num_texts)]
    ids = random_ids(plan.prompt_tokens, model.vocab_size, 0)
    model.read([Reading(sequence, ids, 0) for sequence in sequences])
    return sequences


def _forget(plan: Plan, model: CachedModel, sequences: list[CachedSequence]) -> None:
    for sequence in sequences:
        model.cache.truncate(sequence, plan.prompt_tokens)


def largest_error(plan: Plan) -> float:
    """Returns by how much float32 logits of static steps on the device differ from those of packed ones on the CPU."""
    torch.set_float32_matmul_precision("highest")
    model = build_target(plan.exact_shape, torch.float32, str(plan.device), seed=1)
    model.model.norm.weight.mul_(TAMING)
    own = _logits(model, is_static=True)
    expected = _logits(copy.deepcopy(model).cpu(), is_static=False)
    return float((own.cpu() - expected).abs().max())


def _logits(model: LlamaForCausalLM, is_static: bool) -> Tensor:
    """Returns logits of steps over texts of different lengths, `[steps, texts, vocab]`."""
    cached = drafter(LeanDecoder(model), COMPARED_SIZE, is_static)
    assert not cached.extends_exactly, "the model has as many layers"
    sequences = [cached.cache.open() for _ in range(COMPARED_TEXTS)]
    prompts = [random_ids(20 + 30 * seed, cached.vocab_size, seed) for seed in range(COMPARED_TEXTS)]
    cached.read([Reading(sequence, prompt, 0) for sequence, prompt in zip(sequences, prompts, strict=True)])
    steps = torch.tensor([random_ids(COMPARED_TEXTS, cached.vocab_size, seed) for seed in range(COMPARED_STEPS)])
    return torch.stack([cached.extend(sequences, token_ids) for token_ids in steps.to(cached.device)])
