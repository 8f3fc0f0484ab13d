"""The access log: one line for each request that ended. Numbers and names, never what a request holds."""

import structlog

from draftwire.runtime.interceptor import OWN_METHODS, EndedCall
from draftwire.runtime.served_request import ServedRequest, served_request

log = structlog.get_logger()

METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS"})
"""Methods of HTTP that are logged by their name; clients may make up others."""


PROBES = frozenset({"/health", "/ping", "/ready"})
"""Routes of health checks, whose many lines would say nothing."""


def log_request(method: str, route: str, status: int, duration_s: float, request: ServedRequest) -> None:
    """Logs an HTTP request, unless it is a health check, with the name of its route, and the time until the response
    was sent or the client gone.
    """
    if route not in PROBES:
        _log("http", method if method in METHODS else "other", route, status, duration_s, request)


def log_call(call: EndedCall) -> None:
    """Logs a gRPC call of the gateway's own methods: to HTTP a POST to the method's name, with a status of gRPC's."""
    request = served_request()
    if request is not None and call.method.startswith(OWN_METHODS):
        _log("grpc", "POST", call.method, call.code, call.duration_s, request)


def _log(protocol: str, method: str, route: str, status: int | str, duration_s: float, request: ServedRequest) -> None:
    log.info(
        "gateway.request_ended",
        protocol=protocol,
        method=method,
        route=route,
        status=status,
        duration_ms=round(duration_s * 1e3, 1),
        caller=request.caller,
        num_prompt_tokens=request.num_prompt_tokens,
        num_generated_tokens=request.num_generated_tokens,
        request_id=request.id,
    )
