"""draftwire against transformers and other engines in one run: same models, prompts, numbers of tokens, dtype, threads.

    python -m benchmarks.peers --pairs embedded --output benchmarks/results/peers.json
    python -m benchmarks.peers --pairs DIR --engines transformers openvino vllm --openvino ov/bin/python \
        --vllm vllm/bin/python --sessions 1 4 8 16 --prompt-tokens 16
    python -m benchmarks.peers --pairs SMOLLM2 --services "openvino u8" --questions benchmarks/questions.jsonl
    python -m benchmarks.peers --pairs DIR --engines openvino llama --openvino ov/bin/python --llama ov/bin/python \
        --weights f32 u8 --services openvino "openvino u8" --block-lengths 4

At temperature 0 and 1, by number of sessions and length of the prompts. The contestants:

    transformers                  `generate`, all sessions as one batch
    transformers assisted         `generate(assistant_model=...)` with defaults, one session only
    transformers assisted, tuned  the same with the best constant number of draft tokens and no confidence threshold
    openvino                      OpenVINO GenAI's pipeline with continuous batching
    openvino drafts               the same with the drafter as its draft model
    openvino u8                   the same with weights in eight bits: `--weights f32 u8`; and with drafts
    llama                         llama.cpp's server with weights in Q8_0
    vllm                          vLLM
    vllm drafts                   the same with the drafter as its draft model
    vllm remote                   the same with our drafter service, by contrib/vllm_remote_drafter: `--vllm-remote`
    decoder                       our decoder in a process alone: `judge` with empty blocks, no services
    plain                         our three processes without draft tokens
    speculative                   our three processes with the best block length, rule `block`
    chosen                        our three processes, which choose block lengths
    plain on openvino u8 ...      our services computed otherwise: `--services`, which are float32 unless it says else
    ... on float32 here           the same with the drafter in the verifier's process
    plain on vllm ...             the same with the verifier's target on vLLM: `--verifier-on-vllm PYTHON`

All are in float32 that do not say else, and all drafts of others of `--engine-draft-tokens` tokens. `--without` names
contestants that are not to run.

The two best settings, by median rates, are found by a sweep at the start of the run, unless only one is to be tried.
Then every repetition has every contestant continue every group of prompts, one group for all sessions at a time; they
alternate group by group, in random order, so that a ratio compares runs adjacent in time. While one runs, the others'
processes sleep. Earlier completions of the same prompt are not reused. A token rate is that of whole
completions, prefill included, as the client sees it: with `--max-tokens 1` it is that of first tokens. Our services
read prompts in as few steps as the others do, by `--max-added-latency-ms`, not in the small chunks of the default.

Other engines (benchmarks/engines) run by the Python of environments of their own.

A pair is `embedded`, a folder with `target/`, `drafter/` and a `synthesis.json` that names the temperature that the
pair was made for, at which it is run unless `--temperatures` says else, or the folder of one model: all drafts are then
from earlier places of the text, by the lookup that each contestant has. No text ends early: all run on copies of the
models (links to the weights) without stop tokens, so that no token has to be masked.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import count, product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.contestants import (
    ANSWER_SECONDS,
    ENGINES,
    NGRAM,
    Contestant,
    Decoded,
    Engine,
    Generated,
    Pair,
    Resources,
    Run,
    Served,
    Task,
    Worker,
    engine_script,
    serve_decoder,
    serve_transformers,
)
from benchmarks.paired import ratio_of
from benchmarks.prompts import load_prompts
from benchmarks.report import progress, write_report
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import embedded_model
from draftwire.cli.stack_options import place_here, stack_options
from draftwire.client import Client

EMBEDDED = "embedded"
TRANSFORMERS, ASSISTED, TUNED = "transformers", "transformers assisted", "transformers assisted, tuned"
DECODER, PLAIN, SPECULATIVE, CHOSEN = "decoder", "plain", "speculative", "chosen"
FLOAT32, BFLOAT16, ON_OPENVINO, ON_OPENVINO_U8, ON_VLLM = "float32", "bfloat16", "openvino", "openvino u8", "vllm"
SERVICES: dict[str, dict[str, object]] = {
    FLOAT32: {"engine": "draftwire", "dtype": "float32"},
    BFLOAT16: {"engine": "draftwire", "dtype": "bfloat16"},
    ON_OPENVINO: {"engine": "openvino"},
    ON_OPENVINO_U8: {"engine": "openvino", "weights": "u8"},
}
IN_ONE_PROCESS = " here"
SERVICES |= {f"{kind}{IN_ONE_PROCESS}": {**how, "is_here": True} for kind, how in SERVICES.items()}
"""Options of both models, by kind of services; `here` has the drafter in the verifier's process."""
VLLM_REMOTE = "vllm remote"


