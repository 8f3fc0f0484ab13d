"""Health check of any service, by `grpc.health.v1`."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.client.request_maker import check_number
from draftwire.client.retry_policy import LONGEST_SECONDS
from draftwire.client.security import Security
from draftwire.errors import UnavailableError

_SERVING = health_pb2.HealthCheckResponse.SERVING


def check_health(address: str, grpc_name: str, security: Security, timeout_s: float) -> None:
    """Returns if the service at host:port serves.

    `grpc_name` is the full name of a gRPC service, to check readiness; empty to check that the process is alive.

    Raises:
        InvalidRequestError: a file cannot be read, or the timeout is not a number.
        UnavailableError: the service does not serve or does not answer; the message distinguishes the two.
    """
    check_number("timeout_s", timeout_s)
    request = health_pb2.HealthCheckRequest(service=grpc_name)
    with security.channel_opener(address, (), grpc)() as channel:
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=min(timeout_s, LONGEST_SECONDS)).status
        except grpc.RpcError as error:
            raise UnavailableError(f"{address} does not answer: {error.details()}") from error
    if status != _SERVING:
        raise UnavailableError(f"{address} says {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")
