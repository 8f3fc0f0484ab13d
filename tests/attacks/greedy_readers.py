"""Users of services of an attack's own, who stream at temperature 0 and compare each text with the undisturbed one."""

import threading
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from typing_extensions import override

from benchmarks.prompts import load_prompts
from draftwire.client import Client
from draftwire.errors import DraftwireError
from tests.attacks.victim import Figures
from tests.chaos import Reference, Tally, references
from tests.client_threads import ClientThreads

NUM_READERS = 3
NUM_PROMPTS = 8
MAX_TOKENS = 64
REQUEST_SECONDS = 180.0
"""More than any text takes; a request that is not over then has hung."""
START_SECONDS = 0.5
"""How long a text may take to begin, for a gap."""


@cache
def undisturbed() -> tuple[list[str], list[Reference]]:
    """Returns prompts and their texts, which the target's model makes alone."""
    torch.set_num_threads(1)
    prompts = load_prompts()[:NUM_PROMPTS]
    return prompts, references(prompts, MAX_TOKENS)


@dataclass(slots=True)
class Seen:
    """What the readers saw."""

    tally: Tally = field(default_factory=Tally)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """When each delta came, by `time.monotonic`, and how long after the one before it."""

    def largest_gap_s(self, start: float = 0.0, end: float = float("inf")) -> float:
        return max((gap for at, gap in self.gaps if start <= at - gap and at <= end), default=0.0)

    @property
    def num_changed(self) -> int:
        """Texts that are not the undisturbed ones."""
        return self.tally.lost + self.tally.repeated + self.tally.invented

    def figures(self) -> Figures:
        tally = self.tally
        return {
            "completed": tally.completed,
            "changed": self.num_changed,
            "near_ties": tally.near_ties,
            "largest_gap_s": self.largest_gap_s(),
            "drafted": tally.draft_tokens,
            "moved": tally.moved,
            "drafters_lost": tally.drafters_lost,
            "resumed": tally.resumed,
            "errors": dict(tally.errors),
        }


class GreedyReaders(ClientThreads):
    """Some clients who ask until they are stopped."""

    def __init__(self, address: str, seen: Seen, **options: Any) -> None:
        """Starts nothing yet.

        Args:
            address: host:port of the gateway's gRPC.
            seen: what they see is added to it.
            options: of each `Client`.
        """
        super().__init__(NUM_READERS)
        self._address, self._options, self._seen = address, options, seen
        self._prompts, self._references = undisturbed()
        self._lock = threading.Lock()

    @override
    def _ask(self, index: int) -> None:
        number = index
        with Client(self._address, **self._options) as client:
            while not self._ended.is_set():
                number += 1
                try:
                    self._read(client, number % NUM_PROMPTS)
                except DraftwireError as error:
                    with self._lock:
                        self._seen.tally.errors[f"{type(error).__name__}: {error}"[:120]] += 1
                    self._ended.wait(START_SECONDS)

    def _read(self, client: Client, number: int) -> None:
        reference, tally, last = self._references[number], self._seen.tally, 0.0
        wanted = {"temperature": 0.0, "max_tokens": len(reference.token_ids), "timeout_s": REQUEST_SECONDS}
        stream, token_ids = client.stream(self._prompts[number], **wanted), list[int]()  # type: ignore[arg-type]
        for piece in stream:
            now = time.monotonic()
            if last:
                self._seen.gaps.append((now, now - last))
            last = now
            token_ids += piece.token_ids
        done = stream.completion
        assert done is not None, "a stream that ends without an error has its completion"
        with self._lock:
            tally.completed += 1
            tally.compare(token_ids, reference)
            tally.resumed += done.num_resumed > 0
            tally.moved += done.statistics.num_verifiers_lost
            tally.drafters_lost += done.statistics.num_drafters_lost
            tally.draft_tokens += done.statistics.num_draft_tokens
