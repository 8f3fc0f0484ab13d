"""The embedded pair through the real three processes, and the command line as a user types it."""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.prompts import load_prompts
from draftwire.cli.up import stack_options
from draftwire.client import Client, Completion
from draftwire.models.kv_cache import BLOCK_SIZE
from draftwire.verification import RULES
from tests.in_process import InProcessStack

TARGET = Path(__file__).parents[2] / "models" / "target"
NUM_PROMPTS = 20
NUM_TOKENS = 128
NEAR_TIE = 1e-4
"""Where the two best logits are closer than this, differently shaped batches may choose differently."""


@pytest.fixture(scope="module")
def stack() -> Iterator[InProcessStack]:
    with InProcessStack(stack_options(None, None, 4)) as running:
        yield running


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
@torch.inference_mode()
def references(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """Prompt ids, and what transformers generates after them with the target alone."""
    result = []
    for prompt in load_prompts()[:NUM_PROMPTS]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output = target.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        result.append((ids[0].tolist(), output[0, ids.shape[1] :].tolist()))
    return result


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


SETTINGS = [(rule, block_length, 16) for rule in RULES for block_length in (1, 4, 8)] + [
    ("block", 4, 1),
    ("token", 8, 3),
]
"""Rule, block length, and requests that run at once and share the steps of both models."""


@pytest.mark.parametrize(("rule", "block_length", "concurrency"), SETTINGS)
def test_greedy_output_is_what_transformers_generates_with_the_target_alone(
    stack: InProcessStack,
    target: PreTrainedModel,
    references: list[tuple[list[int], list[int]]],
    rule: str,
    block_length: int,
    concurrency: int,
    record_property,
) -> None:
    def draw(prompt_ids: list[int]) -> Completion:
        return client.generate(
            prompt_ids,
            temperature=0.0,
            max_tokens=NUM_TOKENS,
            num_speculative_tokens=block_length,
            rejection_sample_method=rule,
            cache_salt=f"{rule} {block_length} {concurrency}",  # so that each setting reads the prompts itself
        )

    with Client(stack.address) as client, ThreadPoolExecutor(concurrency) as pool:
        completions = list(pool.map(draw, [prompt_ids for prompt_ids, _ in references]))
    near_ties = 0
    for completion, (prompt_ids, expected) in zip(completions, references, strict=True):
        near_ties += not is_same_up_to_near_tie(target, prompt_ids, completion.token_ids, expected)
    record_property("near_ties", near_ties)
    print(
        f"{rule}, blocks of {block_length}, {concurrency} at once: {len(references)} prompts, "
        f"{near_ties} differ at a near-tie"
    )
    assert near_ties <= 1
    assert [completion.drafter_error for completion in completions] == [""] * NUM_PROMPTS
    accepted = sum(completion.statistics.num_accepted_tokens for completion in completions)
    drafted = sum(completion.statistics.num_draft_tokens for completion in completions)
    assert accepted > 0.3 * drafted > 0
    if concurrency == 1:  # among many, and beside other processes, the drafter may be late
        assert accepted > 0.3 * NUM_TOKENS * NUM_PROMPTS, "speculation did most of the work"


def test_system_prompt_is_read_once_and_the_text_stays_the_same(
    stack: InProcessStack, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    system_prompt = tokenizer("".join(load_prompts()[:8]))["input_ids"][:200]
    first, second = (system_prompt + tokenizer(text)["input_ids"] for text in ("def open(", "class Queue:"))
    with Client(stack.address) as client:

        def draw(prompt_ids: list[int], salt: str) -> Completion:
            return client.generate(prompt_ids, temperature=0.0, max_tokens=64, cache_salt=salt)

        assert draw(first, "one").statistics.num_cached_prompt_tokens == 0
        reusing, reading = draw(second, "one"), draw(second, "other")
    assert reusing.statistics.num_cached_prompt_tokens == len(system_prompt) // BLOCK_SIZE * BLOCK_SIZE
    assert reading.statistics.num_cached_prompt_tokens == 0
    is_same_up_to_near_tie(target, second, reusing.token_ids, reading.token_ids)


def test_text_is_the_decoding_of_the_tokens_and_stop_strings_cut_it(
    stack: InProcessStack, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = "class Stack:\n    def __init__(self):\n"
    with Client(stack.address) as client:
        whole = client.generate(prompt, temperature=0.0, max_tokens=60)
        assert tokenizer.decode(whole.token_ids, skip_special_tokens=True) == whole.text
        stop = whole.text[20:25]
        stream = client.stream(prompt, temperature=0.0, max_tokens=60, stop=[stop])
        shown = "".join(piece.text for piece in stream)
        assert shown == whole.text[: whole.text.index(stop)]
        assert stream.completion is not None
        assert stream.completion.finish_reason == "stop"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftwire.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment}, check=False
    )


STATISTICS = (
    r"\d+ tokens · [\d.]+ tokens/s · block efficiency [\d.]+ · acceptance rate 0\.\d+ · \d+ rounds · rule block"
)


def test_generate_streams_text_and_prints_one_line_of_statistics(stack: InProcessStack) -> None:
    result = run("generate", "def merge_sorted(a, b):", "--temperature", "0", "--address", stack.address)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def merge_sorted(a, b):")
    assert len(result.stdout) > 100
    assert re.fullmatch(STATISTICS + r" · seed \d+", result.stderr.strip())


def test_generate_prints_several_completions_one_after_the_other(stack: InProcessStack) -> None:
    options = ["-n", "3", "--ignore-eos", "--max-tokens", "12", "--seed", "5", "--address", stack.address]
    result = run("generate", "import os", *options)
    assert result.returncode == 0, result.stderr
    texts = re.split(r"^choice \d:\n", result.stdout, flags=re.MULTILINE)[1:]
    assert len(texts) == len(set(texts)) == 3
    assert all(text.startswith("import os") for text in texts)
    assert len(re.findall(r"^12 tokens", result.stderr, flags=re.MULTILINE)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--temperature", "-1"], "temperature must be in"),
        (["generate", "x", "--temperature", "nan"], "temperature must be in"),
        (["generate", "x", "--top-p", "0"], "top_p must be in"),
        (["generate", "x", "--num-choices", "0"], "num_choices must be in"),
        (["generate", "x", "--max-tokens", "99999"], "max_tokens must be in"),
        (["generate", "x", "--rejection-sample-method", "magic"], "known: block, token"),
    ],
)
def test_wrong_input_gives_one_line_that_says_what_is_wrong(
    stack: InProcessStack, arguments: list[str], message: str
) -> None:
    result = run(*arguments, "--address", stack.address)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_missing_server_and_misspelt_variables_are_clear_errors() -> None:
    result = run("generate", "x", "--address", "127.0.0.1:1", "--wait", "0.5")
    assert (result.returncode, result.stdout) == (3, "")
    assert re.fullmatch("error: no gateway answered at 127.0.0.1:1 .*\n", result.stderr)
    result = run("generate", "x", DRAFTWIRE_ADRESS="typo")
    assert result.returncode == 2
    assert "DRAFTWIRE_ADRESS" in result.stderr


