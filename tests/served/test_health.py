"""What health says of a service whose device hangs."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from observing import wait_until

from draftwire.client import Client
from draftwire.v1 import model_pb2, model_pb2_grpc
from tests.in_process import InProcessStack

SECONDS = 20.0
STEP_MS = 1500
STUCK_AFTER_S = 0.4
NAMES = ("", "draftwire.v1.VerifierService", "draftwire.v1.ModelService")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def wait_for(stub: health_pb2_grpc.HealthStub, status: int) -> None:
    """Returns when the process and all of its services have a status."""
    requests = [health_pb2.HealthCheckRequest(service=name) for name in NAMES]
    wait_until(lambda: all(stub.Check(request, timeout=SECONDS).status == status for request in requests), str(status))


@pytest.mark.slow
def test_hung_device_makes_a_service_unready_and_dead_until_the_call_ends() -> None:
    """All steps of the verifier take too long, those at its start included."""
    events: list[str] = []
    verifier = {"model": f"scripted:verify_ms={STEP_MS}", "watchdog_s": STUCK_AFTER_S}
    options: dict[str, dict[str, object]] = {"verifier": verifier, "gateway": {}}
    with (
        InProcessStack(options, on_log=lambda _service, line: events.append(str(line["event"]))) as stack,
        grpc.insecure_channel(f"127.0.0.1:{stack.services['verifier'].port}") as channel,
        Client(stack.address) as client,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        wait_for(stub, SERVING)
        assert "verifier.device_stuck" not in events, "loading does not count"
        stream = client.stream("a", max_tokens=1)
        wait_for(stub, NOT_SERVING)
        with pytest.raises(grpc.RpcError) as refused:
            model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(), timeout=1.0)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "stuck" in refused.value.details()
        assert sum(len(piece.token_ids) for piece in stream) == 1
        wait_for(stub, SERVING)
        assert len(client.generate("c", max_tokens=1).token_ids) == 1
    assert events.count("verifier.device_stuck") == 2, "once for each call"
    assert events.count("verifier.device_recovered") >= 1
