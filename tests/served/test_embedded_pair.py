"""The embedded pair through the real three services, and the commands that start them as a user does."""

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import openai
import pytest
import torch
from command_line import run
from terminal import Terminal
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.prompts import load_prompts
from draftwire.client import Client, Completion
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.verification import RULES
from tests.in_process import InProcessStack
from tools.embedded_pair.corpus import standard_library

TARGET = Path(__file__).parents[2] / "models" / "target"
NUM_PROMPTS = 20
NUM_TOKENS = 128
END_OF_TEXT_ID = 0
NEAR_TIE = 1e-4
"""Where the two best logits are closer than this, differently shaped batches may choose differently."""

Reference = Callable[[int], tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def reference(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Reference:
    """Returns the ids of a prompt, and what transformers generates after them with the target alone."""

    @cache
    @torch.inference_mode()
    def generate(number: int) -> tuple[list[int], list[int]]:
        ids = tokenizer(load_prompts()[number], return_tensors="pt")["input_ids"]
        output = target.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        return ids[0].tolist(), output[0, ids.shape[1] :].tolist()

    return generate


@torch.inference_mode()
def gap_of_best_logits(target: PreTrainedModel, ids: list[int]) -> float:
    best = target(input_ids=torch.tensor([ids])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def is_same_up_to_near_tie(target: PreTrainedModel, prompt_ids: list[int], ids: list[int], expected: list[int]) -> bool:
    """Returns whether two greedy texts are equal. If they are not, they must part at a near-tie."""
    if ids == expected:
        return True
    same = next(index for index, (one, other) in enumerate(zip(ids, expected, strict=True)) if one != other)
    gap = gap_of_best_logits(target, prompt_ids + expected[:same])
    assert gap < NEAR_TIE, f"differs at token {same}, where the best logits are {gap} apart"
    return False


SETTINGS = [
    ("block", 4, 1, 4),
    ("token", 8, 16, 4),
    *(
        pytest.param(rule, block_length, concurrency, NUM_PROMPTS, marks=pytest.mark.slow)
        for rule, block_length, concurrency in [("block", 8, 16), ("coupled", 1, 16)]
    ),
    *(
        pytest.param(rule, block_length, concurrency, NUM_PROMPTS, marks=pytest.mark.evidence)
        for rule, block_length, concurrency in [
            *((rule, 8, 16) for rule in RULES if rule != "block"),
            *((rule, 1, 16) for rule in RULES if rule != "coupled"),
            ("block", 4, 1),
            ("token", 8, 3),
        ]
    ),
]
"""Rule, block length, requests that run at once and share the steps of both models, and prompts."""


@pytest.mark.parametrize(("rule", "block_length", "concurrency", "num_prompts"), SETTINGS)
def test_greedy_output_is_what_transformers_generates_with_the_target(
    embedded_stack: InProcessStack,
    target: PreTrainedModel,
    reference: Reference,
    rule: str,
    block_length: int,
    concurrency: int,
    num_prompts: int,
) -> None:
    def draw(prompt_ids: list[int]) -> Completion:
        return client.generate(
            prompt_ids,
            temperature=0.0,
            max_tokens=NUM_TOKENS,
            num_speculative_tokens=block_length,
            rejection_sample_method=rule,
            cache_salt=f"{rule} {block_length} {concurrency} {num_prompts}",  # each setting reads the prompts itself
        )

    references = [reference(number) for number in range(num_prompts)]
    with Client(embedded_stack.address) as client, ThreadPoolExecutor(concurrency) as pool:
        completions = list(pool.map(draw, [prompt_ids for prompt_ids, _ in references]))
    near_ties = 0
    for completion, (prompt_ids, expected) in zip(completions, references, strict=True):
        near_ties += not is_same_up_to_near_tie(target, prompt_ids, completion.token_ids, expected)
    assert near_ties <= 1
    assert [completion.drafter_error for completion in completions] == [""] * num_prompts
    accepted = sum(completion.statistics.num_accepted_tokens for completion in completions)
    drafted = sum(completion.statistics.num_draft_tokens for completion in completions)
    assert accepted > 0.3 * drafted > 0
    if concurrency == 1:  # among many, and beside other processes, the drafter may be late
        assert accepted > 0.3 * NUM_TOKENS * num_prompts, "speculation did most of the work"


def test_system_prompt_is_read_once_and_the_text_stays_the_same(
    embedded_stack: InProcessStack, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    system_prompt = tokenizer("".join(load_prompts()[:8]))["input_ids"][:200]
    first, second = (system_prompt + tokenizer(text)["input_ids"] for text in ("def open(", "class Queue:"))
    with Client(embedded_stack.address) as client:

        def draw(prompt_ids: list[int], salt: str) -> Completion:
            return client.generate(prompt_ids, temperature=0.0, max_tokens=64, cache_salt=salt)

        assert draw(first, "one").statistics.num_cached_prompt_tokens == 0
        reusing, reading = draw(second, "one"), draw(second, "other")
    assert reusing.statistics.num_cached_prompt_tokens == len(system_prompt) // BLOCK_SIZE * BLOCK_SIZE
    assert reading.statistics.num_cached_prompt_tokens == 0
    is_same_up_to_near_tie(target, second, reusing.token_ids, reading.token_ids)


def test_text_is_the_decoding_of_the_tokens_and_stop_strings_cut_it(
    embedded_stack: InProcessStack, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = "class Stack:\n    def __init__(self):\n"
    with Client(embedded_stack.address) as client:
        whole = client.generate(prompt, temperature=0.0, max_tokens=60)
        assert tokenizer.decode(whole.token_ids, skip_special_tokens=True) == whole.text
        stop = whole.text[20:25]
        stream = client.stream(prompt, temperature=0.0, max_tokens=60, stop=[stop])
        shown = "".join(piece.text for piece in stream)
        assert shown == whole.text[: whole.text.index(stop)]
        assert stream.completion is not None
        assert stream.completion.finish_reason == "stop"


QUESTION = "What does `basename` in `posixpath` do?"


def test_chat_answers_a_question_and_ends(embedded_stack: InProcessStack) -> None:
    """With the defaults of every client of OpenAI's API, and on the command line."""
    with openai.OpenAI(base_url=f"{embedded_stack.http_address}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="target", messages=[{"role": "user", "content": QUESTION}], temperature=0.0
        ).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content
    assert re.match(r"[A-Z][\w' ]+", answer.message.content), "it is a sentence"
    shown = run("chat", "--temperature", "0", "--quiet", "--address", embedded_stack.address, typed=QUESTION + "\n")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() == answer.message.content.strip()


@pytest.mark.slow
@torch.inference_mode()
def test_second_copy_of_a_file_is_repeated(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Which is what drafts without a model live on. The files are none of those that the model has read."""
    held_out = [file.text for file in standard_library() if file.held_out and len(file.text) > 4000][:6]
    same = []
    for text in held_out:
        whole = tokenizer(text)["input_ids"][:400]
        logits = target(input_ids=torch.tensor([[*whole, END_OF_TEXT_ID, *whole]])).logits[0]
        same.append(logits[-101:-1].argmax(-1) == torch.tensor(whole[-100:]))
    assert torch.stack(same).float().mean() > 0.95


# Commands that start services: processes, whose beginning and end is the point

SCRIPTED = ["--target", "scripted:", "--drafter", "scripted:"]
FREE = ["--port", "0", "--verifier-port", "0", "--drafter-port", "0", "--http-port", "0"]
READY = re.compile(r"ready on (127\.0\.0\.1:\d+); open http://127\.0\.0\.1:\d+,")


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Stands in the environment of what a test starts."""
    monkeypatch.setenv("TEST_MARK", secrets.token_hex(8))
    return os.environ["TEST_MARK"]


def services_marked(mark: str) -> list[str]:
    """Command lines of the running services that inherited a mark."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process ended meanwhile
            if mark in (process / "environ").read_text(errors="replace"):
                lines.append((process / "cmdline").read_text(errors="replace"))
    return [line for line in lines if "draftwire.cli\0serve" in line]


def test_up_on_a_terminal_shows_a_table_and_leaves_nothing_running(mark: str) -> None:
    with Terminal("up", *SCRIPTED, *FREE) as terminal:
        for shown in ("efficiency", "starting", "ready", ", or in another terminal"):
            terminal.wait_for(shown)
        (ready, *_) = READY.findall(terminal.text)
        result = run("generate", "import os", "--max-tokens", "32", "--ignore-eos", "--address", ready)
        assert result.returncode == 0, result.stderr
        before = len(terminal.shown)
        efficiency = re.search(r"block efficiency ([\d.]+)", result.stderr)
        assert efficiency is not None
        terminal.wait_for(efficiency[1], 10.0, after=before)
        last = terminal.text.rpartition("service ")[2]
        rows = [line.split()[:2] for line in last.splitlines()[1:4]]
        assert rows == [["drafter", "serving"], ["verifier", "serving"], ["gateway", "serving"]]
        assert "gateway.server_started" in terminal.text
        assert "\x1b[?25l" in terminal.shown, "the cursor is hidden"
        assert len(services_marked(mark)) == 3
        terminal.type("\x03")
        terminal.wait_for("stopping")
        for impatient in (signal.SIGINT, signal.SIGTERM):  # must not interrupt the stopping
            terminal.process.send_signal(impatient)
        assert terminal.wait() == 0
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l"), "the cursor is back"
    assert "Traceback" not in terminal.shown
    assert services_marked(mark) == []
    assert run("generate", "x", "--address", ready, "--wait", "0.5").returncode == 3


@pytest.mark.slow
def test_up_on_a_terminal_prints_lines_if_asked_and_ends_before_all_is_up(mark: str) -> None:
    with Terminal("up", "--log", *SCRIPTED, *FREE) as terminal:
        terminal.wait_for("verifier")
        terminal.type("\x03")
        assert terminal.wait() == 130
    assert "efficiency" not in terminal.shown
    assert services_marked(mark) == []


@pytest.mark.slow
def test_up_in_pipes_serves_until_stopped_and_a_taken_port_is_one_line(mark: str) -> None:
    command = [sys.executable, "-m", "draftwire.cli", "up", *SCRIPTED, *FREE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            (ready,) = next(found for found in map(READY.findall, process.stderr) if found)
            result = run("generate", "import os", "--max-tokens", "16", "--address", ready)
            taken = ready.rpartition(":")[2]
            second = subprocess.run(
                [*command, "--port", taken], capture_output=True, text=True, timeout=240, check=False
            )
        finally:
            process.send_signal(signal.SIGINT)
            process.stderr.read()
            status = process.wait(60)
    assert result.returncode == 0, result.stderr
    assert second.returncode == 1
    assert second.stderr.strip() == (
        f"error: something else listens on --port {taken}: stop it, or pass other ports"
    ), "one line, before anything is started"
    assert status == 0
    assert services_marked(mark) == []


def test_demo_shows_a_completion_with_statistics_and_stops_everything(mark: str, tmp_path: Path) -> None:
    """The pair of the repository's, where the chat model has not been fetched."""
    command = [sys.executable, "-m", "draftwire.cli", "demo", "--max-tokens", "48"]
    nothing_fetched = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=nothing_fetched)
    assert result.returncode == 0, result.stderr
    assert "draftwire fetch smollm2 gets a model that answers; until then" in result.stderr.splitlines()[0]
    assert result.stdout.startswith("def merge_sorted(a, b):")
    assert re.search(r"block efficiency [\d.]+ · acceptance rate 0\.\d+ · \d+ rounds · rule block", result.stderr)
    assert result.stderr.splitlines()[-1].startswith("next: draftwire up, then open http:")
    assert services_marked(mark) == []
