"""The synthetic pair whose steps are timed, made on the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from benchmarks.gpu_sections.batch import Models
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from draftwire.models.decoder import Decoder
from draftwire.models.decoders import decoder_of
from draftwire.models.torch_models import torch_model
from tools.synth.synthesis import SyntheticPair, Trial, synthesize

DRAFT_LAYERS = 2
AGREEMENT = 0.8
TOLERANCE = 0.03
"""Largest difference between wanted and measured agreement on other texts."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Weights of a target and a drafter, ready to run."""

    target: Decoder
    drafter: Decoder
    target_bytes: int
    """Weights that a step of the target reads."""
    drafter_bytes: int
    """Weights that a step of the drafter reads."""
    temperature: float

    def models(self, cache_tokens: int, is_static: bool) -> Models:
        """Returns both with caches of their own."""
        target, drafter = (torch_model(one, cache_tokens, is_static) for one in (self.target, self.drafter))
        return Models(target, drafter)


def bytes_read(model: LlamaForCausalLM) -> int:
    """Returns the bytes of all weights that a step reads: all but the embedding, of which it reads single rows."""
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()}
    total = sum(sizes.values())  # the head is not counted twice where it is the embedding
    return total if model.config.tie_word_embeddings else total - sizes["model.embed_tokens.weight"]


def synthesized(plan: Plan, temperature: float, on_trial: Callable[[Trial], None] | None = None) -> SyntheticPair:
    """Returns models of the plan's shape that agree at a temperature as often as wanted."""
    return synthesize(
        plan.shape,
        draft_layers=DRAFT_LAYERS,
        agreement=AGREEMENT,
        temperature=temperature,
        dtype=plan.dtype,
        device=str(plan.device),
        seed=0,
        on_trial=on_trial,
    )


def make_pair(plan: Plan, temperature: float, findings: Findings, _: Budget) -> Pair:
    """Runs the section and returns the pair."""
    if plan.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    trials: list[Trial] = []
    started = time.perf_counter()
    made = synthesized(plan, temperature, trials.append)
    seconds = time.perf_counter() - started
    target_bytes, drafter_bytes = bytes_read(made.target), bytes_read(made.drafter)
    # The drafter first: converting the target frees its original layers.
    drafter = decoder_of(made.drafter, "lean")
    pair = Pair(decoder_of(made.target, "lean", consumes=True), drafter, target_bytes, drafter_bytes, temperature)
    peak = torch.cuda.max_memory_allocated() if plan.is_cuda else 0
    findings.results |= {
        "shape": plan.size,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "draft_layers": DRAFT_LAYERS,
        "temperature": temperature,
        "wanted_agreement": AGREEMENT,
        "agreement": made.agreement.mean,
        "standard_error": made.agreement.standard_error,
        "drafter_entropy_nats": made.agreement.entropy,
        "scale": made.scale,
        "trials": [{"scale": trial.scale, "agreement": trial.agreement.mean} for trial in trials],
        "synthesis_s": seconds,
        "peak_memory_gib": peak / 2**30,
        "target_gb_read": target_bytes / 1e9,
        "drafter_gb_read": drafter_bytes / 1e9,
    }
    findings.rows += [
        Row(f"agreement at temperature {temperature:g}", made.agreement.mean, f"± {made.agreement.standard_error:.3f}"),
        Row("distance from the wanted agreement", abs(made.agreement.mean - AGREEMENT), "", TOLERANCE),
        Row("making the pair", seconds, "s"),
        Row("peak memory", peak / 2**30, "GiB"),
        Row("weights that a step reads, target", target_bytes / 1e9, "GB"),
        Row("weights that a step reads, drafter", drafter_bytes / 1e9, "GB"),
    ]
    return pair
