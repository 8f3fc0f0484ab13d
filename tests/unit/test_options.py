"""Options and environment variables: everything is documented, nothing is ignored, nothing bad gets in."""

import math
import os
import sys
from dataclasses import MISSING
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import typer
from typer.testing import CliRunner, Result

from draftwire.cli.options import (
    PREFIX,
    SERVICES,
    build,
    refuse_unknown_variables,
    serve_command,
    settings_of,
    unknown_variables,
    variable,
)
from draftwire.errors import InvalidRequestError
from draftwire.runtime.addresses import host_of, is_loopback
from draftwire.runtime.settings import (
    ConnectionSettings,
    EngineSettings,
    ModelSettings,
    ServerSettings,
    TlsSettings,
)
from draftwire_drafter.config import DrafterConfig
from draftwire_gateway.config import DiscoverySettings, GatewayConfig
from draftwire_gateway.session.loop_settings import LoopSettings
from draftwire_verifier.config import VerifierConfig

CERT, KEY, CA = Path("cert.pem"), Path("key.pem"), Path("ca.pem")
DIALLERS = (DrafterConfig, GatewayConfig)

IDENTITY = {"tls_cert": CERT, "tls_key": KEY}
TRACED = {"otlp_endpoint": "http://host:4317"}
IN_KUBERNETES = {"discovery": "kubernetes", "verifier_service": "verifier", "allow_plaintext": True}

OWN_DEFAULTS = ("port", "metrics_port", "tls_require_client_cert")

ALL_SETTINGS = [(service, setting) for service, config in SERVICES.items() for setting in settings_of(config)]


def values_of(config_class: type, **changes: Any) -> dict[str, Any]:
    """Returns the values of all settings: the defaults, a model where one is needed, and the changes."""
    values = {setting.name: setting.default for setting in settings_of(config_class)}
    if "model" in values:
        values["model"] = "some/model"
    assert changes.keys() <= values.keys(), "the test changes a setting that does not exist"
    return values | changes


# What can be set


def test_every_setting_has_a_help_text_and_a_name_of_its_own() -> None:
    """Nested settings are flattened: a name that came twice would set two things."""
    unhelpful = [(service, one.name) for service, one in ALL_SETTINGS if len(one.help) <= 10 or "\n" in one.help]
    assert unhelpful == []
    names = [(service, setting.name) for service, setting in ALL_SETTINGS]
    assert len(names) == len(set(names)) > 60


@pytest.mark.parametrize(
    ("config_class", "nested"),
    [
        (DrafterConfig, (ModelSettings, ServerSettings, EngineSettings, ConnectionSettings, TlsSettings)),
        (VerifierConfig, (ModelSettings, ServerSettings, EngineSettings, ConnectionSettings, TlsSettings)),
        (GatewayConfig, (ServerSettings, DiscoverySettings, LoopSettings, ConnectionSettings, TlsSettings)),
    ],
)
def test_settings_of_nested_classes_are_settings(config_class: type, nested: tuple[type, ...]) -> None:
    names = {setting.name for setting in settings_of(config_class)}
    for inner in nested:
        assert {setting.name for setting in settings_of(inner)} < names
    own = set() if config_class is GatewayConfig else {"engine"}  # which one: also the name of a group of settings
    assert not (names - own) & {"server", "loading", "engine", "loop", "connections", "tls"}


def test_only_the_models_have_no_default() -> None:
    needed = [
        (service, setting.name)
        for service in SERVICES
        for setting in settings_of(SERVICES[service])
        if setting.default is MISSING
    ]
    assert needed == [("drafter", "model"), ("verifier", "model")]


def test_defaults_of_nested_settings_are_those_of_the_service() -> None:
    """Each service has ports of its own, though they share the class that holds them."""
    defaults = {
        service: [setting.default for setting in settings_of(config) if setting.name in OWN_DEFAULTS]
        for service, config in SERVICES.items()
    }
    assert defaults == {
        "gateway": [50051, None, False],
        "verifier": [50052, 9052, True],
        "drafter": [50053, 9053, True],
    }


# Environment variables


