"""Services whose logs cannot be written go on, and their metrics say so."""

import signal
import urllib.request
from contextlib import ExitStack

from observing import wait_until

from benchmarks.report import read_metric
from draftwire.client import Client
from tests.in_process import InProcessStack
from tests.unwritable_logs import SilentService, Unwritable

SCRIPT = "scripted:acceptance=1,verify_ms=1,draft_ms=1"


def test_gateways_that_cannot_log_outlive_their_drafter_and_exit_with_0() -> None:
    """They log each call, the loss of the drafter, and their end."""
    with InProcessStack({"verifier": {"model": SCRIPT}, "drafter": {"model": SCRIPT}}) as peers, ExitStack() as exits:
        options = {name: f"127.0.0.1:{service.port}" for name, service in peers.services.items()}
        gateways = [
            exits.enter_context(SilentService("gateway", {**options, "access_log": True}, why)) for why in Unwritable
        ]
        clients = [exits.enter_context(Client(gateway.address)) for gateway in gateways]
        for gateway, client in zip(gateways, clients, strict=True):
            gateway.wait_until_ready()
            assert client.generate("a", max_tokens=4, timeout_s=10.0).token_ids
        peers.kill("drafter")
        for gateway, client in zip(gateways, clients, strict=True):
            wait_until(lambda client=client: not client.server().drafters, "the gateway notices the drafter's end")
            assert len(client.generate("a", max_tokens=4, timeout_s=10.0).token_ids) == 4
            urllib.request.urlopen(f"{gateway.http_address}/v1/models", timeout=10.0).close()
            assert read_metric(gateway.metrics_port, "log_write_errors_total") >= 5
            gateway.process.send_signal(signal.SIGTERM)
        assert [gateway.process.wait(20.0) for gateway in gateways] == [0, 0]
