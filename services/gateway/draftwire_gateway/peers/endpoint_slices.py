"""The endpoints of a service in Kubernetes, listed once and then watched.

Source: "EndpointSlices" and "Kubernetes API Concepts" (efficient detection of changes) of the Kubernetes documentation.
"""

from __future__ import annotations  # the client library is there only where it is used

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwire.errors import InvalidRequestError
from draftwire.runtime.addresses import host_and_port
from draftwire_gateway.peers.discovery import Endpoint, SourceStatus

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes.aio.client import Configuration, DiscoveryV1Api, V1Endpoint, V1EndpointSlice
    from kubernetes.aio.watch import Watch

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PORT_NAME = "grpc"

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses between attempts while the API fails; each is twice the one before."""


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Timeouts of the Kubernetes API."""

    watch_s: int = 60
    """The server ends a watch after this time; the next watch resumes at its version."""
    answer_s: float = 10.0
    """How long an answer may take to begin, and how long a watch may exceed `watch_s`, which detects a dead
    connection."""


async def read_configuration() -> Configuration:
    """Returns the configuration of the cluster that KUBECONFIG names, or that this pod is in. In a pod the library
    renews the token; elsewhere it is read anew when it is refused.

    Raises:
        InvalidRequestError: no cluster is configured, or the library kubernetes is not installed.
    """
    try:
        from kubernetes.aio import client, config
    except ModuleNotFoundError as error:
        extra = "pip install 'draftwire[services,kubernetes]'"
        raise InvalidRequestError(f"discovery kubernetes needs the library kubernetes: {extra}") from error
    configuration = client.Configuration()
    try:
        if path := os.environ.get("KUBECONFIG"):
            await config.load_kube_config(path, client_configuration=configuration, persist_config=False)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except Exception as error:  # the library does not wrap the errors of its parsers
        raise InvalidRequestError(f"discovery kubernetes needs a pod, or KUBECONFIG: {error}") from error
    configuration.retries = None  # retries are done here
    return configuration


def own_namespace() -> str:
    """Returns the namespace of this pod.

    Raises:
        InvalidRequestError: this process does not run in a pod.
    """
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError as error:
        raise InvalidRequestError(f"set namespace: {NAMESPACE_FILE} cannot be read: {error.strerror}") from error


class EndpointSliceSource:
    """Follows the EndpointSlices of one service.

    Uses the library's `Watch`, not its `SharedInformer`, which needs a thread and waits for ever on a dead connection.
    """

    def __init__(
        self, configuration: Configuration, namespace: str, service: str, times: WatchTimes | None = None
    ) -> None:
        """Sends no request before `endpoints`."""
        self.name = f"service {namespace}/{service}"
        self.status = SourceStatus()
        self._configuration = configuration
        self._namespace = namespace
        self._selector = f"kubernetes.io/service-name={service}"
        self._times = times or WatchTimes()
        self._slices: dict[str, V1EndpointSlice] = {}
        self._version = ""
        """Resource version of `_slices`; empty if they have to be listed again."""

    async def endpoints(self) -> AsyncGenerator[frozenset[Endpoint]]:
        """Lists the slices, then watches them; lists them again if changes may have been missed."""
        from kubernetes.aio import client, watch

        watcher, pause_s = watch.Watch("V1EndpointSlice"), FIRST_PAUSE_S
        async with client.ApiClient(self._configuration) as connection:
            api = client.DiscoveryV1Api(connection)
            while True:
                try:
                    if not self._version:
                        await self._list(api)
                        yield endpoints_of(self._slices.values())
                    async with aclosing(self._watch(api, watcher)) as changes:
                        async for changed in changes:
                            if changed:
                                yield endpoints_of(self._slices.values())
                            pause_s = FIRST_PAUSE_S
                except Exception as error:  # of the network, of the HTTP library, of the client library, of its models
                    self._version = ""  # changes may have been missed
                    self._record_failure(error)
                    if getattr(error, "status", 0) == HTTPStatus.UNAUTHORIZED:
                        await self._read_token()
                    # All gateways lose the same server at once: jitter spreads their reconnects.
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)

    async def _read_token(self) -> None:
        """Reads the credentials anew: a file of KUBECONFIG may hold another token by now, or its program print one."""
        with suppress(InvalidRequestError):  # the failure is recorded, and the next attempt is one more
            fresh = await read_configuration()
            self._configuration.api_key = fresh.api_key

    async def _list(self, api: DiscoveryV1Api) -> None:
        async with asyncio.timeout(self._times.answer_s):
            answer = await api.list_namespaced_endpoint_slice(self._namespace, label_selector=self._selector)
        slices = {slice_.metadata.name: slice_ for slice_ in answer.items}
        endpoints_of(slices.values())
        self._slices, self._version = slices, answer.metadata.resource_version
        self.status.synced_at = time.monotonic()  # no `record_success` yet: the watch may still fail

    async def _watch(self, api: DiscoveryV1Api, watcher: Watch) -> AsyncGenerator[bool]:
        """Applies changes until the server ends the watch, and yields for each whether slices changed."""
        started, num_events = time.monotonic(), 0
        changes = watcher.stream(
            partial(self._begin_watch, api),
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=self._times.watch_s,
            _request_timeout=self._times.watch_s + self._times.answer_s,
        )
        async with watcher:
            async for event in changes:
                num_events += 1
                yield self._apply(event, watcher.resource_version)
                self.status.record_success(self.name)
        if time.monotonic() - started < min(1.0, self._times.watch_s / 2):
            if not num_events:
                raise ConnectionError("the server ended a watch at once")
            await asyncio.sleep(FIRST_PAUSE_S)
        self.status.record_success(self.name)
        yield False

    async def _begin_watch(self, api: DiscoveryV1Api, _preload_content: bool, **parameters: object) -> ClientResponse:
        """Starts a watch and returns the response, whose lines the library reads.

        The library by itself would detect a missing response only at the end of the watch, and a started one only at
        the first change.
        """
        from kubernetes.aio.client import ApiException

        async with asyncio.timeout(self._times.answer_s):
            response: ClientResponse = await api.list_namespaced_endpoint_slice_without_preload_content(
                self._namespace, label_selector=self._selector, **parameters
            )
            if response.status != HTTPStatus.OK:
                raise ApiException(response.status, response.reason, body=await response.text())
        self.status.record_success(self.name)
        return response

    def _apply(self, event: Mapping[str, Any], version: str) -> bool:
        """Applies one change; returns whether slices changed, not only the version."""
        kind, item, slices = event["type"], event["object"], dict(self._slices)
        match kind:
            case "ADDED" | "MODIFIED":
                slices[item.metadata.name] = item
            case "DELETED":
                slices.pop(item.metadata.name, None)
            case "BOOKMARK":
                pass
            case _:
                raise ValueError(f"a watch event of an unknown type: {kind}")
        endpoints_of(slices.values())
        self._slices, self._version = slices, version
        return bool(kind != "BOOKMARK")

    def _record_failure(self, error: Exception) -> None:
        """Counts a failure, unless the watch's version has expired: that is normal, and the slices are listed again."""
        status = getattr(error, "status", 0)  # HTTP status
        if status == HTTPStatus.GONE:
            return
        rights = f"get, list and watch of endpointslices in namespace {self._namespace}"
        hints: dict[int, str] = {
            HTTPStatus.FORBIDDEN: f"; if it lasts, the gateway needs {rights}",
            HTTPStatus.UNAUTHORIZED: "; its credentials are not accepted, and read anew",
        }
        is_refusal = status in hints  # an operator has to grant access
        self.status.record_failure(self.name, _reason_of(error) + hints.get(status, ""), is_lasting=is_refusal)


