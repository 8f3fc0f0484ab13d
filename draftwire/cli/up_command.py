"""`draftwire up`: the three services on this machine, with one command."""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwire.cli.colors import visible
from draftwire.cli.config_file import use_config_file
from draftwire.cli.connection_options import DEFAULT_ADDRESS
from draftwire.cli.exits import FAILED, end
from draftwire.cli.named_models import CHAT_MODEL, EMBEDDED
from draftwire.cli.options import variable
from draftwire.cli.stack_options import (
    SERVICE,
    Computing,
    answers,
    default_target,
    or_variable,
    own_command,
    stack_options,
)
from draftwire.errors import InvalidRequestError
from draftwire.models.fetching import PACKAGED
from draftwire.runtime.addresses import UNSPECIFIED, is_loopback, is_of_this_machine, is_taken, own_address
from draftwire.runtime.log_stream import guard_stderr

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from draftwire.cli.local_stack import LocalStack
    from draftwire.cli.supervisor import Loss

DEMO_PROMPT = "def merge_sorted(a, b):"
HTTP_PORT = 8000
METRICS_PORTS = {"verifier": 9052, "drafter": 9053}
"""Default metrics ports. The gateway takes a free one."""
PAGE = f"http://127.0.0.1:{HTTP_PORT}"
"""Default URL of the playground of `up`."""
CHAT_PAGE = "#chat"
"""Ends its URL where it is to begin as a conversation."""
DRAIN_SECONDS = 2.0
"""How long requests may run on after Ctrl-C."""
API_KEY_VARIABLE = variable("gateway", "api_key")
COLORS = {"drafter": "cyan", "verifier": "magenta", "gateway": "green"}


def _option(service: str, setting: str, text: str, **more: Any) -> Any:
    """Returns the typer option for a service's setting; the service's own variable sets it too."""
    return typer.Option(envvar=variable(service, setting), help=text, **more)


def _read_config(file: Path | None) -> Path | None:
    """Reads the file of settings before any other option takes its default from a variable."""
    if file is not None:
        use_config_file(file)
    return file


def _port(service: str) -> Any:
    return _option(service, "port", f"gRPC port of the {service}; 0 takes a free one.", min=0, max=65535)


def port_or_none(text: str | int) -> int | None:
    """Parses the port of the HTTP edge; "none" is None.

    Raises:
        typer.BadParameter: the text is neither a port nor "none".
    """
    if str(text).lower() == "none":
        return None
    if not str(text).isdecimal() or int(text) > 65535:
        raise typer.BadParameter(f"{text} is neither in 0..65535 nor none")
    return int(text)


