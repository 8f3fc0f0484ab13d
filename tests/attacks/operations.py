"""What operators and machines do while users stream: other certificates, frozen processes, memory that runs out."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import trustme

from draftwire.cli.named_models import EMBEDDED
from draftwire.client import Client
from draftwire.errors import DraftwireError
from tests.attacks.corrupted_wires import MAX_SILENCE_S, related_stack
from tests.attacks.greedy_readers import GreedyReaders, Seen
from tests.attacks.peers import own_stack
from tests.attacks.victim import Figures, Victim, attack, judged, resident_mib
from tests.certificates import NAME, certificate_of, first_certificate, replace_file, write_identity

AFTER_SECONDS = 8.0
"""How long users are watched after a process goes on."""
FROZEN_SECONDS = 30.0
MAX_DRAFTER_GAP_S = 3.0
"""What a drafter may stop a session for; see docs/threats.md."""
MAX_VERIFIER_GAP_S = 42.0
"""What a running stream may wait for the only verifier; see docs/failures.md."""
ROTATIONS = 3
MIB = 2**20
SPARE_MIB = 24
"""What a control group may still take when it is limited."""
UP_SECONDS = 120.0
NUM_GROWING = 4
"""Users whose long prompts fill the cache."""
GROUPS = Path("/sys/fs/cgroup/memory")
"""Control groups of version 1."""


@attack("operator", is_long=True)
def rotated_certificates(victim: Victim) -> Figures:
    """Replaces the issuer and all certificates, as docs/access.md says, three times, and cuts all links between."""
    seen, shown = Seen(), 0
    with related_stack(tls=True) as (stack, to_verifier, to_drafter, of_users):
        folder = Path(of_users["tls_ca"]).parents[1]
        bundle = (folder / "gateway" / "ca.pem").read_bytes()
        pause_s = max(1.0, victim.seconds / (3 * ROTATIONS))
        with GreedyReaders(stack.address, seen, **of_users):
            time.sleep(pause_s)
            for _ in range(ROTATIONS):
                ca = trustme.CA()
                for name in stack.services:
                    replace_file(folder / name / "ca.pem", bundle + ca.cert_pem.bytes())
                time.sleep(pause_s / 2)
                for name in stack.services:
                    replace_file(folder / name / "key.pem", b"half written")
                    time.sleep(pause_s / 8)
                    write_identity(folder / name, ca, role=name)
                    replace_file(folder / name / "ca.pem", bundle + ca.cert_pem.bytes())
                for relay in (to_verifier, to_drafter):
                    relay.cut()
                time.sleep(pause_s / 2)
                bundle = ca.cert_pem.bytes()
                for name, service in stack.services.items():
                    replace_file(folder / name / "ca.pem", bundle)
                    is_new = certificate_of(f"127.0.0.1:{service.port}") == first_certificate(
                        folder / name / "cert.pem"
                    )
                    shown += is_new
                time.sleep(pause_s)
        with Client(stack.address, tls_ca=folder / "gateway" / "ca.pem", tls_target_name=NAME) as client:
            is_served = bool(client.generate("import os", max_tokens=4).token_ids)
        ended = [name for name, service in stack.services.items() if service.process.poll() is not None]
    return judged(
        seen.figures() | {"certificates_shown": shown},
        {
            **{f"{name} ended": True for name in ended},
            "a text is another one": seen.num_changed > 0,
            "completions were lost": bool(seen.tally.errors),
            "a stream was silent for longer than stated": seen.largest_gap_s() > MAX_SILENCE_S,
            "a service shows an old certificate": shown < 3 * ROTATIONS,
            "the new certificates are not believed": not is_served,
        },
    )


def freeze(name: str, most_gap_s: float) -> Figures:
    """Stops a service of an own stack for half a minute while users stream."""
    seen = Seen()
    with own_stack("") as stack:
        pids = {each: service.process.pid for each, service in stack.services.items()}
        with GreedyReaders(stack.address, seen):
            time.sleep(3.0)
            os.kill(pids[name], signal.SIGSTOP)
            frozen_at = time.monotonic()
            try:
                time.sleep(FROZEN_SECONDS)
            finally:
                os.kill(pids[name], signal.SIGCONT)
            thawed_at, num_drafted = time.monotonic(), seen.tally.draft_tokens
            time.sleep(AFTER_SECONDS)
        ended = [each for each, service in stack.services.items() if service.process.poll() is not None]
        sizes = {each: resident_mib(pid) for each, pid in pids.items()}
    before_s = seen.largest_gap_s(end=frozen_at)
    frozen_s = seen.largest_gap_s(frozen_at - 3.0, thawed_at + AFTER_SECONDS)
    return judged(
        seen.figures() | {"gap_before_s": before_s, "gap_while_frozen_s": frozen_s, "resident_mib": sizes},
        {
            **{f"{each} ended": True for each in ended},
            "a text is another one": seen.num_changed > 0,
            "completions were lost": bool(seen.tally.errors),
            f"a stream waited for more than {most_gap_s:g} s": seen.largest_gap_s() > most_gap_s,
            "nothing is drafted afterwards": seen.tally.draft_tokens == num_drafted,
        },
    )


@attack("machine", is_long=True)
def drafter_frozen_for_30_s(_victim: Victim) -> Figures:
    """SIGSTOP of the only drafter of services of its own."""
    return freeze("drafter", MAX_DRAFTER_GAP_S)


@attack("machine", is_long=True)
def verifier_frozen_for_30_s(_victim: Victim) -> Figures:
    """SIGSTOP of the only verifier of services of its own."""
    return freeze("verifier", MAX_VERIFIER_GAP_S)


class Up:
    """A running `draftwire up`."""

    def __init__(self, group: Path | None) -> None:
        """Starts it, in a control group if one is given."""

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        ports = ["--port=0", "--verifier-port=0", "--drafter-port=0", "--http-port=none"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "draftwire.cli", "up", "--target", EMBEDDED, "--log", *ports],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=enter,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += iter(self.process.stderr.readline, "")

    def line(self, pattern: str, seconds: float = UP_SECONDS) -> re.Match[str]:
        """Returns what matches in the output, once it is there.

        Raises:
            TimeoutError: it does not come.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = next(filter(None, (re.search(pattern, line) for line in list(self.lines))), None)
            if found is not None:
                return found
            time.sleep(0.1)
        raise TimeoutError(f"no line {pattern} in {self.lines[-5:]}")

    def pids(self) -> dict[str, int]:
        """Returns the processes of the services."""
        pid, found = self.process.pid, dict[str, int]()
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                with suppress(OSError):
                    command = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                    found |= {name: int(child) for name in ("gateway", "verifier", "drafter") if name in command}
        return found

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def memory_group() -> Iterator[Path]:
    """Makes a control group.

    Raises:
        OSError: this machine lets nobody make one.
    """
    group = GROUPS / f"draftwire-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        time.sleep(0.5)  # its last process may still be on the way out
        with suppress(OSError):
            group.rmdir()


