"""Command line of the recipe of a chat model's head, in the order of its steps.

    python -m tools.chat_head answers --target smollm2 --tokens 400000
    python -m tools.chat_head texts
    python -m tools.chat_head train --target smollm2

The target answers questions through the services, without drafts; its answers are what the head learns to draft. Each
step goes on where it was interrupted. Needs two CPU cores, no network.
"""

import gzip
import json
import site
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from draftwire.cli.local_stack import LocalStack
from draftwire.cli.named_models import folder_of
from draftwire.cli.stack_options import NO_DRAFTER, stack_options
from draftwire.cli.train_command import train as train_on
from draftwire.client import Client
from draftwire.models.card import load_card
from tools.chat_head.questions import Conversation, conversations

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)

LONGEST_ANSWER = 256
"""Tokens."""
TEXTS = Path(__file__).parent / "answers.jsonl.gz"
"""Committed: messages, in the order in which they were written."""
DRAFTED_TOKENS, MLP_WIDTH = 8192, 1408
SHOWN_EVERY_S = 30.0

TargetName = Annotated[str, typer.Option(help="Chat model: folder, GGUF file, or its name.")]
WorkFolder = Annotated[Path, typer.Option(help="Folder of answers and checkpoints; never committed.")]


@app.command()
def answers(
    target: TargetName = "smollm2",
    tokens: Annotated[int, typer.Option(help="Of all answers.")] = 400_000,
    work: WorkFolder = Path("work"),
    concurrency: Annotated[int, typer.Option(help="Conversations at a time.")] = 24,
    packages: Annotated[Path | None, typer.Option(help="Folder of the packages of constraints.txt.")] = None,
    seed: int = 0,
) -> None:
    """Let the target answer questions, and append its answers to a file, until they have so many tokens."""
    work.mkdir(parents=True, exist_ok=True)
    file = work / "answers.jsonl"
    known = _lines(file)
    done, total = len(known), sum(line["tokens"] for line in known)
    asked = islice(conversations(packages or Path(site.getsitepackages()[0]), seed), done, None)
    options = stack_options(target, NO_DRAFTER, 0)
    started, shown, made = time.monotonic(), time.monotonic(), 0
    with (
        LocalStack(options, start_timeout_s=None) as stack,
        Client(stack.address) as client,
        ThreadPoolExecutor(concurrency) as threads,
        file.open("a", encoding="utf-8") as out,
    ):
        while total < tokens:
            batch = list(islice(asked, 4 * concurrency))
            for line in threads.map(lambda one: _answered(client, one), batch):
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
                total, made = total + line["tokens"], made + line["tokens"]
            out.flush()
            if time.monotonic() - shown > SHOWN_EVERY_S:
                shown = time.monotonic()
                typer.echo(f"{total:,} tokens, {made / (shown - started):.0f} a second")
    typer.echo(f"{total:,} tokens: {file}")


def _answered(client: Client, conversation: Conversation) -> dict[str, Any]:
    """Returns the messages of a conversation with the model's answers, and how many tokens these have."""
    messages: list[dict[str, str]] = []
    num_tokens = 0
    for question in conversation.questions:
        messages.append({"role": "user", "content": question})
        answer = client.generate(
            messages, max_tokens=LONGEST_ANSWER, temperature=conversation.temperature, top_p=0.95, seed=0
        )
        messages.append({"role": "assistant", "content": answer.text})
        num_tokens += len(answer.token_ids)
    return {"messages": messages, "tokens": num_tokens}


@app.command()
def texts(work: WorkFolder = Path("work")) -> None:
    """Compress the answers, as they are committed."""
    content = (work / "answers.jsonl").read_bytes()
    TEXTS.write_bytes(gzip.compress(content, 9, mtime=0))
    typer.echo(f"{TEXTS.stat().st_size:,} bytes of {len(content):,}: {TEXTS}")


@app.command()
def train(
    target: TargetName = "smollm2",
    work: WorkFolder = Path("work"),
    out: Annotated[Path, typer.Option(help="Folder of the head.")] = Path("models/smollm2-head"),
    answer_tokens: Annotated[int, typer.Option(help="Of answers to train on, from the first one on.")] = 400_000,
    tokens: Annotated[int, typer.Option(help="To train on, repeats included.")] = 1_600_000,
    threads: int = 2,
    device: str = "cpu",
) -> None:
    """Train the head on conversations as the target's template writes them."""
    folder = folder_of(target)
    tokenizer = load_card(folder).tokenizer
    text = work / f"texts-{answer_tokens}.txt"
    work.mkdir(parents=True, exist_ok=True)
    with text.open("w", encoding="utf-8") as file:
        for line in _first(_lines(TEXTS), answer_tokens):
            file.write(str(tokenizer.apply_chat_template(line["messages"], tokenize=False)))
    train_on(
        "eagle3",
        Path(folder),
        [text],
        out,
        tokens=tokens,
        draft_vocabulary=DRAFTED_TOKENS,
        mlp_width=MLP_WIDTH,
        own_output=False,
        threads=threads,
        device=device,
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    """Returns the answers of a file, compressed or not; none if it does not exist."""
    if not file.exists():
        return []
    content = file.read_bytes()
    text = gzip.decompress(content) if file.suffix == ".gz" else content
    return [json.loads(line) for line in text.decode("utf-8").splitlines()]


def _first(lines: list[dict[str, Any]], tokens: int) -> Iterator[dict[str, Any]]:
    """Yields lines until they have so many tokens."""
    for line in lines:
        if tokens <= 0:
            return
        tokens -= line["tokens"]
        yield line


if __name__ == "__main__":
    app()
