"""`draftwire up`: what it starts the services with, and what it says."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from draftwire.cli import stack_options as stack_module
from draftwire.cli import supervisor
from draftwire.cli import up_command as up_module
from draftwire.cli.__main__ import app
from draftwire.cli.local_stack import ServiceProcess
from draftwire.cli.named_models import embedded_model
from draftwire.cli.options import SERVICES, meant, settings_of, variable
from draftwire.cli.process_end import ProcessEnd
from draftwire.cli.up_command import Interrupts
from draftwire.models.fetching import SMOLLM2
from draftwire.runtime.log_stream import LogSink

REAL_IS_FREE = up_module.is_free
FREE = ["--port", "0", "--verifier-port", "0", "--drafter-port", "0", "--http-port", "0"]


class FakeStack:
    """Stands for `LocalStack`; is stopped as soon as it runs."""

    made: "FakeStack"
    taken: set[int]
    """Ports that something else listens on."""
    interrupts: Interrupts
    address: str
    lost: list[tuple[str, ProcessEnd]]
    """Services that are lost, one after the other."""

    def __init__(self, options: dict[str, dict[str, Any]], on_log: Any, start_timeout_s: float | None) -> None:
        self.options = options
        self.restarted: list[str] = []
        self.start_timeout_s = start_timeout_s
        self.http_address = "https://127.0.0.1:2"
        http_port = 2 if options["gateway"]["http_port"] is not None else 0
        self.services = {
            "gateway": ServiceProcess("gateway", None, metrics_port=3, http_port=http_port)  # type: ignore[arg-type]
        }
        self.is_guarded = isinstance(sys.stderr.buffer, LogSink)
        on_log("verifier", {"event": "a\x1b[2J", "level": "output", "text": "[/x] \x9b1m"})
        FakeStack.made = self

    def __enter__(self) -> "FakeStack":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def next_end(self, timeout_s: float | None) -> ServiceProcess | None:
        if timeout_s is not None:
            return None  # nothing ends in the pause before a start
        if not FakeStack.lost:
            raise KeyboardInterrupt
        name, ending = FakeStack.lost.pop(0)
        return ServiceProcess(name, None, ending=ending)  # type: ignore[arg-type]

    def restart(self, name: str) -> None:
        self.restarted.append(name)

    def kill(self) -> None:
        self.is_killed = True


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwire.cli.local_stack.LocalStack", FakeStack)
    monkeypatch.setattr("draftwire.cli.preflight.check_stack", lambda _options: None)
    monkeypatch.setattr(up_module, "interrupt_on_signals", lambda: FakeStack.interrupts)
    monkeypatch.setattr(up_module, "is_free", lambda port: port not in FakeStack.taken)
    FakeStack.taken, FakeStack.interrupts, FakeStack.address = set(), Interrupts(), "127.0.0.1:50051"
    FakeStack.lost = []
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
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
    assert made["gateway"] == {"port": 50051, "http_port": 8000, "metrics_port": 0, "drain_seconds": 2.0}
    verifier, drafter = made["verifier"], made["drafter"]
    assert (verifier["model"], verifier["port"], verifier["metrics_port"]) == ("t", 50052, 9052)
    assert (drafter["model"], drafter["port"], drafter["metrics_port"]) == ("d", 50053, 9053)
    assert (drafter["draft_mass"], drafter["draft_max_support"]) == (0.99, 512)
    assert FakeStack.made.start_timeout_s is None, "models may take as long as they need"


def test_head_drafts_in_the_place_of_a_drafter_unless_one_is_named() -> None:
    assert options("--draft-head", "h")["verifier"]["draft_head"] == "h"
    assert "drafter" in FakeStack.made.options
    assert CliRunner().invoke(app, ["up", "--target", "t", "--draft-head", "h"]).exit_code == 0
    assert FakeStack.made.options["verifier"]["draft_head"] == "h"
    assert "drafter" not in FakeStack.made.options
    assert "draft_head" not in options()["verifier"]


def test_drafter_drafts_in_the_verifiers_process_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ("up", "--target", "t", "--drafter", "d", "--drafter-placement")
    assert CliRunner().invoke(app, [*said, "here"]).exit_code == 0
    verifier = FakeStack.made.options["verifier"]
    assert ("drafter" in FakeStack.made.options, verifier["draft_model"], "draft_threads" in verifier) == (
        False,
        "d",
        False,
    )
    assert CliRunner().invoke(app, [*said, "auto", "--threads", "2", "--draft-threads", "1"]).exit_code == 0
    verifier = FakeStack.made.options["verifier"]
    assert (verifier["threads"], verifier["draft_threads"]) == (2, 1)
    for asked in (["service"], ["auto", "--draft-device", "cuda:1"]):
        CliRunner().invoke(app, [*said, *asked])
        assert "draft_model" not in FakeStack.made.options["verifier"]
    monkeypatch.setenv("DRAFTWIRE_DRAFTER_MAX_SESSIONS", "8")
    assert CliRunner().invoke(app, [*said, "auto"]).exit_code == 0
    assert "drafter" in FakeStack.made.options, "which has settings of its own"
    for more, why in ((["--engine", "vllm"], "the target is run by vLLM"), ([], "the drafter's strategy is suffix")):
        monkeypatch.setenv("DRAFTWIRE_DRAFTER_STRATEGY", "suffix" if not more else "auto")
        refused = CliRunner().invoke(app, [*said, "here", *more])
        assert str(refused.exception) == f"--drafter-placement here: {why}"
    refused = CliRunner().invoke(app, ["up", "--target", "t", "--drafter-placement", "here"])
    assert str(refused.exception) == "--drafter-placement here: no drafter is named"
    refused = CliRunner().invoke(app, [*said, "there"])
    assert str(refused.exception) == "drafter-placement is auto, here, service, not 'there'"


def test_drafter_is_started_where_one_is_named_or_belongs_to_the_target() -> None:
    assert CliRunner().invoke(app, ["up", "--target", "t"]).exit_code == 0
    assert list(FakeStack.made.options) == ["gateway", "verifier"]
    assert CliRunner().invoke(app, ["up", "--target", "embedded"]).exit_code == 0
    models = {name: FakeStack.made.options[name].get("model") for name in ("verifier", "drafter")}
    assert models == {"verifier": embedded_model("target"), "drafter": embedded_model("drafter")}
    assert CliRunner().invoke(app, ["up", "--target", "t", "--drafter", "embedded"]).exit_code == 0
    assert FakeStack.made.options["drafter"]["model"] == embedded_model("drafter")


def test_chat_model_is_served_where_no_target_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for arguments in ([], ["--drafter", "none"]):
        refused = CliRunner().invoke(app, ["up", *arguments])
        assert refused.exit_code == 1
        assert str(refused.exception) == (
            "the model that answers where no --target is named has not been fetched: draftwire fetch smollm2, or serve "
            "the small pair of the repository: --target embedded"
        )
    SMOLLM2.file.parent.mkdir(parents=True)
    SMOLLM2.file.touch()
    monkeypatch.setattr(stack_module, "folder_of", lambda name, _console: f"folder of {name}")
    assert CliRunner().invoke(app, ["up"]).exit_code == 0
    assert list(FakeStack.made.options) == ["gateway", "verifier"]
    verifier = FakeStack.made.options["verifier"]
    assert (verifier["model"], verifier["dtype"]) == ("folder of smollm2", "float32")
    for option in ("--drafter", "--draft-head"):
        refused = CliRunner().invoke(app, ["up", option, "small"])
        assert str(refused.exception) == (
            f"{option} small drafts for a target, which is to be named too: --target embedded is the small pair's of "
            "the repository"
        )


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


def test_both_models_are_run_as_the_options_say_and_the_drafter_as_its_own() -> None:
    made = options("--device", "cuda:0", "--threads", "3", "--draft-threads", "1", VERIFIER_THREADS="7")
    assert {name: (made[name]["device"], made[name]["threads"]) for name in ("verifier", "drafter")} == {
        "verifier": ("cuda:0", 3),
        "drafter": ("cuda:0", 1),
    }
    made = options("--draft-device", "cuda:1", "--engine", "draftwire")
    assert (made["drafter"]["device"], made["drafter"]["engine"], made["drafter"]["threads"]) == (
        "cuda:1",
        "draftwire",
        up_module.os.cpu_count(),
    )
    assert "device" not in made["verifier"]


@pytest.mark.usefixtures("environment")
def test_other_machines_are_let_in_with_a_key_which_no_argument_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up_module, "own_address", lambda: "192.0.2.7")
    assert str(up("--host", "192.0.2.7").exception) == "--host 192.0.2.7 is no address of this machine"
    refused = up("--host", "0.0.0.0")
    assert str(refused.exception) == (
        "--host 0.0.0.0 lets other machines in: --api-key KEY, or DRAFTWIRE_GATEWAY_API_KEY, says who may call"
    )
    said = up("--host", "0.0.0.0", "--api-key", "long-enough")
    assert (
        FakeStack.made.options["gateway"] | {"host": "0.0.0.0", "allow_plaintext": True}
        == (FakeStack.made.options["gateway"])
    )
    assert "long-enough" not in str(FakeStack.made.options)
    assert "open https://127.0.0.1:2, from other machines https://192.0.2.7:2, or in another terminal: " in said.stderr
    assert "DRAFTWIRE_TOKEN=KEY draftwire generate" in said.stderr
    assert "allow_plaintext" not in options("--host", "127.0.0.1")["gateway"]
    options("--host", "0.0.0.0", GATEWAY_API_KEY="long-enough", GATEWAY_TLS_CERT="c")
    assert "allow_plaintext" not in FakeStack.made.options["gateway"]


def test_free_ports_are_free_for_metrics_so_that_two_stacks_fit_together() -> None:
    made = options(*FREE)
    assert all(made[name]["port"] == made[name]["metrics_port"] == 0 for name in SERVICES)
    assert options(*FREE, VERIFIER_METRICS_PORT="7")["verifier"]["metrics_port"] == "7"


def test_http_port_that_is_none_is_wrong_usage() -> None:
    for text in ("-1", "65536", "many", "1.5"):
        result = up("--http-port", text)
        assert (result.exit_code, "0..65535" in result.stderr) == (2, True), text


def test_page_is_named_where_there_is_one() -> None:
    ready = "ready on 127.0.0.1:50051; "
    assert f"{ready}open https://127.0.0.1:2, or in another terminal: draftwire generate" in up().stderr
    result = up(GATEWAY_HTTP_PORT="none")
    assert FakeStack.made.options["gateway"]["http_port"] is None
    assert f"{ready}in another terminal: draftwire generate" in result.stderr


def test_command_that_is_said_works_as_it_stands() -> None:
    assert 'draftwire generate "def merge_sorted(a, b):"\n' in up().stderr
    FakeStack.address = "127.0.0.1:7"
    assert 'draftwire generate "def merge_sorted(a, b):" --address 127.0.0.1:7\n' in up().stderr


def test_command_has_its_path_where_the_shell_does_not_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "draftwire"
    command.parent.mkdir()
    command.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(command)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert up_module.own_command() == str(command)
    monkeypatch.chdir(tmp_path)
    assert up_module.own_command() == "bin/draftwire"
    monkeypatch.setenv("PATH", str(command.parent))
    assert up_module.own_command() == "draftwire"


def test_all_ports_that_are_taken_are_named_at_once_each_with_its_option() -> None:
    FakeStack.taken = {50051, 50053, 8000}
    result = up()
    assert result.exit_code == 1
    said = "something else listens on --port 50051, --drafter-port 50053 and --http-port 8000"
    assert str(result.exception) == f"{said}: stop it, or pass other ports"


def test_metrics_port_that_is_taken_is_replaced() -> None:
    FakeStack.taken = {9052}
    made = options()
    assert (made["verifier"]["metrics_port"], made["drafter"]["metrics_port"]) == (0, 9053)


def test_second_interrupt_ends_what_the_first_one_lets_run_on() -> None:
    options()
    interrupts = FakeStack.interrupts
    with pytest.raises(KeyboardInterrupt):
        interrupts.handle(2, None)
    assert not hasattr(FakeStack.made, "is_killed")
    interrupts.handle(2, None)
    assert FakeStack.made.is_killed


def test_what_still_runs_after_an_interrupt_is_said_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for running, said in ((0.0, "stopping\n"), (1.0, "stopping: a request may"), (3.0, "stopping: 3 requests may")):
        monkeypatch.setattr(
            "draftwire.cli.service_metrics.fetch", lambda port, count=running: {"num_requests_running": count}
        )
        assert said in up().stderr
    assert "run for 2 s more; Ctrl-C again ends everything now" in up().stderr


@pytest.mark.parametrize("name", ["--target", "--drafter"])
def test_broken_folder_is_named_before_anything_starts(name: str, tmp_path: Path) -> None:
    result = up(name, str(tmp_path))
    assert (result.exit_code, str(result.exception)) == (1, f"{tmp_path} is empty")


def test_lost_service_restarts_and_the_third_loss_in_a_row_ends_all() -> None:
    killed, failed = ProcessEnd(-9, memory_ran_out=True), ProcessEnd(3)
    FakeStack.lost = [("drafter", killed), ("verifier", failed), ("drafter", killed)]
    result = up()
    assert (result.exit_code, FakeStack.made.restarted) == (0, ["drafter", "verifier", "drafter"])
    said = "the drafter was killed by SIGKILL, by the kernel's out-of-memory killer"
    for words in (f"{said}; it starts again in", "the verifier ended with status 3; it starts again in"):
        assert words in result.stderr
    FakeStack.lost = [("drafter", killed)] * 4
    result = up()
    assert (result.exit_code, FakeStack.made.restarted) == (1, ["drafter", "drafter"])
    assert f"{said}, for the third time without a minute of service between, so everything was" in result.stderr


def test_lost_service_can_end_everything_at_once() -> None:
    FakeStack.lost = [("drafter", ProcessEnd(-11))]
    result = up("--no-restart")
    assert (result.exit_code, FakeStack.made.restarted) == (1, [])
    assert "error: the drafter was killed by SIGSEGV, so everything was stopped\n" in result.stderr


def test_full_disk_of_its_log_ends_nothing() -> None:
    options()
    assert FakeStack.made.is_guarded


def test_port_is_free_unless_something_listens_there() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not REAL_IS_FREE(listener.getsockname()[1])
    assert REAL_IS_FREE(0)


def test_nothing_in_a_log_is_obeyed_by_a_terminal() -> None:
    assert "verifier a␛[2J text=[/x] �1m\n" in up().stderr


def test_misspelt_variable_is_answered_with_the_one_that_was_meant() -> None:
    assert meant("DRAFTWIRE_VERIFIER_DEVISE") == "; did you mean DRAFTWIRE_VERIFIER_DEVICE?"
    assert meant("DRAFTWIRE_ADRESS") == "; did you mean DRAFTWIRE_ADDRESS?"
    assert meant("DRAFTWIRE_SOMETHING_ELSE_ENTIRELY") == ""