@contextmanager
def growing(address: str) -> Iterator[Callable[[], None]]:
    """Has the verifier's cache grow within the block, by prompts that fill the context."""
    ended = threading.Event()

    def ask(number: int) -> None:
        with Client(address) as client:
            while not ended.is_set():
                number += NUM_GROWING
                with suppress(DraftwireError):
                    ids = [7 + (number * 31 + place * 17) % 4000 for place in range(1_500)]
                    client.generate(ids, max_tokens=400, timeout_s=20.0, resume_s=0.0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_GROWING)]
    for thread in threads:
        thread.start()
    try:
        yield ended.set
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@attack("machine", is_long=True)
def memory_that_runs_out(_victim: Victim) -> Figures:
    """Limits the control group of a `draftwire up` until the kernel kills its largest service, while users stream."""
    if not os.access(GROUPS, os.W_OK):
        return judged({"skipped": "control groups of version 1 cannot be written on this machine"}, {})
    seen, limited = Seen(), 0
    with memory_group() as group, ExitStack() as cleanup:
        up = Up(group)
        cleanup.callback(up.end)
        address = up.line(r"ready.* on (\S+?);?(?:\s|$)")[1].rstrip(";")
        before = up.pids()
        with GreedyReaders(address, seen):
            time.sleep(3.0)
            limited = int((group / "memory.usage_in_bytes").read_text()) + SPARE_MIB * MIB
            (group / "memory.limit_in_bytes").write_text(str(limited))
            with growing(address) as stop_growing:
                killed_at = time.monotonic()
                reason = up.line(r"service_lost.*reason=(.*)", 60.0)[1]
                killed_at = time.monotonic()
                (group / "memory.limit_in_bytes").write_text("-1")
                stop_growing()
            num_completed = seen.tally.completed
            until = time.monotonic() + UP_SECONDS
            while seen.tally.completed < num_completed + 3 and time.monotonic() < until:
                time.sleep(0.1)
            back_s = time.monotonic() - killed_at
        after = up.pids()
    same = sorted(name for name in before if before[name] == after.get(name))
    return judged(
        seen.figures() | {"reason": reason, "limit_mib": limited / MIB, "lived_on": same, "served_again_s": back_s},
        {
            "more than one service ended": len(same) < len(before) - 1,
            "none ended, so that nothing was shown": len(same) == len(before),
            "its end is not named": "out-of-memory" not in reason,
            "a text is another one": seen.num_changed > 0,
            "nothing is served any more": seen.tally.completed < num_completed + 3,
        },
    )
