"""draftwire against transformers in one run: the same models, prompts, numbers of tokens, dtype and CPU threads.

    python -m benchmarks.peers --pairs embedded --output benchmarks/results/peers.json

One completion at a time, float32, at temperature 0 and 1. The contestants:

    transformers                  `generate`
    transformers assisted         `generate(assistant_model=...)` with defaults
    transformers assisted, tuned  the same with the best constant number of draft tokens and no confidence threshold
    decoder                       our decoder in a process alone: `judge` with empty blocks, no services
    plain                         our three processes without draft tokens
    speculative                   our three processes with the best block length, rule `block`

The two best settings, by median rates, are found by a sweep at the start of the run. Then every repetition has every
contestant continue every prompt; they alternate prompt by prompt, in an order that rotates, so that a ratio compares
runs adjacent in time. While one runs, the others' processes sleep. Earlier completions of the same prompt are not
reused. A token rate is that of whole completions, prefill included, as the client sees it.

A pair is `embedded`, or a folder with `target/`, `drafter/` and a `synthesis.json` that names the temperature that the
pair was made for, the only one at which it is run. No text ends early: all run on copies of the models (links to the
weights) without stop tokens, so that no token has to be masked.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.up_command import embedded_model, stack_options
from draftwire.client import Client
from draftwire.engine.model_loading import load_target
from draftwire.method.keys import Role, derive_key
from draftwire.method.randomness import DrawKey
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime.logging import configure_logging
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire.verification import rule_named
from draftwire.verification.target import Judgement, Judging, judge

EMBEDDED = "embedded"
TRANSFORMERS, ASSISTED, TUNED = "transformers", "transformers assisted", "transformers assisted, tuned"
DECODER, PLAIN, SPECULATIVE = "decoder", "plain", "speculative"
RATIOS = (
    (SPECULATIVE, PLAIN),
    (SPECULATIVE, ASSISTED),
    (SPECULATIVE, TUNED),
    (SPECULATIVE, TRANSFORMERS),
    (DECODER, TRANSFORMERS),
    (PLAIN, TRANSFORMERS),
)
ASSISTANT_TOKENS = (1, 2, 3, 4, 5, 8)
"""Numbers of draft tokens in the sweep of transformers."""
BLOCK_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Block lengths in the sweep of our services."""
ANSWER_SECONDS = 600.0
"""How long a worker may take to load its models, or to continue a prompt."""
WARM_UP_TOKENS = 8
CACHE_TOKENS = 4096
"""Room of our KV caches, far more than one session needs."""


@dataclass(frozen=True, slots=True)
class Task:
    """A completion to generate."""

    prompt_ids: list[int]
    num_tokens: int
    """To generate, exactly."""
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """A completion of a contestant."""

    token_ids: list[int]
    seconds: float
    target_passes: int
    """Forward passes of the target, or rounds; the first one reads the prompt."""
    num_blocks: int = 0
    """Passes that judged a block."""
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models and the temperatures at which they run."""

    name: str
    target: str
    drafter: str
    """Folders."""
    temperatures: tuple[float, ...]


class Contestant(ABC):
    """Something that continues prompts."""

    def __init__(self, name: str, num_draft_tokens: int | None = None) -> None:
        """`num_draft_tokens` is None without drafting, or where the contestant chooses the number itself."""
        self.name = name
        self.num_draft_tokens = num_draft_tokens

    @abstractmethod
    def run(self, task: Task) -> Run:
        """Continues a prompt, with nothing else running."""


class Served(Contestant):
    """Our three processes."""

    def __init__(self, name: str, client: Client, salts: Iterator[int], num_draft_tokens: int) -> None:
        """`salts` are unused numbers, one for the cache salt of each request."""
        super().__init__(name, num_draft_tokens)
        self._client = client
        self._salts = salts

    def run(self, task: Task) -> Run:
        """Generates a completion through the gateway; the time is the client's."""
        started = time.perf_counter()
        completion = self._client.generate(
            task.prompt_ids,
            max_tokens=task.num_tokens,
            temperature=task.temperature,
            seed=task.seed,
            num_speculative_tokens=self.num_draft_tokens,
            rejection_sample_method="block",
            cache_salt=str(next(self._salts)),  # else the second completion of a prompt would hit the prefix cache
        )
        seconds = time.perf_counter() - started
        assert not completion.drafter_error, completion.drafter_error
        spent = completion.statistics
        drafts = (spent.num_drafts, spent.num_draft_tokens, spent.num_accepted_tokens)
        return Run(completion.token_ids, seconds, spent.num_rounds, *drafts)


