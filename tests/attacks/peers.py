"""Peers that are frozen, stall, or say what is not so; and readers that keep their peers waiting."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.service_metrics import fetch
from draftwire.cli.stack_options import stack_options
from draftwire.client import Client, Completion
from draftwire.errors import DraftwireError
from tests.attacks.victim import Figures, Victim, attack, judged, resident_mib

PROMPT = "def mean(values):\n"
WRONG_PEERS = Path(__file__).parents[1] / "injected" / "wrong_peers"
FROZEN_SECONDS = 6.0
"""Longer than a gateway used to wait."""
MAX_GAP_S = FROZEN_SECONDS / 2
"""A gap that is no pause of a busy machine."""
MAX_MORE_MIB = 256.0
FEWEST_USELESS = 32
"""Blocks that have to arrive for each that is used, for a flood."""
MOST_SLOWNESS = 5.0
"""Of a stream beside two others, whose steps and drafts take the same two cores."""
LONG = 400
"""Tokens of a stream that something happens to."""


@contextmanager
def own_stack(way: str, **of_gateway: object) -> Iterator[LocalStack]:
    """Starts services of which one behaves wrongly; see `tests/injected/wrong_peers`.

    Args:
        way: in which.
        of_gateway: options of the gateway.
    """
    options = stack_options(EMBEDDED, None, 4)
    options["gateway"] |= of_gateway
    path = os.pathsep.join([str(WRONG_PEERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        patch.dict(os.environ, {"PYTHONPATH": path, "WRONG_PEER": way}),
        LocalStack(options) as stack,
    ):
        yield stack


def frozen_for_a_while(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(FROZEN_SECONDS, os.kill, (pid, signal.SIGCONT)).start()


def read(client: Client, freezes: int | None = None, seed: int = 0) -> tuple[Completion, float]:
    """Reads a stream, and returns it with its largest gap in seconds.

    Args:
        client: of the gateway.
        freezes: the process to freeze after some tokens.
        seed: of the completion.
    """
    largest_s, last, num_tokens = 0.0, 0.0, 0
    stream = client.stream(PROMPT, max_tokens=LONG, ignore_eos=True, seed=seed)
    for piece in stream:
        now = time.monotonic()
        largest_s, last = max(largest_s, now - last if last else 0.0), now
        if freezes is not None and num_tokens < 100 <= num_tokens + len(piece.token_ids):
            frozen_for_a_while(freezes)
        num_tokens += len(piece.token_ids)
    assert stream.completion is not None
    return stream.completion, largest_s


def plain_s(client: Client, seed: int) -> float:
    """Returns how long a text takes that nothing is drafted for, seconds."""
    started = time.monotonic()
    client.generate(PROMPT, max_tokens=100, ignore_eos=True, seed=seed, num_speculative_tokens=0)
    return time.monotonic() - started


@attack("drafter")
def frozen_drafter(victim: Victim) -> Figures:
    """Freezes the only drafter for 6 s within stream after stream. It drafts again afterwards."""
    gaps: list[float] = []
    lost = num_drafts = 0
    with Client(victim.gateway) as client:
        _, quiet_gap_s = read(client)
        until = time.monotonic() + victim.seconds
        while not gaps or time.monotonic() < until:
            completion, gap_s = read(client, victim.pids["drafter"], seed=len(gaps))
            gaps.append(gap_s)
            lost += completion.statistics.num_drafters_lost
            num_drafts += completion.statistics.num_drafts
            time.sleep(FROZEN_SECONDS)
    return judged(
        {"streams": len(gaps), "quiet_gap_s": quiet_gap_s, "largest_gap_s": max(gaps), "drafts": num_drafts},
        {
            "a stream waited": max(gaps) > MAX_GAP_S,
            f"{lost} drafters were lost": lost > 0,
            "nothing is drafted any more": num_drafts == 0,
        },
    )


@attack("drafter")
def withholding_drafter(victim: Victim) -> Figures:
    """A drafter of its own services sends no block, and repeats that it did. `victim` is left alone."""
    with own_stack("withhold") as stack, Client(stack.address) as client:
        completion, gap_s = read(client)
    numbers = completion.statistics
    return judged(
        {"largest_gap_s": gap_s, "rounds": numbers.num_rounds, "drafted": numbers.num_drafts},
        {"the stream waited": gap_s > MAX_GAP_S, "the drafter was kept": numbers.num_drafters_lost == 0},
    )


@attack("drafter")
def flooding_drafter(victim: Victim) -> Figures:
    """A drafter sends 256 blocks for made-up texts with each true one, while others decode without it."""
    with own_stack("flood", draft_ahead_rounds=2, local_drafts="none") as stack, Client(stack.address) as client:
        verifier = stack.services["verifier"]
        alone_s = median(plain_s(client, seed) for seed in range(3))
        before = resident_mib(verifier.process.pid)
        stopping = threading.Event()
        completed: list[Completion] = []

        def draft_on(first: int) -> None:
            with Client(stack.address) as drafted:
                while not stopping.is_set():
                    completed.append(read(drafted, seed=first + len(completed))[0])

        readers = [threading.Thread(target=draft_on, args=(1000 * number,)) for number in range(2)]
        for reader in readers:
            reader.start()
        until, beside_s = time.monotonic() + victim.seconds, []
        while len(beside_s) < 3 or time.monotonic() < until:
            beside_s.append(plain_s(client, len(beside_s)))
        stopping.set()
        for reader in readers:
            reader.join()
        after = resident_mib(verifier.process.pid)
        metrics = fetch(verifier.metrics_port, timeout_s=5.0) or {}
    num_drafts = sum(one.statistics.num_drafts for one in completed)
    num_received, rest_s = (metrics.get(name, 0.0) for name in ("blocks_received", "drafter_rest_seconds"))
    return judged(
        {
            "plain_s_alone": alone_s,
            "plain_s_beside": median(beside_s),
            "drafts": num_drafts,
            "blocks_received": num_received,
            "drafter_rest_s": rest_s,
            "verifier_mib_before": before,
            "verifier_mib_after": after,
        },
        {
            "streams without drafts waited": median(beside_s) > MOST_SLOWNESS * alone_s,
            "the verifier grew": after > before + MAX_MORE_MIB,
            "no flood arrived, so that nothing was shown": num_received < FEWEST_USELESS * max(1, num_drafts),
            "nobody slowed it down": rest_s == 0.0,
        },
    )


@attack("verifier")
def stalling_verifier(victim: Victim) -> Figures:
    """A verifier whose one step takes 6 s. Beside it nobody notices; its own sessions draft on."""
    with own_stack("stall") as stack, Client(stack.address) as client:
        completion, gap_s = read(client)
    numbers = completion.statistics
    return judged(
        {"largest_gap_s": gap_s, "rounds": numbers.num_rounds, "drafted": numbers.num_drafts},
        {
            "drafters were blamed": numbers.num_drafters_lost > 0,
            "half of the rounds are plain": numbers.num_drafts < numbers.num_rounds / 2,
        },
    )


@attack("user")
def slow_reader(victim: Victim) -> Figures:
    """Reads one delta each third second, so that buffers fill, and looks how long others wait for a frozen drafter."""
    with own_stack("") as stack, Client(stack.address) as client:
        read(client)
        stopping = threading.Event()

        def read_slowly(seed: int) -> None:
            with Client(stack.address) as slow:
                for _ in slow.stream(PROMPT, max_tokens=1500, ignore_eos=True, seed=seed, logprobs=20):
                    if stopping.wait(3.0):
                        return

        readers = [threading.Thread(target=read_slowly, args=(seed,)) for seed in range(8)]
        for reader in readers:
            reader.start()
        time.sleep(max(40.0, victim.seconds))
        stopping.set()
        for reader in readers:
            reader.join()
        _, gap_s = read(client, stack.services["drafter"].process.pid)
    return judged({"largest_gap_s": gap_s}, {"others wait for a frozen drafter": gap_s > MAX_GAP_S})


@attack("verifier")
def lying_verifier(victim: Victim) -> Figures:
    """Says in each fifth verdict that 2**27 draft tokens were judged, which a gateway must not count."""
    outcomes = Counter[str]()
    with own_stack("draft_tokens") as stack, Client(stack.address) as client:
        pid = stack.services["gateway"].process.pid
        before = largest = resident_mib(pid)
        until = time.monotonic() + victim.seconds
        while time.monotonic() < until:
            try:
                client.generate(PROMPT, max_tokens=48, ignore_eos=True, timeout_s=30.0, resume_s=0.0)
                outcomes["completed"] += 1
            except DraftwireError as error:
                outcomes[f"{type(error).__name__}: {error}"[:80]] += 1
            largest = max(largest, resident_mib(pid))
    return judged(
        {"gateway_mib_before": before, "gateway_mib_after": largest, "outcomes": dict(outcomes)},
        {
            "the gateway grew": largest > before + MAX_MORE_MIB,
            "completions were lost": set(outcomes) != {"completed"},
        },
    )