def served_name(name: str, kind: str) -> str:
    """Returns the name of a contestant of ours."""
    return name if kind == FLOAT32 else f"{name} on {kind}"


def compared() -> Iterator[tuple[str, str]]:
    """Yields the contestants whose ratios are reported, where both ran."""
    yield from (
        (SPECULATIVE, ASSISTED),
        (SPECULATIVE, TUNED),
        (SPECULATIVE, TRANSFORMERS),
        (DECODER, TRANSFORMERS),
        (PLAIN, TRANSFORMERS),
        (PLAIN, DECODER),
        (VLLM_REMOTE, "vllm"),
        (VLLM_REMOTE, "vllm drafts"),
        (served_name(SPECULATIVE, ON_VLLM), VLLM_REMOTE),
    )
    kinds = (*SERVICES, ON_VLLM)
    for kind in kinds:
        plain, speculative, chosen = (served_name(name, kind) for name in (PLAIN, SPECULATIVE, CHOSEN))
        if kind.endswith(IN_ONE_PROCESS):
            yield from ((speculative, ASSISTED), (speculative, TUNED))
        yield from ((speculative, plain), (chosen, plain), (chosen, speculative))
        rivals = ("openvino u8", "llama") if kind == ON_OPENVINO_U8 else ("openvino", "vllm")
        for rival in rivals:
            yield from ((plain, rival), (speculative, f"{rival} drafts"), (chosen, rival), (chosen, f"{rival} drafts"))
    for name in (PLAIN, SPECULATIVE, CHOSEN):
        own = [served_name(name, kind) for kind in kinds]
        yield from ((other, first) for index, first in enumerate(own) for other in own[index + 1 :])


ASSISTANT_TOKENS = (1, 2, 3, 4, 5, 8)
"""Numbers of draft tokens in the sweep of transformers."""
BLOCK_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Block lengths in the sweep of our services."""
WARM_UP_TOKENS = 8
CACHE_BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU. Sessions there reserve whole blocks, and all have to fit."""
REST_SECONDS = 0.5
"""Before each task: threads of the contestant before may still be spinning."""


@contextmanager
def endless(pair: Pair) -> Iterator[Pair]:
    """Yields a pair of copies of the models without stop tokens."""
    with tempfile.TemporaryDirectory() as folder:
        copies = {"target": pair.target, "drafter": pair.drafter}
        for name, source in copies.items():
            if source == NGRAM:
                continue
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

    clients: dict[str, Client]
    """Of our services, by their kind: a key of `SERVICES`, or `ON_VLLM`."""
    decoder: Worker | None
    transformers: Worker | None
    engines: list[Engine]
    without: Sequence[str]
    """Names of contestants that are not to run."""
    salts: Iterator[int] = field(default_factory=count)

    def served(self, name: str, num_draft_tokens: int | None, kind: str | None = None) -> Contestant:
        """Returns our three processes with a block length, or with lengths of their choice; of a kind of services."""
        kind = next(iter(self.clients)) if kind is None else kind
        return Served(name, self.clients[kind], self.salts, num_draft_tokens)

    def assisted(self, name: str, num_draft_tokens: int | None) -> Contestant:
        """Returns assisted generation with a number of draft tokens."""
        assert self.transformers is not None
        return Generated(name, self.transformers, True, num_draft_tokens)

    def contestants(self, num_sessions: int, assistant_tokens: int, block_length: int) -> list[Contestant]:
        """Returns all that continue so many prompts at once, with the best settings."""
        everyone: list[Contestant] = []
        if self.transformers is not None:
            everyone.append(Generated(TRANSFORMERS, self.transformers, False))
            if num_sessions == 1:
                everyone += [self.assisted(ASSISTED, None), self.assisted(TUNED, assistant_tokens)]
        everyone += self.engines
        if self.decoder is not None:
            everyone.append(Decoded(DECODER, self.decoder))
        lengths: dict[str, int | None] = {PLAIN: 0, SPECULATIVE: block_length, CHOSEN: None}
        for kind, (name, length) in product(self.clients, lengths.items()):
            everyone.append(self.served(served_name(name, kind), length, kind))
        return [contestant for contestant in everyone if contestant.name not in self.without]