class Worker:
    """A process that continues prompts on request, and sleeps otherwise. A context manager."""

    def __init__(self, serve: Callable[[Connection, Pair, int], None], pair: Pair, threads: int) -> None:
        """Starts the process, without waiting until it has loaded its models."""
        context = multiprocessing.get_context("spawn")
        self._connection, own = context.Pipe()
        self._process = context.Process(target=serve, args=(own, pair, threads), daemon=True)
        self._process.start()
        own.close()  # else the end of the process would not be noticed
        self.facts: dict[str, Any] = {}
        """Settings that the process reports after loading."""

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_error: object) -> None:
        self._connection.close()  # it ends then
        self._process.join(10.0)
        self._process.kill()

    def wait_ready(self) -> None:
        """Waits until the process has loaded its models; to be called before the first task."""
        self.facts = self._answer()

    def run(self, task: Task, *how: object) -> Run:
        """Runs a task in the process and returns its result."""
        self._connection.send((task, *how))
        run: Run = self._answer()
        return run

    def _answer(self) -> Any:
        if not self._connection.poll(ANSWER_SECONDS):
            raise TimeoutError(f"a worker said nothing for {ANSWER_SECONDS:g} s")
        return self._connection.recv()


class Generated(Contestant):
    """transformers in a process of its own."""

    def __init__(self, name: str, worker: Worker, is_assisted: bool, num_draft_tokens: int | None = None) -> None:
        """`worker` runs `serve_transformers`."""
        super().__init__(name, num_draft_tokens)
        self._worker = worker
        self._is_assisted = is_assisted

    def run(self, task: Task) -> Run:
        """Generates a completion in the worker; the time is that of the call of `generate`."""
        return self._worker.run(task, self._is_assisted, self.num_draft_tokens)


class Decoded(Contestant):
    """Our decoder in a process of its own."""

    def __init__(self, name: str, worker: Worker) -> None:
        """`worker` runs `serve_decoder`."""
        super().__init__(name)
        self._worker = worker

    def run(self, task: Task) -> Run:
        """Generates a completion in the worker; the time is that of the decoding loop."""
        return self._worker.run(task)


def serve_transformers(connection: Connection, pair: Pair, threads: int) -> None:
    """Main of the process that continues prompts with `generate`."""
    torch.set_num_threads(threads)
    set_verbosity_error()
    disable_progress_bar()
    target, assistant = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (pair.target, pair.drafter)
    )
    passes = dict.fromkeys((target, assistant), 0)

    def count_pass(model: Any, _inputs: object) -> None:
        passes[model] += 1

    for model in passes:
        model.register_forward_pre_hook(count_pass)
    connection.send({"attention": target.config._attn_implementation, "threads": torch.get_num_threads()})

    def generate(task: Task, is_assisted: bool, num_draft_tokens: int | None) -> Run:
        options: dict[str, Any] = {"do_sample": False}
        if task.temperature:
            options = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
        if is_assisted:
            options["assistant_model"] = assistant
            _set_assistant(assistant.generation_config, num_draft_tokens)
        prompt = torch.tensor([task.prompt_ids])
        passes.update(dict.fromkeys(passes, 0))
        torch.manual_seed(task.seed)
        started = time.perf_counter()
        output = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=task.num_tokens, **options
        )
        seconds = time.perf_counter() - started
        token_ids = output[0, len(task.prompt_ids) :].tolist()
        if not is_assisted:
            return Run(token_ids, seconds, passes[target])
        # Each pass of the assistant drafts a token, and each of the target adds one to those that it accepts.
        accepted = len(token_ids) - passes[target]
        return Run(token_ids, seconds, passes[target], passes[target], passes[assistant], accepted)

    _answer_all(connection, generate)


def _set_assistant(config: Any, num_draft_tokens: int | None) -> None:
    """Sets an assistant's number of draft tokens; None for the default schedule."""
    config.num_assistant_tokens = num_draft_tokens
    config.num_assistant_tokens_schedule = None if num_draft_tokens is None else "constant"
    config.assistant_confidence_threshold = None if num_draft_tokens is None else 0.0


