"""Step times of one sequence relative to memory bandwidth, that is to reading the weights once."""

from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_sections.batch import Batch, Models, random_ids
from benchmarks.gpu_sections.pair import Pair
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.timer import WARM_UPS, Timer
from benchmarks.planned_trees import shape_of_widths
from draftwire.models.cached_model import CachedModel
from draftwire.models.sequence_model import Reading
from draftwire.models.static_steps import MOST_QUERIES
from draftwire.requests.parameters import SamplingParams

VERIFY_RATIO, VERIFY_AIM = 1.4, 1.25
"""Of a verify step to a reduction over the target's weights."""
DRAFT_RATIO = 2.0
"""Of a draft step, per token, to a reduction over the drafter's weights."""
VERIFIED_TOKENS = 5
"""A committed token and a block of four."""
BLOCK_LENGTHS = (4, 8)
TREES = (16, 32, 64)
"""Nodes of trees."""
CACHE_TOKENS = 2048


def steps(plan: Plan, pair: Pair, findings: Findings, budget: Budget) -> None:
    """Runs the section."""
    timer = Timer(plan.device)
    reductions = {
        "target": reduction_ms(pair.target_bytes, timer, plan),
        "drafter": reduction_ms(pair.drafter_bytes, timer, plan),
    }
    sizes = {"target": pair.target_bytes, "drafter": pair.drafter_bytes}
    findings.results["reduction_ms"] = reductions
    findings.results["reduction_gb_per_s"] = {name: sizes[name] / reductions[name] / 1e6 for name in sizes}
    for name, milliseconds in reductions.items():
        label = f"reduction over the {name}'s weights ({sizes[name] / milliseconds / 1e6:.0f} GB/s)"
        findings.rows.append(Row(label, milliseconds, "ms"))
    for is_static, name in ((True, "static"), (False, "packed")):
        if budget.is_nearly_spent:
            findings.results["left_out"] = name
            break
        models = pair.models(CACHE_TOKENS, is_static)
        verified_ms = verify_ms(plan, models.target, timer)
        found: dict[str, Any] = {"verify_ms": verified_ms, "verify_ratio": verified_ms / reductions["target"]}
        found["trees"] = {num_nodes: tree_ms(plan, models.target, num_nodes, timer) for num_nodes in TREES}
        for block_length in BLOCK_LENGTHS:
            times = round_times(plan, pair, models, block_length, timer)
            forward_ms = extend_ms(plan, models.drafter, block_length, timer)
            found[f"block_{block_length}"] = {
                **times,
                "forward_ms_per_token": forward_ms,
                "sampling_ms_per_token": times["draft_ms_per_token"] - forward_ms,
                "judge_ratio": times["judge_ms"] / reductions["target"],
                "draft_ratio": times["draft_ms_per_token"] / reductions["drafter"],
            }
        findings.results[name] = found
        bounds = (plan.bound(VERIFY_RATIO), plan.bound(DRAFT_RATIO)) if is_static else (None, None)
        findings.rows += _rows(name, found, *bounds)
    findings.results["attention"] = attention_times(plan, pair, timer)
    for name, times in findings.results["attention"].items():
        findings.rows += [
            Row(f"{name}: static verify step", times["verify_ms"], "ms"),
            Row(f"{name}: drafter reads a text of a new length", times["new_length_ms"], "ms"),
        ]


def _rows(name: str, found: dict[str, Any], verify_bound: float | None, draft_bound: float | None) -> list[Row]:
    """Returns the table's lines for one way to run steps."""
    rows = [
        Row(f"{name}: verify step, {VERIFIED_TOKENS} tokens", found["verify_ms"], "ms"),
        Row(f"{name}: verify step / reduction (aim {VERIFY_AIM})", found["verify_ratio"], "", verify_bound),
    ]
    for num_nodes, times in found["trees"].items():
        tree = f"{name}, tree of {num_nodes}"
        rows += [
            Row(f"{tree}: verify step", times["verify_ms"], "ms"),
            Row(f"{tree}: keeping a path", times["keep_path_ms"], "ms"),
        ]
    for block_length in BLOCK_LENGTHS:
        times, block = found[f"block_{block_length}"], f"{name}, block of {block_length}"
        rows += [
            Row(f"{block}: whole `judge`", times["judge_ms"], "ms"),
            Row(f"{block}: `judge` / reduction", times["judge_ratio"], "", verify_bound),
            Row(f"{block}: draft step per token", times["draft_ms_per_token"], "ms"),
            Row(f"{block}:   of it forward pass", times["forward_ms_per_token"], "ms"),
            Row(f"{block}:   of it sampling and the rest", times["sampling_ms_per_token"], "ms"),
            Row(f"{block}: draft step per token / reduction", times["draft_ratio"], "", draft_bound),
        ]
    return rows


