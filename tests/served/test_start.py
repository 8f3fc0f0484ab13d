"""Services that are started and stopped in one event loop leave nothing, and have nothing of each other."""

import socket
import threading
from pathlib import Path

import pytest
from observing import read_metric, wait_until
from service_address import ServiceAddress

from draftwire.client import Client
from draftwire.errors import UnavailableError
from tests.in_process import InProcessStack

SCRIPT = "scripted:acceptance=0.5"
VERIFIER = {"verifier": {"model": SCRIPT}}


def can_bind(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def num_own_threads() -> int:
    """Counts the threads that services start themselves; pools of asyncio and of gRPC stay."""
    return sum(thread.name == "torch" for thread in threading.enumerate())


def is_refused(client: Client) -> bool:
    try:
        client.server()
    except UnavailableError:
        return True
    return False


def test_stopped_services_free_their_ports_and_threads() -> None:
    threads = num_own_threads()
    with InProcessStack({**VERIFIER, "drafter": {"model": SCRIPT}, "gateway": {}}) as stack:
        ports = [
            port
            for service in stack.services.values()
            for port in (service.port, service.metrics_port, service.http_port)
            if port
        ]
        assert len(ports) == 7
        assert not any(map(can_bind, ports))
        with Client(stack.address) as client:
            assert len(client.generate("abc", max_tokens=20).token_ids) == 20
    wait_until(lambda: all(map(can_bind, ports)), "all ports are free again")
    wait_until(lambda: num_own_threads() == threads, "threads of the devices end")


def test_service_that_cannot_load_leaves_no_port_bound(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"verifier": {"model": tmp_path / "nothing", "port": port}}
    with pytest.raises(UnavailableError, match="verifier did not come up: no model folder"), InProcessStack(options):
        pass
    assert can_bind(port)


def test_two_stacks_in_one_loop_count_their_own() -> None:
    options = {**VERIFIER, "gateway": {}}
    with InProcessStack(options) as one, InProcessStack(options) as other, Client(one.address) as client:
        client.generate("abc", max_tokens=20)
        assert read_metric(one, "verifier", "target_passes") > 0
        assert read_metric(other, "verifier", "target_passes") == 0


def test_call_during_a_drain_is_refused_and_the_open_one_ends_whole() -> None:
    with InProcessStack({"verifier": {"model": "scripted:verify_ms=5"}, "gateway": {}}) as stack:
        with Client(stack.address) as client:
            pieces = iter(client.stream("abc", max_tokens=100, num_speculative_tokens=0))
            count = len(next(pieces).token_ids)
            ending = stack.begin_stop("gateway")
            wait_until(lambda: is_refused(client), "the gateway refuses new calls")
            assert count + sum(len(piece.token_ids) for piece in pieces) == 100
        ending.result(10.0)


def test_drain_leads_the_next_call_on_an_old_connection_to_another_gateway() -> None:
    """Of gRPC, whose clients keep one connection: refused on it, they would be refused until the drain has ended."""
    with InProcessStack({"verifier": {"model": "scripted:verify_ms=5"}}) as models:
        peers = {"verifier": f"127.0.0.1:{models.services['verifier'].port}", "drafter": "none"}
        with InProcessStack({"gateway": peers}) as first, InProcessStack({"gateway": peers}) as second:
            ports = [stack.services["gateway"].port for stack in (first, second)]
            with ServiceAddress(ports[0]) as address, Client(f"127.0.0.1:{address.port}") as client:
                pieces = iter(client.stream("abc", max_tokens=200, num_speculative_tokens=0))
                count = len(next(pieces).token_ids)
                address.ports = ports[1:]
                ending = first.begin_stop("gateway")
                for _ in range(20):
                    done = client.generate("abc", max_tokens=2, num_speculative_tokens=0)
                    assert (len(done.token_ids), done.num_resumed) == (2, 0)
                assert not ending.done(), "the stream runs on"
                assert count + sum(len(piece.token_ids) for piece in pieces) == 200
                ending.result(10.0)
