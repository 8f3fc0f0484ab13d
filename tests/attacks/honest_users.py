"""Users who want nothing but completions, and what they notice. They have a process of their own: an attack that keeps
this interpreter busy would make them look as if they waited.
"""

import multiprocessing
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from transformers import AutoTokenizer
from typing_extensions import override

from benchmarks.prompts import load_prompts
from draftwire.cli.named_models import embedded_model
from draftwire.client import Client
from tests.attacks.honest_law import Sample
from tests.client_threads import ClientThreads

NUM_USERS = 3
MAX_TOKENS = 48
MAX_SAMPLES = 2_000
"""Completions that are kept, the first ones; each is 48 tokens."""
ANSWER_SECONDS = 30.0
"""How long the process may take to start, and to answer a question."""


@dataclass(slots=True)
class Notes:
    """What the users noticed."""

    num_completed: int = 0
    errors: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """When each delta came, by `time.monotonic`, and how long after the one before it or the request."""
    waiting_since: dict[int, float] = field(default_factory=dict)
    """Of each user who waits for a delta now."""

    def add(self, others: "Notes") -> None:
        """Adds what users of another stack noticed, but for when it was."""
        self.num_completed += others.num_completed
        self.errors += others.errors
        self.samples += others.samples

    def largest_gap_s(self, start: float, end: float) -> float:
        """Returns the longest wait for a delta that was over in a span of time, or is not over; seconds."""
        over = [gap for at, gap in list(self.gaps) if start <= at <= end]
        return max(over + [end - since for since in self.waiting_since.copy().values()], default=0.0)


class HonestUsers:
    """The users' process. A context manager; `notes` has what they noticed once it is left."""

    def __init__(self, address: str, **options: Any) -> None:
        """Starts nothing yet.

        Args:
            address: host:port of the gateway's gRPC.
            options: of each user's `Client`, such as its TLS files.
        """
        context = multiprocessing.get_context("spawn")
        self._questions, asked = context.Pipe()
        self._process = context.Process(target=_serve, args=(address, options, asked), name="honest users")
        self.notes = Notes()

    def __enter__(self) -> "HonestUsers":
        self._process.start()
        self._answer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._questions.send(None)
        self.notes = self._answer()
        self._process.join()

    def noticed(self, start: float, end: float) -> tuple[float, list[str]]:
        """Returns the longest wait within a span of time, seconds, and the errors since the last question."""
        self._questions.send((start, end))
        return self._answer()

    def _answer(self) -> Any:
        """Returns what was asked for."""
        if not self._questions.poll(ANSWER_SECONDS):
            raise TimeoutError("the honest users do not answer")
        return self._questions.recv()


class _Users(ClientThreads):
    """Completions, one after the other, from several clients."""

    def __init__(self, address: str, options: dict[str, Any], notes: Notes) -> None:
        super().__init__(NUM_USERS)
        tokenizer = AutoTokenizer.from_pretrained(embedded_model("target"))
        self._address, self._options, self._notes = address, options, notes
        self._prompts: list[list[int]] = [tokenizer(prompt)["input_ids"] for prompt in load_prompts()]

    @override
    def _ask(self, index: int) -> None:
        seed = index
        with Client(self._address, **self._options) as client:
            while not self._ended.is_set():
                seed += NUM_USERS
                try:
                    self._complete(client, index, seed)
                except Exception as error:
                    self._notes.errors.append(f"{type(error).__name__}: {error}")
                else:
                    self._notes.num_completed += 1

    def _complete(self, client: Client, index: int, seed: int) -> None:
        notes, token_ids = self._notes, list[int]()
        prompt = self._prompts[seed % len(self._prompts)]
        last = notes.waiting_since[index] = time.monotonic()
        for piece in client.stream(prompt, max_tokens=MAX_TOKENS, seed=seed, temperature=1.0, ignore_eos=True):
            now = time.monotonic()
            notes.gaps.append((now, now - last))
            token_ids += piece.token_ids
            last = notes.waiting_since[index] = now
        del notes.waiting_since[index]
        if len(notes.samples) < MAX_SAMPLES:
            notes.samples.append(Sample(prompt, token_ids))


def _serve(address: str, options: dict[str, Any], questions: Connection) -> None:
    """Runs the users, and answers questions of spans of time until there is none."""
    notes, num_told = Notes(), 0
    with _Users(address, options, notes):
        questions.send("ready")
        while (span := questions.recv()) is not None:
            new_errors = notes.errors[num_told:]
            num_told += len(new_errors)
            questions.send((notes.largest_gap_s(*span), new_errors))
    questions.send(notes)
