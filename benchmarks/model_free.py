"""Drafts without a model, with one, and plain decoding, on text that repeats itself and on text that does not.

    python -m benchmarks.model_free --output benchmarks/results/model_free.json
    python -m benchmarks.model_free --vllm vllm/bin/python --output benchmarks/results/model_free.json

Three services with a draft model, whose verifier drafts by itself too; requests name what may draft. Cells are kinds of
work: a scripted target that writes the same file again and again with 5 % or 20 % of the tokens changed, and the
embedded target that completes, edits and quotes (the prompts of `benchmarks.model_free_replay`, of which a retrieval
store is built). Plain decoding, each source, and what the server chooses among all of them have turns forwards and
backwards; ratios are of the turns of one pass. A/A is plain decoding over itself. vLLM, with and without its own drafts
from the text, continues as many prompts of the same kind in one call.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.adaptive import SCRIPTED_CACHE, Cell, run_turn
from benchmarks.contestants import NGRAM, Engine, Pair, Resources, Task, engine_script
from benchmarks.model_free_replay import works
from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED, embedded_model
from draftwire.cli.stack_options import stack_options
from draftwire.client import AsyncClient
from draftwire.models.card import load_card
from draftwire.options.model_free.store_building import build_store, read_tokens

MODEL = "model"
"""Stands for the name of the draft model."""
NUM_PROMPTS = 40
NGRAM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Arm:
    """What the requests of a turn ask for."""

    num_draft_tokens: int | None
    """None is chosen."""
    drafter: str | None = None
    """Which may draft; None is all."""


ARMS = {
    "plain": Arm(0),
    "suffix, 4": Arm(4, "suffix"),
    "suffix, 8": Arm(8, "suffix"),
    "lookup, 8": Arm(8, "lookup"),
    "retrieval, 8": Arm(8, "retrieval"),
    "model, 4": Arm(4, MODEL),
    "model, 8": Arm(8, MODEL),
    "chosen": Arm(None),
    "plain again": Arm(0),
}
FIXED = [name for name, arm in ARMS.items() if arm.num_draft_tokens is not None and name != "plain again"]


@dataclass(frozen=True, slots=True)
class Work:
    """What the sessions of a cell do."""

    name: str
    model: str
    """A script, or "embedded"."""
    temperature: float
    sessions: int
    prompts: Sequence[str] = ("a",)
    max_tokens: int = 8192

    @property
    def shown(self) -> str:
        """The cell in words."""
        return f"{self.name}, T = {self.temperature:g}, {self.sessions} sessions"


def scripted(changes: float, temperature: float, sessions: int) -> Work:
    """Returns a cell in which the alphabet is written again and again; at temperature 0 without changes."""
    script = f"scripted:verify_ms=20,read_us=200,draft_ms=2,acceptance={1.0 - changes:g}"
    shown = f"scripted, {changes:.0%} changed" if temperature else "scripted, nothing changed"
    return Work(shown, script, temperature, sessions)


def all_works() -> list[Work]:
    """Returns all cells."""
    prompts: dict[str, list[str]] = {}
    for kind, prompt in works(NUM_PROMPTS):
        prompts.setdefault(kind, []).append(prompt)
    cells = [scripted(changes, 1.0, sessions) for changes in (0.05, 0.2) for sessions in (1, 16)]
    cells += [scripted(0.05, 0.0, sessions) for sessions in (1, 16)]
    return cells + [
        Work(f"embedded, {kind}", "embedded", temperature, sessions, given, 128)
        for kind, given in prompts.items()
        for temperature in (0.0, 1.0)
        for sessions in (1, 16)
    ]


@dataclass(frozen=True, slots=True)
class WorkResult:
    """What a cell showed."""

    name: str
    temperature: float
    sessions: int
    tokens_per_second: dict[str, float]
    """Of all sessions, medians."""
    over_plain: dict[str, dict[str, float]]
    """Ratios to plain decoding; "plain again" is A/A."""
    best: str
    """The best of the fixed arms, plain decoding included, by medians."""
    chosen_over_best: dict[str, float]
    turns: dict[str, list[float]] = field(default_factory=dict)


def build_prompt_store(folder: Path) -> Path:
    """Builds a retrieval store of the files that are completed, edited and quoted."""
    card = load_card(embedded_model("target"))
    text = folder / "text"
    text.write_text("\n".join(load_prompts()), encoding="utf-8")
    described = card.description
    tokens = read_tokens([text], card.tokenizer.backend_tokenizer, described.vocab_size)
    build_store(folder / "store", tokens, described.vocabulary_fingerprint, described.vocab_size)
    return folder / "store"


def measure(work: Work, store: Path, arguments: argparse.Namespace) -> WorkResult:
    """Runs the turns of a cell, after the server has chosen for a while."""
    if work.model == "embedded":
        options = stack_options(EMBEDDED, None, None)
        options["verifier"]["retrieval_store"] = store
    else:
        options = {
            "verifier": {"model": work.model, "threads": 1, "kv_cache_tokens": SCRIPTED_CACHE},
            "drafter": {"model": work.model, "threads": 1, "kv_cache_tokens": SCRIPTED_CACHE},
            "gateway": {},
        }
    arms = {name: arm for name, arm in ARMS.items() if arm.drafter != "retrieval" or work.model == "embedded"}
    cell = Cell(work.name, work.model, work.sessions, work.temperature, work.max_tokens)
    turns: dict[str, list[float]] = {name: [] for name in arms}

    async def run(address: str) -> None:
        async with AsyncClient(address) as client:
            (model,) = (await client.server()).drafters
            await run_turn(client, cell, None, 0.0, arguments.warm_up_s, work.prompts)
            for number in range(arguments.turns):
                for name in arms if number % 2 == 0 else reversed(arms):
                    arm = arms[name]
                    drafter = model.name if arm.drafter == MODEL else arm.drafter
                    timing = arguments.settle_s, arguments.seconds
                    rate = await run_turn(client, cell, arm.num_draft_tokens, *timing, work.prompts, drafter=drafter)
                    turns[name].append(rate)

    with LocalStack(options) as stack:
        asyncio.run(run(stack.address))
    rates = {name: median(found) for name, found in turns.items()}
    best = max((name for name in FIXED if name in rates), key=lambda name: rates[name])
    return WorkResult(
        work.name,
        work.temperature,
        work.sessions,
        rates,
        {name: asdict(ratio_of(turns[name], turns["plain"])) for name in arms if name != "plain"},
        best,
        asdict(ratio_of(turns["chosen"], turns[best])),
        turns,
    )


def vllm_rates(cells: Sequence[Work], python: str, threads: int, runs: int) -> Iterator[dict[str, object]]:
    """Yields what vLLM makes of the cells of the embedded pair, tokens/s, with its drafts and without."""
    target = embedded_model("target")
    tokenizer = load_card(target).tokenizer
    resources = Resources(threads, 16, 65_536)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine(name, engine_script("vllm", python), Pair(name, target, NGRAM, ()), resources, num_draft_tokens)
            )
            for name, num_draft_tokens in (("vllm", 0), ("vllm ngram", NGRAM_TOKENS))
        }
        for work in cells:
            if work.model != "embedded":
                continue
            prompts = [tokenizer.encode(prompt) for prompt in work.prompts]
            found: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(runs + 1):
                given = [prompts[(number * work.sessions + index) % len(prompts)] for index in range(work.sessions)]
                for name, engine in engines.items():
                    run = engine.run(Task(given, work.max_tokens, work.temperature, number))
                    if number:  # the first one warms up
                        found[name].append(work.sessions * work.max_tokens / run.seconds)
            rates = {name: median(each) for name, each in found.items()}
            ratio = asdict(ratio_of(found["vllm ngram"], found["vllm"]))
            named = {"name": work.name, "temperature": work.temperature, "sessions": work.sessions}
            print(f"{work.shown}: vllm {rates['vllm']:.0f} tokens/s; ngram over it {ratio['median']:.3f}", flush=True)
            yield {**named, "tokens_per_second": rates, "ngram_over_plain": ratio}


def main() -> None:
    """Measures, prints a line for each cell, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cells whose name has this in it")
    parser.add_argument("--turns", type=int, default=2, help="of each arm")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a turn, that are counted")
    parser.add_argument(
        "--settle-s", type=float, default=2.0, help="of a turn, before: sessions begin anew, where nothing repeats yet"
    )
    parser.add_argument("--warm-up-s", type=float, default=8.0, help="chosen drafts before the first turn of a cell")
    parser.add_argument("--vllm", metavar="PYTHON", help="of the environment of vllm")
    parser.add_argument("--vllm-runs", type=int, default=2, help="of a cell")
    parser.add_argument("--threads", type=int, default=2, help="of vllm")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cells = [work for work in all_works() if (arguments.only or "") in work.name]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        store = build_prompt_store(Path(folder))
        for work in progress(cells, "cells"):
            result = measure(work, store, arguments)
            results.append(result)
            ratios = ", ".join(f"{arm} {ratio['median']:.3f}" for arm, ratio in result.over_plain.items())
            plain, chosen = result.tokens_per_second["plain"], result.chosen_over_best["median"]
            line = f"plain {plain:.0f} tokens/s; over plain: {ratios}; chosen / {result.best} {chosen:.3f}"
            print(f"{work.shown}: {line}", flush=True)
    others = (
        []
        if arguments.vllm is None
        else list(vllm_rates(cells, arguments.vllm, arguments.threads, arguments.vllm_runs))
    )
    write_report(arguments, {"results": [asdict(result) for result in results], "vllm": others})


if __name__ == "__main__":
    main()
