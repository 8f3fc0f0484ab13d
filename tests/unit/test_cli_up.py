"""`draftwire up`: what it starts the services with, and what it says."""

from typing import Any

import pytest
from typer.testing import CliRunner, Result

from draftwire.cli import up_command as up_module
from draftwire.cli.__main__ import app
from draftwire.cli.local_stack import ServiceProcess
from draftwire.cli.options import SERVICES, settings_of, variable

FREE = ["--port", "0", "--verifier-port", "0", "--drafter-port", "0", "--http-port", "0"]


class FakeStack:
    """Stands for `LocalStack`; is stopped as soon as it runs."""

    made: "FakeStack"

    def __init__(self, options: dict[str, dict[str, Any]], on_log: Any, start_timeout_s: float | None) -> None:
        self.options = options
        self.start_timeout_s = start_timeout_s
        self.address = "127.0.0.1:1"
        self.http_address = "https://127.0.0.1:2"
        http_port = 2 if options["gateway"]["http_port"] is not None else 0
        self.services = {"gateway": ServiceProcess("gateway", None, http_port=http_port)}  # type: ignore[arg-type]
        on_log("verifier", {"event": "a\x1b[2J", "level": "output", "text": "[/x] \x9b1m"})
        FakeStack.made = self

    def __enter__(self) -> "FakeStack":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self) -> str:
        raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwire.cli.local_stack.LocalStack", FakeStack)
    monkeypatch.setattr(up_module, "interrupt_on_signals", lambda: None)
    for service, config in SERVICES.items():
        for setting in settings_of(config):
            monkeypatch.delenv(variable(service, setting.name), raising=False)


def up(*arguments: str, **environment: str) -> Result:
    environment = {f"DRAFTWIRE_{name}": value for name, value in environment.items()}
    return CliRunner(env=environment).invoke(app, ["up", "--target", "t", "--drafter", "d", *arguments])


def options(*arguments: str, **environment: str) -> dict[str, dict[str, Any]]:
    result = up(*arguments, **environment)
    assert result.exit_code == 0, result.output
    return FakeStack.made.options


def test_defaults_are_those_of_the_page() -> None:
    made = options()
    assert made["gateway"] == {"port": 50051, "http_port": 8000, "metrics_port": 0}
    verifier, drafter = made["verifier"], made["drafter"]
    assert (verifier["model"], verifier["port"], verifier["metrics_port"]) == ("t", 50052, 9052)
    assert (drafter["model"], drafter["port"], drafter["metrics_port"]) == ("d", 50053, 9053)
    assert (drafter["draft_mass"], drafter["draft_max_support"]) == (0.99, 512)
    assert FakeStack.made.start_timeout_s is None, "models may take as long as they need"


def test_no_default_is_stronger_than_a_variable() -> None:
    """Whatever `up` passes to a service, bar the models, which are said by options here."""
    for service, name in [(service, name) for service, made in options().items() for name in made if name != "model"]:
        said = options(**{f"{service.upper()}_{name.upper()}": "7"})[service][name]
        assert str(said) == "7", (service, name)


def test_variables_name_models_and_options_are_stronger_than_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"DRAFTWIRE_VERIFIER_MODEL": "big", "DRAFTWIRE_DRAFTER_MODEL": "small"}
    assert CliRunner(env=environment).invoke(app, ["up"]).exit_code == 0
    assert [FakeStack.made.options[name]["model"] for name in ("verifier", "drafter")] == ["big", "small"]
    made = options("--port", "1", "--http-port", "2", GATEWAY_PORT="7", GATEWAY_HTTP_PORT="8", VERIFIER_MODEL="x")
    assert (made["gateway"]["port"], made["gateway"]["http_port"], made["verifier"]["model"]) == (1, 2, "t")


def test_free_ports_are_free_for_metrics_too_so_that_two_stacks_run_beside_each_other() -> None:
    made = options(*FREE)
    assert all(made[name]["port"] == made[name]["metrics_port"] == 0 for name in SERVICES)
    assert options(*FREE, VERIFIER_METRICS_PORT="7")["verifier"]["metrics_port"] == "7"


def test_http_port_that_is_none_is_wrong_usage() -> None:
    for text in ("-1", "65536", "many", "1.5"):
        result = up("--http-port", text)
        assert (result.exit_code, "0..65535" in result.stderr) == (2, True), text


def test_page_is_named_where_there_is_one() -> None:
    assert "ready on 127.0.0.1:1; open https://127.0.0.1:2, or in another terminal: draftwire generate" in up().stderr
    result = up(GATEWAY_HTTP_PORT="none")
    assert FakeStack.made.options["gateway"]["http_port"] is None
    assert "ready on 127.0.0.1:1; in another terminal: draftwire generate" in result.stderr


def test_nothing_in_a_log_is_obeyed_by_a_terminal() -> None:
    assert "verifier a␛[2J text=[/x] �1m\n" in up().stderr
