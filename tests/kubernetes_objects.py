"""As much of a Kubernetes API server as Helm talks to: it keeps objects of the kinds that the chart makes, over HTTP.

    with ObjectServer() as server:
        ...  # helm install --kube-apiserver http://127.0.0.1:<server.port>
        server.names("Deployment")

Objects are created, read, listed, changed and deleted, by server-side apply too: fields that were applied before and
are not now are removed, fields that others set are kept. What a real server refuses is refused: objects that its
schemas do not know, and changes of what cannot be changed. Nothing runs.
"""

import base64
import copy
import functools
import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

Json = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace and name of an object."""

VERSION = "1.34"
GROUPS = {
    "v1": ("ConfigMap", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "cert-manager.io/v1": ("Certificate",),
    "gateway.networking.k8s.io/v1": ("GRPCRoute", "HTTPRoute"),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
    "monitoring.coreos.com/v1": ("PrometheusRule", "ServiceMonitor"),
    "networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}
"""Kinds by group and version; all are namespaced."""
OWN = ("apps", "autoscaling", "networking.k8s.io", "policy", "rbac.authorization.k8s.io", "v1")
"""Kubernetes' own groups; the schemas of others are not known here."""
FIXED = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
    "PersistentVolumeClaim": ("accessModes", "storageClassName", "volumeMode"),
    "Service": ("clusterIP", "loadBalancerClass"),
    "Pod": ("containers", "volumes"),
}
"""Fields of `spec` that a server lets nobody change."""


def plural_of(kind: str) -> str:
    lower = kind.lower()
    if lower.endswith("y"):
        return f"{lower[:-1]}ies"
    return f"{lower}es" if lower.endswith("s") else f"{lower}s"


KINDS = {plural_of(kind): (group, kind) for group, kinds in GROUPS.items() for kind in kinds}


class RefusalError(Exception):
    """What the server answers in place of what was asked for."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


def applied_onto(live: Any, before: Any, after: Any) -> Any:
    """Returns an object after its applier's configuration went from one state to another."""
    if not isinstance(live, dict) or not isinstance(after, dict):
        return copy.deepcopy(after)
    before = before if isinstance(before, dict) else {}
    kept = {name: value for name, value in live.items() if name in after or name not in before}
    return kept | {name: applied_onto(live.get(name), before.get(name), value) for name, value in after.items()}


def _owned(applied: Json, live: Json) -> Json:
    """Returns what an applier still owns of what it applied: who sets a number of pods takes that field over."""
    records = live.get("metadata", {}).get("managedFields", [])
    if not any("f:replicas" in record["fieldsV1"].get("f:spec", {}) for record in records):
        return applied
    return {**applied, "spec": {name: value for name, value in applied["spec"].items() if name != "replicas"}}


