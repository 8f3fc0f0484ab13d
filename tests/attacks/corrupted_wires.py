"""A proxy between services that changes, repeats, reorders and leaves out bytes while users stream."""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trustme
from typing_extensions import override

from benchmarks.relay import CHUNK_BYTES, Connection, Relay, free_port
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import EMBEDDED
from draftwire.cli.stack_options import stack_options
from tests.attacks.greedy_readers import GreedyReaders, Seen
from tests.attacks.victim import Figures, Victim, attack, judged, resident_mib
from tests.certificates import NAME, write_identity

MAX_SILENCE_S = 12.0
"""What docs/failures.md states of a verifier that does not answer."""
FAULT_EVERY_S = 0.7
"""Between two faults of a link: opening it again takes half a second."""
LEAST_SECONDS = 12.0
"""A second for each way on each link."""
TARGET_CACHE_TOKENS = 13_648

Way = Callable[[random.Random, bytes, list[bytes]], bytes]
"""Returns what is sent in the place of some bytes; may keep some for later in the list."""


def corrupt(generator: random.Random, data: bytes, _kept: list[bytes]) -> bytes:
    place = generator.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << generator.randrange(8))]) + data[place + 1 :]


def duplicate(_generator: random.Random, data: bytes, _kept: list[bytes]) -> bytes:
    return data + data


def truncate(generator: random.Random, data: bytes, _kept: list[bytes]) -> bytes:
    return data[: generator.randrange(len(data))]


def reorder(_generator: random.Random, data: bytes, kept: list[bytes]) -> bytes:
    kept.append(data)
    return b""


WAYS: Mapping[str, Way] = {"corrupt": corrupt, "duplicate": duplicate, "truncate": truncate, "reorder": reorder}


class HostileRelay(Relay):
    """A relay that does one thing to bytes once in a while, on the connections of one client."""

    def __init__(self, target_port: int, seed: int) -> None:
        """Is honest at first."""
        super().__init__(target_port)
        self.way = ""
        """What it does; empty for nothing."""
        self.of_pid: int | None = None
        """The process whose connections it does it to; None for all."""
        self.num_faults: Counter[str] = Counter()
        self._generator, self._due, self._lock = random.Random(seed), 0.0, threading.Lock()

    @override
    def _pass_on(self, connection: Connection, is_sending: bool) -> None:
        source, sink = connection.client, connection.server
        if not is_sending:
            source, sink = sink, source
        kept: list[bytes] = []
        with contextlib.suppress(OSError):
            client_port = connection.client.getpeername()[1]
            while data := source.recv(CHUNK_BYTES):
                later, kept = kept, []
                if self._takes(client_port):
                    data = WAYS[self.way](self._generator, data, kept)
                sink.sendall(data + b"".join(later))
        connection.close()

    def _takes(self, client_port: int) -> bool:
        """Whether the next fault is due, of a connection that it is for."""
        with self._lock:
            if not self.way or time.monotonic() < self._due:
                return False
            if self.of_pid is not None and not is_of(client_port, self.of_pid):
                return False
            self._due = time.monotonic() + FAULT_EVERY_S
            self.num_faults[self.way] += 1
            return True


def is_of(port: int, pid: int) -> bool:
    """Whether a process has a connection from a port of this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    inodes = {line.split()[9] for line in lines if line.split()[1].endswith(f":{port:04X}")}
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if link.readlink().name.removeprefix("socket:[").removesuffix("]") in inodes:
                    return True
    return False


@contextlib.contextmanager
def related_stack(tls: bool) -> Iterator[tuple[LocalStack, HostileRelay, HostileRelay, dict[str, Any]]]:
    """Starts services with a relay before the verifier and one before the drafter.

    Args:
        tls: whether all connections are mutual TLS.

    Yields:
        The stack, the two relays, and options of its clients.
    """
    options, of_users = stack_options(EMBEDDED, None, 4), dict[str, Any]()
    options["verifier"] |= {"kv_cache_tokens": TARGET_CACHE_TOKENS, "port": free_port()}
    options["drafter"]["port"] = free_port()
    with (
        TemporaryDirectory() as folder,
        HostileRelay(int(str(options["verifier"]["port"])), 0) as to_verifier,
        HostileRelay(int(str(options["drafter"]["port"])), 1) as to_drafter,
    ):
        options["gateway"] |= {"verifier": f"127.0.0.1:{to_verifier.port}", "drafter": f"127.0.0.1:{to_drafter.port}"}
        if tls:
            ca = trustme.CA()
            for service in options:
                files = write_identity(Path(folder) / service, ca, role=service)
                options[service] |= files | ({} if service == "verifier" else {"tls_target_name": NAME})
            of_users = {"tls_ca": files["tls_ca"], "tls_target_name": NAME}
        with LocalStack(options) as stack:
            yield stack, to_verifier, to_drafter, of_users


def disturb(victim: Victim, *, tls: bool) -> tuple[Figures, Seen, list[str]]:
    """Does everything to every link while users stream, then nothing; returns which services have ended, too."""
    seen, faults = Seen(), Counter[str]()
    with related_stack(tls) as (stack, to_verifier, to_drafter, of_users):
        pids = {name: service.process.pid for name, service in stack.services.items()}
        links = {
            "gateway to verifier": (to_verifier, pids["gateway"]),
            "drafter to verifier": (to_verifier, pids["drafter"]),
            "gateway to drafter": (to_drafter, None),
        }
        with GreedyReaders(stack.address, seen, **of_users):
            time.sleep(2.0)
            each_s = max(LEAST_SECONDS, victim.seconds) / (len(links) * len(WAYS))
            for way in WAYS:
                for name, (relay, pid) in links.items():
                    before = relay.num_faults.total()
                    relay.of_pid, relay.way = pid, way
                    time.sleep(each_s)
                    relay.way = ""
                    faults[name] += relay.num_faults.total() - before
        ended = [name for name, service in stack.services.items() if service.process.poll() is not None]
        sizes = {name: resident_mib(pid) for name, pid in pids.items()}
    return seen.figures() | {"faults": dict(faults), "resident_mib": sizes}, seen, ended


@attack("network", is_long=True)
def corrupted_wires(victim: Victim) -> Figures:
    """Changes, repeats, reorders and leaves out bytes on the three links of services of its own, over TLS."""
    figures, seen, ended = disturb(victim, tls=True)
    return judged(
        figures,
        {
            **{f"{name} ended": True for name in ended},
            "a text is another one": seen.num_changed > 0,
            "completions were lost": bool(seen.tally.errors),
            "a stream was silent for longer than stated": seen.largest_gap_s() > MAX_SILENCE_S,
            "a link was not disturbed, so that nothing was shown": min(figures["faults"].values()) == 0,
        },
    )


@attack("network", is_long=True)
def corrupted_wires_in_plaintext(victim: Victim) -> Figures:
    """The same without TLS, where nobody can tell changed bytes from others: services go on, texts may change."""
    figures, _, ended = disturb(victim, tls=False)
    return judged(figures, {f"{name} ended": True for name in ended})
