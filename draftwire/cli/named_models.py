"""Models as they are named on the command line: folders, names of the hub, GGUF files, and names of this project."""

from pathlib import Path
from typing import TYPE_CHECKING

from draftwire.errors import InvalidRequestError
from draftwire.models.fetching import PACKAGED, fetched_file
from draftwire.models.gguf.cache import converted_folder
from draftwire.models.model_names import is_gguf

if TYPE_CHECKING:
    from rich.console import Console

EMBEDDED = "embedded"
"""Names the pair of the repository, its target or its drafter."""
CHAT_MODEL = "smollm2"
"""Served where no target is named: small, and answers."""


def folder_of(name: str, console: "Console | None" = None) -> str:
    """Returns the folder of a fetched model or a GGUF file, which is converted if it has not been, or the name itself.

    Args:
        name: of the model.
        console: shows how far it is.

    Raises:
        InvalidRequestError: it has not been fetched, the file is broken or its model is not known, or the disk has no
            room or cannot be written.
        UnavailableError: it could not be converted.
    """
    if name in PACKAGED:
        name = str(fetched_file(name))
    if not is_gguf(name):
        return name

    def report(*, share: float) -> None:
        if console is not None:
            console.print(f"reading {Path(name).name}: {share:.0%}")

    return str(converted_folder(name, report))


def embedded_folder(part: str) -> Path:
    """Returns where a model of the embedded pair is, in a checkout of the repository."""
    return Path(__file__).resolve().parents[2] / "models" / part


def embedded_model(part: str) -> str:
    """Returns the folder of a model of the embedded pair.

    Raises:
        InvalidRequestError: the folder is missing, because this is not a checkout of the repository.
    """
    folder = embedded_folder(part)
    if not (folder / "config.json").is_file():
        raise InvalidRequestError(f"the embedded pair is not installed ({folder}); pass --target and --drafter")
    return str(folder)