@pytest.mark.parametrize(
    "name",
    [
        "DRAFTWIRE_VERIFIER_PROT",
        "DRAFTWIRE_GATEWAY_MODEL",
        "DRAFTWIRE_PORT",
        "DRAFTWIRE_VERIFIER_LOADING",
        "DRAFTWIRE_",
        "DRAFTWIRE_verifier_port",
    ],
)
def test_unknown_variable_is_reported(name: str) -> None:
    assert unknown_variables({name: "1", "PATH": "/bin", "DRAFTWIRE_VERIFIER_PORT": "1"}) == [name]


def test_variables_of_settings_clients_and_others_are_not_reported() -> None:
    settings = {f"{service.upper()}_{setting.name.upper()}" for service, setting in ALL_SETTINGS}
    clients = dict.fromkeys(
        ("ADDRESS", "TOKEN", "ALLOW_PLAINTEXT", "TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_TARGET_NAME"), "x"
    )
    others = {"OTHER_PORT": "1", "MY_DRAFTWIRE_X": "1"}
    assert unknown_variables({PREFIX + name: "1" for name in (*clients, *settings)} | others) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DRAFTWIRE_VERIFIER_PROT", "1", "DRAFTWIRE_VERIFIER_PROT"),
        # The command line would take it as not set, and so ignore it.
        ("DRAFTWIRE_GATEWAY_DRAFTER", "", "empty environment variable: DRAFTWIRE_GATEWAY_DRAFTER"),
    ],
)
def test_unknown_and_empty_variables_end_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        refuse_unknown_variables()
    assert said in capsys.readouterr().err


# Values


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        *((config, change) for config in SERVICES.values() for change in ({"port": 65535}, {"metrics_port": None})),
        (VerifierConfig, {"dtype": "bfloat16", "threads": 3, "revision": "main", "max_sessions": 1, "host": "::1"}),
        *((config, {"host": "0.0.0.0", "allow_plaintext": True}) for config in SERVICES.values()),
        *(
            (config, {"host": "0.0.0.0", "tls_cert": CERT, "tls_key": KEY, "tls_ca": CA})
            for config in SERVICES.values()
        ),
        *((config, {"tls_cert": CERT, "tls_key": KEY, "tls_ca": CA, "tls_target_name": "x"}) for config in DIALLERS),
        *((config, {"tls_cert": CERT, "tls_key": KEY}) for config in SERVICES.values()),
        (GatewayConfig, {"verifier": "10.0.0.1:1", "drafter": "d:1", "allow_plaintext": True}),
        (GatewayConfig, {"verifier": "localhost:1", "drafter": "dns:///[::1]:1", "max_request_bytes": 2**20}),
        (VerifierConfig, {"tls_cert": CERT, "tls_key": KEY, "tls_ca": CA, "tls_require_client_cert": False}),
        (VerifierConfig, {"tls_cert": CERT, "tls_key": KEY, "host": "0.0.0.0"}),
        (DrafterConfig, {"tls_cert": CERT, "tls_key": KEY, "host": "0.0.0.0", "allow_plaintext": True}),
        (GatewayConfig, {"tls_ca": CA, "verifier": "10.0.0.1:1", "tokens_file": Path("tokens.toml")}),
        (GatewayConfig, {"tls_cert": CERT, "tls_key": KEY, "tls_ca": CA, "tls_require_client_cert": True}),
        *((config, {"kv_cache_tokens": 16, "max_added_latency_ms": 0.5}) for config in (VerifierConfig, DrafterConfig)),
        *(
            (config, {"kv_cache_tokens": "auto", "gpu_memory_utilization": 0.4, "device": "cuda"})
            for config in (VerifierConfig, DrafterConfig)
        ),
        (GatewayConfig, {"caller_metrics": True, "api_key": "12345678", "access_log": True}),
        (DrafterConfig, {"layer_parallel_size": 4, "layer_parallel_ranks": 2, "layer_parallel_timeout_s": 5.0}),
        (DrafterConfig, {"layer_groups": "0 1-3 4", "layer_parallel_ranks": 3, "bonus_calibration": False}),
        (DrafterConfig, {"device": "cuda:0", "max_draft_tokens": 1, "connect_timeout_s": 0.5, "drain_seconds": 0.0}),
        (GatewayConfig, {"drafter": "none", "num_speculative_tokens": 0, "bridge_rounds": 7, "block_timeout_s": 0.25}),
        *((config, {"keepalive_time_s": 1.0, "keepalive_timeout_s": 2.5}) for config in SERVICES.values()),
        *((config, {"flow_control_window_bytes": 2**16}) for config in SERVICES.values()),
        (GatewayConfig, {"max_message_bytes": 2**20, "log_format": "json", "verifier": "[::1]:1"}),
        (GatewayConfig, {"verifier": "dns:///v:1,dns:///more:2", "drafter": "dns:///d:1", "allow_plaintext": True}),
        (GatewayConfig, {**IN_KUBERNETES, "verifier_service": "v", "tls_ca": CA}),
        (GatewayConfig, {**IN_KUBERNETES, "drafter_service": "d-1", "namespace": "n" * 63, "near_drafter_sessions": 0}),
        (GatewayConfig, {**IN_KUBERNETES, "tls_cert": CERT, "tls_key": KEY, "tls_ca": CA}),
        (GatewayConfig, {**TRACED, "trace_sample_ratio": 0.0}),
        *(
            (config, {"otlp_endpoint": url})
            for config in SERVICES.values()
            for url in ("http://127.0.0.1:4317", "https://collector.tracing.svc:4317", "http://[::1]:4317")
        ),
    ],
)
def test_every_value_arrives_where_it_belongs(config_class: type, changes: dict[str, Any]) -> None:
    values = values_of(config_class, **changes)
    built = build(config_class, values)
    found = {setting.name: setting.default for setting in settings_of(config_class, defaults=built)}
    assert found == values


