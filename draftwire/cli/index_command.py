"""`draftwire index`: build what drafts are retrieved from."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwire.cli.exits import FAILED, MISUSED, end
from draftwire.cli.named_models import embedded_model
from draftwire.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.progress import Progress
    from tokenizers import Tokenizer

    from draftwire.models.card import ModelCard
    from draftwire.options.model_free.retrieval_store import StoreIndex

index_app = typer.Typer(no_args_is_help=True, help="Index files, for drafts that are retrieved from them.")


@index_app.command()
def build(
    files: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, readable=True, help="Texts, in UTF-8; no folders.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the store.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Target model: folder or hub name.", show_default="the embedded one")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the store that the folder holds.")] = False,
) -> None:
    """Build a retrieval store: drafts go on as these files do.

    Services take it with --retrieval-store. It is of one tokenizer, the target's. A store that is replaced stays usable
    where it is open. Exits with 2 if the store cannot be built of such files or there, and with 1 if memory or disk are
    too small for it.
    """
    from rich.progress import TaskProgressColumn

    from draftwire.cli.console import make_console, make_progress

    started = time.monotonic()
    try:
        built = _build(files, out, tokenizer, force, make_progress(make_console(stderr=True), TaskProgressColumn()))
    except InvalidRequestError as error:
        end(MISUSED, error)
    except (OSError, MemoryError) as error:
        end(FAILED, f"{out} cannot be built: {str(error) or 'no memory'}")
    duration_s = time.monotonic() - started
    typer.echo(f"{built.num_tokens:,} tokens, {built.num_bytes / 1e6:,.1f} MB on disk, {duration_s:.1f} s: {out}")


def _build(files: list[Path], out: Path, model: str | None, force: bool, bar: "Progress") -> "StoreIndex":
    """Builds the store, and draws how far it is.

    Raises:
        InvalidRequestError: a file, the folder or the tokenizer is not what it has to be.
        OSError: the store cannot be written.
    """
    try:
        from draftwire.options.model_free.store_building import build_store, check_files, prepare_folder, read_tokens

        prepare_folder(out, force)
        num_bytes = check_files(files)
        card = _card(model)
    except ImportError as error:
        raise InvalidRequestError(f"this needs pip install 'draftwire[services]' ({error})") from error
    vocab_size = max(card.description.vocab_size, len(card.vocabulary))
    with bar as progress:
        reading, sorting = progress.add_task("tokenizing", total=num_bytes), progress.add_task("sorting", total=None)
        return build_store(
            out,
            read_tokens(files, _backend(card), vocab_size, lambda read: progress.advance(reading, read)),
            card.description.vocabulary_fingerprint,
            vocab_size,
            replace=force,
            on_round=lambda done, of: progress.update(sorting, completed=done, total=of),
        )


def _card(model: str | None) -> "ModelCard":
    """Loads the tokenizer of a model, and no weights; None is the embedded target."""
    from draftwire.models.card import load_card

    try:
        name = model or embedded_model("target")
    except InvalidRequestError as error:
        raise InvalidRequestError("the embedded pair is not installed; pass --tokenizer") from error
    try:
        return load_card(name)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"the tokenizer of {name} cannot be loaded: {error}") from error


def _backend(card: "ModelCard") -> "Tokenizer":
    from tokenizers import Tokenizer

    backend = getattr(card.tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise InvalidRequestError(
            f"the tokenizer of {card.description.name} cannot be used: it is not one of the tokenizers library"
        )
    return backend