def serve_decoder(connection: Connection, pair: Pair, threads: int) -> None:
    """Main of the process that continues prompts with our decoder and the computations of a verifier's step."""
    configure_logging("console", "decoder")
    settings = ModelSettings(pair.target, dtype="float32", threads=threads)
    model = load_target(settings, EngineSettings(kv_cache_tokens=CACHE_TOKENS)).model
    rule = rule_named("block")
    connection.send({})

    def decode(task: Task) -> Run:
        sampling, key = SamplingParams(task.temperature), derive_key(task.seed, Role.VERIFYING)
        started = time.perf_counter()
        sequence, text = model.cache.open(), list(task.prompt_ids)
        for number in range(task.num_tokens):
            step = judge(model, [Judging(sequence, text, [], None, sampling, rule, DrawKey(key, 0, number))])
            (judgement,) = step.outcomes
            assert isinstance(judgement, Judgement)
            text += judgement.token_ids
        model.cache.close(sequence)
        seconds = time.perf_counter() - started
        return Run(text[len(task.prompt_ids) :], seconds, task.num_tokens)

    _answer_all(connection, decode)


def _answer_all(connection: Connection, run: Callable[..., Run]) -> None:
    """Runs received tasks until the other side closes the connection."""
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        connection.send(run(*arguments))


@contextmanager
def endless(pair: Pair) -> Iterator[Pair]:
    """Yields a pair of copies of the models without stop tokens."""
    with tempfile.TemporaryDirectory() as folder:
        copies = {"target": pair.target, "drafter": pair.drafter}
        for name, source in copies.items():
            copies[name] = str(_copy_endless(Path(source).expanduser().resolve(), Path(folder) / name))
        yield Pair(pair.name, copies["target"], copies["drafter"], pair.temperatures)


def _copy_endless(source: Path, copy: Path) -> Path:
    """Links all files of a model except those that declare stop tokens, which are written without them."""
    copy.mkdir()
    for file in source.iterdir():
        if file.name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            facts = json.loads(file.read_text())
            facts.update({key: None for key in ("eos_token_id", "eos_token") if key in facts})
            (copy / file.name).write_text(json.dumps(facts))
        else:
            (copy / file.name).symlink_to(file)
    return copy


@dataclass(slots=True)
class Arena:
    """All contestants, running."""

    client: Client
    transformers: Worker
    decoder: Worker
    salts: Iterator[int]

    def served(self, name: str, num_draft_tokens: int) -> Contestant:
        """Returns our three processes with a block length."""
        return Served(name, self.client, self.salts, num_draft_tokens)

    def assisted(self, name: str, num_draft_tokens: int | None) -> Contestant:
        """Returns assisted generation with a number of draft tokens."""
        return Generated(name, self.transformers, True, num_draft_tokens)

    def contestants(self, assistant_tokens: int, block_length: int) -> list[Contestant]:
        """Returns all of them, with the best settings."""
        return [
            Generated(TRANSFORMERS, self.transformers, False),
            self.assisted(ASSISTED, None),
            self.assisted(TUNED, assistant_tokens),
            Decoded(DECODER, self.decoder),
            self.served(PLAIN, 0),
            self.served(SPECULATIVE, block_length),
        ]


@contextmanager
def arena(pair: Pair, arguments: argparse.Namespace) -> Iterator[Arena]:
    """Starts all contestants on a pair."""
    options = stack_options(pair.target, pair.drafter, max(arguments.block_lengths))
    for service in ("verifier", "drafter"):
        options[service].update(dtype="float32", kv_cache_tokens=CACHE_TOKENS)
        if arguments.threads is not None:
            options[service]["threads"] = arguments.threads
    threads: int = options["verifier"]["threads"]
    with ExitStack() as cleanup:
        transformers = cleanup.enter_context(Worker(serve_transformers, pair, threads))
        decoder = cleanup.enter_context(Worker(serve_decoder, pair, threads))
        stack = cleanup.enter_context(LocalStack(options))
        client = cleanup.enter_context(Client(stack.address))
        for worker in (transformers, decoder):
            worker.wait_ready()
        yield Arena(client, transformers, decoder, count())


