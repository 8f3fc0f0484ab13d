"""`draftwire up`: the three services on this machine, with one command."""

import os
import shutil
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
from draftwire.cli.connection_options import DEFAULT_ADDRESS
from draftwire.cli.exits import FAILED, end
from draftwire.cli.named_models import CHAT_MODEL, EMBEDDED, embedded_folder, embedded_model, folder_of
from draftwire.cli.options import variable
from draftwire.errors import InvalidRequestError
from draftwire.models.fetching import PACKAGED
from draftwire.models.folder import check_model, has_chat_template
from draftwire.options.model_free.names import are_text_drafters
from draftwire.runtime.addresses import is_taken
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
SMALL_MODEL_BYTES = 64 * 2**20
"""Models with fewer bytes of weights run as fast on one thread as on several."""
NO_DRAFTER = "none"
"""Stands in the place of a draft model."""
COLORS = {"drafter": "cyan", "verifier": "magenta", "gateway": "green"}


def _option(service: str, setting: str, text: str, **more: Any) -> Any:
    """Returns the typer option for a service's setting; the service's own variable sets it too."""
    return typer.Option(envvar=variable(service, setting), help=text, **more)


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
    engine: EngineOption = None,
    weights: WeightsOption = None,
    port: Annotated[int, _port("gateway")] = 50051,
    verifier_port: Annotated[int, _port("verifier")] = 50052,
    drafter_port: Annotated[int, _port("drafter")] = 50053,
    http_port: HttpPort = HTTP_PORT,
    num_speculative_tokens: SpeculativeOption = None,
    log: Annotated[bool, typer.Option("--log", help="Lines of the services' logs, on a terminal too.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Start a service again that is lost; else stop everything.")
    ] = True,
) -> None:
    """Start drafter, verifier and gateway, and run them until Ctrl-C.

    On a terminal, a table shows what they do; elsewhere, and with --log, the lines of their logs.

    A service that is lost is started again while the others go on, unless it is lost three times in a row.

    Everything else is set by environment variables, such as DRAFTWIRE_VERIFIER_DEVICE=cuda:0; see `draftwire serve
    verifier --help`.
    """
    guard_stderr(ends_with_reader=True)  # the services outlive a full disk, and so does this
    from draftwire.cli.console import make_console
    from draftwire.cli.preflight import check_stack

    computing = {"engine": engine, "weights": weights}
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
        options[name]["drain_seconds"] = _or_variable(name, "drain_seconds", DRAIN_SECONDS)
    options["gateway"]["http_port"] = http_port
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
        screen.notice(f"[bold]ready[/bold] on {stack.address}{page} in another terminal: {command}")
        try:
            return Supervisor(stack, lose, restarts).run()
        except KeyboardInterrupt:
            screen.notice(_stopping(stack, float(options["gateway"]["drain_seconds"])))
            return None


def answers(model: str) -> bool:
    """Whether a model's folder has a template for conversations; that of the embedded target is for tests alone."""
    return has_chat_template(Path(model)) and Path(model) != embedded_folder("target")


def own_command() -> str:
    """Returns this command as it can be typed here: its name if the shell finds it, else its path."""
    own = Path(sys.argv[0])
    found = shutil.which(own.name)
    if own.name != "draftwire" or not own.exists() or (found is not None and Path(found).samefile(own)):
        return "draftwire"
    return os.path.relpath(own) if own.absolute().is_relative_to(Path.cwd()) else str(own)


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


def default_target(drafts: Mapping[str, str | None]) -> str:
    """Returns the model that is served where no target is named.

    Args:
        drafts: what else is named, by option: a model for a target.

    Raises:
        InvalidRequestError: something is, or the model has not been fetched.
    """
    for option, model in drafts.items():
        if model not in (None, NO_DRAFTER):
            raise InvalidRequestError(
                f"{option} {model} drafts for a target, which is to be named too: --target {EMBEDDED} is the small "
                "pair's of the repository"
            )
    if not PACKAGED[CHAT_MODEL].file.is_file():
        raise InvalidRequestError(
            f"the model that answers where no --target is named has not been fetched: {own_command()} fetch "
            f"{CHAT_MODEL}, or serve the small pair of the repository: --target {EMBEDDED}"
        )
    return CHAT_MODEL


