"""Memory bandwidth by reading and by copying: what everything else is compared with."""

import torch

from benchmarks.gpu_kernel_sections.inferred import COPY_TB_PER_S, READ_TB_PER_S, WEIGHTS_MS
from benchmarks.gpu_kernel_sections.products import bytes_of_products
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.steps import reduction_ms
from benchmarks.gpu_sections.timer import Timer


def bandwidth(plan: Plan, findings: Findings, _: Budget) -> float:
    """Runs the section and returns the bandwidth of reading, bytes/ms."""
    timer, num_bytes = Timer(plan.device), 2**24 if plan.is_tiny else 2**33
    read_ms = reduction_ms(num_bytes, timer, plan)
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=plan.device).fill_(1)
    target = torch.empty_like(source)
    copied_ms = timer.median_ms(lambda: target.copy_(source), plan.repetitions)
    read, copied = num_bytes / read_ms, num_bytes / copied_ms
    weights_ms = bytes_of_products(plan.shape, plan.dtype.itemsize) / read
    findings.results |= {
        "bytes": num_bytes,
        "read_tb_per_s": read / 1e9,
        "copy_tb_per_s": copied / 1e9,
        "weights_ms": weights_ms,
    }
    findings.rows += [
        Row("reading", read / 1e9, "TB/s", inferred=READ_TB_PER_S),
        Row("copying, bytes read and written", copied / 1e9, "TB/s", inferred=COPY_TB_PER_S),
        Row("reading the weights of a step of the target", weights_ms, "ms", inferred=WEIGHTS_MS),
    ]
    return read
