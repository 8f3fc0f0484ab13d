"""The three services with certificates that say what their holders are, and callers of other roles."""

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from certificates import NAME, write_identity
from observing import wait_until

from benchmarks.relay import Relay, free_port
from draftwire.client import Client
from draftwire.models.script import expected_tokens
from draftwire.runtime.settings import ConnectionSettings, TlsSettings
from draftwire.runtime.tls import Dialler, watch_tls
from draftwire.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.in_process import InProcessStack

SCRIPT = "scripted:acceptance=1,verify_ms=10,context_length=4096"
PROMPT = [1, 2, 3, 4, 5]
SERVICES = ("verifier", "drafter", "gateway")
Rig = tuple[InProcessStack, trustme.CA, Path, Relay]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder, ca, port = tmp_path_factory.mktemp("roles"), trustme.CA(), free_port()
    files = {service: write_identity(folder / service, ca, role=service) for service in SERVICES}
    with Relay(port) as to_verifier:
        stack = InProcessStack(
            {
                "verifier": {"model": SCRIPT, "port": port, **files["verifier"]},
                "drafter": {"model": SCRIPT, "tls_target_name": NAME, **files["drafter"]},
                "gateway": {
                    "verifier": f"127.0.0.1:{to_verifier.port}",
                    "tls_target_name": NAME,
                    **files["gateway"],
                },
            }
        )
        with stack:
            yield stack, ca, folder, to_verifier


def check(rig: Rig) -> None:
    """Checks that a completion comes, of drafted tokens."""
    stack, _, folder, _ = rig
    with Client(stack.address, tls_ca=folder / "gateway" / "ca.pem", tls_target_name=NAME) as client:
        completion = client.generate(PROMPT, max_tokens=40, temperature=0.0)
    assert completion.token_ids == expected_tokens(len(PROMPT), 40)
    assert (completion.drafter_error, completion.statistics.num_drafts > 0) == ("", True)


def drafters_known(stack: InProcessStack) -> int:
    """Returns of how many drafters the verifier's audit has a record."""
    port = stack.services["verifier"].metrics_port
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    return sum(line.startswith("draftwire:drafter_proven{") for line in text.splitlines())


def test_each_role_does_its_own_part_and_no_other(rig: Rig, tmp_path: Path) -> None:
    check(rig)
    stack, ca, _, _ = rig

    async def outcome(call: Any) -> str:
        """What becomes of a stream that says nothing."""
        try:
            async with asyncio.timeout(5.0):
                return "served" if await call.read() is not grpc.aio.EOF else "ended"
        except grpc.aio.AioRpcError as error:
            return error.code().name

    async def outcomes(role: str) -> list[str]:
        settings = TlsSettings(**write_identity(tmp_path / (role or "none"), ca, role=role), tls_target_name=NAME)
        dialler = Dialler(ConnectionSettings(), settings, watch_tls(settings))

        def channel(service: str) -> grpc.aio.Channel:
            return dialler.open(f"127.0.0.1:{stack.services[service].port}", bulk=False)

        async with channel("verifier") as to_verifier, channel("drafter") as to_drafter:
            verifier = verifier_pb2_grpc.VerifierServiceStub(to_verifier)
            drafter = drafter_pb2_grpc.DrafterServiceStub(to_drafter)
            unary = [
                verifier.OpenTargetSession(verifier_pb2.OpenTargetSessionRequest()),
                drafter.OpenDraftSession(drafter_pb2.OpenDraftSessionRequest()),
            ]
            results = await asyncio.gather(*unary, return_exceptions=True)
            codes = [error.code().name for error in results if isinstance(error, grpc.aio.AioRpcError)]
            streams = (verifier.RunTargetSessions(), drafter.RunDraftSessions(), verifier.PushDraftBlocks(iter(())))
            return [*[await outcome(stream) for stream in streams], *codes]

    async def all_outcomes() -> list[list[str]]:
        return [await outcomes(role) for role in ("gateway", "drafter", "user", "")]

    denied, invalid = "PERMISSION_DENIED", "INVALID_ARGUMENT"
    gateway, drafter, user, nobody = asyncio.run(all_outcomes())
    assert gateway == ["served", "served", denied, invalid, invalid]
    assert drafter == [denied, denied, "ended", denied, denied]
    assert user == [denied] * 5
    assert nobody == ["served", "served", "ended", invalid, invalid], "for one version"


def test_drafter_that_connects_again_is_the_same_one(rig: Rig) -> None:
    stack, _, _, to_verifier = rig
    check(rig)
    before = drafters_known(stack)
    for connection in to_verifier.open_connections:
        connection.close()

    def is_whole() -> bool:
        try:
            check(rig)
        except Exception:
            return False
        return True

    wait_until(is_whole, "the services find each other")
    assert drafters_known(stack) == before
