"""Speculative against plain decoding in one process, by the number of texts side by side."""

import time
from typing import Any

import torch

from benchmarks.gpu_sections.batch import Batch, Models, Tally, random_ids
from benchmarks.gpu_sections.pair import Pair
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from draftwire.method.quantization import Quantization
from draftwire.requests.parameters import SamplingParams

QUANTIZATIONS = {"default": Quantization(), "512 of mass 0.99": Quantization(mass=0.99, max_support=512)}
LEAST_RATIO = 2.0
"""Of speculative to plain decoding of one text."""
WARM_UP_ROUNDS = 8
"""Rounds that are not counted: they record CUDA graphs."""
CACHE_MARGIN = 32
"""Room for each text beyond its tokens."""


def speculation(plan: Plan, pair: Pair, findings: Findings, budget: Budget) -> None:
    """Runs the section."""
    findings.results["runs"] = runs = []
    findings.results["best"] = {}
    for num_texts in plan.batch_sizes:
        models = pair.models(num_texts * (plan.longest_text + CACHE_MARGIN), is_static=True)
        plain = measure(plan, pair, models, num_texts, 0, Quantization())
        runs.append({"texts": num_texts, "block_length": 0, **plain})
        candidates = []
        for block_length in plan.block_lengths:
            for name, quantization in QUANTIZATIONS.items():
                if budget.is_nearly_spent:
                    findings.results.setdefault("left_out", []).append([num_texts, block_length, name])
                    continue
                found = measure(plan, pair, models, num_texts, block_length, quantization)
                run = {"texts": num_texts, "block_length": block_length, "quantization": name, **found}
                run["ratio"] = found["tokens_per_s"] / plain["tokens_per_s"]
                runs.append(run)
                candidates.append(run)
        del models
        if candidates:
            best = max(candidates, key=lambda run: run["tokens_per_s"])
            findings.results["best"][f"batch_{num_texts}"] = {"plain_tokens_per_s": plain["tokens_per_s"], **best}
            findings.rows += _rows(num_texts, plain, best, plan.bound(LEAST_RATIO if num_texts == 1 else None))
        if plan.is_cuda:
            torch.cuda.empty_cache()


def _rows(num_texts: int, plain: dict[str, Any], best: dict[str, Any], bound: float | None) -> list[Row]:
    name = f"batch {num_texts}"
    how = f"block of {best['block_length']}, {best['quantization']}"
    return [
        Row(f"{name}: plain", plain["tokens_per_s"], "tokens/s"),
        Row(f"{name}: best speculative ({how})", best["tokens_per_s"], "tokens/s"),
        Row(f"{name}: speculative / plain", best["ratio"], "", bound, is_least=True),
        Row(f"{name}: acceptance rate", best["acceptance_rate"]),
        Row(f"{name}: block efficiency", best["block_efficiency"], "tokens"),
    ]


def measure(
    plan: Plan, pair: Pair, models: Models, num_texts: int, block_length: int, quantization: Quantization
) -> dict[str, Any]:
    """Returns rates of rounds of some texts, none of which grows beyond the plan."""
    prompts = [random_ids(plan.prompt_tokens, models.target.vocab_size, seed) for seed in range(num_texts)]
    limit = plan.longest_text - block_length - 1
    with Batch(models, prompts, SamplingParams(pair.temperature), quantization) as batch:
        for _ in range(WARM_UP_ROUNDS if not plan.is_tiny else 2):
            batch.round(block_length)
        batch.tally = Tally()
        _synchronize(plan)
        started = time.perf_counter()
        rounds = 0
        while not rounds or (batch.longest <= limit and time.perf_counter() - started < plan.seconds):
            batch.round(block_length)
            rounds += 1
        _synchronize(plan)
        seconds, tally = time.perf_counter() - started, batch.tally
    return {
        "tokens_per_s": tally.committed / seconds,
        "ms_per_round": seconds / rounds * 1e3,
        "rounds": rounds,
        "acceptance_rate": tally.accepted / tally.drafted if tally.drafted else 0.0,
        "block_efficiency": tally.committed / tally.judged,
    }


def _synchronize(plan: Plan) -> None:
    if plan.is_cuda:
        torch.cuda.synchronize()