def test_up_serves_until_it_is_stopped_and_then_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("TEST_MARK", mark)
    command = [sys.executable, "-m", "draftwire.cli", "up"]
    ports = ["--port", "50151", "--verifier-port", "50152", "--drafter-port", "50153", "--http-port", "0"]
    with subprocess.Popen([*command, *ports], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready" in line:
                break
        result = run("generate", "import os", "--max-tokens", "16", "--address", "127.0.0.1:50151")
        assert result.returncode == 0, result.stderr
        assert len(services_marked(mark)) == 3
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        for impatient in (signal.SIGINT, signal.SIGTERM):  # must not interrupt the stopping
            process.send_signal(impatient)
        process.stderr.read()
        assert process.wait(60) == 0
    assert services_marked(mark) == []
    assert run("generate", "x", "--address", "127.0.0.1:50151", "--wait", "0.5").returncode == 3


def services_marked(mark: str) -> list[str]:
    """Command lines of the running services that inherited an environment variable of this value."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process ended meanwhile
            if mark in (process / "environ").read_text(errors="replace"):
                lines.append((process / "cmdline").read_text(errors="replace"))
    return [line for line in lines if "draftwire.services" in line]


def test_demo_shows_a_completion_and_its_statistics_and_leaves_nothing_running(
    stack: InProcessStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("TEST_MARK", mark)
    result = run("demo", "--max-tokens", "48")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def merge_sorted(a, b):")
    assert re.search(STATISTICS, result.stderr)
    assert result.stderr.splitlines()[-1].startswith("next: draftwire up, then open http:")
    assert services_marked(mark) == []
