"""What only processes can show: they are killed, stopped and asked to end."""

import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from observing import wait_until
from test_services import PROMPT, greedy_ids

from benchmarks.law import stack_options
from draftwire.cli.local_stack import LocalStack
from draftwire.cli.supervisor import Loss, Supervisor
from draftwire.client import Client
from draftwire.client.health_check import check_health
from draftwire.client.security import Security
from draftwire.errors import UnavailableError
from draftwire_gateway.peers import answer_watch
from draftwire_gateway.session import verifier_seat as seat
from tests.in_process import InProcessStack


@pytest.fixture(scope="module")
def own_stack(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    """Processes that go on after what is done to them here."""
    options = stack_options(*pair)
    options["gateway"] = {"block_timeout_s": 0.3, "local_drafts": "none"}
    with LocalStack(options) as running:
        yield running


@pytest.mark.slow
def test_hung_drafter_costs_its_timeout_only(own_stack: LocalStack, pair: tuple[Path, Path]) -> None:
    drafter = own_stack.services["drafter"].process
    with Client(own_stack.address) as client:
        client.generate(PROMPT, max_tokens=10)
        stream = client.stream(PROMPT, temperature=0.0, max_tokens=55, num_speculative_tokens=1)
        ids: list[int] = []
        try:
            for piece in stream:
                if not ids:
                    drafter.send_signal(signal.SIGSTOP)
                ids += piece.token_ids
        finally:
            drafter.send_signal(signal.SIGCONT)
        assert ids == greedy_ids(pair[0], PROMPT, 55)


def test_gateway_of_a_frozen_verifier_is_unready_and_nobody_waits(
    own_stack: LocalStack, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all its probes, until the verifier goes on; it lives all the time. Times are a tenth of the real ones."""
    for module, name in (
        (answer_watch, "BEAT_SECONDS"),
        (answer_watch, "ANSWER_SECONDS"),
        (seat, "FIRST_WAIT_SECONDS"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) / 10)
    process, port = own_stack.services["verifier"].process, own_stack.services["verifier"].port
    options: dict[str, object] = {
        "verifier": f"127.0.0.1:{port}",
        "keepalive_timeout_s": 1.0,
        "failover_timeout_s": 0.5,
    }
    events: list[str] = []
    with (
        InProcessStack({"gateway": options}, on_log=lambda _, line: events.append(str(line["event"]))) as stack,
        Client(stack.address) as client,
    ):
        gateway = stack.services["gateway"]

        def probes() -> set[str]:
            """What says that the gateway is ready."""
            urls = {"/ready": gateway.http_port, "/readyz": gateway.metrics_port}
            ready = {path for path, of in urls.items() if status_of(f"http://127.0.0.1:{of}{path}") == 200}
            with suppress(UnavailableError):
                check_health(stack.address, "draftwire.v1.GatewayService", Security(), 5.0)
                ready.add("grpc")
            return ready

        assert probes() == {"/ready", "/readyz", "grpc"}
        stream = client.stream(PROMPT, max_tokens=55, num_speculative_tokens=0, resume_s=0.0)
        next(stream)
        process.send_signal(signal.SIGSTOP)
        try:
            frozen_at = time.monotonic()
            wait_until(lambda: not probes(), "no probe says that it is ready", 5.0)
            assert status_of(f"{stack.http_address}/health") == 200
            check_health(stack.address, "", Security(), 5.0)
            with suppress(UnavailableError):  # it is known by then at the latest
                client.generate(PROMPT, max_tokens=4)
            asked_at = time.monotonic()
            with pytest.raises(UnavailableError, match="no verifier"):
                client.generate(PROMPT, max_tokens=4)
            assert time.monotonic() - asked_at < 1.0
            with suppress(UnavailableError):  # its text may have been complete
                list(stream)
            assert time.monotonic() - frozen_at < 10.0, (
                "keepalive_timeout_s and failover_timeout_s, and the calls above"
            )
        finally:
            process.send_signal(signal.SIGCONT)
        wait_until(lambda: len(probes()) == 3, "it is ready again")
        ids = client.generate(PROMPT, temperature=0.0, max_tokens=20).token_ids
        assert ids == greedy_ids(pair[0], PROMPT, 20)
    assert (events.count("gateway.readiness_lost"), events.count("gateway.readiness_restored")) == (1, 1)


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_second_server_on_a_port_ends_with_a_clear_error_and_status_2(
    own_stack: LocalStack, pair: tuple[Path, Path]
) -> None:
    options = {"verifier": {**stack_options(*pair)["verifier"], "port": own_stack.services["verifier"].port}}
    second = LocalStack(options)
    with pytest.raises(UnavailableError, match="cannot listen"), second:
        pass
    assert second.services["verifier"].process.wait(20) == 2


def test_killed_drafter_costs_speed_only_and_a_killed_verifier_its_request(pair: tuple[Path, Path]) -> None:
    """And the gateway finds the verifier that comes next. A stack of its own, which does not live on."""
    with LocalStack(stack_options(*pair)) as stack, Client(stack.address) as client:
        stream = client.stream(PROMPT, temperature=0.0, max_tokens=55, num_speculative_tokens=1)
        ids: list[int] = []
        for piece in stream:
            if not ids:
                stack.services["drafter"].process.kill()
            ids += piece.token_ids
        assert ids == greedy_ids(pair[0], PROMPT, 55)
        assert stream.completion is not None
        wait_until(lambda: not client.server().drafters, "the gateway notices that the drafter is gone")
        after = client.generate(PROMPT, temperature=0.0, max_tokens=55)
        assert after.token_ids == ids
        assert after.statistics.num_drafts == 0

        verifier = stack.services["verifier"]
        verifier.process.kill()
        with pytest.raises(UnavailableError):
            client.generate(PROMPT, max_tokens=50)

        def ids_again() -> list[int] | None:
            try:
                return client.generate(PROMPT, temperature=0.0, max_tokens=55).token_ids
            except UnavailableError:
                return None

        with InProcessStack({"verifier": {**stack_options(*pair)["verifier"], "port": verifier.port}}):
            wait_until(lambda: ids_again() == ids, "the gateway finds the next verifier at the same address")


@pytest.mark.slow
def test_killed_drafter_starts_again_where_the_gateway_looks_for_it() -> None:
    """As `draftwire up` does it; the text that runs meanwhile is whole."""
    script = {"model": "scripted:acceptance=1,verify_ms=5,draft_ms=1,context_length=4096"}
    losses: list[Loss] = []

    def supervise() -> None:
        with suppress(UnavailableError):  # once the stack stops, no service starts any more
            Supervisor(processes, losses.append).run()

    with LocalStack({"drafter": script}) as processes:
        threading.Thread(target=supervise, daemon=True).start()
        gateway = {"drafter": f"127.0.0.1:{processes.services['drafter'].port}"}
        with InProcessStack({"verifier": script, "gateway": gateway}) as stack, Client(stack.address) as client:
            stream = client.stream("a", max_tokens=300, ignore_eos=True)
            num_tokens = len(next(stream).token_ids)
            processes.services["drafter"].process.kill()
            assert num_tokens + sum(len(piece.token_ids) for piece in stream) == 300
            wait_until(lambda: losses, "the loss is noticed")
            assert str(losses[0]) == "the drafter was killed by SIGKILL"
            wait_until(lambda: not client.server().drafters, "the gateway notices it too")
            wait_until(lambda: client.server().drafters, "the drafter is back", 60.0)


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish_and_ends_with_status_0(pair: tuple[Path, Path]) -> None:
    with LocalStack(stack_options(*pair)) as stack:
        with Client(stack.address) as client:
            pieces = iter(client.stream(PROMPT, max_tokens=60, num_speculative_tokens=1))
            count = len(next(pieces).token_ids)
            for service in stack.services.values():
                service.process.send_signal(signal.SIGTERM)
            count += sum(len(piece.token_ids) for piece in pieces)
            assert count == 60
        for service in stack.services.values():
            assert service.process.wait(20) == 0