TargetOption = Annotated[
    str | None,
    _option(
        "verifier",
        "model",
        f"Target model: folder, GGUF file, hub name, {EMBEDDED}, or {', '.join(PACKAGED)} once it is fetched.",
        show_default=CHAT_MODEL,
    ),
]
DrafterOption = Annotated[
    str | None,
    _option(
        "drafter",
        "model",
        'Draft model, as --target; "none" for none: then the verifier drafts from earlier places of each text.',
        show_default=f"the embedded one beside --target {EMBEDDED}, else none",
    ),
]
HeadOption = Annotated[
    str | None,
    _option(
        "verifier",
        "draft_head",
        "Folder of a head of the target, which drafts inside the verifier: no drafter is started unless one is named.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,
        callback=_read_config,
        help="File of settings, TOML or YAML: sections verifier, drafter, gateway; see docs/serving.md.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="Device of both models, such as cuda:0.", show_default="the services' own: cpu"),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads of each model.", show_default="all cores, one for a small model"),
]
PlacementOption = Annotated[
    str,
    typer.Option(
        help="Where the drafter drafts: here, in the verifier's process; service, in one of its own; or auto, here "
        "where both are on one device.",
    ),
]
HostOption = Annotated[
    str | None,
    _option(
        "gateway",
        "host",
        "Address at which the gateway listens; 0.0.0.0 lets other machines in, and needs --api-key.",
        show_default="127.0.0.1: this machine alone",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        help="Engine of both models: auto, draftwire, openvino; see docs/cpu.md.",
        show_default="the services' own: auto",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        help="How openvino stores both models' weights: auto, f32, u8.",
        show_default="the services' own: auto, as they are",
    ),
]
SpeculativeOption = Annotated[
    int | None,
    _option(
        "gateway",
        "num_speculative_tokens",
        "Draft tokens per round where a request does not say.",
        show_default="chosen by measurement",
        min=0,
    ),
]
HttpPort = Annotated[
    int | None,
    _option(
        "gateway",
        "http_port",
        'HTTP port of the gateway; 0 takes a free one, "none" serves none.',
        parser=port_or_none,
        metavar="INTEGER|none",
    ),
]


def up(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    draft_head: HeadOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    draft_device: Annotated[str | None, typer.Option(help="Device of the drafter.", show_default="--device")] = None,
    draft_threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of the drafter.", show_default="--threads")
    ] = None,
    drafter_placement: PlacementOption = SERVICE,
    engine: EngineOption = None,
    weights: WeightsOption = None,
    host: HostOption = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=API_KEY_VARIABLE,
            help="Key that clients have to show, at least 8 characters; better said by the variable, which no list of "
            "processes shows.",
            show_default="none is needed",
        ),
    ] = None,
    port: Annotated[int, _port("gateway")] = 50051,
    verifier_port: Annotated[int, _port("verifier")] = 50052,
    drafter_port: Annotated[int, _port("drafter")] = 50053,
    http_port: HttpPort = HTTP_PORT,
    num_speculative_tokens: SpeculativeOption = None,
    unknown_parameters: Annotated[
        str | None,
        _option(
            "gateway", "unknown_parameters", "Parameters of HTTP requests that mean nothing here: refuse or ignore."
        ),
    ] = None,
    _config: ConfigOption = None,
    log: Annotated[bool, typer.Option("--log", help="Lines of the services' logs, on a terminal too.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Start a service again that is lost; else stop everything.")
    ] = True,
) -> None:
    """Start drafter, verifier and gateway, and run them until Ctrl-C.

    On a terminal, a table shows what they do; elsewhere, and with --log, the lines of their logs.

    A service that is lost is started again while the others go on, unless it is lost three times in a row.

    Whatever else a service can be told (`draftwire serve verifier --help`) is said by --config, or by environment
    variables, such as DRAFTWIRE_VERIFIER_MAX_SESSIONS=64, which are stronger; options here are stronger than both.
    """
    guard_stderr(ends_with_reader=True)  # the services outlive a full disk, and so does this
    from draftwire.cli.console import make_console
    from draftwire.cli.preflight import check_stack

    computing = Computing(engine, weights, device, threads, draft_device, draft_threads, drafter_placement)
    console = make_console(stderr=True)
    target = target or default_target({"--drafter": drafter, "--draft-head": draft_head})
    options = stack_options(target, drafter, num_speculative_tokens, draft_head, computing, console)
    ports = {"gateway": port, "verifier": verifier_port, "drafter": drafter_port}
    needed = {"port" if name == "gateway" else f"{name}-port": ports[name] for name in options}
    needed["http-port"] = http_port or 0
    taken = [f"--{name} {one}" for name, one in needed.items() if not is_free(one)]
    if taken:
        named = " and ".join([", ".join(taken[:-1])] * (len(taken) > 1) + taken[-1:])
        raise InvalidRequestError(f"something else listens on {named}: stop it, or pass other ports")
    for name in options:
        own_port = ports[name]
        options[name].update(port=own_port, metrics_port=_metrics_port(name, own_port))
        options[name]["drain_seconds"] = or_variable(name, "drain_seconds", DRAIN_SECONDS)
    options["gateway"]["http_port"] = http_port
    if unknown_parameters is not None:
        options["gateway"]["unknown_parameters"] = unknown_parameters
    if api_key is not None:
        os.environ[API_KEY_VARIABLE] = api_key  # which the gateway inherits; its arguments are public
    if host is not None:
        options["gateway"] |= listening_at(host)
    check_stack(options)
    shows_table = not log and sys.stderr.isatty()
    loss = run_until_stopped(options, interrupt_on_signals(), shows_table=shows_table, restarts=restart)
    if loss is not None:
        end(FAILED, f"{loss}, so everything was stopped")


def run_until_stopped(
    options: dict[str, dict[str, Any]], interrupts: "Interrupts", *, shows_table: bool, restarts: bool
) -> "Loss | None":
    """Runs the services until Ctrl-C; a second one ends them at once.

    Returns:
        The loss of the service that was given up; None if the user stopped them.

    Raises:
        UnavailableError: the services did not start.
        KeyboardInterrupt: the user stopped them before they served.
    """
    from draftwire.cli.console import make_console
    from draftwire.cli.live_table import LiveTable
    from draftwire.cli.local_stack import LocalStack
    from draftwire.cli.supervisor import Supervisor

    console = make_console(stderr=True)
    colors = {name: color for name, color in COLORS.items() if name in options}
    table = LiveTable(console, colors) if shows_table else None
    screen = table or LogScreen(console)

    def log(service: str, line: Mapping[str, Any]) -> None:
        screen.take_log(service, line, _log_text(service, line))

    def lose(loss: "Loss") -> None:  # what starts again is a line among those of its log
        if loss.pause_s is not None:
            reason = f"{loss}; it starts again in {loss.pause_s:g} s"
            log(loss.name, {"event": "up.service_lost", "level": "warning", "reason": reason})

    with ExitStack() as cleanup:
        # No timeout: large models may take long to download and read, and the user sees the progress and can stop it.
        stack = LocalStack(options, on_log=log, start_timeout_s=None)
        interrupts.again = stack.kill
        if table is not None:
            cleanup.enter_context(table).watch(stack)
        cleanup.enter_context(stack)
        is_chat = answers(str(options["verifier"]["model"]))
        address = f"{stack.http_address}{f'/{CHAT_PAGE}' if is_chat else ''}"
        page = f"; open [bold]{address}[/bold], or" if stack.services["gateway"].http_port else ";"
        command = f"{own_command()} chat" if is_chat else f'{own_command()} generate "{DEMO_PROMPT}"'
        if stack.address != DEFAULT_ADDRESS:
            command += f" --address {stack.address}"
        if API_KEY_VARIABLE in os.environ:
            command = f"DRAFTWIRE_TOKEN=KEY {command}"
        if page and str(options["gateway"].get("host")) in UNSPECIFIED:
            for_others = stack.http_address.replace("127.0.0.1", own_address())
            page = page.replace(" or", f" from other machines {for_others}, or")
        screen.notice(f"[bold]ready[/bold] on {stack.address}{page} in another terminal: {command}")
        try:
            return Supervisor(stack, lose, restarts).run()
        except KeyboardInterrupt:
            screen.notice(_stopping(stack, float(options["gateway"]["drain_seconds"])))
            return None


