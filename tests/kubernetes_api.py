"""As much of a Kubernetes API server as whoever follows EndpointSlices talks to: list and watch, over real HTTP.

    with KubernetesApi() as api:
        api.put(endpoint_slice("verifier-x1", "verifier", [pod("10.0.0.1")]))
        ...  # ask http://127.0.0.1:<api.port>

It keeps to "Kubernetes API Concepts": a list has the version of the whole collection; a watch from a version gets
everything that happened since, as one JSON object a line in chunks, until `timeoutSeconds` are over; an object that
changes gets a new version, a deleted one too; a watch from a version that is no longer kept gets 410 Gone, as the
status of the answer or as an event of type ERROR, since real servers do both.
"""

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

SERVICE_LABEL = "kubernetes.io/service-name"
PORT = 50051

Json = dict[str, Any]


def pod(address: str, zone: str | None = None, **changes: Any) -> Json:
    """Returns an endpoint as the endpoint slice controller writes it; `changes` are made to its conditions."""
    conditions = {"ready": True, "serving": True, "terminating": False} | changes
    endpoint: Json = {"addresses": [address], "conditions": conditions, "nodeName": "node-1"}
    endpoint["targetRef"] = {"kind": "Pod", "namespace": "default", "name": address, "uid": f"uid-of-{address}"}
    return endpoint | ({"zone": zone} if zone is not None else {})


def endpoint_slice(
    name: str,
    service: str,
    endpoints: Sequence[Json],
    ports: Sequence[Json] | None = None,
    address_type: str = "IPv4",
    namespace: str = "default",
) -> Json:
    """Returns a slice of a service's endpoints, with a gRPC port unless other ports are given."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": {SERVICE_LABEL: service}, "uid": f"uid-{name}"},
        "addressType": address_type,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "grpc", "port": PORT, "protocol": "TCP"}] if ports is None else list(ports),
    }


def status(code: int, reason: str, message: str) -> Json:
    """Returns what a server says when it refuses."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