def reduction_ms(num_bytes: int, timer: Timer, plan: Plan) -> float:
    """Returns the median time of a sum over so many bytes, the faster one of two ways, milliseconds."""
    width = 2**16 if num_bytes > 2**28 else 2**8
    rows = torch.empty(num_bytes // (4 * width), width, device=plan.device).normal_()
    ways = (lambda: rows.sum(dim=1), lambda: rows.sum())
    return min(timer.median_ms(way, plan.repetitions) for way in ways)


def verify_ms(plan: Plan, model: CachedModel, timer: Timer) -> float:
    """Returns the median time of a target's forward pass over a block, after a text, milliseconds."""
    sequence = model.cache.open()
    ids = random_ids(plan.prompt_tokens + VERIFIED_TOKENS, model.vocab_size, 0)
    model.read([Reading(sequence, ids[:-VERIFIED_TOKENS], 0)])
    reading = Reading(sequence, ids[-VERIFIED_TOKENS:], VERIFIED_TOKENS)
    milliseconds = timer.median_ms(
        lambda: model.read([reading]),
        plan.repetitions,
        lambda: model.cache.truncate(sequence, plan.prompt_tokens),
    )
    model.cache.close(sequence)
    return milliseconds


def tree_ms(plan: Plan, model: CachedModel, num_nodes: int, timer: Timer) -> dict[str, float]:
    """Returns the median times of a target's forward pass over a tree after a text and its last token, and of keeping
    a path of four nodes, milliseconds.
    """
    sequence, tree = model.cache.open(), shape_of_widths((num_nodes // 4, 1, 1, 1))
    ids = random_ids(plan.prompt_tokens + 1 + num_nodes, model.vocab_size, 0)
    model.read([Reading(sequence, ids[: plan.prompt_tokens], 0)])
    reading = Reading(sequence, ids[plan.prompt_tokens :], num_nodes + 1, tree.parents)

    def forget() -> None:
        model.cache.truncate(sequence, plan.prompt_tokens)

    def read() -> None:
        forget()
        model.read([reading])

    verified_ms = timer.median_ms(lambda: model.read([reading]), plan.repetitions, forget)
    path = tree.path_to(num_nodes - 1)
    kept_ms = timer.median_ms(lambda: model.keep_path(sequence, path), plan.repetitions, read)
    model.cache.close(sequence)
    return {"verify_ms": verified_ms, "keep_path_ms": kept_ms}


def attention_times(plan: Plan, pair: Pair, timer: Timer) -> dict[str, dict[str, float]]:
    """Returns step times with and without cuDNN's attention, which builds a new plan for every shape."""
    found = {}
    was_allowed = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for is_allowed, name in ((True, "cuDNN allowed"), (False, "without cuDNN")):
            torch.backends.cuda.enable_cudnn_sdp(is_allowed)
            models = pair.models(CACHE_TOKENS, is_static=True)
            found[name] = {
                "verify_ms": verify_ms(plan, models.target, timer),
                "new_length_ms": new_length_ms(plan, models.drafter, 7 * is_allowed, timer),
            }
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_allowed)
    return found


def new_length_ms(plan: Plan, model: CachedModel, start: int, timer: Timer) -> float:
    """Returns the median time of a forward pass over texts of new lengths, milliseconds."""
    times = []
    for index in range(start, start + 7):
        sequence = model.cache.open()
        ids = random_ids(plan.prompt_tokens + MOST_QUERIES + 3 * index, model.vocab_size, index)
        times.append(timer.ms(partial(model.read, [Reading(sequence, ids, 1)])))
        model.cache.close(sequence)
    return median(times)


def extend_ms(plan: Plan, model: CachedModel, block_length: int, timer: Timer) -> float:
    """Returns the median time of a drafter's forward pass over one token that follows another, milliseconds."""
    sequence = model.cache.open()
    model.read([Reading(sequence, random_ids(plan.prompt_tokens, model.vocab_size, 0), 0)])
    token_ids = torch.zeros(1, dtype=torch.int64, device=plan.device)

    def extend() -> None:
        for _ in range(block_length):
            model.extend([sequence], token_ids)

    milliseconds = timer.median_ms(extend, plan.repetitions, lambda: model.cache.truncate(sequence, plan.prompt_tokens))
    model.cache.close(sequence)
    return milliseconds / block_length


def round_times(plan: Plan, pair: Pair, models: Models, block_length: int, timer: Timer) -> dict[str, float]:
    """Returns median times of the two halves of real rounds of one text, after a prompt."""
    drafts, judgements = [], []
    prompt = random_ids(plan.prompt_tokens, models.target.vocab_size, 0)
    with Batch(models, [prompt], SamplingParams(pair.temperature)) as batch:
        for _ in range(2 * WARM_UPS + plan.repetitions):
            if batch.longest > plan.longest_text - 2 * (block_length + 1):
                break  # a text that grew too long would have another shape
            batch.calibrate()
            drafts.append(timer.ms(partial(batch.draft, block_length)))
            batch.hand_over()
            judgements.append(timer.ms(batch.judge))
    return {
        "draft_ms_per_token": median(drafts[2 * WARM_UPS :]) / block_length,
        "judge_ms": median(judgements[2 * WARM_UPS :]),
        "rounds": len(drafts) - 2 * WARM_UPS,
        "acceptance_rate": batch.tally.accepted / batch.tally.drafted,
    }
