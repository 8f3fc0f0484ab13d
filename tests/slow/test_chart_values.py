"""Values that say nothing, or nonsense, are refused; options are those that the services have."""

import json
import re
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import CHART, EVERYTHING, VALUES, refuse, render, run_helm, template, values_file

from draftwire.cli.options import SERVICES, settings_of
from draftwire.runtime.settings import AUTO, CacheTokens

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())

SET_BY_CHART = {
    "api_key",  # values are no place for it: tokens.secret is
    "chat_template",  # a file, which no pod has
    "discovery",
    "verifier_service",
    "drafter_service",
    "namespace",
    "host",
    "port",
    "metrics_port",
    "http_port",
    "drain_seconds",
    "log_format",
    "stop_with_stdin",
    "tls_cert",
    "tls_key",
    "tls_ca",
    "tls_require_client_cert",
    "tls_target_name",
    "allow_plaintext",
    "model",
    "device",
    "max_added_latency_ms",
    "tensor_parallel_size",
    "layer_parallel_size",
    "layer_parallel_ranks",
    "verifier",
    "drafter",
    "startup_timeout_s",
    "tokens_file",
    "otlp_endpoint",
    "trace_sample_ratio",
}
"""Settings that follow from other values, so that they cannot contradict them."""

KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}


def closed(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yields where a schema lists what an object may hold, but for what Kubernetes defines."""
    if schema.get("$ref") in {f"#/$defs/{name}" for name in (*SERVICES, "claim", "authenticationRef", "perService")}:
        schema = resolved(schema)
    if "properties" in schema:
        yield path
        for name, inner in schema["properties"].items():
            yield from closed(inner, f"{path}/{name}")


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def mappings(values: Any, schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the mappings among values whose keys are known, each with its place."""
    schema = resolved(schema)
    if isinstance(values, list):
        for index, value in enumerate(values):
            yield from mappings(value, schema["items"], f"{path}/{index}")
    elif isinstance(values, dict) and schema.get("additionalProperties") is False:
        (others,) = schema.get("patternProperties", {"": {}}).values()
        if not others:
            yield path, values
        for name, value in values.items():
            yield from mappings(value, schema.get("properties", {}).get(name, others), f"{path}/{name}")


def merged(first: Any, second: Any) -> Any:
    """Returns what Helm makes of values and those of a later file."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    return first | {name: merged(first.get(name), value) for name, value in second.items()}


def test_misspelt_keys_are_refused_at_every_level(tmp_path: Path) -> None:
    values = merged(DEFAULTS, yaml.safe_load(values_file(EVERYTHING).read_text()))
    values["models"]["volume"] = {"persistentVolumeClaim": {"claimName": "models"}}
    values["drafter"]["tolerations"] = [{"key": "gpu"}]
    values["drafter"]["extraEnv"] = [{"name": "A", "value": "b"}]
    places = dict(mappings(values, SCHEMA))
    known = {"", "/gateway/options", "/models/hub", "/networkPolicy/clients/1/namespaceSelector", "/drafter/extraEnv/0"}
    assert known | {"/targets/big", "/targets/big/verifier/tensorParallel", "/verifier/securityContext"} <= set(places)
    assert set(closed(SCHEMA)) <= set(places), "the schema knows of mappings that values.yaml does not show"
    for mapping in places.values():
        mapping["misspelt"] = 1
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = run_helm("template", "prod", str(CHART), f"--values={file}")
    assert done.returncode != 0
    for place in places:
        assert f"at '{place}': additional properties 'misspelt' not allowed" in done.stderr, place


def test_values_file_shows_everything_that_can_be_set() -> None:
    def missing(schema: dict[str, Any], values: Any, path: str) -> Iterator[str]:
        for name, inner in resolved(schema).get("properties", {}).items():
            if name in ("resources", "options", "podSecurityContext", "securityContext", "volume", "cache", "affinity"):
                assert name in values
            elif name not in values:
                yield f"{path}.{name}"
            else:
                yield from missing(inner, values[name], f"{path}.{name}")

    assert [path for path in missing(SCHEMA, DEFAULTS, "") if path != ".global"] == []


@pytest.mark.parametrize("service", SERVICES)
def test_options_are_those_that_the_service_has(service: str) -> None:
    known = SCHEMA["$defs"][service]["properties"]["options"]["properties"]
    settings = {setting.name: setting for setting in settings_of(SERVICES[service])}
    assert set(known) == set(settings) - SET_BY_CHART
    for name, schema in known.items():
        kind = settings[name].kind
        if kind == CacheTokens:
            assert schema == {"anyOf": [{"type": "integer"}, {"const": AUTO}]}
            continue
        kind = next((part for part in typing.get_args(kind) if part is not type(None)), kind)
        if issubclass(kind, Enum):
            assert schema["enum"] == [member.value for member in kind]
        elif "enum" in schema:
            assert kind is str
            assert settings[name].default in schema["enum"]
        elif "pattern" in schema:
            assert kind is str
            assert re.search(schema["pattern"], settings[name].default)
        else:
            assert schema == {"type": KINDS[kind]}, name


def test_settings_that_the_chart_makes_exist() -> None:
    known = {setting.name for config in SERVICES.values() for setting in settings_of(config)}
    assert known >= SET_BY_CHART


BAD = [
    ("verifier.replicas=0", "/verifier/replicas"),
    ("verifier.device=tpu", "/verifier/device"),
    ("verifier.tensorParallel.size=two", "/verifier/tensorParallel/size"),
    ("drafter.perVerifier=0", "/drafter/perVerifier"),
    ("drafter.autoscaling.waitingSessions=0", "/drafter/autoscaling/waitingSessions"),
    ("drafter.options.draft_encoding=dense", "/drafter/options/draft_encoding"),
    ("gateway.options.rejection_sample_method=typical", "/gateway/options/rejection_sample_method"),
    ("gateway.options.max_requests=many", "/gateway/options/max_requests"),
    ("discovery=consul", "/discovery"),
    ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
    ("image.registry=example.com/team/", "/image/registry"),
    ("tls.certManager.duration=soon", "/tls/certManager/duration"),
    ("verifier.sharedMemory=8 GB", "/verifier/sharedMemory"),
    ('models.volume={"nfs":{"server":"a","path":"b"},"hostPath":{"path":"c"}}', "/models/volume"),
    ('verifier.extraEnv=[{"value":"1"}]', "/verifier/extraEnv/0"),
    ('networkPolicy.clients=[{"podSelector":{"app":"web"}}]', "/networkPolicy/clients/0/podSelector"),
    ('verifier.tolerations=[{"effect":"NoRun"}]', "/verifier/tolerations/0/effect"),
]
"""Settings of no sense, and where it is said that they are none."""


def test_bad_values_are_refused_by_place() -> None:
    """Each by itself would be, for each is named."""
    done = template("tp8", *(setting for setting, _ in BAD))
    assert done.returncode != 0
    assert [said for _, said in BAD if f"at '{said}'" not in done.stderr] == []


@pytest.mark.parametrize(
    ("values", "setting", "said"),
    [
        ("tp8", "verifier.model=", "verifier.model: a folder under /models, or a name on the hub"),
        ("tp8", "drafter.model=", "drafter.model: a folder under /models, or a name on the hub"),
        ("tp8", "tls.enabled=false", "prompts and texts would travel unencrypted"),
        ("tp8", "tls.allowPlaintext=true", "tls.allowPlaintext: has no use with tls.enabled"),
        ("cpu-demo", "tls.certManager.enabled=true", "tls.certManager: needs tls.enabled and issuer.name"),
        ("mtls", "tls.certManager.issuer.name=", "tls.certManager: needs tls.enabled and issuer.name"),
        ("multi-node-tp", "verifier.tensorParallel.size=15", "size has to be a multiple of nodes"),
        ("drafter-autoscaling", "drafter.autoscaling.prometheusAddress=", "where is the Prometheus"),
        ("drafter-autoscaling", "drafter.enabled=false", "drafter.autoscaling: needs drafter.enabled"),
        ("drafter-autoscaling", "monitoring.enabled=false", "monitoring.serviceMonitor: need monitoring.enabled"),
        ("prometheus-off", "monitoring.rules.enabled=true", "monitoring.serviceMonitor: need monitoring.enabled"),
        ("no-network-policy", "tls.requireClientCert=true", "tls.requireClientCert: needs tls.enabled"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: str, setting: str, said: str) -> None:
    render(values)
    refuse(values, said, setting)


def test_there_are_values_for_what_the_manual_names() -> None:
    assert set(VALUES) >= {
        "cpu-demo",
        "single-gpu",
        "tp8",
        "multi-node-tp",
        "mtls",
        "no-network-policy",
        "hpa-off",
        "prometheus-off",
        "llama-70b",
        "two-targets",
        "object-storage",
    }
