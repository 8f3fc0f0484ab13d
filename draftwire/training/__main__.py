"""Command line of the training steps, in the order in which they run.

    python -m draftwire.training tokenizer
    python -m draftwire.training target
    python -m draftwire.training samples
    python -m draftwire.training copies
    python -m draftwire.training drafter drafter
    python -m draftwire.training drafter drafter-8-layers
    python -m draftwire.training evaluate

Each step reads what the one before wrote, can be interrupted and started again, and gives the same result for the
same seed, library and machine. The steps need the standard library's sources, the packages of constraints.txt and some
four hours of two CPU cores, no network.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import torch
import typer
from rich.progress import track

from draftwire.training.attention import attend_in_chunks
from draftwire.training.batches import Repetition, TrainingTexts
from draftwire.training.conversations import CHAT_TEMPLATE, conversations
from draftwire.training.corpus import encode_texts, packages, save_tokenizer, standard_library, train_tokenizer
from draftwire.training.distillation import distillation_loss, next_token_loss, sample_continuations
from draftwire.training.evaluation import held_out_loss, measure_acceptance, share_repeated
from draftwire.training.pair import (
    CONTEXT_LENGTH,
    DRAFTERS,
    TARGET,
    DrafterName,
    inherit_embeddings,
    load_float32,
    save_bf16,
)
from draftwire.training.plan import Phase, TrainingPlan
from draftwire.training.trainer import Trainer

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

END_OF_TEXT_ID = 0
PROMPT_TOKENS, WRITTEN_TOKENS = 64, 192
SAMPLING_TEMPERATURES = (1.0, 0.6)
PHASES = (Phase(0.65, 256), Phase(0.2, 512), Phase(0.15, 1024))
COPYING_PHASES = (Phase(0.3, 512), Phase(0.7, 1024))
DRAFTER_PHASES = (Phase(0.8, 256), Phase(0.2, 1024))
"""Longer ones at the end too: a model knows nothing of positions that it was not trained on."""

ModelsFolder = Annotated[Path, typer.Option(help="Folder of the pair.")]
WorkFolder = Annotated[Path, typer.Option(help="Folder of token arrays and checkpoints; never committed.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Compiled = Annotated[
    bool, typer.Option(help="Compile the model first: much faster after some minutes, needs a C++ compiler.")
]


@app.command()
def tokenizer(
    models: ModelsFolder = Path("models"), work: WorkFolder = Path(".training"), vocab_size: int = 4096
) -> None:
    """Train the tokenizer on the library's training files, and encode all texts."""
    library = list(standard_library())
    training = [file for file in library if not file.held_out]
    trained = train_tokenizer((file.text for file in training), vocab_size)
    for name in ("target", *DRAFTERS):
        save_tokenizer(trained, models / name, CONTEXT_LENGTH, CHAT_TEMPLATE)
    installed = list(packages())
    texts = {
        "library": [file.text for file in training],
        "packages": [file.text for file in installed],
        "conversations": list(conversations([*training, *installed])),
        "held_out": [file.text for file in library if file.held_out],
    }
    work.mkdir(parents=True, exist_ok=True)
    for name, each in texts.items():
        ids = encode_texts(trained, each, END_OF_TEXT_ID)
        np.save(work / f"{name}.npy", ids)
        print(f"{name}: {len(each)} texts, {sum(map(len, each)):,} characters, {len(ids):,} tokens")


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the texts that a model reads. The library's are most frequent: the held-out files are of it."""

    library: float
    copies: float
    """Windows of the library in which a passage is repeated."""
    packages: float
    conversations: float
    repetition: Repetition

    def sources(self, work: Path) -> list[TrainingTexts]:
        """Returns the texts in `work`, with their shares."""
        library, installed, chats = (np.load(work / f"{name}.npy") for name in ("library", "packages", "conversations"))
        return [
            TrainingTexts(library, self.library),
            TrainingTexts(library, self.copies, self.repetition),
            TrainingTexts(installed, self.packages),
            TrainingTexts(chats, self.conversations),
        ]


READING = Mix(0.68, 0.14, 0.10, 0.08, Repetition(END_OF_TEXT_ID, (0.0, 0.01, 0.03)))
COPYING = Mix(0.30, 0.54, 0.06, 0.10, Repetition(END_OF_TEXT_ID, (0.0, 0.0, 0.02), shortest=0.125, copies=7))
"""A small model copies text with a slip every dozen tokens until it has read some millions of tokens of copies."""


@app.command()
def target(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    tokens: Annotated[int, typer.Option(help="Tokens to train on.")] = 15_000_000,
    threads: Threads = 2,
    compiled: Compiled = True,
    seed: int = 1,
) -> None:
    """Train the target on the corpus."""
    torch.set_num_threads(threads)
    model = TARGET.build(vocab_size=4096, seed=seed)
    attend_in_chunks(model)
    plan = TrainingPlan(total_tokens=tokens, phases=PHASES, seed=seed)
    Trainer(model, plan, work / "target.pt", compiled).run(READING.sources(work), next_token_loss, "target")
    save_bf16(model, models / "target")


