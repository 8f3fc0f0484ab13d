"""Single requests over HTTP, and what came of them."""

import http.client
import json
import ssl
import time
import urllib.request
from contextlib import closing, suppress
from functools import cache
from typing import Any

JSON = {"content-type": "application/json"}
UNCHECKED = ssl.create_default_context()
"""Of clients that talk TLS to whoever answers."""
UNCHECKED.check_hostname, UNCHECKED.verify_mode = False, ssl.CERT_NONE


@cache
def model_of(address: str) -> str:
    """Returns the name of the model that a gateway serves."""
    with urllib.request.urlopen(f"{address}/v1/models", context=UNCHECKED) as response:
        return str(json.load(response)["data"][0]["id"])


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    return host, int(port)


def connection_to(address: str, **options: Any) -> http.client.HTTPConnection:
    """Returns a connection that is not open yet, over TLS where the address says so."""
    if address.startswith("https:"):
        return http.client.HTTPSConnection(*split(address), context=UNCHECKED, **options)
    return http.client.HTTPConnection(*split(address), **options)


def ask(
    address: str,
    path: str,
    body: bytes | None = None,
    *,
    headers: dict[str, str] = JSON,
    source: str = "127.0.0.1",
    timeout_s: float = 30.0,
) -> tuple[int, float]:
    """Sends one request; returns the status, or 0 without an answer, and how long it took, seconds."""
    started, status = time.monotonic(), 0
    connection = connection_to(address, timeout=timeout_s, source_address=(source, 0))
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        response.read()
        status = response.status
    return status, time.monotonic() - started


def complete(address: str, fields: dict[str, Any], **options: Any) -> tuple[int, float]:
    """Asks for a completion; see `ask`."""
    body = {"model": model_of(address), "prompt": "a", "max_tokens": 4} | fields
    return ask(address, "/v1/completions", json.dumps(body).encode(), **options)