def test_build_makes_the_nested_settings() -> None:
    built = build(VerifierConfig, values_of(VerifierConfig, model="m", threads=2, port=7, max_draft_tokens=5))
    expected = VerifierConfig(
        loading=ModelSettings(model="m", threads=2),
        server=ServerSettings(port=7, metrics_port=9052),
        engine=EngineSettings(max_draft_tokens=5),
    )
    assert built == expected


@pytest.mark.parametrize("config_class", SERVICES.values())
def test_values_left_alone_give_the_default_configuration(config_class: type) -> None:
    needed = {} if config_class is GatewayConfig else {"loading": ModelSettings("some/model")}
    assert build(config_class, values_of(config_class)) == config_class(**needed)


@pytest.mark.parametrize(
    ("config_class", "name", "value"),
    [
        *((config, "port", port) for config in SERVICES.values() for port in (99999, -1)),
        *((config, "max_message_bytes", 2**20 - 1) for config in SERVICES.values()),
        *((config, "keepalive_time_s", 0.5) for config in SERVICES.values()),
        *(
            (config, name, value)
            for config in (VerifierConfig, DrafterConfig)
            for name, value in (
                ("max_sessions", 0),
                ("max_draft_tokens", 0),
                ("kv_cache_tokens", 15),
                ("kv_cache_tokens", -1),
                ("kv_cache_tokens", "most"),
                ("gpu_memory_utilization", 0.0),
                ("gpu_memory_utilization", 0.5),
                ("max_added_latency_ms", 0.0),
                ("max_added_latency_ms", -1.0),
                ("max_added_latency_ms", math.inf),
                ("max_added_latency_ms", math.nan),
            )
        ),
        *((config, "host", host) for config in SERVICES.values() for host in ("0.0.0.0", "::", "", "10.0.0.1", "host")),
        *((config, name, Path("x")) for config in SERVICES.values() for name in ("tls_cert", "tls_key")),
        *((config, "tls_target_name", "x") for config in SERVICES.values()),
        *(
            (config, "otlp_endpoint", url)
            for config in SERVICES.values()
            for url in ("", "host:4317", "http://host", "http://:4317", "ftp://host:4317", "http://host:port")
        ),
        *((config, "otlp_endpoint", f"http://host:4317{path}") for config in SERVICES.values() for path in "/?#"),
        (GatewayConfig, "trace_sample_ratio", 0.5),
        (GatewayConfig, "caller_metrics", True),
        (VerifierConfig, "tls_ca", Path("x")),
        (DrafterConfig, "tls_ca", Path("x")),
        (GatewayConfig, "tls_require_client_cert", True),
        (GatewayConfig, "http_port", 65536),
        (GatewayConfig, "http_port", -1),
        *(
            (config, "watchdog_s", seconds)
            for config in (VerifierConfig, DrafterConfig)
            for seconds in (0.0, -1.0, math.inf, math.nan)
        ),
        (VerifierConfig, "metrics_port", 65536),
        (VerifierConfig, "drain_seconds", -1.0),
        (VerifierConfig, "drain_seconds", math.nan),
        (VerifierConfig, "log_format", "xml"),
        (VerifierConfig, "threads", 0),
        (VerifierConfig, "model", ""),
        (DrafterConfig, "threads", -1),
        (DrafterConfig, "connect_timeout_s", 0.0),
        (DrafterConfig, "connect_timeout_s", math.nan),
        (DrafterConfig, "layer_parallel_size", 0),
        (DrafterConfig, "layer_parallel_ranks", 0),
        *((DrafterConfig, "layer_parallel_timeout_s", seconds) for seconds in (0.0, math.inf, math.nan)),
        *((VerifierConfig, "tensor_parallel_timeout_s", seconds) for seconds in (0.0, math.inf, math.nan)),
        (VerifierConfig, "tensor_parallel_size", 0),
        (GatewayConfig, "verifier", "localhost"),
        (GatewayConfig, "verifier", ":50052"),
        (GatewayConfig, "verifier", "localhost:"),
        (GatewayConfig, "verifier", "localhost:http"),
        (GatewayConfig, "verifier", "localhost:99999"),
        (GatewayConfig, "verifier", ""),
        (GatewayConfig, "drafter", "localhost"),
        (GatewayConfig, "drafter", "localhost:99999"),
        (GatewayConfig, "drafter", ""),
        (GatewayConfig, "drafter", "dns:///"),
        (GatewayConfig, "drafter", "dns:///name"),
        (GatewayConfig, "verifier", "dns:///name:1,other:2"),
        (GatewayConfig, "discovery", "consul"),
        (GatewayConfig, "discovery", "kubernetes"),
        (GatewayConfig, "near_drafter_sessions", -1),
        (GatewayConfig, "num_speculative_tokens", -1),
        (GatewayConfig, "num_speculative_tokens", 17),
        (GatewayConfig, "max_speculative_tokens", 3),
        (GatewayConfig, "startup_timeout_s", 0.0),
        (GatewayConfig, "max_requests", 0),
        (GatewayConfig, "max_request_bytes", 2**20 - 1),
        (GatewayConfig, "max_request_bytes", 2**31),
        (GatewayConfig, "plain_run_rounds", 0),
        (GatewayConfig, "bridge_rounds", 0),
        (GatewayConfig, "block_timeout_s", 0.0),
        (GatewayConfig, "verdict_timeout_s", -1.0),
        (GatewayConfig, "verdict_timeout_s", math.nan),
    ],
)
def test_value_out_of_range_is_refused(config_class: type, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError):
        build(config_class, values_of(config_class, **{name: value}))


