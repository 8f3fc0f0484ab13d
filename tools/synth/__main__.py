"""`python -m tools.synth`: make a synthetic pair of models of real size, with a chosen acceptance rate."""

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwire.cli.exits import FAILED, MISUSED, end
from draftwire.errors import InvalidRequestError
from draftwire.runtime.openmp import set_waiting

if TYPE_CHECKING:
    from rich.console import Console

    from tools.synth.synthesis import ModelShape, SyntheticPair, Trial

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Dtype(StrEnum):  # typer takes a `Literal` as of 0.19 only
    """Types of weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@app.command()
def synth(
    shape: Annotated[str, typer.Option(help="Name of a shape, or path of a Llama-type config.json.")],
    out: Annotated[Path, typer.Option(help="Folder for target/, drafter/ and synthesis.json.")],
    draft_layers: Annotated[int, typer.Option(help="Layers of the drafter.")] = 2,
    agreement: Annotated[float, typer.Option(help="Wanted acceptance of a draft token, above 0, at most 1.")] = 0.8,
    temperature: Annotated[float, typer.Option(help="At which they agree so far; 0 is greedy.")] = 1.0,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.FLOAT32,
    device: Annotated[str, typer.Option(help="Where the pair is made: cpu, cuda:0.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of weights and measured texts.", min=0)] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="torch's choice", min=1)] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
) -> None:
    """Make a synthetic pair: as fast as real models of the shape, with texts that mean nothing.

    The models are random; the drafter is the target's first layers, and what the further layers add is scaled until the
    two agree as far as wanted on texts of the target's own. Exits with 2 if that cannot be done,
    and with 1 if memory or disk are too small for it.
    """
    from rich.markup import escape

    from draftwire.cli.console import make_console

    console = make_console(stderr=True)
    started = time.monotonic()
    set_waiting()
    try:
        try:
            import torch
            from safetensors import SafetensorError

            from draftwire.method.devices import prepare
            from tools.synth.synthesis import synthesize, write_pair
        except ImportError as error:
            raise InvalidRequestError(f"this needs torch: pip install 'draftwire[services]' ({error})") from error
        chosen = _shape(shape)
        _prepare_folder(out, force)
        prepare(device)
        if threads is not None:
            torch.set_num_threads(threads)
        with console.status(f"making and measuring a pair of shape {escape(shape)}"):
            pair = synthesize(
                chosen,
                draft_layers=draft_layers,
                agreement=agreement,
                temperature=temperature,
                dtype=getattr(torch, dtype.value),
                device=device,
                seed=seed,
                on_trial=lambda trial: _print_trial(console, trial, started),
            )
            try:
                write_pair(pair, out)
            except (OSError, SafetensorError) as error:
                end(FAILED, f"{out} cannot be written: {error}")
    except InvalidRequestError as error:
        end(MISUSED, error)
    except RuntimeError as error:  # torch raises it on every device when memory is exhausted
        if "allocate" not in str(error):
            raise
        end(FAILED, f"no memory for a pair of shape {shape} on {device}: {str(error).partition(chr(10))[0]}")
    _print_pair(pair, time.monotonic() - started)
    typer.echo(f"draftwire up --target {out / 'target'} --drafter {out / 'drafter'}")


def _shape(name: str) -> "ModelShape":
    """Returns the shape with this name, or reads it from a file if the name looks like a path."""
    from tools.synth.synthesis import SHAPES, read_shape

    if name in SHAPES:
        return SHAPES[name]
    if Path(name).is_file() or "/" in name or name.endswith(".json"):
        return read_shape(Path(name))
    raise InvalidRequestError(f"no shape {name!r}; known: {', '.join(SHAPES)}, or the path of a config.json")


def _prepare_folder(folder: Path, force: bool) -> None:
    """Creates the folder, before minutes are spent on its contents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not force:
            raise InvalidRequestError(f"{folder} is not empty; pass --force to write into it nevertheless")
    except OSError as error:
        raise InvalidRequestError(f"{folder} cannot be written to: {error}") from error


def _print_trial(console: "Console", trial: "Trial", started: float) -> None:
    console.print(
        f"{time.monotonic() - started:6.1f} s  scale {trial.scale:.5f}  agreement {trial.agreement.mean:.3f} "
        f"+- {trial.agreement.standard_error:.3f}",
    )


def _print_pair(pair: "SyntheticPair", duration_s: float) -> None:
    found = pair.agreement
    typer.echo(f"agreement  {found.mean:.3f} +- {found.standard_error:.3f} at temperature {pair.temperature:g}")
    typer.echo(f"scale      {pair.scale:.5f}")
    for name, model in (("target", pair.target), ("drafter", pair.drafter)):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        typer.echo(f"{name:<9}  {parameters / 1e6:,.1f} M parameters, {len(model.model.layers)} layers, {model.dtype}")
    typer.echo(f"took       {duration_s:.0f} s")


if __name__ == "__main__":
    app(prog_name="python -m tools.synth")