@app.command()
def samples(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    batches: Annotated[int, typer.Option(help="Batches of 128 continuations, 192 tokens each.")] = 20,
    threads: Threads = 2,
    seed: int = 2,
) -> None:
    """Let the target write text for the drafter to learn from, at two temperatures in turn."""
    torch.set_num_threads(threads)
    ids = np.concatenate([np.load(work / f"{name}.npy") for name in ("library", "conversations")])
    model = load_float32(models / "target")
    cast(torch.nn.Module, model).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    written = []
    for number in track(range(batches), "sampling"):
        starts = torch.randint(0, len(ids) - PROMPT_TOKENS, (128,), generator=generator).tolist()
        prompts = np.stack([ids[start : start + PROMPT_TOKENS] for start in starts])
        temperature = SAMPLING_TEMPERATURES[number % len(SAMPLING_TEMPERATURES)]
        written.append(sample_continuations(model, prompts, WRITTEN_TOKENS, temperature, generator).ravel())
    np.save(work / "samples.npy", np.concatenate(written))


@app.command()
def copies(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    tokens: Annotated[int, typer.Option(help="Tokens to train on.")] = 6_000_000,
    threads: Threads = 2,
    compiled: Compiled = True,
    seed: int = 11,
) -> None:
    """Train the target further, on text of which half is copies, until it repeats what it has read."""
    torch.set_num_threads(threads)
    model = TARGET.build(vocab_size=4096, seed=seed)
    model.load_state_dict(torch.load(work / "target.pt", weights_only=True)["model"])
    attend_in_chunks(model)
    plan = TrainingPlan(
        total_tokens=tokens,
        phases=COPYING_PHASES,
        matrix_learning_rate=0.01,
        embedding_learning_rate=1.5e-3,
        warmup_fraction=0.05,
        seed=seed,
    )
    Trainer(model, plan, work / "copies.pt", compiled).run(COPYING.sources(work), next_token_loss, "copies")
    save_bf16(model, models / "target")


@app.command()
def drafter(
    name: Annotated[DrafterName, typer.Argument(help="Which drafter.")],
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    tokens: Annotated[int, typer.Option(help="Tokens to distil on.")] = 8_000_000,
    threads: Threads = 2,
    compiled: Compiled = True,
    seed: int = 3,
) -> None:
    """Distil a drafter from the target, on the corpus and on the target's own text."""
    torch.set_num_threads(threads)
    teacher = load_float32(models / "target")
    model = DRAFTERS[name].build(vocab_size=4096, seed=seed)
    inherit_embeddings(model, teacher)
    for each in (teacher, model):
        attend_in_chunks(each)
    plan = TrainingPlan(total_tokens=tokens, phases=DRAFTER_PHASES, batch_tokens=4_096, seed=seed)
    # A drafter is used on the target's own text.
    written = TrainingTexts(np.load(work / "samples.npy"), 1.0)
    sources = [written, *READING.sources(work)]
    Trainer(model, plan, work / f"{name}.pt", compiled).run(sources, distillation_loss(teacher), name)
    save_bf16(model, models / name)


@app.command()
def evaluate(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    num_prompts: Annotated[int, typer.Option(help="Held-out prompts of 64 tokens to continue.")] = 100,
    threads: Threads = 2,
    seed: int = 4,
) -> None:
    """Print held-out losses, how well the target repeats a text, and how often it accepts what drafters propose."""
    torch.set_num_threads(threads)
    held_out = np.load(work / "held_out.npy")
    pair = {name: load_float32(models / name) for name in ("target", *DRAFTERS)}
    for name, model in pair.items():
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}: {parameters / 1e6:.1f} M parameters, held-out loss {held_out_loss(model, held_out):.3f} nats")
    files = [
        text.tolist() for text in np.split(held_out, np.flatnonzero(held_out == END_OF_TEXT_ID)) if len(text) > 400
    ]
    print(f"target: repeats {share_repeated(pair['target'], files, END_OF_TEXT_ID):.1%} of {len(files)} files")
    starts = np.random.default_rng(seed).integers(0, len(held_out) - PROMPT_TOKENS, num_prompts)
    prompts = [held_out[start : start + PROMPT_TOKENS].tolist() for start in starts]
    for name in DRAFTERS:
        for temperature in (0.0, 0.6, 1.0):
            for rule in ("token", "block"):
                found = measure_acceptance(pair["target"], pair[name], prompts, rule, temperature, block_length=4)
                by_position = " ".join(f"{share:.3f}" for share in found.by_position)
                print(
                    f"{name}, T = {temperature}, {rule}: accepted {found.acceptance_rate:.3f} ({by_position}), "
                    f"block efficiency {found.block_efficiency:.2f}"
                )


if __name__ == "__main__":
    app()