@pytest.mark.parametrize(
    ("config_class", "changes", "message"),
    [
        (DrafterConfig, {"layer_parallel_ranks": 2}, "set layer_parallel_size or layer_groups"),
        (DrafterConfig, {"layer_parallel_size": 4, "layer_groups": "0 1-3 4"}, "set one of them"),
        (DrafterConfig, {"layer_parallel_size": 4, "decoder": "transformers"}, "need decoder lean"),
        (DrafterConfig, {"layer_groups": "0 1-3 4", "decoder": "transformers"}, "need decoder lean"),
        (GatewayConfig, {**IN_KUBERNETES, "verifier": "127.0.0.1:50052"}, "verifier and discovery kubernetes both say"),
        (GatewayConfig, {**IN_KUBERNETES, "drafter": "none"}, "drafter and discovery kubernetes both say"),
        (GatewayConfig, {"verifier_service": "v"}, "verifier_service is for discovery kubernetes"),
        (GatewayConfig, {"drafter_service": "d"}, "drafter_service is for discovery kubernetes"),
        (GatewayConfig, {"namespace": "n"}, "namespace is for discovery kubernetes"),
        (GatewayConfig, {"discovery": "kubernetes", "drafter_service": "d"}, "needs verifier_service"),
        (GatewayConfig, {**IN_KUBERNETES, "verifier_service": "a,b=c"}, "'a,b=c' is not a name in Kubernetes"),
        (GatewayConfig, {**IN_KUBERNETES, "verifier_service": "v.ns"}, "is not a name"),
        (GatewayConfig, {**IN_KUBERNETES, "drafter_service": "Drafter"}, "is not a name"),
        (GatewayConfig, {**IN_KUBERNETES, "drafter_service": "-d"}, "is not a name"),
        (GatewayConfig, {**IN_KUBERNETES, "namespace": "n" * 64}, "is not a name"),
        (GatewayConfig, {**IN_KUBERNETES, "namespace": "../x"}, "is not a name"),
        *(
            (GatewayConfig, {**TRACED, "trace_sample_ratio": ratio}, "trace_sample_ratio must be in")
            for ratio in (-0.1, 1.1, math.nan, math.inf)
        ),
        (VerifierConfig, {"host": "0.0.0.0"}, "0.0.0.0 .* set tls_cert and tls_key, or allow_plaintext"),
        (VerifierConfig, {**IDENTITY, "tls_ca": CA, "tls_target_name": "x"}, "tls_target_name"),
        *(
            (GatewayConfig, {"verifier": f"{host}:1"}, f"{host} would be called without TLS: set tls_ca, or allow_pl")
            for host in ("10.0.0.1", "host", "0.0.0.0")
        ),
        (GatewayConfig, {"drafter": "10.0.0.2:1"}, "10.0.0.2 would be called without TLS"),
        (GatewayConfig, IN_KUBERNETES | {"allow_plaintext": False}, "a pod would be called without TLS"),
        (GatewayConfig, {**IDENTITY, "verifier": "10.0.0.1:1"}, "10.0.0.1 would be called without TLS"),
        (GatewayConfig, {**IDENTITY, "drafter": "10.0.0.2:1"}, "10.0.0.2 would be called without TLS"),
        (GatewayConfig, {**IDENTITY, "drafter": "dns:///drafters:1"}, "drafters would be called without TLS"),
        (GatewayConfig, {**IDENTITY, **IN_KUBERNETES, "allow_plaintext": False}, "a pod would be called without TLS"),
        (DrafterConfig, {**IDENTITY, "host": "0.0.0.0"}, "without TLS: set tls_ca"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    config_class: type, changes: dict[str, Any], message: str
) -> None:
    """Layers that cannot run together, two places to look for services, and what would travel unencrypted."""
    with pytest.raises(InvalidRequestError, match=message):
        build(config_class, values_of(config_class, **changes))


def test_loopback_addresses_are_known_and_all_others_leave_the_machine() -> None:
    own = ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "0:0:0:0:0:0:0:1", "localhost", "LocalHost"]
    others = ["", "0.0.0.0", "::", "[::]", "128.0.0.1", "localhost.example", "127.0.0.1.example"]
    assert [host for host in (*own, *others) if is_loopback(host)] == own


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("a.example:1", "a.example"),
        ("[::1]:1", "[::1]"),
        ("dns:///localhost:1", "localhost"),
        ("dns:a.example:1", "a.example"),
        ("dns://8.8.8.8/a.example:1", "a.example"),
        ("ipv4:127.0.0.1:1", "127.0.0.1"),
        ("ipv6:[::1]:1", "[::1]"),
        ("127.evil.example:1", "127.evil.example"),
    ],
)
def test_host_is_found_in_whatever_way_an_address_is_written(address: str, host: str) -> None:
    assert host_of(address) == host


