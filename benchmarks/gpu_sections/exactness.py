"""Correctness on the device.

Compares logits with transformers' own forward pass and drafts with those of the CPU, and checks that drafting does not
synchronise with the device.
"""

import copy
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import draftwire
from benchmarks.gpu_sections.batch import random_ids
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from draftwire.drafting.drawing import Drawer
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import Draft, Drafting, DraftRequest
from draftwire.errors import DraftwireError
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.models.decoders import decoder_of
from draftwire.models.sequence_model import Reading
from draftwire.models.torch_models import torch_model
from draftwire.options.trees.token_tree import TokenTree
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from tests.cache_integrity import check_integrity
from tools.synth.synthesis import build_target

LARGEST_ERROR = 1e-4
"""Of float32 logits."""
TAMING = 0.25
"""Scale of compared logits, for a standard deviation of about 1: rounding errors grow with the logits."""
STEPS = {True: 12, False: 60}
"""Steps whose logits are compared, by whether the plan is tiny."""
NUM_TEXTS = 6
FEW, MANY = (1, 2, 3, 5), (9, 40, 150)
"""Numbers of tokens per step. The few ones recur, so that recorded CUDA graphs are replayed."""
TREES = (0, 3, 8, 31, 64)
"""Nodes of trees."""
NUM_BLOCKS = 16
"""Blocks in a batch, for each kind of sampling."""

SAMPLINGS = {
    "temperature 1": SamplingParams(),
    "temperature 0.7, top-p 0.95": SamplingParams(0.7, top_p=0.95),
    "top-k 50, min-p 0.05": SamplingParams(top_k=50, min_p=0.05),
    "greedy": SamplingParams(0.0),
    "biased": SamplingParams(logit_bias=((3, 2.0), (7, -5.0)), allowed_token_ids=frozenset(range(200))),
}


def exactness(plan: Plan, findings: Findings, budget: Budget) -> None:
    """Runs the section."""
    torch.set_float32_matmul_precision("highest")
    model = build_target(plan.exact_shape, torch.float32, str(plan.device), seed=1)
    model.model.norm.weight.mul_(TAMING)
    for is_static in (False, True):
        name = "static" if is_static else "packed"
        found = largest_error(model, plan, is_static)
        findings.results[f"largest_error_{name}"] = found["largest_error"]
        findings.results[f"logits_{name}"] = found
        label = f"largest error of float32 logits, {name} steps ({found['rows']} rows)"
        findings.rows.append(Row(label, found["largest_error"], "", LARGEST_ERROR))
        findings.results[f"trees_{name}"] = trees = largest_tree_error(model, plan, is_static)
        label = f"largest error of float32 logits in trees, {name} steps ({trees['rows']} rows)"
        findings.rows.append(Row(label, trees["largest_error"], "", LARGEST_ERROR))
    model.model.norm.weight.div_(TAMING)
    findings.results["synchronizations"] = waits = synchronizations(model, plan)
    label = "ways of drafting that wait for the device too early"
    findings.rows.append(Row(label, len(waits), f"of {2 * len(SAMPLINGS)}", 0))
    findings.results["draft_differences"] = different = draft_differences(model, budget)
    label = "draft blocks that differ from the CPU's by rounding"
    findings.rows.append(Row(label, different["differing"], f"of {different['blocks']}", 0.05 * different["blocks"]))