@dataclass(eq=False)
class ObjectServer:
    """The server. A context manager."""

    objects: dict[Key, Json] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    """What was refused, but for what is not there."""
    port: int = 0
    _applied: dict[Key, Json] = field(default_factory=dict)
    _versions: Iterator[int] = field(default_factory=functools.partial(itertools.count, 1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "ObjectServer":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def names(self, kind: str) -> set[str]:
        """Returns the names of the objects of a kind."""
        return {key[2] for key in self.objects if key[0] == plural_of(kind)}

    def object(self, kind: str, name: str, namespace: str = "llm") -> Json:
        return self.objects[plural_of(kind), namespace, name]

    def specs(self) -> dict[tuple[str, str], Json]:
        """Returns what the chart says of each object, but for Helm's own records."""
        return {
            (kind, name): {part: value for part, value in item.items() if part not in ("metadata", "status")}
            for (kind, _, name), item in self.objects.items()
            if kind != "secrets"
        }

    def answer(self, method: str, path: str, query: Mapping[str, str], body: bytes, content_type: str) -> Json:
        """Returns the answer to a request.

        Raises:
            RefusalError: it is none that can be fulfilled.
        """
        parts = path.strip("/").split("/")
        if path == "/version":
            return {"major": "1", "minor": VERSION.partition(".")[2], "gitVersion": f"v{VERSION}.0"}
        if path in ("/api", "/apis"):
            return self._groups() if path == "/apis" else {"kind": "APIVersions", "versions": ["v1"]}
        group = "/".join(parts[1:2] if parts[0] == "api" else parts[1:3])
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if group not in GROUPS:
            raise RefusalError(404, "NotFound", "the server could not find the requested resource")
        if not rest:
            return _resources(group)
        if rest[0] != "namespaces" or len(rest) not in (3, 4) or KINDS.get(rest[2], ("",))[0] != group:
            raise RefusalError(404, "NotFound", f"the server could not find {path}")
        with self._lock:
            if len(rest) == 3:
                return self._collection(method, rest[2], rest[1], query, body)
            return self._item(method, (rest[2], rest[1], rest[3]), body, content_type)

    def _groups(self) -> Json:
        groups = []
        for version in (each for each in GROUPS if "/" in each):
            entry = {"groupVersion": version, "version": version.partition("/")[2]}
            groups.append({"name": version.partition("/")[0], "versions": [entry], "preferredVersion": entry})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def _collection(self, method: str, plural: str, namespace: str, query: Mapping[str, str], body: bytes) -> Json:
        group, kind = KINDS[plural]
        if method == "POST":
            item = json.loads(body)
            key = (plural, namespace, item["metadata"]["name"])
            if key in self.objects:
                raise RefusalError(409, "AlreadyExists", f"{kind} {key[2]} already exists")
            return self._keep(key, item)
        wanted = dict(part.partition("=")[::2] for part in query.get("labelSelector", "").split(",") if part)
        items = [
            item
            for key, item in sorted(self.objects.items())
            if key[:2] == (plural, namespace) and wanted.items() <= item["metadata"].get("labels", {}).items()
        ]
        return {"kind": f"{kind}List", "apiVersion": group, "metadata": {"resourceVersion": "1"}, "items": items}

    def _item(self, method: str, key: Key, body: bytes, content_type: str) -> Json:
        live = self.objects.get(key)
        is_apply = method == "PATCH" and content_type.startswith("application/apply-patch")
        if live is None and not is_apply:
            raise RefusalError(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        if method == "GET":
            return dict(live or {})
        if method == "DELETE":
            self._applied.pop(key, None)
            return self.objects.pop(key)
        sent = yaml.safe_load(body)
        if is_apply:
            item = applied_onto(live or {}, _owned(self._applied.get(key, {}), live or {}), sent)
            kept = self._keep(key, item)
            self._applied[key] = sent
            return kept
        return self._keep(key, sent if method == "PUT" else applied_onto(live, {}, sent))

    def _keep(self, key: Key, item: Json) -> Json:
        group, kind = KINDS[key[0]]
        live = self.objects.get(key)
        if (item["apiVersion"], item["kind"], item["metadata"].get("namespace", key[1])) != (group, kind, key[1]):
            raise RefusalError(400, "BadRequest", f"{kind} {key[2]} does not belong here")
        if group.partition("/")[0] in OWN and kind != "Secret":
            _validate(item)
        for name in FIXED.get(kind, ()) if live else ():
            if (live or {})["spec"].get(name) != item["spec"].get(name):
                raise RefusalError(422, "Invalid", f"{kind} {key[2]}: spec.{name}: field is immutable")
        if kind == "RoleBinding" and live and live["roleRef"] != item["roleRef"]:
            raise RefusalError(422, "Invalid", f"{kind} {key[2]}: roleRef: cannot change it")
        version = str(next(self._versions))
        facts = {"namespace": key[1], "uid": f"uid-{key[2]}", "creationTimestamp": "2026-01-01T00:00:00Z"}
        item = {**item, "metadata": item["metadata"] | facts | {"resourceVersion": version}}
        self.objects[key] = item
        return item


def _validate(item: Json) -> None:
    metadata = {name: value for name, value in item["metadata"].items() if name in ("name", "labels", "annotations")}
    fault = _fault_of(json.dumps({**item, "metadata": metadata}))
    if fault is not None:
        raise RefusalError(422, "Invalid", f"{item['kind']} {metadata['name']}: {fault}")


@functools.cache
def _fault_of(item: str) -> str | None:
    try:
        kubernetes_validate.validate(json.loads(item), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return None


def _resources(group: str) -> Json:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {"name": plural_of(kind), "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for kind in GROUPS[group]
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": resources}


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the numbers and contents of the fields of a protobuf message that have a length."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(message):
        tag = varint()
        if tag & 7 == 0:
            varint()
            continue
        assert tag & 7 == 2, "strings, bytes, messages and numbers are all that a Secret has"
        length = varint()
        yield tag >> 3, message[place : place + length]
        place += length


def _secret(body: bytes) -> Json:
    """Returns a Secret, in which Helm keeps its records, from the protobuf that it is sent as."""
    magic, unknown = body[:4], dict(_fields(body[4:]))
    assert magic == b"k8s\0"
    parts = list(_fields(unknown[2]))
    meta = list(_fields(dict(parts)[1]))
    labels = [dict(_fields(entry)) for number, entry in meta if number == 11]
    data = [dict(_fields(entry)) for number, entry in parts if number == 2]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": dict(meta)[1].decode(),
            "labels": {label[1].decode(): label[2].decode() for label in labels},
        },
        "type": dict(parts)[3].decode(),
        "data": {entry[1].decode(): base64.b64encode(entry[2]).decode() for entry in data},
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, api: ObjectServer, *arguments: Any) -> None:
        self.api = api
        super().__init__(*arguments)

    def handle_request(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        code = 200
        try:
            content_type = self.headers.get("Content-Type") or ""
            if "protobuf" in content_type and self.command in ("POST", "PUT"):
                body = json.dumps(_secret(body)).encode()
            answer = self.api.answer(self.command, parts.path, query, body, content_type)
        except RefusalError as error:
            code = error.code
            facts = {"status": "Failure", "reason": error.reason, "code": code, "message": str(error)}
            answer = {"kind": "Status", "apiVersion": "v1", "metadata": {}, **facts}
            if code != 404:
                self.api.refusals.append(str(error))
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""