# The command


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configurations that the services were started with; they do nothing but note them."""
    configs: list[Any] = []

    def note(config: Any, *_ranks: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("draftwire.engine.ranks.rank_launch.configure_logging", lambda *_: None)
    monkeypatch.setattr("draftwire.runtime.process.run_service", AsyncMock(return_value=0))
    for service in SERVICES:
        module = SimpleNamespace(serve=note, make_service=note)
        monkeypatch.setitem(sys.modules, f"draftwire_{service}.server", module)
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    return configs


def run_command(service: str, *arguments: str, **environment: str) -> Result:
    app = typer.Typer()
    app.command()(serve_command(service))
    return CliRunner().invoke(app, arguments, env={PREFIX + name: value for name, value in environment.items()})


MODEL = ["--model", "some/model"]


@pytest.mark.parametrize(
    ("service", "arguments", "environment", "changes"),
    [
        ("gateway", [], {}, {}),
        (
            "verifier",
            [*MODEL, "--max-draft-tokens", "3"],
            {"VERIFIER_PORT": "7", "VERIFIER_MAX_DRAFT_TOKENS": "4", "DRAFTER_PORT": "8"},
            {"port": 7, "max_draft_tokens": 3},
        ),
        ("verifier", [*MODEL, "--allow-plaintext"], {}, {"allow_plaintext": True}),
        ("verifier", [*MODEL, "--no-allow-plaintext"], {"VERIFIER_ALLOW_PLAINTEXT": "true"}, {}),
        ("verifier", MODEL, {"VERIFIER_ALLOW_PLAINTEXT": "1"}, {"allow_plaintext": True}),
        ("verifier", MODEL, {"VERIFIER_ALLOW_PLAINTEXT": "false"}, {}),
        *(
            ("gateway", arguments, environment, {"http_port": port})
            for text, port in (("none", None), ("None", None), ("0", 0), ("8080", 8080))
            for arguments, environment in ((["--http-port", text], {}), ([], {"GATEWAY_HTTP_PORT": text}))
        ),
    ],
)
def test_options_and_variables_set_values_and_options_win(
    served: list[Any], service: str, arguments: list[str], environment: dict[str, str], changes: dict[str, Any]
) -> None:
    """Switches can be turned on and off, and a port that is served by default can be turned off."""
    assert run_command(service, *arguments, **environment).exit_code == 0
    assert served == [build(SERVICES[service], values_of(SERVICES[service], **changes))]


def test_plaintext_beyond_the_machine_is_refused_on_one_line(served: list[Any]) -> None:
    result = run_command("gateway", "--host", "0.0.0.0")
    assert (result.exit_code, served) == (2, [])
    assert result.stderr.startswith("gateway: host 0.0.0.0 is reached from other machines")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("service", "arguments", "environment"),
    [
        ("verifier", [], {}),  # no model
        ("gateway", ["--prot", "1"], {}),
        ("gateway", ["--port", "http"], {}),
        ("gateway", ["--port", "99999"], {}),
        ("gateway", [], {"GATEWAY_PORT": "http"}),
        ("gateway", [], {"GATEWAY_PORT": "99999"}),
        ("gateway", [], {"GATEWAY_PORT": "1.5"}),
        ("gateway", [], {"GATEWAY_BLOCK_TIMEOUT_S": "soon"}),
        ("gateway", [], {"GATEWAY_LOG_FORMAT": "xml"}),
        *(("gateway", ["--http-port", text], {}) for text in ("http", "99999", "-1", "1.5")),
        *(("gateway", [], {"GATEWAY_HTTP_PORT": text}) for text in ("http", "99999", "-1", "1.5")),
    ],
)
def test_malformed_value_ends_the_command_before_anything_starts(
    served: list[Any], service: str, arguments: list[str], environment: dict[str, str]
) -> None:
    assert run_command(service, *arguments, **environment).exit_code == 2
    assert served == []


def test_help_names_every_option_and_variable() -> None:
    """Only a wide terminal keeps long names whole."""
    app = typer.Typer(rich_markup_mode=None)
    app.command()(serve_command("gateway"))
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).output
    for setting in settings_of(GatewayConfig):
        assert "--" + setting.name.replace("_", "-") in text
        assert variable("gateway", setting.name) in text