@torch.inference_mode()
def largest_error(model: LlamaForCausalLM, plan: Plan, is_static: bool) -> dict[str, Any]:
    """Compares logits of mixed batches, with ends forgotten and read again, with fresh forward passes.

    All steps come before the first comparison: nothing but the steps themselves orders them, and rows that a later
    step overwrote would show.
    """
    cached = torch_model(decoder_of(model, "lean"), 16_384, is_static)
    generator = random.Random(3)
    texts: list[list[int]] = [[] for _ in range(NUM_TEXTS)]
    sequences = [cached.cache.open() for _ in texts]
    pending: list[tuple[list[int], Tensor]] = []
    for _ in range(STEPS[plan.is_tiny]):
        readings = []
        members = generator.sample(range(NUM_TEXTS), generator.randint(1, NUM_TEXTS))
        is_few = generator.random() < 0.8
        for index in members:
            if len(texts[index]) > 400 or (texts[index] and generator.random() < 0.5):
                del texts[index][generator.randrange(len(texts[index])) :]
                cached.cache.truncate(sequences[index], len(texts[index]))
            ids = [generator.randrange(cached.vocab_size) for _ in range(generator.choice(FEW if is_few else MANY))]
            texts[index] += ids
            readings.append(Reading(sequences[index], ids, min(len(ids), 5)))
        rows = cached.read(readings).split([reading.keep for reading in readings])
        pending += [(list(texts[index]), own) for index, own in zip(members, rows, strict=True)]
    check_integrity(cached.cache)
    errors, deviations = [], []
    for text, own in pending:
        whole = torch.tensor([text], device=plan.device)
        expected = model(input_ids=whole, use_cache=False, logits_to_keep=len(own)).logits[0]
        errors.append(float((own - expected).abs().max()))
        deviations.append(float(expected.std()))
    return {
        "largest_error": max(errors),
        "median_error": sorted(errors)[len(errors) // 2],
        "logit_deviation": min(deviations),
        "rows": sum(len(own) for _, own in pending),
        "steps": STEPS[plan.is_tiny],
    }


@torch.inference_mode()
def largest_tree_error(model: LlamaForCausalLM, plan: Plan, is_static: bool) -> dict[str, Any]:
    """Compares logits after the nodes of random trees, a path of each of which is kept, with fresh passes over paths.

    As in `largest_error`, all steps come before the first comparison.
    """
    cached = torch_model(decoder_of(model, "lean"), 16_384, is_static)
    generator = random.Random(4)
    texts: list[list[int]] = [[] for _ in range(NUM_TEXTS)]
    sequences = [cached.cache.open() for _ in texts]
    pending: list[tuple[list[int], Tensor]] = []
    for _ in range(STEPS[plan.is_tiny] // 2):
        members = generator.sample(range(NUM_TEXTS), generator.randint(1, NUM_TEXTS))
        readings, trees = [], []
        for index in members:
            num_nodes, reach = generator.choice(TREES), generator.choice((1, 4, 100))
            trees.append(TokenTree(tuple(generator.randint(max(n - reach, -1), n - 1) for n in range(num_nodes))))
            ids = [generator.randrange(cached.vocab_size) for _ in range(1 + num_nodes)]
            texts[index].append(ids[0])
            readings.append(Reading(sequences[index], ids, len(ids), trees[-1].parents))
        rows = cached.read(readings).split([reading.keep for reading in readings])
        for index, reading, tree, own in zip(members, readings, trees, rows, strict=True):
            for node in generator.sample(range(len(tree)), min(len(tree), 3)):
                path = [reading.token_ids[1 + each] for each in tree.path_to(node)]
                pending.append(([*texts[index], *path], own[1 + node]))
            kept = tree.path_to(generator.randrange(-1, len(tree)))
            cached.keep_path(sequences[index], kept)
            texts[index] += [reading.token_ids[1 + each] for each in kept]
    check_integrity(cached.cache)
    errors = []
    for text, own in pending:
        whole = torch.tensor([text], device=plan.device)
        expected = model(input_ids=whole, use_cache=False, logits_to_keep=1).logits[0, 0]
        errors.append(float((own - expected).abs().max()))
    return {"largest_error": max(errors), "rows": len(errors), "steps": STEPS[plan.is_tiny] // 2}


class _WatchedDrawer(Drawer):
    """Raises on any synchronisation with the device while tokens are drawn."""

    def __init__(self, *arguments: Any) -> None:
        """Starts the check."""
        super().__init__(*arguments)
        torch.cuda.set_sync_debug_mode("error")

    def drafts(self) -> list[Draft | DraftwireError]:
        """Ends the check: reading the drafts synchronises."""
        torch.cuda.set_sync_debug_mode("default")
        return super().drafts()


@contextmanager
def _watched(is_cuda: bool) -> Iterator[None]:
    if not is_cuda:
        yield
        return
    try:
        with patch("draftwire.drafting.language_model.Drawer", _WatchedDrawer):
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def synchronizations(model: LlamaForCausalLM, plan: Plan) -> dict[str, str]:
    """Returns where drafting synchronised before all tokens were drawn, by kind of sampling.

    Without a GPU drafting runs, and never synchronises.
    """
    waits: dict[str, str] = {}
    decoder = decoder_of(model, "lean")
    for is_static in (False, True):
        drafter = LanguageModelDrafter(torch_model(decoder, 4096, is_static), 1024)
        for name, sampling in SAMPLINGS.items():
            for watches in (False, True):  # the first run records graphs and allocates memory
                try:
                    with _watched(plan.is_cuda and watches):
                        draft_blocks(drafter, sampling, num_blocks=3, prompt_tokens=20)
                except RuntimeError as error:
                    waits[f"{name}, {'static' if is_static else 'packed'} steps"] = f"{_own_place(error)}: {error}"
                    break
    return waits


def _own_place(error: BaseException) -> str:
    """Returns the innermost frame of this project in the traceback of an error."""
    folder = str(Path(draftwire.__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


def draft_blocks(
    drafter: LanguageModelDrafter, sampling: SamplingParams, num_blocks: int, prompt_tokens: int
) -> list[list[int]]:
    """Returns blocks of 4 to 8 tokens that were drafted side by side, after texts of different lengths."""
    vocab_size = drafter.model.vocab_size
    sequences = [
        drafter.open(random_ids(prompt_tokens + 7 * index, vocab_size, index), ALONE) for index in range(num_blocks)
    ]
    draftings = []
    for index, sequence in enumerate(sequences):
        sequence.calibrate(prompt_tokens + 7 * index, [])
        key = DrawKey(derive_key(index, Role.DRAFTING), 0, 0)
        is_coupled = index % 3 == 2
        draftings.append(Drafting(sequence, DraftRequest(4 + index % 5, sampling, key, vocab_size, is_coupled)))
    blocks = []
    for draft in drafter.step(draftings).drafts:
        assert isinstance(draft, Draft), draft
        blocks.append(draft.token_ids)
    for sequence in sequences:
        sequence.close()
    return blocks


def draft_differences(model: LlamaForCausalLM, budget: Budget) -> dict[str, Any]:
    """Counts blocks that device and CPU draft differently, from the same weights and keys, in float32.

    Logits are rounded differently, so a uniform number close to the border between two tokens may select the other one.
    """
    on_cpu: Any = copy.deepcopy(model)
    reference = LanguageModelDrafter(torch_model(decoder_of(on_cpu.to("cpu"), "lean"), 8192), 1024)
    own = LanguageModelDrafter(torch_model(decoder_of(model, "lean"), 8192, True), 1024)
    found: dict[str, Any] = {"blocks": 0, "differing": 0, "by_sampling": {}}
    for name, sampling in SAMPLINGS.items():
        if budget.is_nearly_spent:
            break
        blocks, expected = (draft_blocks(drafter, sampling, NUM_BLOCKS, 20) for drafter in (own, reference))
        differing = sum(one != other for one, other in zip(blocks, expected, strict=True))
        found["by_sampling"][name] = differing
        found["blocks"] += NUM_BLOCKS
        found["differing"] += differing
    return found
