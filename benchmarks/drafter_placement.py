"""A drafter in the verifier's process and one in a process of its own, in turns: tokens/s, and a round's time.

    python -m benchmarks.drafter_placement --output benchmarks/results/drafter_placement.json
    python -m benchmarks.drafter_placement --target DIR --drafter DIR --sessions 1 --threads 2

Two stacks of the same pair run, of which one computes at a time. In each turn both continue the same prompts in random
order, at each number of sessions and temperature, with drafts of a fixed length; a ratio is that of one turn, here over
service. A round is of one session, prompts included, beside what the services report of it. The models' passes alone
are timed in this process, with the same settings, in the same turns: a chain of that length and the target's rows over
it, at a text of a hundred tokens. Memory is that of the processes of models, with their share of what they have in
common.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.load import Ask, run_load
from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import HERE, SERVICE, Computing, stack_options
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import Drafting, DraftRequest
from draftwire.engine.model_loading import load_draft_model, load_target
from draftwire.engine.step_drafts import LOCAL_QUANTIZATION
from draftwire.method.keys import KEY_BYTES, DrawKey
from draftwire.models.sequence_model import Reading
from draftwire.requests.parameters import SamplingParams
from draftwire.requests.session_parameters import ALONE
from draftwire.runtime.settings import EngineSettings, ModelSettings

TEXT_TOKENS = 100
PASSES = 40
"""Blocks whose passes are timed in a turn."""


class Passes:
    """Both models in this process."""

    def __init__(self, options: dict[str, Any], length: int) -> None:
        """Loads them as a verifier is told to."""
        threads = options["threads"]
        engine = EngineSettings(kv_cache_tokens=1024)
        target = load_target(ModelSettings(options["model"], threads=threads), engine)
        draft_threads = options.get("draft_threads", threads)
        drafter = load_draft_model(ModelSettings(options["draft_model"], threads=draft_threads), engine)
        for loaded in (target, drafter):
            if loaded.make_steps is not None:
                loaded.make_steps()
        self._target, self._length = target.model, length
        self._drafter = LanguageModelDrafter(drafter.model, 1024, 0, LOCAL_QUANTIZATION)
        text = [1] * TEXT_TOKENS
        self._sequence = self._target.cache.open()
        self._target.read([Reading(self._sequence, text, 1)])
        self._drafted = self._drafter.open(text, ALONE)

    def milliseconds(self) -> float:
        """Returns the median time of a block's passes: of the draft model's, drawing included, and of the target's."""
        request = DraftRequest(self._length, SamplingParams(), DrawKey(bytes(KEY_BYTES), 0, 0), self._target.vocab_size)
        times = []
        for _ in range(PASSES):
            self._target.cache.truncate(self._sequence, TEXT_TOKENS)
            self._drafted.calibrate(TEXT_TOKENS - 2, [1, 1])
            started = time.perf_counter()
            self._drafter.step([Drafting(self._drafted, request)])
            self._target.read([Reading(self._sequence, [1] * (self._length + 1), self._length + 1)])
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e3


def proportional_mib(process: int) -> float:
    """Returns the memory of a process, of what it shares its share, MiB."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def main() -> None:
    """Measures, prints and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=EMBEDDED)
    parser.add_argument("--drafter", default=EMBEDDED)
    parser.add_argument("--threads", type=int, default=1, help="of each model")
    parser.add_argument("--length", type=int, default=4, help="draft tokens of a round")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    threads, prompts = arguments.threads, load_prompts()
    options = {
        place: stack_options(
            arguments.target, arguments.drafter, None, None, Computing(threads=threads, placement=place)
        )
        for place in (HERE, SERVICE)
    }
    passes = Passes(options[HERE]["verifier"], arguments.length)
    rates: dict[tuple[float, int, str], list[float]] = {}
    rounds: defaultdict[str, list[float]] = defaultdict(list)
    with LocalStack(options[HERE]) as here, LocalStack(options[SERVICE]) as service:
        stacks = {HERE: here, SERVICE: service}
        memory = {
            place: sum(proportional_mib(one.process.pid) for name, one in stack.services.items() if name != "gateway")
            for place, stack in stacks.items()
        }
        for turn in progress(range(arguments.turns + 1), "turns"):
            for temperature in arguments.temperatures:
                for sessions in arguments.sessions:
                    asks = [
                        Ask(
                            prompts[(turn * sessions + each) % len(prompts)],
                            arguments.max_tokens,
                            arguments.length,
                            each,
                            temperature,
                        )
                        for each in range(2 * sessions)
                    ]
                    order = [HERE, SERVICE]
                    random.Random(turn).shuffle(order)
                    for place in order:
                        started = time.perf_counter()
                        answers = run_load(stacks[place].address, asks, sessions)
                        seconds = time.perf_counter() - started
                        num_tokens = sum(answer.statistics.num_emitted_tokens for answer in answers)
                        if turn:  # the first one warms up
                            rates.setdefault((temperature, sessions, place), []).append(num_tokens / seconds)
                            if sessions == 1:
                                spent = [answer.statistics for answer in answers]
                                num_rounds = sum(each.num_rounds for each in spent)
                                drafting_us = sum(
                                    each.draft_duration_us + each.calibration_duration_us for each in spent
                                )
                                verifying_us = sum(each.verify_duration_us for each in spent)
                                rounds[place].append(seconds / num_rounds * 1e3)
                                rounds[f"{place}_drafting"].append(drafting_us / num_rounds / 1e3)
                                rounds[f"{place}_verifying"].append(verifying_us / num_rounds / 1e3)
            if turn:
                rounds["passes"].append(passes.milliseconds())
    cells = {
        f"T = {temperature:g}, {sessions} sessions": {
            **{place: statistics.median(rates[temperature, sessions, place]) for place in (HERE, SERVICE)},
            "here_over_service": ratio_of(rates[temperature, sessions, HERE], rates[temperature, sessions, SERVICE]),
        }
        for temperature in arguments.temperatures
        for sessions in arguments.sessions
    }
    medians = {f"{name}_ms": statistics.median(times) for name, times in rounds.items() if times}
    write_report(arguments, {"tokens_per_second": cells, "a_round": medians, "memory_mib": memory})


if __name__ == "__main__":
    main()
