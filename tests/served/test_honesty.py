"""Drafters that lie, against the real services: nobody else notices, and they are found out."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from observing import read_metric, wait_until

from benchmarks.law import stack_options
from draftwire.client import Client
from tests.dishonest_drafter import CORRUPTED_TEMPERATURE, argmax, corrupt, forge, lying, too_cold
from tests.in_process import InProcessStack, slow_verifiers
from tests.tiny_heads import REMOTE, head_options, save_tiny_head

PROMPT = [0, 2, 1, 1]


def wait_until_drafted(client: Client) -> None:
    wait_until(lambda: client.generate(PROMPT, max_tokens=50).statistics.num_drafts > 0, "the drafter takes part")


@pytest.mark.parametrize(
    ("way", "has_head"), [(argmax, False), (too_cold, False), pytest.param(too_cold, True, marks=pytest.mark.slow)]
)
def test_drafter_that_draws_otherwise_than_declared_is_quarantined(
    pair: tuple[Path, Path], tmp_path: Path, way: Callable[[pytest.MonkeyPatch], None], has_head: bool
) -> None:
    """A stack of its own, whose drafter ends in quarantine: with a model, or with a head of the target."""
    events: list = []
    options = (
        head_options(pair[0], save_tiny_head(tmp_path / "head", pair[0]), REMOTE) if has_head else stack_options(*pair)
    )
    running = InProcessStack(options, on_log=lambda _service, line: events.append(line))
    with lying(way), running as stack, Client(stack.address) as client, ThreadPoolExecutor(8) as pool:

        def generate(seed: int):
            return client.generate(PROMPT, max_tokens=50, seed=seed, num_speculative_tokens=4)

        for rounds in range(40):  # of some 300 draft tokens
            completions = list(pool.map(generate, range(8 * rounds, 8 * rounds + 8)))
            assert all(len(completion.token_ids) == 50 for completion in completions)
            if read_metric(stack, "verifier", "drafter_quarantined"):
                break
        assert read_metric(stack, "verifier", "drafter_quarantined") == 1.0
        later = generate(1)
        assert len(later.token_ids) == 50
        assert later.statistics.num_drafts == 0
        coupled = client.generate(PROMPT, max_tokens=50, rejection_sample_method="coupled")
        assert len(coupled.token_ids) == 50
    (told,) = (line for line in events if line["event"] == "verifier.drafter_quarantined")
    assert "does not draw from the distributions that it sends" in told["reason"]


def test_corrupt_block_ends_speculation_of_its_session_alone(client: Client, stack: InProcessStack) -> None:
    before = read_metric(stack, "verifier", "blocks_refused", 'violation="weights"')
    with lying(corrupt), slow_verifiers(), ThreadPoolExecutor(8) as pool:

        def generate(seed: int):
            temperature = CORRUPTED_TEMPERATURE if seed % 2 else 1.0
            return client.generate(PROMPT, max_tokens=50, seed=seed, temperature=temperature)

        completions = list(pool.map(generate, range(16)))
        assert all(len(completion.token_ids) == 50 for completion in completions)
        for completion in completions[1::2]:
            assert "draft weights do not sum to 65536" in completion.drafter_error
            assert completion.statistics.num_drafts == 0
        for completion in completions[::2]:
            assert completion.drafter_error == ""
            assert completion.statistics.num_drafts > 5
        assert read_metric(stack, "verifier", "blocks_refused", 'violation="weights"') == before + 8.0


def test_drafter_with_a_forged_permit_costs_its_sessions_only_speed(client: Client, stack: InProcessStack) -> None:
    before = read_metric(stack, "verifier", "blocks_refused", 'violation="peer"')

    def is_refused() -> bool:
        completion = client.generate(PROMPT, max_tokens=50, seed=1)
        assert len(completion.token_ids) == 50
        assert completion.statistics.num_drafts == 0
        return read_metric(stack, "verifier", "blocks_refused", 'violation="peer"') > before

    with lying(forge):
        wait_until(is_refused, "a completion lasts until the drafter's first block has come")


def test_honest_drafter_is_not_suspected_and_its_bytes_are_counted(client: Client, stack: InProcessStack) -> None:
    wait_until_drafted(client)
    before = read_metric(stack, "verifier", "spec_decode_num_draft_bytes")
    statistics = client.generate(PROMPT, max_tokens=50, seed=3).statistics
    sent = read_metric(stack, "verifier", "spec_decode_num_draft_bytes") - before
    assert 10 < sent / statistics.num_draft_tokens < 100  # 3 tokens: 9 bytes a distribution, and what goes around it
    assert read_metric(stack, "verifier", "draft_bytes_per_emitted_token") > 0.0
    assert read_metric(stack, "verifier", "audit_evidence") < 0.0
    assert read_metric(stack, "verifier", "audit_draft_tokens") > 0.0
    assert read_metric(stack, "verifier", "drafter_quarantined") == 0.0
