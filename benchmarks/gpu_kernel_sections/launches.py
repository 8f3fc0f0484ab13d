"""Cost of getting work to the device and its result back: operations, graphs and their nodes, downloads."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_kernel_sections.inferred import DOWNLOAD_US, NODE_US, OPERATION_US
from benchmarks.gpu_kernel_sections.recording import NO_GRAPHS, recorded, recorder_of
from benchmarks.gpu_sections.plan import Plan
from benchmarks.gpu_sections.section import Budget, Findings, Row
from benchmarks.gpu_sections.timer import Timer
from draftwire.method.devices import upload

OPERATIONS = 300
"""Launched one after the other."""
NODES = (1, 300, 700)
"""Of graphs; 700 are about those of a step."""
LAUNCH_CALLS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
NUMBERS = 16
"""Of a download: a decision."""
NO_LAUNCHES = "a launch apart from its operation needs a GPU"
NO_PINNED_MEMORY = "pinned memory needs a GPU"


def launches(plan: Plan, findings: Findings, _: Budget) -> None:
    """Runs the section."""
    timer = Timer(plan.device)
    numbers = torch.zeros(NUMBERS, dtype=torch.int64, device=plan.device)

    findings.results["us"] = found = {}

    def report(label: str, microseconds: float, inferred: float | None = None) -> None:
        found[label] = microseconds
        findings.rows.append(Row(label, microseconds, "us", inferred=inferred))

    def times(count: int) -> Callable[[], Tensor]:
        def work() -> Tensor:
            for _ in range(count):
                numbers.add_(1)
            return numbers

        return work

    many = times(OPERATIONS)
    host_ms = timer.median_host_ms(many, plan.repetitions)
    report("an eager operation, host", host_ms / OPERATIONS * 1e3, OPERATION_US)
    report("an eager operation, until done", timer.median_ms(many, plan.repetitions) / OPERATIONS * 1e3)
    uploaded_ms = timer.median_host_ms(lambda: upload([0] * NUMBERS, plan.device), plan.repetitions)
    report("an upload of a few numbers, host", uploaded_ms * 1e3)
    report("a download of a few numbers by `tolist`", timer.median_host_ms(numbers.tolist, plan.repetitions) * 1e3)
    if not plan.is_cuda:
        findings.lacks("a launch, host", NO_LAUNCHES)
        for label in ("a node of a graph", *(f"launching a graph of {count}, host" for count in NODES)):
            findings.lacks(label, NO_GRAPHS)
        findings.lacks("a pinned download with its wait", NO_PINNED_MEMORY)
        return
    report("a pinned download with its wait", download_ms(numbers, timer, plan) * 1e3, DOWNLOAD_US)
    recorder, replayed_ms = recorder_of(plan.device), {}
    for count in NODES:
        replay = recorded(times(count), recorder)
        report(f"launching a graph of {count}, host", timer.median_host_ms(replay, plan.repetitions) * 1e3)
        replayed_ms[count] = timer.median_ms(replay, plan.repetitions)
        report(f"a graph of {count}, until done", replayed_ms[count] * 1e3)
    few, most = NODES[1:]
    report("a node of a graph", (replayed_ms[most] - replayed_ms[few]) / (most - few) * 1e3, NODE_US)
    launch_us = traced_launch_us(many)
    if launch_us is None:
        findings.lacks("a launch, host", "the profiler saw none")
    else:
        report("a launch, host", launch_us)


def download_ms(numbers: Tensor, timer: Timer, plan: Plan) -> float:
    """Returns the median time from asking for a few numbers of an idle device until they are on the host."""
    pinned = torch.empty_like(numbers, device="cpu", pin_memory=True)
    done = torch.cuda.Event()

    def download() -> None:
        pinned.copy_(numbers, non_blocking=True)
        done.record()
        done.synchronize()

    return timer.median_host_ms(download, plan.repetitions)


def traced_launch_us(work: Callable[[], object]) -> float | None:
    """Returns the mean time of the driver's call that launches a kernel, as profiled; None if none was seen."""
    with torch.profiler.profile() as profiler:
        work()
        torch.cuda.synchronize()
    calls = [
        event for event in profiler.key_averages() if event.device_type.name == "CPU" and event.key in LAUNCH_CALLS
    ]
    count = sum(event.count for event in calls)
    return sum(event.self_cpu_time_total for event in calls) / count if count else None