EXPIRED = status(410, "Expired", "too old resource version: 1 (1000)")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that the server got."""

    path: str
    query: Mapping[str, str]
    authorization: str | None


def is_open() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(eq=False)
class KubernetesApi:
    """The server. A context manager; may be stopped and started again, on the same port."""

    tls: ssl.SSLContext | None = None
    port: int = 0
    """A free one, from the first start on."""
    lists: list[Asked] = field(default_factory=list)
    watches: list[Asked] = field(default_factory=list)
    gone_is_status: bool = True
    """Whether a watch from too far back gets the status 410, or an event."""
    refusal: int | None = None
    """Status of all answers, instead of what is asked for."""
    refuses_watches: bool = False
    """Whether listing is allowed and watching is not."""
    ends_watches_at_once: bool = False
    answers: threading.Event = field(default_factory=is_open)
    """While it is not set, new requests get no answer, and running watches nothing more, not even their end."""
    answers_watches: threading.Event = field(default_factory=is_open)
    """While it is not set, lists are answered, and new watches are not."""
    connections: list[socket.socket] = field(default_factory=list)
    """All that were ever opened."""
    server: ThreadingHTTPServer | None = None
    _objects: dict[tuple[str, str], Json] = field(default_factory=dict)
    _events: list[tuple[int, str, Json]] = field(default_factory=list)
    _version: int = 1000
    _oldest: int = 0
    """Versions before this one are no longer kept."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> "KubernetesApi":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listens: at first on a free port, later on the same one."""
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), partial(_Handler, self))
        self.port = self.server.server_address[1]
        if self.tls is not None:
            self.server.socket = self.tls.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Closes everything, as a server that is killed does. What it knows is kept."""
        server, self.server = self.server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        with self._changed:
            self._changed.notify_all()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def put(self, slice_: Json) -> None:
        """Creates a slice, or replaces the one of that name."""
        key = (slice_["metadata"]["namespace"], slice_["metadata"]["name"])
        with self._changed:
            self._objects[key] = self._happens("MODIFIED" if key in self._objects else "ADDED", slice_)

    def delete(self, name: str) -> None:
        """Deletes a slice."""
        with self._changed:
            self._happens("DELETED", self._objects.pop(("default", name)))

    def bookmark(self) -> None:
        """Something else changes, and watches that allow bookmarks hear how far they are."""
        self._happens("BOOKMARK", {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": {}})

    def forget_history(self) -> None:
        """Keeps no version but the present one, a new one: running watches expire, for they are behind it."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._events.clear()
            self._changed.notify_all()

    def kubeconfig(self) -> str:
        """Returns a kubeconfig that leads here."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "gateway"}}],
                "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                "users": [{"name": "gateway", "user": {"token": "secret-token"}}],
            }
        )

    def _happens(self, kind: str, item: Json) -> Json:
        with self._changed:
            self._version += 1
            item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self._version)}}
            self._events.append((self._version, kind, item))
            self._changed.notify_all()
        return item

    # What the handler asks

    def snapshot(self, namespace: str, service: str) -> Json:
        """Returns a list."""
        with self._changed:
            known = [self._objects[key] for key in sorted(self._objects)]
            return {
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"resourceVersion": str(self._version)},
                "items": [item for item in known if _matches(item, namespace, service)],
            }

    def is_kept(self, version: int) -> bool:
        return version >= self._oldest

    def changes_after(self, version: int, seconds: float) -> Iterator[tuple[str, Json]]:
        """Yields what happens after a version, until the time is over or the server is stopped."""
        until, server = time.monotonic() + seconds, self.server
        while (left := until - time.monotonic()) > 0.0:
            with self._changed:
                if self.server is not server:
                    return
                is_kept, new = self.is_kept(version), [event for event in self._events if event[0] > version]
                if is_kept and not new:
                    self._changed.wait(left)
            if not is_kept:
                yield "ERROR", EXPIRED
                return
            for version, kind, item in new:  # noqa: B007
                yield kind, item


def _matches(item: Json, namespace: str, service: str) -> bool:
    metadata = item["metadata"]
    return bool(metadata["namespace"] == namespace and metadata["labels"].get(SERVICE_LABEL) == service)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, api: KubernetesApi, connection: socket.socket, *arguments: Any) -> None:
        self.api = api
        api.connections.append(connection)
        super().__init__(connection, *arguments)

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        asked = Asked(parts.path, query, self.headers.get("Authorization"))
        (self.api.watches if "watch" in query else self.api.lists).append(asked)
        self.api.answers.wait()
        if "watch" in query:
            self.api.answers_watches.wait()
        with suppress(OSError):  # who asked has gone
            self._serve(asked.path, query)

    def _serve(self, path: str, query: Mapping[str, str]) -> None:
        api, is_watch = self.api, "watch" in query
        label, _, service = query.get("labelSelector", "").partition("=")
        head, _, namespace = path.removesuffix("/endpointslices").rpartition("/")
        if api.refusal is not None:
            reason = {401: "Unauthorized", 403: "Forbidden"}.get(api.refusal, "InternalError")
            self._answer(status(api.refusal, reason, "endpointslices is forbidden: User cannot list"))
        elif head != "/apis/discovery.k8s.io/v1/namespaces" or label != SERVICE_LABEL:
            self._answer(status(404, "NotFound", "the server could not find the requested resource"))
        elif api.refuses_watches and is_watch:
            self._answer(status(403, "Forbidden", "endpointslices is forbidden: User cannot watch"))
        elif not is_watch:
            self._answer(api.snapshot(namespace, service))
        elif api.gone_is_status and not api.is_kept(int(query["resourceVersion"])):
            self._answer(EXPIRED)
        else:
            self._stream(query, namespace, service)

    def _answer(self, body: Json) -> None:
        text = json.dumps(body).encode()
        self._begin(body.get("code", 200), "Content-Length", str(len(text)))
        self.wfile.write(text)

    def _begin(self, code: int, header: str, value: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header(header, value)
        self.end_headers()

    def _stream(self, query: Mapping[str, str], namespace: str, service: str) -> None:
        api, server = self.api, self.api.server
        self._begin(200, "Transfer-Encoding", "chunked")
        bookmarks = query.get("allowWatchBookmarks") == "true"
        seconds = 0.0 if api.ends_watches_at_once else float(query.get("timeoutSeconds", 1800))
        for kind, item in api.changes_after(int(query["resourceVersion"]), seconds):
            api.answers.wait()
            if bookmarks if kind == "BOOKMARK" else kind == "ERROR" or _matches(item, namespace, service):
                self._chunk(json.dumps({"type": kind, "object": item}).encode() + b"\n")
        api.answers.wait()
        if api.server is server:
            self._chunk(b"")
        else:
            self.close_connection = True  # killed, not ended

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""