def listening_at(host: str) -> dict[str, object]:
    """Returns the gateway's settings that let it listen at an address.

    Raises:
        InvalidRequestError: it is none of this machine, or other machines reach it, and nothing says who may call.
    """
    if is_loopback(host):
        return {"host": host}
    if not is_of_this_machine(host):
        raise InvalidRequestError(f"--host {host} is no address of this machine")
    if not any(variable("gateway", name) in os.environ for name in ("api_key", "tokens_file", "allow_plaintext")):
        raise InvalidRequestError(
            f"--host {host} lets other machines in: --api-key KEY, or {API_KEY_VARIABLE}, says who may call"
        )
    has_tls = variable("gateway", "tls_cert") in os.environ
    return {"host": host} if has_tls else {"host": host, "allow_plaintext": True}


def _stopping(stack: "LocalStack", drain_s: float) -> str:
    """Returns what is said after Ctrl-C: what may still run, and for how long."""
    from draftwire.cli.service_metrics import fetch

    port = stack.services["gateway"].metrics_port
    running = (fetch(port) or {}).get("num_requests_running", 0.0) if port else 0.0
    if not running:
        return "stopping"
    requests = "a request" if running == 1 else f"{running:.0f} requests"
    return f"stopping: {requests} may run for {drain_s:g} s more; Ctrl-C again ends everything now"


def is_free(port: int) -> bool:
    """Whether nothing on this machine listens on a port; 0 stands for a free one."""
    return not is_taken("127.0.0.1", port)


class LogScreen:
    """Output of `up` line by line, in the place of a `LiveTable`."""

    def __init__(self, console: "Console") -> None:
        self._console = console

    def take_log(self, _service: str, _line: Mapping[str, Any], shown: "Text") -> None:
        """Prints a line of a service's log. Called on any thread."""
        self._console.print(shown, soft_wrap=True)

    def notice(self, markup: str) -> None:
        """Prints a message about the whole stack."""
        self._console.print(markup, soft_wrap=True)


def _metrics_port(service: str, port: int) -> object:
    """Returns the port of a service's `/metrics`: a free one (0) if the usual one is taken, or its own port is 0."""
    usual = METRICS_PORTS.get(service, 0) if port else 0
    return or_variable(service, "metrics_port", usual if is_free(usual) else 0)


@dataclass(slots=True)
class Interrupts:
    """Handles signals: the first one raises `KeyboardInterrupt`. Later ones do not interrupt the shutdown, which takes
    a bounded time.
    """

    again: Callable[[], None] = lambda: None
    """Called by the second signal."""
    num_signals: int = 0

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        """Handles a signal."""
        self.num_signals += 1
        if self.num_signals == 1:
            raise KeyboardInterrupt
        if self.num_signals == 2:
            self.again()


def interrupt_on_signals() -> Interrupts:
    """Makes SIGINT and SIGTERM raise `KeyboardInterrupt`, so that cleanup stops the services. Handling SIGINT has to be
    explicit: a shell starts background jobs with SIGINT ignored.
    """
    interrupts = Interrupts()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupts.handle)
    return interrupts


def _log_text(service: str, line: Mapping[str, Any]) -> "Text":
    from rich.text import Text

    said = {key: value for key, value in line.items() if value is not None and value != ""}
    shown = {key: value for key, value in said.items() if key not in ("event", "level", "timestamp", "service")}
    pairs = " ".join(f"{key}={value}" for key, value in shown.items())
    text = visible(f"{line['event']} {pairs}")
    style = {"warning": "yellow", "error": "red"}.get(str(line.get("level")), "")
    return Text.assemble((f"{service:>8}", COLORS[service]), " ", (text, style))
