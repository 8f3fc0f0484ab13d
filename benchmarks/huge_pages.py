"""Steps of a decoder whose weights are on huge pages, beside those of the same decoder on small ones.

    python -m benchmarks.huge_pages --sessions 1 8 --dtype float32 --output benchmarks/results/huge_pages.json

Three decoders of a shape of `tools.synth` are in this process, with random weights: A and A' on the kernel's usual
pages, B on huge ones. Their steps alternate. A ratio is B over A of one turn; A' over A is the noise.
"""

import argparse
import re
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.decoder import DTYPES, Sessions, fill, milliseconds
from benchmarks.paired import ratio_of
from benchmarks.report import write_report
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.huge_pages import use_huge_pages
from draftwire.models.torch_models import torch_model
from tools.synth.synthesis import SHAPES


def memory_mib() -> dict[str, float]:
    """Returns the resident memory of this process, and what of it is on huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    kib = dict(re.findall(r"^(Rss|AnonHugePages): +(\d+) kB", text, re.MULTILINE))
    return {"resident_mib": float(kib["Rss"]) / 1024, "huge_mib": float(kib["AnonHugePages"]) / 1024}


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="370m")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=64, help="tokens of each text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape, dtype = SHAPES[arguments.shape], getattr(torch, arguments.dtype)

    def model() -> CachedModel:
        network = AutoModelForCausalLM.from_config(shape.config(shape.num_layers, dtype), dtype=dtype).eval()
        return torch_model(
            decoder_of(network, "lean", consumes=True), 2 * max(arguments.sessions) * (arguments.length + 32)
        )

    torch.manual_seed(0)
    huge = model()
    before, started = memory_mib(), time.perf_counter()
    use_huge_pages()
    moved_s, after = time.perf_counter() - started, memory_mib()
    models = {"b": huge, "a": model(), "a2": model()}
    for one in models.values():
        fill(one)
    steps = {}
    for count in arguments.sessions:
        times: dict[str, list[float]] = {name: [] for name in models}
        sessions = {name: Sessions(one, count, arguments.length) for name, one in models.items()}
        for turn in range(arguments.turns):
            for name in sorted(models, reverse=bool(turn % 2)):
                sessions[name].step()  # what another model left in the caches of the processor is gone
                times[name] += milliseconds(sessions[name].step, 1)
        for opened in sessions.values():
            opened.close()
        steps[f"{count} sessions"] = {
            "small_ms": sorted(times["a"])[len(times["a"]) // 2],
            "huge_ms": sorted(times["b"])[len(times["b"]) // 2],
            "ratio": ratio_of(times["b"], times["a"]),
            "noise": ratio_of(times["a2"], times["a"]),
        }
    write_report(
        arguments, {"moved_s": moved_s, "memory": {"before": before, "after": after}, "with_all": memory_mib(), **steps}
    )


if __name__ == "__main__":
    main()
