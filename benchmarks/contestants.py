"""What `benchmarks.peers` compares: our services, our decoder, transformers, and other engines.

All but the services run in a process each, which answers tasks and sleeps otherwise; other engines in environments of
their own.
"""

import json
import multiprocessing
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from draftwire.client import Client
from draftwire.engine.model_loading import load_target
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.requests.parameters import SamplingParams
from draftwire.runtime.logging import configure_logging
from draftwire.runtime.settings import EngineSettings, ModelSettings
from draftwire.verification import rule_named
from draftwire.verification.deciding import Judgement
from draftwire.verification.target import Judging, judge

ANSWER_SECONDS = 600.0
"""How long a worker may take to load its models, or to continue the prompts of a task."""
ENGINES = {"openvino": "openvino_engine.py", "vllm": "vllm_engine.py", "llama": "llama_engine.py"}
"""Scripts of other engines, in the folder `engines`."""
NGRAM = "ngram"
"""In the place of a draft model: drafts from earlier places of the text."""


@dataclass(frozen=True, slots=True)
class Task:
    """Completions to generate together."""

    prompts: list[list[int]]
    """Token ids, all of one length."""
    num_tokens: int
    """To generate for each prompt, exactly."""
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """What a contestant made of a task."""

    token_ids: list[list[int]]
    """Of each completion."""
    seconds: float
    """Until the last one was whole."""
    target_passes: int = 0
    """Forward passes of the target, or rounds, of each completion, summed; the first reads the prompt. 0 if unknown."""
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
    """Folders; the drafter can be `NGRAM`."""
    temperatures: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Resources:
    """What every contestant may use."""

    threads: int
    max_sessions: int
    """Most prompts of a task."""
    cache_tokens: int
    """Room of the KV cache."""


class Contestant(ABC):
    """Something that continues prompts."""

    def __init__(self, name: str, num_draft_tokens: int | None = None) -> None:
        """`num_draft_tokens` is None without drafting, or where the contestant chooses the number itself."""
        self.name = name
        self.num_draft_tokens = num_draft_tokens

    @abstractmethod
    def run(self, task: Task) -> Run:
        """Continues the prompts of a task, with nothing else running."""


class Served(Contestant):
    """Our three processes."""

    def __init__(self, name: str, client: Client, salts: Iterator[int], num_draft_tokens: int | None) -> None:
        """`salts` are unused numbers, one for the cache salt of each task. Without `num_draft_tokens` they choose."""
        super().__init__(name, num_draft_tokens)
        self._client = client
        self._salts = salts

    def run(self, task: Task) -> Run:
        """Generates the completions through the gateway, a request each; the time is the client's."""
        started = time.perf_counter()
        completions = self._client.generate_batch(
            task.prompts,
            concurrency=len(task.prompts),
            max_tokens=task.num_tokens,
            temperature=task.temperature,
            seed=task.seed,
            num_speculative_tokens=self.num_draft_tokens,
            rejection_sample_method="block",
            cache_salt=str(next(self._salts)),  # else the second completion of a prompt would hit the prefix cache
        )
        seconds = time.perf_counter() - started
        errors = [completion.drafter_error for completion in completions if completion.drafter_error]
        assert not errors, errors
        spent = [completion.statistics for completion in completions]
        return Run(
            [completion.token_ids for completion in completions],
            seconds,
            sum(each.num_rounds for each in spent),
            sum(each.num_drafts for each in spent),
            sum(each.num_draft_tokens for each in spent),
            sum(each.num_accepted_tokens for each in spent),
        )


class Worker:
    """A process of ours that continues prompts. A context manager."""

    def __init__(self, serve: Callable[[Connection, Pair, Resources], None], pair: Pair, resources: Resources) -> None:
        """Starts the process, without waiting until it has loaded its models."""
        context = multiprocessing.get_context("spawn")
        self._connection, own = context.Pipe()
        self._process = context.Process(target=serve, args=(own, pair, resources), daemon=True)
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
        """Generates the completions in the worker, as one batch; the time is that of the call of `generate`."""
        return self._worker.run(task, self._is_assisted, self.num_draft_tokens)


class Decoded(Contestant):
    """Our decoder in a process of its own."""

    def __init__(self, name: str, worker: Worker) -> None:
        """`worker` runs `serve_decoder`."""
        super().__init__(name)
        self._worker = worker

    def run(self, task: Task) -> Run:
        """Generates the completions in the worker; the time is that of the decoding loop."""
        return self._worker.run(task)


