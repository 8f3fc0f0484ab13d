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
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwire.errors import InvalidRequestError
from draftwire_gateway.peers.discovery import Endpoint, SourceStatus, host_and_port

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from kubernetes.aio.client import Configuration, DiscoveryV1Api, V1Endpoint, V1EndpointSlice
    from kubernetes.aio.watch import Watch

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PORT_NAME = "grpc"

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between attempts while the API cannot be asked; doubled from one to the next."""


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """How long the API may take."""

    watch_s: int = 60
    """The server ends a watch after this time, and a new one goes on where it ended."""
    answer_s: float = 10.0
    """How long an answer may take to begin, and a watch may go on after it should have ended: a connection that was cut
    without being closed is noticed by that."""


async def read_configuration() -> Configuration:
    """Returns how to reach the cluster that KUBECONFIG names, or that this pod is in. The library renews the token.

    Raises:
        InvalidRequestError: there is no cluster, or no library.
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
    except Exception as error:  # the library raises what its parsers raise
        raise InvalidRequestError(f"discovery kubernetes needs a pod, or KUBECONFIG: {error}") from error
    configuration.retries = None  # failures are dealt with here
    return configuration


def own_namespace() -> str:
    """Returns the namespace of this pod.

    Raises:
        InvalidRequestError: this is no pod.
    """
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError as error:
        raise InvalidRequestError(f"set namespace: {NAMESPACE_FILE} cannot be read: {error.strerror}") from error


class EndpointSliceSource:
    """Follows the EndpointSlices of one service.

    With the library's `Watch`, not its `SharedInformer`: that one lives on a thread, and waits for ever on a connection
    that is dead.
    """

    def __init__(
        self, configuration: Configuration, namespace: str, service: str, times: WatchTimes | None = None
    ) -> None:
        """Prepares; nothing is asked before `endpoints`."""
        self.name = f"service {namespace}/{service}"
        self.status = SourceStatus()
        self._configuration = configuration
        self._namespace = namespace
        self._selector = f"kubernetes.io/service-name={service}"
        self._times = times or WatchTimes()
        self._slices: dict[str, V1EndpointSlice] = {}
        self._version = ""
        """Of what is known; empty where it has to be listed again."""

    async def endpoints(self) -> AsyncGenerator[frozenset[Endpoint]]:
        """Lists the slices, then watches them; lists them again where changes may have been missed."""
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
                    self._version = ""  # who knows what was missed
                    self._note_failure(error)
                    # All gateways lose the same server at once: they must not all come back at once.
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)

    async def _list(self, api: DiscoveryV1Api) -> None:
        """Learns all slices, as they are now."""
        async with asyncio.timeout(self._times.answer_s):
            answer = await api.list_namespaced_endpoint_slice(self._namespace, label_selector=self._selector)
        slices = {slice_.metadata.name: slice_ for slice_ in answer.items}
        endpoints_of(slices.values())
        self._slices, self._version = slices, answer.metadata.resource_version
        self.status.synced_at = time.monotonic()  # all is well only when they can be watched too

    async def _watch(self, api: DiscoveryV1Api, watcher: Watch) -> AsyncGenerator[bool]:
        """Takes changes as they come, until the server ends the watch, and yields whether slices changed."""
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
                yield self._take(event, watcher.resource_version)
                self.status.note_success(self.name)
        if time.monotonic() - started < min(1.0, self._times.watch_s / 2):
            if not num_events:
                raise ConnectionError("the server ended a watch at once")
            await asyncio.sleep(FIRST_PAUSE_S)
        self.status.note_success(self.name)
        yield False

    async def _begin_watch(self, api: DiscoveryV1Api, _preload_content: bool, **parameters: object) -> ClientResponse:
        """Returns an answer whose lines the library reads, with what it asks for.

        By itself it would notice an answer that does not begin only when the watch should have ended, and that one has
        begun only when something happens.
        """
        from kubernetes.aio.client import ApiException

        async with asyncio.timeout(self._times.answer_s):
            response: ClientResponse = await api.list_namespaced_endpoint_slice_without_preload_content(
                self._namespace, label_selector=self._selector, **parameters
            )
            if response.status != HTTPStatus.OK:
                raise ApiException(response.status, response.reason, body=await response.text())
        self.status.note_success(self.name)
        return response

    def _take(self, event: Mapping[str, Any], version: str) -> bool:
        """Takes one change; returns whether slices changed, and not the version alone."""
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

    def _note_failure(self, error: Exception) -> None:
        """Counts a failure, unless the watch was too far behind: that is normal, and mended by listing again."""
        status = getattr(error, "status", 0)  # of HTTP
        if status == HTTPStatus.GONE:
            return
        is_refusal = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)  # somebody has to give us rights
        needed = f"; the gateway needs get, list and watch of endpointslices in namespace {self._namespace}"
        self.status.note_failure(self.name, _reason_of(error) + needed * is_refusal, is_lasting=is_refusal)


def _reason_of(error: Exception) -> str:
    """Returns in a line why the API did not give what was asked for."""
    from kubernetes.aio.client import ApiException

    if isinstance(error, ApiException):
        try:
            said = json.loads(error.body)["message"]
        except (ValueError, KeyError, TypeError):
            said = error.reason
        return f"HTTP {error.status}: {said}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, (LookupError, TypeError, AttributeError, ValueError)):
        return f"not a list or a change of EndpointSlices: {error!r}"
    return f"{type(error).__name__}: {error}"


def endpoints_of(slices: Iterable[V1EndpointSlice]) -> frozenset[Endpoint]:
    """Returns each endpoint of some slices once.

    The addresses of one endpoint lead to the same pod, and so do those that a service with two IP families has in
    slices of their own: the first one is taken, IPv4 before IPv6. An endpoint that is being moved from one slice to
    another is in both for a while.

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
            by_pod[pod] = _both(by_pod[pod], found) if pod in by_pod else found
    return frozenset(by_pod.values())


def _port_of(slice_: V1EndpointSlice) -> int | None:
    """Returns the port named grpc, else the first one; None if there is none."""
    ports = [port for port in slice_.ports or () if port.port is not None]
    named = [port for port in ports if port.name == PORT_NAME]
    return int((named or ports)[0].port) if ports else None


def _endpoint(item: V1Endpoint, port: int) -> Endpoint:
    ready, serving, terminating = (getattr(item.conditions, name, None) for name in ("ready", "serving", "terminating"))
    is_ready = ready is None or ready  # what nobody knows counts as ready
    return Endpoint(
        address=host_and_port(item.addresses[0], port),
        zone=item.zone or None,
        is_ready=is_ready,
        is_serving=is_ready if serving is None else serving,
        is_terminating=bool(terminating),
    )


def _both(first: Endpoint, second: Endpoint) -> Endpoint:
    """Returns what two slices say of one endpoint. One of them may be behind; what terminates does not come back."""
    return replace(
        first,
        zone=first.zone or second.zone,
        is_ready=first.is_ready or second.is_ready,
        is_serving=first.is_serving or second.is_serving,
        is_terminating=first.is_terminating or second.is_terminating,
    )
