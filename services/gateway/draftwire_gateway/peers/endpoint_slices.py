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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwire.errors import InvalidRequestError
from draftwire_gateway.peers.discovery import Endpoint, SourceStatus, host_and_port

if TYPE_CHECKING:
    from kubernetes.aio.client import Configuration, DiscoveryV1Api

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PORT_NAME = "grpc"

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between attempts while the API cannot be asked; doubled from one to the next."""

Slices = dict[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """How long the API may take."""

    watch_s: int = 60
    """The server ends a watch after this time, and a new one goes on where it ended."""
    answer_s: float = 10.0
    """How long an answer may take to begin, and a watch may go on after it should have ended: a connection that was cut
    without being closed is noticed by that."""


class ApiError(Exception):
    """The API did not give what was asked for. Stays within this module."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        """Of HTTP; 0 where there was none."""

    @property
    def is_expired(self) -> bool:
        """Whether the watch was too far behind: normal, and mended by listing again."""
        return self.status == 410

    @property
    def is_refusal(self) -> bool:
        """Whether somebody has to give us rights."""
        return self.status in (401, 403)


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
    """Follows the EndpointSlices of one service."""

    def __init__(
        self, configuration: Configuration, namespace: str, service: str, times: WatchTimes | None = None
    ) -> None:
        """Prepares; nothing is asked before `endpoints`."""
        self.name = f"service {namespace}/{service}"
        self.status = SourceStatus()
        self._configuration = configuration
        self._namespace = namespace
        self._service = service
        self._times = times or WatchTimes()
        self._slices: Slices = {}
        self._version = ""
        """Of what is known; empty where it has to be listed again."""

    async def endpoints(self) -> AsyncGenerator[frozenset[Endpoint]]:
        """See `Source.endpoints`."""
        from kubernetes.aio import client

        async with (
            client.ApiClient(self._configuration) as connection,
            aclosing(self._follow(client.DiscoveryV1Api(connection))) as changes,
        ):
            async for endpoints in changes:
                yield endpoints

    async def _follow(self, api: DiscoveryV1Api) -> AsyncGenerator[frozenset[Endpoint]]:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if not self._version:
                    await self._list(api)
                    yield endpoints_of(self._slices.values())
                async with aclosing(self._watch(api)) as changes:
                    async for changed in changes:
                        if changed:
                            yield endpoints_of(self._slices.values())
                        pause_s = FIRST_PAUSE_S
            except ApiError as failure:
                self._version = ""  # who knows what was missed
                if not failure.is_expired:
                    self.status.note_failure(self.name, str(failure), is_lasting=failure.is_refusal)
                # All gateways lose the same server at once: they must not all come back at once.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)

    async def _list(self, api: DiscoveryV1Api) -> None:
        """Learns all slices, as they are now."""
        async with aclosing(self._lines(api, self._times.answer_s)) as lines:
            body = b"".join([line async for line in lines])
        answer = _parsed(body)
        try:
            slices = {str(item["metadata"]["name"]): item for item in answer["items"] or ()}
            endpoints_of(slices.values())
            self._slices, self._version = slices, str(answer["metadata"]["resourceVersion"])
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ApiError(f"not a list of EndpointSlices: {error!r}") from error
        self.status.synced_at = time.monotonic()  # all is well only when they can be watched too

    async def _watch(self, api: DiscoveryV1Api) -> AsyncGenerator[bool]:
        """Takes changes as they come, until the server ends the watch, and yields whether slices changed."""
        started, num_events = time.monotonic(), 0
        watch = {"watch": True, "resource_version": self._version, "allow_watch_bookmarks": True}
        limits = {"timeout_seconds": self._times.watch_s}
        async with aclosing(self._lines(api, self._times.watch_s + self._times.answer_s, **watch, **limits)) as lines:
            async for line in lines:
                if line:
                    num_events += 1
                    yield self._take(_parsed(line))
                self.status.note_success(self.name)
        if time.monotonic() - started < min(1.0, self._times.watch_s / 2):
            if not num_events:
                raise ApiError("the server ended a watch at once")
            await asyncio.sleep(FIRST_PAUSE_S)
        self.status.note_success(self.name)
        yield False

    def _take(self, event: Mapping[str, Any]) -> bool:
        """Takes one change; returns whether slices changed, and not the version alone."""
        try:
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                raise ApiError(str(item.get("message", "")), int(item.get("code", 0)))
            name, version = str(item["metadata"].get("name", "")), str(item["metadata"]["resourceVersion"])
            slices = dict(self._slices)
            if kind in ("ADDED", "MODIFIED"):
                slices[name] = item
            elif kind == "DELETED":
                slices.pop(name, None)
            elif kind != "BOOKMARK":
                raise ApiError(f"a watch event of an unknown type: {kind}")
            endpoints_of(slices.values())
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ApiError(f"not a change of an EndpointSlice: {error!r}") from error
        self._slices, self._version = slices, version
        return bool(kind != "BOOKMARK")

    async def _lines(self, api: DiscoveryV1Api, most_s: float, **parameters: object) -> AsyncGenerator[bytes]:
        """Asks for the slices and yields the lines of the answer as they come; an empty one when it begins.

        Args:
            api: whom to ask.
            most_s: how long the whole answer may take.
            parameters: of the call.

        Raises:
            ApiError: no answer, a bad one, or not in time.
        """
        try:
            async with asyncio.timeout(self._times.answer_s):
                response = await api.list_namespaced_endpoint_slice_without_preload_content(
                    self._namespace,
                    label_selector=f"kubernetes.io/service-name={self._service}",
                    _request_timeout=most_s,
                    **parameters,
                )
            async with response:
                if response.status != 200:
                    raise self._refusal(response.status, await response.read())
                yield b""
                async for line in response.content:
                    yield line
        except TimeoutError as error:
            raise ApiError("no answer in time") from error
        except ApiError:
            raise
        except Exception as error:  # of the network, of the HTTP library, of the client library, of the token's file
            raise ApiError(f"{type(error).__name__}: {error}") from error

    def _refusal(self, status: int, body: bytes) -> ApiError:
        try:
            said = str(json.loads(body)["message"])
        except (ValueError, KeyError, TypeError):
            said = "no reason given"
        needed = f"; the gateway needs get, list and watch of endpointslices in namespace {self._namespace}"
        return ApiError(f"HTTP {status}: {said}{needed if status in (401, 403) else ''}", status)


def endpoints_of(slices: Iterable[Mapping[str, Any]]) -> frozenset[Endpoint]:
    """Returns each endpoint of some slices once.

    The addresses of one endpoint lead to the same pod, and so do those that a service with two IP families has in
    slices of their own: the first one is taken, IPv4 before IPv6. An endpoint that is being moved from one slice to
    another is in both for a while.

    Raises:
        LookupError, TypeError, AttributeError, ValueError: what was given is not EndpointSlices.
    """
    by_pod: dict[str, Endpoint] = {}
    for slice_ in sorted(slices, key=lambda item: (str(item["addressType"]), str(item["metadata"]["name"]))):
        port = _port_of(slice_)
        if port is None:
            continue
        for item in slice_["endpoints"] or ():
            found = _endpoint(item, port)
            pod = str((item.get("targetRef") or {}).get("uid") or found.address)
            by_pod[pod] = _both(by_pod[pod], found) if pod in by_pod else found
    return frozenset(by_pod.values())


def _port_of(slice_: Mapping[str, Any]) -> int | None:
    """Returns the port named grpc, else the first one; None if there is none."""
    ports = [port for port in slice_.get("ports") or () if port.get("port") is not None]
    named = [port for port in ports if port.get("name") == PORT_NAME]
    return int((named or ports)[0]["port"]) if ports else None


def _endpoint(item: Mapping[str, Any], port: int) -> Endpoint:
    conditions = item.get("conditions") or {}
    ready, serving = conditions.get("ready"), conditions.get("serving")
    is_ready = ready is None or bool(ready)  # what nobody knows counts as ready
    return Endpoint(
        address=host_and_port(str(item["addresses"][0]), port),
        zone=item.get("zone") or None,
        is_ready=is_ready,
        is_serving=is_ready if serving is None else bool(serving),
        is_terminating=bool(conditions.get("terminating")),
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


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ApiError("the answer is not JSON") from error
