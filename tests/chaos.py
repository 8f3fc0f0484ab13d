"""Breaks whatever can break, at random, while completions run, and checks every token that comes out.

    python -m tests.chaos [--seconds 60] [--concurrency 16] [--seed 0] [--rolling-restart] [--log full|closed]

Two verifiers, two drafters and two gateways of the embedded pair run on this machine. The gateways reach the others,
and the drafters the verifiers, through relays. Services are killed, paused and drained; links are partitioned, where
both ends see nothing but silence, and cut. Everything comes back after a while.

Every completion must end with its whole text or with an error that the protocol documents. At temperature 0 the tokens
must be those that the target gives undisturbed, but for near-ties; at other temperatures there must be as many as were
asked for. The text must be that of the tokens. In the end no session and no cache row may be left. With `--log` no
service can write its log: to a full disk, or to a pipe whose reader is gone.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.prompts import load_prompts
from benchmarks.relay import Relay, free_port
from benchmarks.report import read_metric
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import embedded_model
from draftwire.client import Client
from draftwire.errors import DraftwireError, NoRoomError, UnavailableError
from draftwire.verification.deciding import NEAR_TIE
from tests.unwritable_logs import SilentService, Unwritable

REPLICAS = 2
"""Of each service."""
SETTLE_SECONDS = 30.0
"""How long everything may take to be as it was, once nothing is broken any more."""
REQUEST_SECONDS = 120.0
DOCUMENTED = (UnavailableError, NoRoomError)

KEEPALIVE = {"keepalive_time_s": 1.0, "keepalive_timeout_s": 1.0}
MODEL_OPTIONS = {**KEEPALIVE, "threads": 1, "drain_seconds": 3.0}
ROUNDS_AHEAD = 2
GATEWAY_OPTIONS = {**KEEPALIVE, "block_timeout_s": 1.0, "drain_seconds": 3.0, "failover_timeout_s": 30.0}


class Server:
    """One service, which can be broken and comes back on the same port."""

    def __init__(self, kind: str, options: dict[str, Any], log: Unwritable | None) -> None:
        self.kind = kind
        self.port = free_port()
        self.is_broken = False
        self._options = {**options, "port": self.port}
        self._log = log
        self._stack = LocalStack({})
        self._silent: SilentService | None = None

    @property
    def metrics_port(self) -> int:
        return self._stack.services[self.kind].metrics_port if self._silent is None else self._silent.metrics_port

    def start(self) -> None:
        if self._log is None:
            self._stack = LocalStack({self.kind: self._options})
            self._stack.start()
        else:
            self._silent = SilentService(self.kind, self._options, self._log)
            self._silent.begin()
            self._silent.wait_until_ready()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait_for_end(self) -> int:
        return self._process.wait(60.0)

    def stop(self) -> None:
        if self._silent is not None:
            self._silent.stop()
        elif self.kind in self._stack.services:
            self.send(signal.SIGCONT)
        self._stack.stop()

    @property
    def _process(self) -> subprocess.Popen[Any]:
        return self._stack.services[self.kind].process if self._silent is None else self._silent.process


class World:
    """All services and links. A context manager."""

    def __init__(self, log: Unwritable | None = None) -> None:
        self._exits = ExitStack()
        models = {"verifier": embedded_model("target"), "drafter": embedded_model("drafter")}
        self.servers = [
            Server(kind, {**MODEL_OPTIONS, "model": models[kind]}, log) for kind in models for _ in range(REPLICAS)
        ]
        self.relays = [Relay(server.port) for server in self.servers]
        behind = {
            kind: ",".join(
                f"127.0.0.1:{relay.port}"
                for server, relay in zip(self.servers, self.relays, strict=True)
                if server.kind == kind
            )
            for kind in models
        }
        # Every other gateway has blocks drafted before their text is known.
        rounds = [index % 2 * ROUNDS_AHEAD for index in range(REPLICAS)]
        self.gateways = [
            Server("gateway", {**GATEWAY_OPTIONS, **behind, "draft_ahead_rounds": each}, log) for each in rounds
        ]
        self.servers += self.gateways

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{gateway.port}" for gateway in self.gateways]

    def __enter__(self) -> "World":
        for relay in self.relays:
            self._exits.enter_context(relay)
        with ThreadPoolExecutor(len(self.servers)) as starting:
            started = [starting.submit(server.start) for server in self.servers]
            for server in self.servers:
                self._exits.callback(server.stop)
        try:
            for one in started:
                one.result()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def leaks(self) -> dict[str, float]:
        """Returns what the model servers still hold, waiting for it to be nothing."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            held = {
                f"{server.kind} {server.port} {name}": value
                for server in self.servers
                if server.kind != "gateway"
                for name in ("num_sessions", "kv_cache_usage_perc")
                if (value := read_metric(server.metrics_port, name))
            }
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.2)


# Faults


