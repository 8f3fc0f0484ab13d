"""Command line of the training steps, in the order in which they run.

    python -m tools.embedded_pair tokenizer
    python -m tools.embedded_pair target
    python -m tools.embedded_pair samples
    python -m tools.embedded_pair lessons
    python -m tools.embedded_pair drafter drafter
    python -m tools.embedded_pair drafter drafter-8-layers
    python -m tools.embedded_pair head
    python -m tools.embedded_pair evaluate
    python -m tools.embedded_pair compare

Each step reads what the one before wrote, can be interrupted and started again, and gives the same result for the
same seed, library and machine. The steps need the standard library's sources, the packages of constraints.txt and some
three and a half hours of two CPU cores, no network.
"""

import sys
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import torch
import typer
from rich.progress import track
from transformers import LlamaForCausalLM

from draftwire.method.devices import prepare
from draftwire.options.heads.draft_head import DraftHead
from draftwire.options.heads.head_loading import load_head
from draftwire.training.batches import TrainingTexts, batches
from draftwire.training.heads.head_training import train_head
from draftwire.training.muon import fast_type
from draftwire.training.trainer import Trainer
from tools.embedded_pair.attention import attend_in_chunks
from tools.embedded_pair.conversations import CHAT_TEMPLATE, conversations
from tools.embedded_pair.corpus import encode_texts, packages, save_tokenizer, standard_library, train_tokenizer
from tools.embedded_pair.evaluation import held_out_loss, measure_acceptance, share_repeated
from tools.embedded_pair.lessons import Lessons, sample_continuations
from tools.embedded_pair.pair import (
    CONTEXT_LENGTH,
    DRAFTERS,
    TARGET,
    DrafterName,
    inherit,
    load_float32,
    mean_of,
    save_bf16,
)
from tools.embedded_pair.pair_losses import distillation_loss, next_token_loss
from tools.embedded_pair.recipe import (
    DRAFTER_TOKENS,
    EMBEDDED_HEAD,
    END_OF_TEXT_ID,
    LAST_STAGES,
    LESSONS,
    READING,
    TARGET_STAGES,
    Stage,
)

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

PROMPT_TOKENS, WRITTEN_TOKENS = 64, 192
SAMPLING_TEMPERATURES = (1.0, 0.6)