class StackOnVllm(LocalStack):
    """Services whose verifier runs on vLLM, by the Python of another environment."""

    def __init__(self, options: Mapping[str, Mapping[str, object]], python: str) -> None:
        """Takes options of services on our own engine."""
        verifier = {name: value for name, value in options["verifier"].items() if name != "threads"}
        super().__init__({**options, "verifier": {**verifier, "engine": "vllm"}}, start_timeout_s=ANSWER_SECONDS)
        self._python = python

    def interpreter(self, name: str) -> str:
        """Returns the other environment's Python for the verifier."""
        return self._python if name == "verifier" else super().interpreter(name)


def computed(
    options: Mapping[str, Mapping[str, object]], pair: Pair, how: Mapping[str, object]
) -> dict[str, dict[str, object]]:
    """Returns options of services with settings by which models are run."""
    with_models = {"verifier"} if pair.drafter == NGRAM else {"verifier", "drafter"}
    how = dict(how)
    is_here = how.pop("is_here", False)
    made = {service: {**own, **(how if service in with_models else {})} for service, own in options.items()}
    if is_here:
        place_here(made)
    return made


@contextmanager
def arena(pair: Pair, arguments: argparse.Namespace) -> Iterator[Arena]:
    """Starts all contestants on a pair."""
    most = max(arguments.sessions)
    longest = max(arguments.prompt_tokens) + arguments.max_tokens + max(arguments.block_lengths) + 32
    texts = most * -(-longest // CACHE_BLOCK) * CACHE_BLOCK
    options = stack_options(pair.target, pair.target if pair.drafter == NGRAM else pair.drafter, None)
    if pair.drafter == NGRAM:
        options["drafter"]["strategy"] = "suffix"
    for service in ("verifier", "drafter"):
        options[service].update(kv_cache_tokens=texts, max_added_latency_ms=arguments.max_added_latency_ms)
        if arguments.threads is not None:
            options[service]["threads"] = arguments.threads
    resources = Resources(options["verifier"]["threads"], most, texts)
    with ExitStack() as cleanup:
        engines = []
        for name, drafts, weights in product(ENGINES, sorted({0, arguments.engine_draft_tokens}), arguments.weights):
            has_only = {"llama": (0, "u8"), "vllm": (drafts, "f32")}  # numbers of draft tokens, and weights
            title = f"{name} u8" if weights == "u8" and name not in has_only else name
            title += " drafts" if drafts else ""
            if name not in arguments.engines or title in arguments.without:
                continue
            if has_only.get(name, (drafts, weights)) == (drafts, weights):
                script = engine_script(name, getattr(arguments, name))
                engines.append(cleanup.enter_context(Engine(title, script, pair, resources, drafts, weights)))
        decoder = None
        if DECODER not in arguments.without:
            decoder = cleanup.enter_context(Worker(serve_decoder, pair, resources))
        transformers = None
        if TRANSFORMERS in arguments.engines:
            transformers = cleanup.enter_context(Worker(serve_transformers, pair, resources))
            transformers.wait_ready()
        clients = {}
        for kind in arguments.services:
            stack = cleanup.enter_context(LocalStack(computed(options, pair, SERVICES[kind])))
            clients[kind] = cleanup.enter_context(Client(stack.address))
        if arguments.vllm_remote:
            drafter = f"draftwire:127.0.0.1:{stack.services['drafter'].port}"
            script, drafted_by = engine_script("vllm", arguments.vllm), replace(pair, drafter=drafter)
            remote = Engine(VLLM_REMOTE, script, drafted_by, resources, arguments.engine_draft_tokens)
            engines.append(cleanup.enter_context(remote))
        if arguments.verifier_on_vllm is not None:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{resources.threads - 1}")
            own = computed(options, pair, {"dtype": "float32"})
            other = cleanup.enter_context(StackOnVllm(own, arguments.verifier_on_vllm))
            clients[ON_VLLM] = cleanup.enter_context(Client(other.address))
        if decoder is not None:
            decoder.wait_ready()
        yield Arena(clients, decoder, transformers, engines, arguments.without)


QUESTION_TOKENS = 256
"""What questions have at most."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one table is about."""

    temperature: float
    num_sessions: int
    prompt_tokens: int
    """Length of the prompts."""

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, {self.num_sessions} sessions, prompts of {self.prompt_tokens} tokens"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One contestant in one repetition, over all prompts."""

    repetition: int
    contestant: str
    tokens_per_second: float
    """Of all sessions together."""
    tokens_per_pass: float | None
    """Generated tokens over forward passes of the target, those that judged no block included; None if unknown."""
    block_efficiency: float | None
    """Mean number of tokens per pass that judged a block; None without drafting."""
    acceptance_rate: float | None
    """Accepted draft tokens over draft tokens; None without drafting."""
    token_ids: list[list[int]]
    """Of each prompt's completion."""


Group = list[list[int]]
"""Prompts that are continued together, token ids."""


def measure(
    contestants: Sequence[Contestant], groups: Sequence[Group], task: Callable[[Group, int], Task], turn: int
) -> list[Measurement]:
    """Lets every contestant continue every group of prompts once, alternating.

    Args:
        contestants: all contestants, with distinct names.
        groups: prompts.
        task: makes a task from a group and a seed.
        turn: number of the repetition, which gives the seeds, of the order too.
    """
    runs: dict[str, list[Run]] = defaultdict(list)
    for number, group in enumerate(groups):
        seed = turn * len(groups) + number
        for contestant in random.Random(seed).sample(contestants, len(contestants)):
            wanted = task(group, seed)
            time.sleep(REST_SECONDS)
            run = contestant.run(wanted)
            if any(len(made) != wanted.num_tokens for made in run.token_ids) or len(run.token_ids) != len(group):
                raise RuntimeError(
                    f"{contestant.name} made {[*map(len, run.token_ids)]} tokens, not {wanted.num_tokens} each"
                )
            runs[contestant.name].append(run)
    return [_measured(turn, contestant.name, runs[contestant.name]) for contestant in contestants]


def _measured(turn: int, contestant: str, runs: list[Run]) -> Measurement:
    texts = [made for run in runs for made in run.token_ids]
    num_tokens, passes = sum(map(len, texts)), sum(run.target_passes for run in runs)
    blocks, drafted = sum(run.num_blocks for run in runs), sum(run.draft_tokens for run in runs)
    accepted = sum(run.accepted_tokens for run in runs)
    return Measurement(
        turn,
        contestant,
        num_tokens / sum(run.seconds for run in runs),
        num_tokens / passes if passes else None,
        1.0 + accepted / blocks if blocks else None,
        accepted / drafted if drafted else None,
        texts,
    )


def prompts_of(pair: Pair, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Returns different prompts of equal length, token ids."""
    tokenizer = Tokenizer.from_file(str(Path(pair.target) / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for text in load_prompts()]
    prompts = []
    for start in range(num_prompts):
        ids: list[int] = []
        for index in count(start):
            if len(ids) >= num_tokens:
                break
            ids += texts[index % len(texts)]
        prompts.append(ids[:num_tokens])
    return prompts


def questions_of(pair: Pair, file: Path) -> list[list[int]]:
    """Returns the questions of a file by the target's chat template, token ids."""
    template = AutoTokenizer.from_pretrained(pair.target).apply_chat_template
    questions = [json.loads(line)["question"] for line in file.read_text(encoding="utf-8").splitlines()]
    chats = ([{"role": "user", "content": question}] for question in questions)
    tokenizer = Tokenizer.from_file(str(Path(pair.target) / "tokenizer.json"))
    texts = (template(chat, tokenize=False, add_generation_prompt=True) for chat in chats)
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def compare(
    pair: Pair, cell: Cell, running: Arena, arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[Measurement]]:
    """Runs all contestants on a pair; returns a summary and the measurements."""
    if arguments.questions is None:
        prompts = prompts_of(pair, arguments.prompts * cell.num_sessions, cell.prompt_tokens)
    else:
        prompts = questions_of(pair, arguments.questions)[: arguments.prompts]
    groups = [prompts[start :: arguments.prompts] for start in range(arguments.prompts)]

    def task(group: Group, seed: int) -> Task:
        return Task(group, arguments.max_tokens, cell.temperature, seed)

    def warm_up(group: Group, seed: int) -> Task:
        return Task(group, min(WARM_UP_TOKENS, arguments.max_tokens), cell.temperature, seed)

    lengths = {TUNED: arguments.assistant_tokens, SPECULATIVE: arguments.block_lengths}
    best = {name: own[0] for name, own in lengths.items()}
    measure(running.contestants(cell.num_sessions, *best.values()), groups[:1], warm_up, 0)
    makers: dict[str, Callable[..., Contestant]] = {SPECULATIVE: running.served}
    if running.transformers is not None and cell.num_sessions == 1:
        makers[TUNED] = running.assisted
    rates: dict[str, dict[str, float]] = {}
    for name, make in makers.items():
        if len(lengths[name]) == 1:
            continue
        candidates = [make(str(number), number) for number in lengths[name]]
        turns = list(enumerate(groups * arguments.sweep_repetitions))
        tried = [measure(candidates, [group], task, turn) for turn, group in progress(turns, name)]
        rates[name] = _medians(each for measurements in tried for each in measurements)
        best[name] = int(max(rates[name], key=lambda number: rates[name][number]))
    contestants = running.contestants(cell.num_sessions, best[TUNED], best[SPECULATIVE])
    measurements = [
        each
        for turn in progress(range(arguments.repetitions), f"{pair.name}, {cell}")
        for each in measure(contestants, groups, task, turn)
    ]
    summary = {
        "sweep_tokens_per_second_by_draft_tokens": rates,
        "best_draft_tokens": {name: best[name] for name in makers},
        **summarize(measurements, is_greedy=cell.temperature == 0.0),
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
    for name, baseline in compared():
        if name in own and baseline in own:
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
        **({"share_of_texts_like_those_of_plain": _agreement(own)} if is_greedy else {}),
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def _agreement(own: dict[str, dict[int, Measurement]]) -> dict[str, float]:
    """Returns how many texts of each contestant equal those of our plain services of the first kind.

    Greedy texts differ only at near-ties, which passes of different shapes round differently.
    """
    reference = next(name for name in (*(served_name(PLAIN, kind) for kind in SERVICES), *own) if name in own)
    expected = next(iter(own[reference].values())).token_ids
    return {
        name: statistics.mean(
            float(text == other) for one in turns.values() for text, other in zip(one.token_ids, expected, strict=True)
        )
        for name, turns in own.items()
    }


def table(results: dict[str, Any]) -> str:
    """Returns what one table is about as text."""
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
    if not (folder / "target").exists():
        return Pair(folder.name, name, NGRAM, (0.0, 1.0))
    temperature = float(json.loads((folder / "synthesis.json").read_text())["temperature"])
    return Pair(folder.name, str(folder / "target"), str(folder / "drafter"), (temperature,))


def _row(pair: Pair, cell: Cell, measurement: Measurement) -> dict[str, Any]:
    """Returns a measurement for the report, without the texts."""
    facts = {key: value for key, value in asdict(measurement).items() if key != "token_ids"}
    return {"pair": pair.name, **asdict(cell), **facts}


def main() -> None:
    """Measures, prints tables and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", nargs="+", default=[EMBEDDED], help=f"{EMBEDDED}, or folders")
    parser.add_argument("--engines", nargs="*", choices=(TRANSFORMERS, *ENGINES), default=[TRANSFORMERS])
    for engine in ENGINES:
        parser.add_argument(f"--{engine}", metavar="PYTHON", help=f"of the environment of {engine}")
    parser.add_argument("--weights", nargs="+", choices=("f32", "u8"), default=["f32"], help="of openvino")
    parser.add_argument("--services", nargs="+", choices=(*SERVICES,), default=[FLOAT32], help="kinds of ours")
    parser.add_argument("--without", nargs="*", default=[], metavar="NAME", help="contestants that are not to run")
    parser.add_argument("--vllm-remote", action="store_true", help="vLLM with our drafter too, in that environment")
    parser.add_argument("--verifier-on-vllm", metavar="PYTHON", help="of an environment with draftwire[vllm]")
    parser.add_argument("--engine-draft-tokens", type=int, default=4, help="of other engines; 0: they only run plain")
    parser.add_argument("--temperatures", type=float, nargs="+", help="[default: 0 and 1, or what a pair is made for]")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1], help="prompts that are continued at once")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32], help="lengths of the prompts")
    parser.add_argument("--prompts", type=int, default=3, help="for each session")
    parser.add_argument(
        "--questions", type=Path, help="in the place of such prompts: lines of JSON with a question each; one session"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate, exactly")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sweep-repetitions", type=int, default=2)
    parser.add_argument(
        "--threads", type=int, help="CPU threads of every contestant [default: those of `draftwire up`]"
    )
    parser.add_argument("--max-added-latency-ms", type=float, default=60_000.0, help="of our services")
    parser.add_argument("--assistant-tokens", type=int, nargs="+", default=ASSISTANT_TOKENS, help="tried in the sweep")
    parser.add_argument("--block-lengths", type=int, nargs="+", default=BLOCK_LENGTHS, help="tried in the sweep")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    for engine in ENGINES:
        if engine in arguments.engines and getattr(arguments, engine) is None:
            parser.error(f"--{engine} says whose Python runs {engine}")
    if arguments.questions is not None:
        if arguments.sessions != [1]:
            parser.error("--questions are answered one at a time")
        arguments.prompt_tokens = [QUESTION_TOKENS]
    if arguments.vllm_remote and arguments.vllm is None:
        parser.error("--vllm says whose Python runs vllm")
    results: dict[str, Any] = {"versions": {name: version(name) for name in ("torch", "transformers", "grpcio")}}
    rows: list[dict[str, Any]] = []
    for name in arguments.pairs:
        with endless(read_pair(name)) as pair, arena(pair, arguments) as running:
            own = results.setdefault(pair.name, {})
            if running.transformers is not None:
                own["transformers_process"] = running.transformers.facts
            temperatures = arguments.temperatures or pair.temperatures
            for facts in product(temperatures, arguments.sessions, arguments.prompt_tokens):
                cell = Cell(*facts)
                summary, measurements = compare(pair, cell, running, arguments)
                own[str(cell)] = summary
                rows += [_row(pair, cell, measurement) for measurement in measurements]
                print(f"{pair.name}, {cell}\n{table(summary)}\n", flush=True)
    results["measurements"] = rows
    write_report(arguments, results)


if __name__ == "__main__":
    main()
