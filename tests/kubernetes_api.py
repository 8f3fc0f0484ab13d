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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
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


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that the server got."""

    path: str
    query: Mapping[str, str]
    authorization: str | None

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") in ("true", "1")


@dataclass
class Collection:
    """The slices, and what happened to them."""

    objects: dict[tuple[str, str], Json] = field(default_factory=dict)
    events: list[tuple[int, str, Json]] = field(default_factory=list)
    version: int = 1000
    oldest: int = 0
    """Versions before this one are no longer kept."""


class KubernetesApi:
    """The server. A context manager; may be stopped and started again, on the same port."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """Listens from `start` on, over TLS if there is a context for it."""
        self._tls = tls
        self.asked: list[Asked] = []
        self.gone_is_status = True
        """Whether a watch from too far back gets the status 410, or an event."""
        self.refusal: int | None = None
        """Status of all answers, instead of what is asked for."""
        self.is_dead = False
        """Whether new requests get no answer, and running watches nothing more, not even their end."""
        self.ends_watches_at_once = False
        self.refuses_watches = False
        """Whether listing is allowed and watching is not."""
        self.ignores_watches = False
        """Whether lists are answered, and watches are not."""
        self._collection = Collection()
        self._changed = threading.Condition()
        self._server: ThreadingHTTPServer | None = None
        self._generation = 0
        self._open: set[socket.socket] = set()
        self.port = 0

    def __enter__(self) -> "KubernetesApi":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listens: at first on a free port, later on the same one."""
        api = self

        class Handler(_Handler):
            server_api = api

        self._server = _Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Closes everything, as a server that is killed does. What it knows is kept."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._server = None
        with self._changed:
            self._generation += 1
            self._changed.notify_all()
            for connection in tuple(self._open):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def put(self, slice_: Json) -> None:
        """Creates a slice, or replaces the one of that name."""
        metadata = slice_["metadata"]
        key = (metadata["namespace"], metadata["name"])
        self._happens("MODIFIED" if key in self._collection.objects else "ADDED", key, slice_)

    def delete(self, name: str, namespace: str = "default") -> None:
        """Deletes a slice."""
        self._happens("DELETED", (namespace, name), self._collection.objects[namespace, name])

    def bookmark(self) -> None:
        """Something else changes, and watches that allow bookmarks hear how far they are."""
        with self._changed:
            collection = self._collection
            collection.version += 1
            metadata = {"resourceVersion": str(collection.version)}
            item = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata}
            collection.events.append((collection.version, "BOOKMARK", item))
            self._changed.notify_all()

    def forget_history(self) -> None:
        """Keeps no version but the present one, a new one: running watches expire, for they are behind it."""
        with self._changed:
            self._collection.version += 1
            self._collection.oldest = self._collection.version
            self._collection.events.clear()
            self._changed.notify_all()

    def watches(self) -> list[Asked]:
        """Returns the watches that were asked for."""
        return [asked for asked in self.asked if asked.is_watch]

    def lists(self) -> list[Asked]:
        """Returns the lists that were asked for."""
        return [asked for asked in self.asked if not asked.is_watch]

    def kubeconfig(self, token: str = "secret-token") -> str:
        """Returns a kubeconfig that leads here."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "gateway"}}],
                "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                "users": [{"name": "gateway", "user": {"token": token}}],
            }
        )

    def _happens(self, kind: str, key: tuple[str, str], slice_: Json) -> None:
        with self._changed:
            collection = self._collection
            collection.version += 1
            item = {**slice_, "metadata": {**slice_["metadata"], "resourceVersion": str(collection.version)}}
            collection.objects[key] = item
            if kind == "DELETED":
                del collection.objects[key]
            collection.events.append((collection.version, kind, item))
            self._changed.notify_all()

    # What the handler asks

    def snapshot(self, namespace: str, service: str) -> Json:
        """Returns a list."""
        with self._changed:
            known = [self._collection.objects[key] for key in sorted(self._collection.objects)]
            return {
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"resourceVersion": str(self._collection.version)},
                "items": [item for item in known if _matches(item, namespace, service)],
            }

    def is_kept(self, version: int) -> bool:
        return version >= self._collection.oldest

    def changes_after(self, version: int, until: float, generation: int) -> tuple[int, list[tuple[str, Json]]] | None:
        """Waits for what happens after a version; None when the time is over or the server was stopped."""
        with self._changed:
            while True:
                if generation != self._generation or time.monotonic() >= until:
                    return None
                if not self.is_kept(version):
                    return version, [("ERROR", expired())]
                new = [event for event in self._collection.events if event[0] > version]
                if new:
                    return new[-1][0], [(kind, item) for _, kind, item in new]
                self._changed.wait(max(0.0, until - time.monotonic()))

    @property
    def generation(self) -> int:
        return self._generation

    def opened(self, connection: socket.socket) -> None:
        self._open.add(connection)

    def closed(self, connection: socket.socket) -> None:
        self._open.discard(connection)


def expired() -> Json:
    return status(410, "Expired", "too old resource version: 1 (1000)")


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


def _matches(item: Json, namespace: str, service: str) -> bool:
    metadata = item["metadata"]
    return bool(metadata["namespace"] == namespace and metadata["labels"].get(SERVICE_LABEL) == service)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False


class _Handler(BaseHTTPRequestHandler):
    server_api: KubernetesApi
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server_api.opened(self.connection)

    def finish(self) -> None:
        self.server_api.closed(self.connection)
        with suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        api = self.server_api
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        asked = Asked(parts.path, query, self.headers.get("Authorization"))
        api.asked.append(asked)
        while api.is_dead or (api.ignores_watches and asked.is_watch):
            time.sleep(0.02)
        with suppress(OSError):  # who asked has gone
            self._serve(asked)

    def _serve(self, asked: Asked) -> None:
        api, query = self.server_api, asked.query
        label, _, service = query.get("labelSelector", "").partition("=")
        head, _, namespace = asked.path.removesuffix("/endpointslices").rpartition("/")
        if api.refusal is not None:
            reason = {401: "Unauthorized", 403: "Forbidden"}.get(api.refusal, "InternalError")
            self._answer(api.refusal, status(api.refusal, reason, "endpointslices is forbidden: User cannot list"))
        elif head != "/apis/discovery.k8s.io/v1/namespaces" or label != SERVICE_LABEL:
            self._answer(404, status(404, "NotFound", "the server could not find the requested resource"))
        elif api.refuses_watches and asked.is_watch:
            self._answer(403, status(403, "Forbidden", "endpointslices is forbidden: User cannot watch"))
        elif not asked.is_watch:
            self._answer(200, api.snapshot(namespace, service))
        elif api.gone_is_status and not api.is_kept(int(query["resourceVersion"])):
            self._answer(410, expired())
        else:
            self._stream(asked, namespace, service)

    def _answer(self, code: int, body: Json) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, asked: Asked, namespace: str, service: str) -> None:
        api, generation = self.server_api, self.server_api.generation
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        version = int(asked.query["resourceVersion"])
        seconds = 0.0 if api.ends_watches_at_once else float(asked.query.get("timeoutSeconds", 1800))
        until = time.monotonic() + seconds
        while (changes := api.changes_after(version, until, generation)) is not None:
            version, events = changes
            while api.is_dead:
                time.sleep(0.02)
            for kind, item in events:
                if kind == "BOOKMARK" and asked.query.get("allowWatchBookmarks") != "true":
                    continue
                if kind in ("BOOKMARK", "ERROR") or _matches(item, namespace, service):
                    self._chunk(json.dumps({"type": kind, "object": item}).encode() + b"\n")
                if kind == "ERROR":
                    until = 0.0
        while api.is_dead:
            time.sleep(0.02)
        if generation != api.generation:
            self.close_connection = True
            return  # killed, not ended
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""