@dataclass(frozen=True)
class Chaos:
    """Breaks things, one after the other and some at once, by a seed."""

    world: World
    generator: random.Random
    faults: Counter[str] = field(default_factory=Counter)
    _healing: list[threading.Thread] = field(default_factory=list)
    _paused_relays: set[int] = field(default_factory=set)
    statuses: list[int] = field(default_factory=list)
    """Exit statuses of drained services."""

    def run(self, seconds: float) -> None:
        """Breaks things for a while, and returns when everything is whole again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(self.generator.uniform(0.2, 1.0))
            kind = self.generator.choices(["kill", "pause", "drain", "partition", "cut"], [3, 3, 1, 3, 2])[0]
            duration = self.generator.uniform(0.3, 4.0)
            if kind in ("partition", "cut"):
                self._break_link(kind, duration)
            else:
                self._break_server(kind, duration)
        for thread in self._healing:
            thread.join()

    def restart_one_after_the_other(self) -> None:
        """Drains and restarts every service once."""
        for server in self.world.servers:
            self.faults[f"drain {server.kind}"] += 1
            self._disturb(server, "drain", 0.0)

    def _break_server(self, kind: str, duration: float) -> None:
        server = self.generator.choice(self.world.servers)
        others = [other for other in self.world.servers if other.kind == server.kind and other is not server]
        is_last = all(other.is_broken for other in others)
        # The last of a kind goes down too, but seldom: else hardly anything would run.
        if server.is_broken or (is_last and server.kind != "drafter" and self.generator.random() < 0.9):
            return
        server.is_broken = True
        self.faults[f"{kind} {server.kind}"] += 1
        self._heal(lambda: self._disturb(server, kind, duration))

    def _disturb(self, server: Server, kind: str, duration: float) -> None:
        if kind == "pause":
            server.send(signal.SIGSTOP)
            time.sleep(duration)
            server.send(signal.SIGCONT)
        else:
            server.send(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            status = server.wait_for_end()
            if kind == "drain":
                self.statuses.append(status)
            server.start()
        server.is_broken = False

    def _break_link(self, kind: str, duration: float) -> None:
        index = self.generator.randrange(len(self.world.relays))
        if index in self._paused_relays:
            return
        relay, server = self.world.relays[index], self.world.servers[index]
        self.faults[f"{kind} {server.kind}"] += 1
        if kind == "cut":
            relay.cut()
            return
        self._paused_relays.add(index)
        relay.pause()

        def resume() -> None:
            time.sleep(duration)
            relay.resume()
            self._paused_relays.discard(index)

        self._heal(resume)

    def _heal(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        self._healing.append(thread)


# What comes out


@dataclass(frozen=True, slots=True)
class Reference:
    """What the target says at temperature 0."""

    token_ids: list[int]
    is_tie: list[bool]
    """Whether the second-best token is as good, up to rounding."""


def references(prompts: Sequence[str], max_tokens: int) -> list[Reference]:
    """Returns the undisturbed completions."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model("target"))
    model = AutoModelForCausalLM.from_pretrained(embedded_model("target"), dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        done = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )
        best = [logits[0].topk(2).values for logits in done.logits]
        ties = [float(pair[0] - pair[1]) < NEAR_TIE for pair in best]
        found.append(Reference(done.sequences[0, ids.shape[1] :].tolist(), ties))
    return found


@dataclass(slots=True)
class Tally:
    """What became of the completions."""

    requests: int = 0
    completed: int = 0
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    undocumented: list[str] = field(default_factory=list)
    resumed: int = 0
    """Completions that a client had to resume."""
    moved: int = 0
    """Times that a session moved to another verifier."""
    drafters_lost: int = 0
    near_ties: int = 0
    """Completions that left the reference at a near-tie; what follows there was not compared."""
    lost: int = 0
    repeated: int = 0
    invented: int = 0
    other_texts: int = 0
    """Texts that are not those of their tokens."""
    draft_tokens: int = 0

    @property
    def is_clean(self) -> bool:
        return not (self.undocumented or self.lost or self.repeated or self.invented or self.other_texts)

    def compare(self, token_ids: list[int], reference: Reference) -> None:
        """Counts how a greedy completion differs from the undisturbed one."""
        expected = reference.token_ids
        if token_ids == expected:
            return
        shared = min(len(token_ids), len(expected))
        place = next((at for at in range(shared) if token_ids[at] != expected[at]), shared)
        if place < len(expected) and reference.is_tie[place]:
            self.near_ties += 1
            return
        following = token_ids[place : place + 6]
        if not following or any(following == expected[at : at + len(following)] for at in range(place + 1, shared)):
            self.lost += 1
        elif any(following == expected[at : at + len(following)] for at in range(place)):
            self.repeated += 1
        else:
            self.invented += 1