@dataclass(frozen=True, slots=True)
class Measurement:
    """One contestant in one repetition, over all prompts."""

    repetition: int
    contestant: str
    tokens_per_second: float
    tokens_per_pass: float
    """Generated tokens over forward passes of the target, those that judged no block included."""
    block_efficiency: float | None
    """Mean number of tokens per pass that judged a block; None without drafting."""
    acceptance_rate: float | None
    """Accepted draft tokens over draft tokens; None without drafting."""
    token_ids: list[list[int]]
    """Of each prompt's completion."""


def measure(
    contestants: Sequence[Contestant], prompts: Sequence[list[int]], task: Callable[[list[int], int], Task], turn: int
) -> list[Measurement]:
    """Lets every contestant continue every prompt once, alternating.

    Args:
        contestants: all contestants, with distinct names.
        prompts: token ids.
        task: makes a task from a prompt and a seed.
        turn: number of the repetition, which rotates the order and gives the seeds.
    """
    runs: dict[str, list[Run]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        first = (turn + number) % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            wanted = task(prompt, turn * len(prompts) + number)
            run = contestant.run(wanted)
            if len(run.token_ids) != wanted.num_tokens:
                raise RuntimeError(f"{contestant.name} made {len(run.token_ids)} tokens, not {wanted.num_tokens}")
            runs[contestant.name].append(run)
    return [_measured(turn, contestant.name, runs[contestant.name]) for contestant in contestants]


def _measured(turn: int, contestant: str, runs: list[Run]) -> Measurement:
    num_tokens = sum(len(run.token_ids) for run in runs)
    blocks, drafted = sum(run.num_blocks for run in runs), sum(run.draft_tokens for run in runs)
    accepted = sum(run.accepted_tokens for run in runs)
    return Measurement(
        turn,
        contestant,
        num_tokens / sum(run.seconds for run in runs),
        num_tokens / sum(run.target_passes for run in runs),
        1.0 + accepted / blocks if blocks else None,
        accepted / drafted if drafted else None,
        [run.token_ids for run in runs],
    )


def compare(
    pair: Pair, temperature: float, running: Arena, arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[Measurement]]:
    """Runs all contestants on a pair at a temperature; returns a summary and the measurements."""
    tokenizer = Tokenizer.from_file(str(Path(pair.target) / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids[: arguments.prompt_tokens] for text in load_prompts()[: arguments.prompts]]

    def task(prompt_ids: list[int], seed: int) -> Task:
        return Task(prompt_ids, arguments.max_tokens, temperature, seed)

    def warm_up(prompt_ids: list[int], seed: int) -> Task:
        return Task(prompt_ids, WARM_UP_TOKENS, temperature, seed)

    label = f"{pair.name}, temperature {temperature:g}"
    measure(running.contestants(arguments.assistant_tokens[0], arguments.block_lengths[0]), prompts[:1], warm_up, 0)
    sweeps = {
        TUNED: [running.assisted(str(number), number) for number in arguments.assistant_tokens],
        SPECULATIVE: [running.served(str(number), number) for number in arguments.block_lengths],
    }
    rates: dict[str, dict[str, float]] = {}
    for name, candidates in sweeps.items():
        turns = list(enumerate(prompts * arguments.sweep_repetitions))
        tried = [measure(candidates, [prompt], task, turn) for turn, prompt in progress(turns, name)]
        rates[name] = _medians(each for measurements in tried for each in measurements)
    best = {name: max(own, key=lambda number: own[number]) for name, own in rates.items()}
    contestants = running.contestants(int(best[TUNED]), int(best[SPECULATIVE]))
    measurements = [
        each
        for turn in progress(range(arguments.repetitions), label)
        for each in measure(contestants, prompts, task, turn)
    ]
    summary = {
        "sweep_tokens_per_second_by_draft_tokens": rates,
        "best_draft_tokens": {name: int(number) for name, number in best.items()},
        **summarize(measurements, is_greedy=temperature == 0.0),
    }
    return summary, measurements


def _medians(measurements: Iterable[Measurement]) -> dict[str, float]:
    rates: dict[str, list[float]] = defaultdict(list)
    for each in measurements:
        rates[each.contestant].append(each.tokens_per_second)
    return {name: statistics.median(own) for name, own in rates.items()}


def summarize(measurements: list[Measurement], is_greedy: bool) -> dict[str, Any]:
    """Returns medians over repetitions, and ratios of the same repetitions."""
    own: dict[str, dict[int, Measurement]] = defaultdict(dict)
    for each in measurements:
        own[each.contestant][each.repetition] = each
    medians = _medians(measurements)
    ratios = {}
    for name, baseline in RATIOS:
        rates = [[own[each][turn].tokens_per_second for turn in own[name]] for each in (name, baseline)]
        ratios[f"{name} / {baseline}"] = ratio_of(*rates)
    means = {
        measure: {name: _mean([getattr(one, measure) for one in turns.values()]) for name, turns in own.items()}
        for measure in ("tokens_per_pass", "block_efficiency", "acceptance_rate")
    }
    return {
        "median_tokens_per_second": medians,
        "ratios": ratios,
        **means,
        **({"share_of_texts_like_those_of_transformers": _agreement(own)} if is_greedy else {}),
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def _agreement(own: dict[str, dict[int, Measurement]]) -> dict[str, float]:
    """Returns how many texts of each contestant equal those of `generate`.

    Greedy texts differ only at near-ties, which passes of different shapes round differently.
    """
    expected = next(iter(own[TRANSFORMERS].values())).token_ids
    return {
        name: statistics.mean(
            float(text == other) for one in turns.values() for text, other in zip(one.token_ids, expected, strict=True)
        )
        for name, turns in own.items()
    }


def table(results: dict[str, Any]) -> str:
    """Returns what was measured at one temperature as text."""
    columns = ("tokens_per_pass", "block_efficiency", "acceptance_rate")
    lines = [f"{'':<32}{'tokens/s':>10}{'tokens/pass':>14}{'block effic.':>14}{'acceptance':>14}"]
    for name, rate in results["median_tokens_per_second"].items():
        values = [results[column][name] for column in columns]
        lines.append(f"{name:<32}{rate:>10.2f}" + "".join(f"{'-' if v is None else f'{v:.3f}':>14}" for v in values))
    lines.append("medians of ratios, with 95 % intervals")
    lines += [f"{name:<46}  {ratio}" for name, ratio in results["ratios"].items()]
    return "\n".join(lines)


def read_pair(name: str) -> Pair:
    """Returns the pair of a name on the command line."""
    if name == EMBEDDED:
        return Pair(EMBEDDED, embedded_model("target"), embedded_model("drafter"), (0.0, 1.0))
    folder = Path(name)
    temperature = float(json.loads((folder / "synthesis.json").read_text())["temperature"])
    return Pair(folder.name, str(folder / "target"), str(folder / "drafter"), (temperature,))


def _row(pair: Pair, temperature: float, measurement: Measurement) -> dict[str, Any]:
    """Returns a measurement for the report, without the texts."""
    facts = {key: value for key, value in asdict(measurement).items() if key != "token_ids"}
    return {"pair": pair.name, "temperature": temperature, **facts}


def main() -> None:
    """Measures, prints tables and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", nargs="+", default=[EMBEDDED], help=f"{EMBEDDED}, or folders")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sweep-repetitions", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=32, help="prompts are cut to so many tokens")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate, exactly")
    parser.add_argument(
        "--threads", type=int, help="CPU threads of every contestant [default: those of `draftwire up`]"
    )
    parser.add_argument("--assistant-tokens", type=int, nargs="+", default=ASSISTANT_TOKENS, help="tried in the sweep")
    parser.add_argument("--block-lengths", type=int, nargs="+", default=BLOCK_LENGTHS, help="tried in the sweep")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"versions": {name: version(name) for name in ("torch", "transformers", "grpcio")}}
    rows: list[dict[str, Any]] = []
    for name in arguments.pairs:
        with endless(read_pair(name)) as pair, arena(pair, arguments) as running:
            own = results.setdefault(pair.name, {"transformers_process": running.transformers.facts})
            for temperature in pair.temperatures:
                summary, measurements = compare(pair, temperature, running, arguments)
                own[f"temperature {temperature:g}"] = summary
                rows += [_row(pair, temperature, measurement) for measurement in measurements]
                print(f"{pair.name}, temperature {temperature:g}\n{table(summary)}\n", flush=True)
    results["measurements"] = rows
    write_report(arguments, results)


if __name__ == "__main__":
    main()