class Engine(Contestant):
    """Another engine, run by the Python of its own environment. A context manager."""

    def __init__(
        self,
        name: str,
        script: list[str],
        pair: Pair,
        resources: Resources,
        num_draft_tokens: int,
        weights: str = "f32",
    ) -> None:
        """Starts the engine and waits until it has loaded its models.

        Args:
            name: of the contestant.
            script: Python of the environment, and the script.
            pair: models.
            resources: what it may use.
            num_draft_tokens: in each block; 0 decodes plainly.
            weights: f32 or u8, of engines that have both.
        """
        super().__init__(name, num_draft_tokens or None)
        options: dict[str, object] = {
            "--target": pair.target,
            "--weights": weights,
            "--threads": resources.threads,
            "--max-sessions": resources.max_sessions,
            "--cache-tokens": resources.cache_tokens,
        }
        if num_draft_tokens:
            options.update({"--drafter": pair.drafter, "--num-draft-tokens": num_draft_tokens})
        settings = [str(part) for option in options.items() for part in option]
        own = ("OMP_", "GOMP_", "PYTHON")  # how our threads wait is not how theirs do
        environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        self._process = subprocess.Popen(
            [*script, *settings], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends then
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def run(self, task: Task) -> Run:
        """Generates the completions in the engine, given together; the time is the engine's."""
        assert self._process.stdin is not None
        facts = {name: getattr(task, name) for name in ("prompts", "num_tokens", "temperature", "seed")}
        print(json.dumps(facts), file=self._process.stdin, flush=True)
        answer = self._answer()
        return Run(answer["token_ids"], answer["seconds"])

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(line)


def engine_script(engine: str, python: str) -> list[str]:
    """Returns the command of another engine, a key of `ENGINES`."""
    return [python, str(Path(__file__).parent / "engines" / ENGINES[engine])]


def serve_transformers(connection: Connection, pair: Pair, resources: Resources) -> None:
    """Main of the process that continues prompts with `generate`."""
    torch.set_num_threads(resources.threads)
    set_verbosity_error()
    disable_progress_bar()
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    assistant = None
    if pair.drafter != NGRAM:
        assistant = AutoModelForCausalLM.from_pretrained(pair.drafter, dtype=torch.float32).eval()
    passes = {target: 0} if assistant is None else {target: 0, assistant: 0}

    def count_pass(model: Any, _inputs: object) -> None:
        passes[model] += 1

    for model in passes:
        model.register_forward_pre_hook(count_pass)
    connection.send({"attention": target.config._attn_implementation, "threads": torch.get_num_threads()})

    def generate(task: Task, is_assisted: bool, num_draft_tokens: int | None) -> Run:
        options: dict[str, Any] = {"do_sample": False}
        if task.temperature:
            options = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
        if is_assisted and assistant is None:
            options["prompt_lookup_num_tokens"] = num_draft_tokens or LOOKED_UP_TOKENS
        elif is_assisted and assistant is not None:
            options["assistant_model"] = assistant
            _set_assistant(assistant.generation_config, num_draft_tokens)
        prompts = torch.tensor(task.prompts)
        passes.update(dict.fromkeys(passes, 0))
        torch.manual_seed(task.seed)
        started = time.perf_counter()
        output = target.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=task.num_tokens, **options
        )
        seconds = time.perf_counter() - started
        token_ids = output[:, prompts.shape[1] :].tolist()
        if not is_assisted or assistant is None:
            return Run(token_ids, seconds, passes[target] * len(token_ids))
        # Each pass of the assistant drafts a token, and each of the target adds one to those that it accepts.
        accepted = len(token_ids[0]) - passes[target]
        return Run(token_ids, seconds, passes[target], passes[target], passes[assistant], accepted)

    _answer_all(connection, generate)


LOOKED_UP_TOKENS = 10
"""Drafted by a lookup in the text, which has no default: what transformers' own guide takes."""


def _set_assistant(config: Any, num_draft_tokens: int | None) -> None:
    """Sets an assistant's number of draft tokens; None for the default schedule."""
    config.num_assistant_tokens = num_draft_tokens
    config.num_assistant_tokens_schedule = None if num_draft_tokens is None else "constant"
    config.assistant_confidence_threshold = None if num_draft_tokens is None else 0.0


def serve_decoder(connection: Connection, pair: Pair, resources: Resources) -> None:
    """Main of the process that continues prompts with our decoder and the computations of a verifier's step."""
    configure_logging("console", "decoder")
    settings = ModelSettings(pair.target, dtype="float32", threads=resources.threads, engine="draftwire")
    model = load_target(settings, EngineSettings(kv_cache_tokens=resources.cache_tokens)).model
    rule = rule_named("block")
    connection.send({})

    def decode(task: Task) -> Run:
        sampling = SamplingParams(task.temperature)
        keys = [derive_key(task.seed + index, Role.VERIFYING) for index in range(len(task.prompts))]
        started = time.perf_counter()
        texts = [list(prompt) for prompt in task.prompts]
        sequences = [model.cache.open() for _ in texts]
        for number in range(task.num_tokens):
            step = judge(
                model,
                [
                    Judging(
                        [], None, sampling, rule, DrawKey(key, 0, number), len(text), sequence=sequence, committed=text
                    )
                    for sequence, text, key in zip(sequences, texts, keys, strict=True)
                ],
            )
            for text, judgement in zip(texts, step.outcomes, strict=True):
                assert isinstance(judgement, Judgement)
                text += judgement.token_ids
        for sequence in sequences:
            model.cache.close(sequence)
        seconds = time.perf_counter() - started
        made = [text[len(prompt) :] for text, prompt in zip(texts, task.prompts, strict=True)]
        return Run(made, seconds, task.num_tokens * len(texts))

    _answer_all(connection, decode)


def _answer_all(connection: Connection, run: Callable[..., Run]) -> None:
    """Runs received tasks until the other side closes the connection."""
    while True:
        try:
            arguments: Sequence[Any] = connection.recv()
        except EOFError:
            return
        connection.send(run(*arguments))
