"""The embedded pair through the real three processes, and the command line as a user types it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.prompts import load_prompts
from draftwire.cli.up import stack_options
from draftwire.client import Client
from draftwire.services.local_stack import LocalStack
from draftwire.verification import RULES

TARGET = Path(__file__).parents[2] / "models" / "target"
NUM_PROMPTS = 20
NUM_TOKENS = 128
NEAR_TIE = 1e-4
"""Where the two best logits are closer than this, differently shaped batches may choose differently."""


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(stack_options(None, None, 4)) as running:
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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_length", [1, 4, 8])
def test_greedy_output_is_what_transformers_generates_with_the_target_alone(
    stack: LocalStack,
    target: PreTrainedModel,
    references: list[tuple[list[int], list[int]]],
    rule: str,
    block_length: int,
    record_property,
) -> None:
    near_ties = 0
    accepted = 0
    with Client(stack.address) as client:
        for prompt_ids, expected in references:
            completion = client.generate(
                prompt_ids,
                temperature=0.0,
                max_tokens=NUM_TOKENS,
                num_speculative_tokens=block_length,
                rejection_sample_method=rule,
            )
            accepted += completion.statistics.num_accepted_tokens
            if completion.token_ids != expected:
                pairs = zip(completion.token_ids, expected, strict=False)
                same = next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
                gap = gap_of_best_logits(target, prompt_ids + expected[:same])
                assert gap < NEAR_TIE, f"differs at token {same}, where the best logits are {gap} apart"
                near_ties += 1
    record_property("near_ties", near_ties)
    print(f"{rule}, blocks of {block_length}: {len(references)} prompts, {near_ties} differ at a near-tie")
    assert near_ties <= 1
    assert accepted > 0.3 * NUM_TOKENS * NUM_PROMPTS, "speculation did most of the work"


def test_text_is_the_decoding_of_the_tokens_and_stop_strings_cut_it(
    stack: LocalStack, tokenizer: PreTrainedTokenizerBase
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


def test_generate_streams_text_and_prints_one_line_of_statistics(stack: LocalStack) -> None:
    result = run("generate", "def merge_sorted(a, b):", "--temperature", "0", "--address", stack.address)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def merge_sorted(a, b):")
    assert len(result.stdout) > 100
    assert re.fullmatch(STATISTICS + r" · seed \d+", result.stderr.strip())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--temperature", "-1"], "temperature must be in"),
        (["generate", "x", "--temperature", "nan"], "temperature must be in"),
        (["generate", "x", "--top-p", "0"], "top_p must be in"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be in"),
        (["generate", "x", "--max-tokens", "99999"], "max_tokens must be in"),
        (["generate", "x", "--rejection-sample-method", "magic"], "known: block, token"),
    ],
)
def test_wrong_input_gives_one_line_that_says_what_is_wrong(
    stack: LocalStack, arguments: list[str], message: str
) -> None:
    result = run(*arguments, "--address", stack.address)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_missing_server_and_misspelt_variables_are_clear_errors() -> None:
    result = run("generate", "x", "--address", "127.0.0.1:1", "--wait", "0.5")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    result = run("generate", "x", DRAFTWIRE_ADRESS="typo")
    assert result.returncode == 2
    assert "DRAFTWIRE_ADRESS" in result.stderr


def test_up_serves_until_it_is_stopped_and_then_leaves_nothing_running() -> None:
    command = [sys.executable, "-m", "draftwire.cli", "up"]
    ports = ["--port", "50151", "--verifier-port", "50152", "--drafter-port", "50153"]
    with subprocess.Popen([*command, *ports], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready" in line:
                break
        result = run("generate", "import os", "--max-tokens", "16", "--address", "127.0.0.1:50151")
        assert result.returncode == 0, result.stderr
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(60) == 0
    assert run("generate", "x", "--address", "127.0.0.1:50151", "--wait", "0.5").returncode == 1


def running_services() -> set[str]:
    lines = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process ended meanwhile
            lines.add(path.read_text(errors="replace"))
    return {line for line in lines if "draftwire.services" in line}


def test_demo_shows_a_completion_and_its_statistics_and_leaves_nothing_running(stack: LocalStack) -> None:
    before = running_services()
    result = run("demo", "--max-tokens", "48")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def merge_sorted(a, b):")
    assert re.search(STATISTICS, result.stderr)
    assert running_services() <= before