def _reason_of(error: Exception) -> str:
    """Returns one line with the reason of a failed API call."""
    from kubernetes.aio.client import ApiException

    if isinstance(error, ApiException):
        try:
            message = json.loads(error.body)["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        return f"HTTP {error.status}: {message}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, (LookupError, TypeError, AttributeError, ValueError)):
        return f"not a list or a change of EndpointSlices: {error!r}"
    return f"{type(error).__name__}: {error}"


def endpoints_of(slices: Iterable[V1EndpointSlice]) -> frozenset[Endpoint]:
    """Returns the endpoints of slices, one per pod.

    All addresses of an endpoint belong to the same pod. A dual-stack service has a slice per IP family: the first
    address is used, IPv4 before IPv6. An endpoint that moves between slices is in both for a while.

    Raises:
        LookupError: an endpoint has no address.
    """
    by_pod: dict[str, Endpoint] = {}
    for slice_ in sorted(slices, key=lambda item: (item.address_type, item.metadata.name)):
        port = _port_of(slice_)
        if port is None:
            continue
        for item in slice_.endpoints or ():
            found = _endpoint(item, port)
            pod = getattr(item.target_ref, "uid", None) or found.address
            by_pod[pod] = _merged(by_pod[pod], found) if pod in by_pod else found
    return frozenset(by_pod.values())


def _port_of(slice_: V1EndpointSlice) -> int | None:
    """Returns the port named grpc, else the first one; None if there is none."""
    ports = [port for port in slice_.ports or () if port.port is not None]
    named = [port for port in ports if port.name == PORT_NAME]
    return int((named or ports)[0].port) if ports else None


def _endpoint(item: V1Endpoint, port: int) -> Endpoint:
    ready, terminating = (getattr(item.conditions, name, None) for name in ("ready", "terminating"))
    return Endpoint(
        address=host_and_port(item.addresses[0], port),
        zone=item.zone or None,
        is_ready=ready is None or ready,  # unknown counts as ready, as Kubernetes specifies
        is_terminating=bool(terminating),
    )


def _merged(first: Endpoint, second: Endpoint) -> Endpoint:
    """Merges the states of one endpoint in two slices, one of which may be stale. Termination is never reverted."""
    return replace(
        first,
        zone=first.zone or second.zone,
        is_ready=first.is_ready or second.is_ready,
        is_terminating=first.is_terminating or second.is_terminating,
    )
