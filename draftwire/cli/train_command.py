"""`draftwire train`: train a draft head for a target."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwire.cli.exits import FAILED, MISUSED, end
from draftwire.errors import InvalidRequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = ("eagle3", "medusa", "hydra")
HELD_OUT_SHARE = 0.05
"""Share of the tokens, at the end of the files, that are not trained on."""


def train(
    kind: Annotated[str, typer.Argument(help=f"Kind of head: {', '.join(KINDS)}.")],
    target: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the target model.")],
    data: Annotated[
        list[Path], typer.Option(exists=True, dir_okay=False, readable=True, help="Text in UTF-8; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the head.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to train on, repeats included.")] = 4_000_000,
    steps: Annotated[int, typer.Option(min=1, max=16, help="Draft tokens in a row.")] = 4,
    layers: Annotated[
        list[int] | None,
        typer.Option(help="Layers whose inputs EAGLE-3 reads; repeatable.", show_default="2, n/2, n-3"),
    ] = None,
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(min=1, help="So many tokens that EAGLE-3 can draft, the most frequent.", show_default="all"),
    ] = None,
    mlp_width: Annotated[
        int | None, typer.Option(min=1, help="Width of EAGLE-3's MLP.", show_default="the target's")
    ] = None,
    own_output: Annotated[
        bool,
        typer.Option(
            "--own-output/--target-output",
            help="Whether EAGLE-3 has an output layer of its own, or takes the target's rows, which are not stored.",
        ),
    ] = True,
    batch_tokens: Annotated[int, typer.Option(min=64, help="Tokens of an optimiser step.")] = 2048,
    window: Annotated[int, typer.Option(min=32, help="Tokens of a training text.")] = 256,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    compiled: Annotated[bool, typer.Option(help="Compile the training step; needs a C++ compiler.")] = False,
    seed: int = 0,
) -> None:
    """Train a draft head on the target's features of texts, best of texts that the target has written itself.

    Acceptance is printed before and after, by place in the block, on the last twentieth of the tokens. Interrupted, it
    goes on where it was when started again. The folder is in the format of `speculators`. Exits with 2 if the texts or
    the target are not what they have to be, or the device is missing.
    """
    if kind not in KINDS:
        end(MISUSED, InvalidRequestError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}"))
    try:
        import torch

        from draftwire.options.heads.head_names import HeadKind
        from draftwire.training.batches import TrainingTexts
        from draftwire.training.heads.head_recipe import HeadRecipe
        from draftwire.training.heads.head_training import train_head
        from draftwire.training.plan import Phase

        torch.set_num_threads(threads)
        ids = _token_ids(target, data)
        kept = len(ids) - max(1, round(HELD_OUT_SHARE * len(ids)))
        recipe = HeadRecipe(
            HeadKind(kind),
            tokens,
            steps,
            taps=tuple(layers) if layers else None,
            draft_vocab_size=draft_vocabulary,
            intermediate_size=mlp_width,
            trains_output=own_output,
            batch_tokens=batch_tokens,
            phases=(Phase(1.0, window),),
            seed=seed,
        )
        texts = TrainingTexts(ids[:kept], 1.0)
        train_head(target, [texts], ids[kept:], recipe, out, compiled, device=device, report=typer.echo)
    except ImportError as error:
        end(MISUSED, f"this needs pip install 'draftwire[services]' ({error})")
    except (InvalidRequestError, ValueError) as error:
        end(MISUSED, error)
    except OSError as error:
        end(FAILED, f"{out} cannot be written: {error}")
    typer.echo(str(out))


def _token_ids(target: Path, data: list[Path]) -> "NDArray[Any]":
    """Returns the ids of all files, one after the other, each after the target's first stop token."""
    import numpy as np

    from draftwire.models.card import load_card

    card = load_card(str(target))
    separator = list(card.description.stop_token_ids[:1])
    ids: list[int] = []
    for path in data:
        try:
            text = path.read_text(encoding="utf-8")
        except ValueError as error:
            raise InvalidRequestError(f"{path} is no text in UTF-8") from error
        ids += separator + card.tokenizer.encode(text, add_special_tokens=False)
    return np.asarray(ids, np.uint16 if card.description.vocab_size <= 2**16 else np.uint32)