ModelsFolder = Annotated[Path, typer.Option(help="Folder of the pair.")]
WorkFolder = Annotated[Path, typer.Option(help="Folder of token arrays and checkpoints; never committed.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
ShareOfTokens = Annotated[float, typer.Option(min=0.0, max=1.0, help="Of the recipe's tokens, for a try.")]
DeviceName = Annotated[str, typer.Option("--device", help="A torch device.")]
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


@app.command()
def target(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    share: ShareOfTokens = 1.0,
    threads: Threads = 2,
    compiled: Compiled = True,
) -> None:
    """Train the target on the corpus, in stages."""
    torch.set_num_threads(threads)

    def train(model: LlamaForCausalLM, stage: Stage) -> None:
        state = work / f"target-{stage.name.replace(' ', '-')}.pt"
        plan = stage.plan.shortened(share)
        texts = partial(batches, stage.mix.sources(work), plan)
        Trainer(model, plan, state, compiled).run(texts, next_token_loss, stage.name)

    model = TARGET.build(vocab_size=4096, seed=TARGET_STAGES[0].plan.seed)
    attend_in_chunks(model)
    for stage in TARGET_STAGES:
        train(model, stage)
    ends = [model, *(deepcopy(model) for _ in LAST_STAGES)]
    for branch, stage in zip(ends[1:], LAST_STAGES, strict=True):
        train(branch, stage)
    save_bf16(mean_of(ends), models / "target")


@app.command()
def samples(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    rounds: Annotated[int, typer.Option(help="Each writes continuations of 192 tokens.")] = 24,
    texts: Annotated[int, typer.Option(min=1, help="Continuations that are written at once.")] = 128,
    threads: Threads = 2,
    device: DeviceName = "cpu",
    seed: int = 2,
) -> None:
    """Let the target write text for the drafter to learn from, at two temperatures in turn."""
    torch.set_num_threads(threads)
    ids = np.concatenate([np.load(work / f"{name}.npy") for name in ("library", "conversations")])
    prepare(device)
    model = load_float32(models / "target")
    cast(torch.nn.Module, model).to(device, fast_type(torch.device(device)))
    generator = torch.Generator(device).manual_seed(seed)
    written = []
    for number in track(range(rounds), "sampling"):
        starts = torch.randint(0, len(ids) - PROMPT_TOKENS, (texts,), generator=generator, device=device).tolist()
        prompts = np.stack([ids[start : start + PROMPT_TOKENS] for start in starts])
        temperature = SAMPLING_TEMPERATURES[number % len(SAMPLING_TEMPERATURES)]
        written.append(sample_continuations(model, prompts, WRITTEN_TOKENS, temperature, generator).ravel())
    np.save(work / "samples.npy", np.concatenate(written))


@app.command()
def lessons(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    threads: Threads = 2,
    compiled: Compiled = True,
) -> None:
    """Write down what the target says about its own text and about as much of the corpus."""
    torch.set_num_threads(threads)
    teacher = load_float32(models / "target")
    attend_in_chunks(teacher)
    # A drafter is used on the target's own text.
    written = TrainingTexts(np.load(work / "samples.npy"), 1.0)
    Lessons(LESSONS, work).write(teacher, [written, *READING.sources(work)], compiled)


@app.command()
def drafter(
    name: Annotated[DrafterName, typer.Argument(help="Which drafter.")],
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    share: ShareOfTokens = 1.0,
    threads: Threads = 2,
    compiled: Compiled = True,
) -> None:
    """Distil a drafter from the target, on the lessons."""
    torch.set_num_threads(threads)
    teacher = load_float32(models / "target")
    plan = replace(LESSONS, total_tokens=DRAFTER_TOKENS[name]).shortened(share)
    model = DRAFTERS[name].build(vocab_size=4096, seed=plan.seed)
    inherit(model, teacher)
    attend_in_chunks(model)
    texts = partial(Lessons(LESSONS, work).batches, plan)
    Trainer(model, plan, work / f"{name}.pt", compiled).run(texts, distillation_loss(teacher), name)
    save_bf16(model, models / name)


@app.command()
def head(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    threads: Threads = 1,
    device: DeviceName = "cpu",
    compiled: Compiled = True,
) -> None:
    """Train the target's EAGLE-3 head on the corpus."""
    torch.set_num_threads(threads)
    held_out, sources = np.load(work / "held_out.npy"), READING.sources(work)
    train_head(models / "target", sources, held_out, EMBEDDED_HEAD, models / "head", compiled, device=device)


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


@app.command()
def compare(
    models: ModelsFolder = Path("models"),
    work: WorkFolder = Path(".training"),
    folder: Annotated[Path, typer.Option(help="The head.")] = Path("models/head"),
    num_prompts: Annotated[int, typer.Option(help="Held-out prompts of 64 tokens to continue.")] = 40,
    block_length: int = 4,
    threads: Threads = 1,
    seed: int = 4,
) -> None:
    """Print what the target accepts of a head and of the drafter in a round, and how long they draft."""
    torch.set_num_threads(threads)
    held_out = np.load(work / "held_out.npy")
    target = load_float32(models / "target")
    starts = np.random.default_rng(seed).integers(0, len(held_out) - PROMPT_TOKENS, num_prompts)
    prompts = [held_out[start : start + PROMPT_TOKENS].tolist() for start in starts]
    drafters: dict[str, LlamaForCausalLM | DraftHead] = {
        "drafter": load_float32(models / "drafter"),
        "head": load_head(folder, models / "target", CONTEXT_LENGTH, torch.float32),
    }
    for temperature in (0.0, 1.0):
        found = {
            name: measure_acceptance(target, each, prompts, "block", temperature, block_length)
            for name, each in drafters.items()
        }
        for name, each in found.items():
            by_position = " ".join(f"{share:.3f}" for share in each.by_position)
            print(
                f"{name}, T = {temperature:g}: {each.accepted_per_round:.2f} ± {each.accepted_margin:.2f} of "
                f"{block_length} accepted a round ({by_position}), {each.draft_ms:.2f} ms a draft token"
            )
        head, drafter = found["head"], found["drafter"]
        accepted, time = head.accepted_per_round / drafter.accepted_per_round, head.draft_ms / drafter.draft_ms
        print(f"T = {temperature:g}: head / drafter: accepted {accepted:.2f}, time {time:.2f}")


if __name__ == "__main__":
    try:
        app()
    except FileNotFoundError as error:
        sys.exit(f"{error.filename} is missing: an earlier step writes it")