@dataclass(slots=True)
class Load:
    """Completions, over and over, from many clients."""

    addresses: list[str]
    prompts: list[str]
    references: list[Reference]
    max_tokens: int
    tally: Tally = field(default_factory=Tally)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _tokenizer: Any = None

    def run(self, concurrency: int, seed: int, work: Callable[[], None]) -> None:
        """Asks for completions for as long as `work` takes."""
        self._tokenizer = AutoTokenizer.from_pretrained(embedded_model("target"))
        clients = [
            threading.Thread(target=self._ask_for_ever, args=(random.Random(f"{seed} {number}"),))
            for number in range(concurrency)
        ]
        for client in clients:
            client.start()
        try:
            work()
        finally:
            self._stopping.set()
            for client in clients:
                client.join()

    def _ask_for_ever(self, generator: random.Random) -> None:
        with Client(self.addresses) as client:
            while not self._stopping.is_set():
                self._ask(client, generator)

    def _ask(self, client: Client, generator: random.Random) -> None:
        number = generator.randrange(len(self.prompts))
        is_greedy = generator.random() < 0.7
        options: dict[str, Any] = {
            "temperature": 0.0 if is_greedy else 1.0,
            "max_tokens": len(self.references[number].token_ids) if is_greedy else self.max_tokens,
            "num_speculative_tokens": generator.choice((0, 2, 4, 8)),
            "rejection_sample_method": generator.choice(("block", "token", "coupled")),
        }
        try:
            done = client.generate(self.prompts[number], timeout_s=REQUEST_SECONDS, **options)
        except DOCUMENTED as error:
            with self._lock:
                self.tally.requests += 1
                self.tally.errors[type(error).__name__] += 1
            self._stopping.wait(0.5)
            return
        except DraftwireError as error:
            with self._lock:
                self.tally.requests += 1
                self.tally.undocumented.append(f"{type(error).__name__}: {error}")
            return
        with self._lock:
            tally = self.tally
            tally.requests += 1
            tally.completed += 1
            tally.tokens += len(done.token_ids)
            tally.resumed += done.num_resumed > 0
            tally.moved += done.statistics.num_verifiers_lost
            tally.drafters_lost += done.statistics.num_drafters_lost
            tally.draft_tokens += done.statistics.num_draft_tokens
            if is_greedy:
                tally.compare(done.token_ids, self.references[number])
            elif done.finish_reason == "length":
                tally.lost += len(done.token_ids) < self.max_tokens
                tally.repeated += len(done.token_ids) > self.max_tokens
            ids = done.token_ids[:-1] if done.finish_reason == "stop" else done.token_ids
            tally.other_texts += done.text != self._text(self.prompts[number], ids)

    def _text(self, prompt: str, token_ids: list[int]) -> str:
        """Returns what tokens add to a prompt."""
        decoded = [self._tokenizer(prompt)["input_ids"] + ids for ids in ([], token_ids)]
        before, after = (
            self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) for ids in decoded
        )
        return str(after[len(before) :])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed."""

    seconds: float
    faults: dict[str, int]
    tally: Tally
    leaks: dict[str, float]
    drain_statuses: list[int]

    @property
    def is_clean(self) -> bool:
        return self.tally.is_clean and not self.leaks and not any(self.drain_statuses)

    def shown(self) -> str:
        tally = self.tally
        return json.dumps(
            {
                "seconds": round(self.seconds, 1),
                "requests": tally.requests,
                "completed": tally.completed,
                "tokens": tally.tokens,
                "draft_tokens": tally.draft_tokens,
                "documented_errors": dict(tally.errors),
                "undocumented_errors": tally.undocumented,
                "faults": sum(self.faults.values()),
                "faults_by_kind": dict(sorted(self.faults.items())),
                "completions_resumed_by_clients": tally.resumed,
                "sessions_moved": tally.moved,
                "drafters_lost": tally.drafters_lost,
                "lost": tally.lost,
                "repeated": tally.repeated,
                "invented": tally.invented,
                "other_texts": tally.other_texts,
                "near_ties": tally.near_ties,
                "leaks": self.leaks,
                "exit_statuses_of_drained_services": sorted(set(self.drain_statuses)),
            },
            indent=1,
        )


def run(
    work: Callable[[Chaos], None],
    concurrency: int,
    seed: int,
    num_prompts: int = 24,
    max_tokens: int = 64,
    log: Unwritable | None = None,
) -> Outcome:
    """Runs everything for as long as `work` breaks things. With `log` no service can write its log."""
    prompts = load_prompts()[:num_prompts]
    expected = references(prompts, max_tokens)
    with World(log) as world:
        chaos = Chaos(world, random.Random(seed))
        load = Load(world.addresses, prompts, expected, max_tokens)
        started = time.monotonic()
        load.run(concurrency, seed, lambda: work(chaos))
        elapsed = time.monotonic() - started
        return Outcome(elapsed, dict(chaos.faults), load.tally, world.leaks(), chaos.statuses)


def main() -> None:
    """Runs, prints what happened, and ends with status 1 if anything was lost, repeated, invented or left over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rolling-restart", action="store_true", help="only drain and restart all services, in turn")
    parser.add_argument("--log", type=Unwritable, metavar="full|closed", help="why no service can write its log")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    def work(chaos: Chaos) -> None:
        if arguments.rolling_restart:
            chaos.restart_one_after_the_other()
        else:
            chaos.run(arguments.seconds)

    outcome = run(work, arguments.concurrency, arguments.seed, log=arguments.log)
    print(outcome.shown())
    sys.exit(0 if outcome.is_clean else 1)


if __name__ == "__main__":
    main()