def stack_options(
    target: str,
    drafter: str | None,
    num_speculative_tokens: int | None,
    draft_head: str | None = None,
    computing: Mapping[str, str | None] | None = None,
    console: "Console | None" = None,
) -> dict[str, dict[str, Any]]:
    """Returns the options of a `LocalStack`.

    Args:
        target: model of the verifier, as for `folder_of`, or `EMBEDDED`.
        drafter: model of the drafter; None is the embedded one beside the embedded target without a head, and
            otherwise, as `NO_DRAFTER`, none: the verifier drafts by itself.
        num_speculative_tokens: draft tokens per round where a request does not say; None chooses by measurement.
        draft_head: folder of a head that drafts inside the verifier; None if there is none.
        computing: settings by which both models are run; one that is None is the services' own.
        console: shows how far the conversion of a file is.

    Raises:
        InvalidRequestError: the embedded pair is not installed, a model has not been fetched, or its folder or file
            lacks something.
        UnavailableError: a file could not be converted.
    """
    if drafter is None:
        drafter = EMBEDDED if target == EMBEDDED and draft_head is None else NO_DRAFTER
    named = {"verifier": target, "drafter": drafter}
    parts = {"verifier": "target", "drafter": "drafter"}
    models = {
        service: embedded_model(parts[service]) if name == EMBEDDED else folder_of(name, console)
        for service, name in named.items()
        if name != NO_DRAFTER
    }
    strategy = str(_or_variable("drafter", "strategy", ""))
    for service, model in models.items():
        check_model(model, needs_weights=service == "verifier" or not are_text_drafters(strategy))
    # On one machine bytes are nearly free, and the mass that a sparse distribution leaves out costs acceptance.
    drafts = {"draft_mass": 0.99, "draft_max_support": 512}
    options: dict[str, dict[str, Any]] = {"gateway": {}}
    if num_speculative_tokens is not None:
        options["gateway"] |= {"speculation": "fixed", "num_speculative_tokens": num_speculative_tokens}
    for service, model in models.items():
        defaults = {"threads": threads_for(model), **(drafts if service == "drafter" else {})}
        settings = {name: _or_variable(service, name, default) for name, default in defaults.items()}
        options[service] = {"model": model, **settings}
        if named[service] == CHAT_MODEL and str(_or_variable(service, "device", "cpu")) == "cpu":
            # By whichever engine, texts at temperature 0 are then the same with drafts and without.
            options[service]["dtype"] = _or_variable(service, "dtype", "float32")
        if service == "verifier" or not are_text_drafters(strategy):
            options[service] |= {name: value for name, value in (computing or {}).items() if value is not None}
    if draft_head is not None:
        options["verifier"]["draft_head"] = draft_head
    return options


def _or_variable(service: str, setting: str, default: object) -> object:
    """Returns the value of a service's variable, as text; the default if the variable is not set."""
    return os.environ.get(variable(service, setting), default)


def _metrics_port(service: str, port: int) -> object:
    """Returns the port of a service's `/metrics`: a free one (0) if the usual one is taken, or its own port is 0."""
    usual = METRICS_PORTS.get(service, 0) if port else 0
    return _or_variable(service, "metrics_port", usual if is_free(usual) else 0)


def threads_for(model: str) -> int:
    """Returns how many threads run a model fastest: all cores, or 1 if waking threads costs more than they save.

    With one session, drafter and verifier work in turn, so each may use all cores; see `docs/speed.md`.
    """
    size = sum(file.stat().st_size for file in Path(model).expanduser().glob("*.safetensors"))
    is_small = 0 < size < SMALL_MODEL_BYTES  # a model named by its hub name has no files here: size 0
    return 1 if is_small else os.cpu_count() or 1


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

    shown = {key: value for key, value in line.items() if key not in ("event", "level", "timestamp", "service")}
    pairs = " ".join(f"{key}={value}" for key, value in shown.items())
    text = visible(f"{line['event']} {pairs}")
    style = {"warning": "yellow", "error": "red"}.get(str(line.get("level")), "")
    return Text.assemble((f"{service:>8}", COLORS[service]), " ", (text, style))
