"""Command line of the training steps, in the order in which they run.

    python -m draftwire.training tokenizer
    python -m draftwire.training target
    python -m draftwire.training samples
    python -m draftwire.training drafter
    python -m draftwire.training evaluate

Each step reads what the one before wrote, can be interrupted and started again, and gives the same result for the
same seed, library and machine. The steps need the standard library's sources and about two CPU hours, no network.
"""

from pathlib import Path
from typing import Annotated, cast

import numpy as np
import torch
import typer
from rich.progress import track

from draftwire.training.corpus import SourceFile, encode_files, save_tokenizer, standard_library, train_tokenizer
from draftwire.training.distillation import distillation_loss, next_token_loss, sample_continuations
from draftwire.training.evaluation import held_out_loss, measure_acceptance
from draftwire.training.pair import CONTEXT_LENGTH, DRAFTER, TARGET, inherit_embeddings, load_float32, save_bf16
from draftwire.training.trainer import Trainer, TrainingPlan

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

END_OF_TEXT_ID = 0

ModelsFolder = Annotated[Path, typer.Option(help="Folder of the pair.")]
WorkFolder = Annotated[Path, typer.Option(help="Folder of token arrays and checkpoints; never committed.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Compiled = Annotated[bool, typer.Option(help="Compile the model first: about 1.2 times as fast, needs a C++ compiler.")]


def _split() -> tuple[list[SourceFile], list[SourceFile]]:
    files = list(standard_library())
    return [f for f in files if not f.held_out], [f for f in files if f.held_out]


@app.command()
def tokenizer(
    models: ModelsFolder = Path("models"), work: WorkFolder = Path(".training"), vocab_size: int = 4096
) -> None:
    """Train the tokenizer on the training files and encode both parts of the corpus."""
    training, held_out = _split()
    trained = train_tokenizer((file.text for file in training), vocab_size)
    for name in ("target", "drafter"):
        save_tokenizer(trained, models / name, CONTEXT_LENGTH)
    work.mkdir(parents=True, exist_ok=True)
    for name, files in (("training", training), ("held_out", held_out)):
        ids = encode_files(trained, files, END_OF_TEXT_ID)
        np.save(work / f"{name}.npy", ids)
        size = sum(len(file.text) for file in files)
        print(f"{name}: {len(files)} files, {size:,} characters, {len(ids):,} tokens")


@app.command()
def target(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    tokens: Annotated[int, typer.Option(help="Tokens to train on.")] = 12_000_000,
    threads: Threads = 2,
    compiled: Compiled = True,
    seed: int = 1,
) -> None:
    """Train the target on the corpus."""
    torch.set_num_threads(threads)
    ids = np.load(work / "training.npy")
    model = TARGET.build(vocab_size=4096, seed=seed)
    plan = TrainingPlan(total_tokens=tokens, seed=seed)
    Trainer(model, plan, work / "target.pt", compiled).run(ids, next_token_loss, "target")
    save_bf16(model, models / "target")


@app.command()
def samples(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    batches: Annotated[int, typer.Option(help="Batches of 128 continuations, 192 tokens each.")] = 30,
    threads: Threads = 2,
    seed: int = 2,
) -> None:
    """Let the target write text for the drafter to learn from."""
    torch.set_num_threads(threads)
    ids = np.load(work / "training.npy")
    model = load_float32(models / "target")
    cast(torch.nn.Module, model).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    written = []
    for _ in track(range(batches), "sampling"):
        starts = torch.randint(0, len(ids) - 64, (128,), generator=generator).tolist()
        prompts = np.stack([ids[start : start + 64] for start in starts])
        written.append(sample_continuations(model, prompts, 192, generator).ravel())
    np.save(work / "samples.npy", np.concatenate(written))


@app.command()
def drafter(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    tokens: Annotated[int, typer.Option(help="Tokens to distil on.")] = 5_000_000,
    threads: Threads = 2,
    compiled: Compiled = True,
    seed: int = 3,
) -> None:
    """Distil the drafter from the target, on the corpus and on the target's own text."""
    torch.set_num_threads(threads)
    corpus, written = np.load(work / "training.npy"), np.load(work / "samples.npy")
    teacher = load_float32(models / "target")
    model = DRAFTER.build(vocab_size=4096, seed=seed)
    inherit_embeddings(model, teacher)
    plan = TrainingPlan(total_tokens=tokens, batch_tokens=8_192, seed=seed)
    # The drafter is used on the target's own text, so that text is three times as frequent.
    ids = np.concatenate([written, written, written, corpus])
    Trainer(model, plan, work / "drafter.pt", compiled).run(ids, distillation_loss(teacher, compiled), "drafter")
    save_bf16(model, models / "drafter")


@app.command()
def evaluate(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    num_prompts: Annotated[int, typer.Option(help="Held-out prompts of 64 tokens to continue.")] = 100,
    threads: Threads = 2,
    seed: int = 4,
) -> None:
    """Print the held-out loss of both models and the acceptance rate of the pair."""
    torch.set_num_threads(threads)
    held_out = np.load(work / "held_out.npy")
    pair = {name: load_float32(models / name) for name in ("target", "drafter")}
    for name, model in pair.items():
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}: {parameters / 1e6:.1f} M parameters, held-out loss {held_out_loss(model, held_out):.3f} nats")
    starts = np.random.default_rng(seed).integers(0, len(held_out) - 64, num_prompts)
    prompts = [held_out[start : start + 64].tolist() for start in starts]
    for temperature in (0.0, 1.0):
        for rule in ("token", "block"):
            print(measure_acceptance(pair["target"], pair["drafter"], prompts, rule, temperature, block_length=4))


if __name__ == "__main__":
    app()
