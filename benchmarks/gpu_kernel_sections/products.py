"""Matrix products of a step by cuBLAS, for a target's and a drafter's shape, at the numbers of rows that steps have."""

from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.gpu_kernel_sections.inferred import PRODUCTS_SHARE
from benchmarks.gpu_kernel_sections.recording import recorded, recorder_of
from benchmarks.gpu_sections import layer_parallel
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.timer import Timer
from draftwire.models.static_steps import Recorder
from tools.synth.synthesis import ModelShape

ROWS = (1, 5, 9, 16, 33, 65, 80, 144, 320, 576)
"""One text with chains and trees, and 4 to 64 texts with chains of 4 and 8."""
TINY_ROWS = (1, 5, 16)
STUDIED_ROWS = 5
"""For which a share of the bandwidth was inferred."""
COPIES, LEAST_BYTES = 4, 2**29
"""Copies of each matrix that are read in turn, and their bytes at least: far more than a cache holds."""
CALLS = {True: 4, False: 32}
"""Calls that are timed together, by whether the plan is tiny."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix that a step multiplies with."""

    name: str
    outputs: int
    inputs: int
    count: int
    """Of its kind in a step."""


def products_of(shape: ModelShape) -> list[Product]:
    """Returns the products of a step: those of all layers, and of the head."""
    width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    keys_values = 2 * shape.num_kv_heads * shape.head_dim
    return [
        Product("queries, keys, values", heads + keys_values, width, shape.num_layers),
        Product("attention's output", width, heads, shape.num_layers),
        Product("gate, up", 2 * shape.intermediate_size, width, shape.num_layers),
        Product("down", width, shape.intermediate_size, shape.num_layers),
        Product("head", shape.vocab_size, width, 1),
    ]


def bytes_of_products(shape: ModelShape, itemsize: int) -> int:
    """Returns the bytes of all matrices that a step reads."""
    return sum(one.outputs * one.inputs * one.count * itemsize for one in products_of(shape))


def products(plan: Plan, read: float | None, findings: Findings, budget: Budget) -> None:
    """Runs the section; `read` is the bandwidth, bytes/ms, or None if it was not measured."""
    shapes = {"target": plan.shape, "drafter of 1B": plan.shape if plan.is_tiny else layer_parallel.SHAPE}
    timer, recorder = Timer(plan.device), recorder_of(plan.device)
    rows = TINY_ROWS if plan.is_tiny else ROWS
    findings.results["library"] = "cuBLAS" if plan.is_cuda else "that of the CPU"
    for name, shape in shapes.items():
        found: dict[str, dict[int, float]] = {}
        for product in products_of(shape):
            if budget.is_nearly_spent:
                findings.lacks(f"{name}: products", "the section's time was spent")
                return
            found[product.name] = times_ms(product, rows, plan, timer, recorder)
        findings.results[name] = {"ms_by_rows": found}
        num_bytes = bytes_of_products(shape, plan.dtype.itemsize)
        steps = {count: sum(found[one.name][count] * one.count for one in products_of(shape)) for count in rows}
        findings.results[name] |= {"step_ms": steps, "bytes": num_bytes}
        shares = {} if read is None else {count: num_bytes / step_ms / read for count, step_ms in steps.items()}
        findings.results[name]["share_of_bandwidth"] = shares
        for count, milliseconds in steps.items():
            label = f"{name}: products of a step over {count} row{'s' if count > 1 else ''}"
            findings.rows.append(Row(label, milliseconds, "ms"))
            if count == STUDIED_ROWS and count in shares:
                inferred = PRODUCTS_SHARE if name == "target" else None
                findings.rows.append(Row("  bandwidth, as a share of reading's", shares[count], inferred=inferred))


@torch.inference_mode()
def times_ms(
    product: Product, rows: tuple[int, ...], plan: Plan, timer: Timer, recorder: Recorder | None
) -> dict[int, float]:
    """Returns the time of a product by its number of rows."""
    size = product.outputs * product.inputs
    copies = COPIES if plan.is_tiny else max(COPIES, -(-LEAST_BYTES // (size * plan.dtype.itemsize)))
    weights = torch.empty(copies, product.outputs, product.inputs, dtype=plan.dtype, device=plan.device).normal_()
    calls = CALLS[plan.is_tiny]
    times = {}
    for count in rows:
        own = torch.empty(count, product.inputs, dtype=plan.dtype, device=plan.device).normal_()

        def multiply(own: Tensor = own) -> Tensor:
            for matrix in islice(cycle(weights), calls):
                result = linear(own, matrix)
            return result

        times[count] = timer.median_ms(recorded(multiply, recorder), min(10, plan.repetitions)) / calls
    return times
