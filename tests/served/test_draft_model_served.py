"""A draft model in the verifier's process, through the services: its law, its names, its passes and its failures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.law import LOSSLESS, PROMPT, compare, draw_completions, exact_law
from draftwire.client import Client
from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.drafting.strategy import Drafting, DraftStep
from draftwire.errors import UnavailableError
from draftwire.options.draft_model import model_drafts
from draftwire.options.draft_model.model_drafts import MOST_FAILURES
from draftwire.requests.parameters import SamplingParams
from tests.in_process import InProcessStack, slow_verifiers
from tests.observing import read_metric, wait_until
from tests.tiny_models import save_tiny_model

ALPHA = 1e-6
"""Probability of a false alarm of each comparison of laws."""
SAMPLING = SamplingParams()


def options_of(pair: tuple[Path, Path], **more: object) -> dict[str, dict[str, Any]]:
    """Returns the options of a stack without a drafter's service; draft lengths are fixed."""
    verifier = {"model": pair[0], "draft_model": pair[1], "threads": 1, "metrics_port": 0, **more}
    return {"verifier": verifier, "gateway": {"speculation": "fixed", "num_speculative_tokens": 3}}


@pytest.fixture(scope="module")
def stack(pair: tuple[Path, Path]) -> Iterator[InProcessStack]:
    with InProcessStack(options_of(pair)) as running:
        yield running


@pytest.fixture(scope="module")
def law(pair: tuple[Path, Path]) -> dict[tuple[int, ...], float]:
    return exact_law(pair[0], SAMPLING)


def test_model_has_a_name_that_requests_may_say_and_metrics_show(stack: InProcessStack) -> None:
    with Client(stack.address) as client:
        assert list(client.server().drafter_names) == ["model", "suffix", "lookup"]
        drawn = client.generate(PROMPT, max_tokens=20, ignore_eos=True, drafter="model", num_speculative_tokens=3)
        other = client.generate(PROMPT, max_tokens=20, ignore_eos=True)
    assert 0 < drawn.statistics.num_accepted_tokens < drawn.statistics.num_draft_tokens
    assert other.statistics.num_draft_tokens > 0, "where nobody is named"
    assert read_metric(stack, "verifier", "local_draft_tokens", 'strategy="model"') > 0
    audited = 'model_name="model",span="total"'
    wait_until(lambda: read_metric(stack, "verifier", "audit_draft_tokens", audited) > 0, "drafts are audited")


@pytest.mark.parametrize(
    "rule", ["block", *(pytest.param(rule, marks=pytest.mark.slow) for rule in LOSSLESS if rule != "block")]
)
def test_texts_follow_the_law_of_the_target(
    stack: InProcessStack, law: dict[tuple[int, ...], float], rule: str
) -> None:
    """Beside requests of other kinds, which share its passes. False alarm: 1e-6."""
    completions = list(draw_completions(stack.address, rule, SAMPLING, range(120), 16))
    result = compare(rule, completions, law, 16, judged=3)
    assert result.share_of_rounds_with_draft > 0.5
    assert 0.1 < result.acceptance_rate < 0.9
    assert result.p_value > ALPHA, result


def test_coupled_texts_are_those_of_a_drafters_service(stack: InProcessStack, pair: tuple[Path, Path]) -> None:
    """And of plain decoding: the noise is that of the places."""
    model = {"threads": 1, "metrics_port": 0}
    options = {"verifier": {"model": pair[0], **model}, "drafter": {"model": pair[1], **model}, "gateway": {}}
    asked = {"max_tokens": 40, "seed": 7, "rejection_sample_method": "coupled", "ignore_eos": True}
    with InProcessStack(options) as other, Client(other.address) as served, Client(stack.address) as here:
        texts = [client.generate(PROMPT, **asked, num_speculative_tokens=3) for client in (served, here)]
        plain = here.generate(PROMPT, **asked, num_speculative_tokens=0)
    assert texts[1].statistics.num_accepted_tokens > 0
    assert texts[0].token_ids == texts[1].token_ids == plain.token_ids


def test_all_sessions_of_a_step_share_the_models_passes(stack: InProcessStack, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int]] = []
    step = LanguageModelDrafter.step

    def noting(self: LanguageModelDrafter, draftings: list[Drafting]) -> DraftStep:
        done = step(self, draftings)
        steps.append((len(draftings), done.num_passes))
        return done

    monkeypatch.setattr(LanguageModelDrafter, "step", noting)
    with slow_verifiers(0.01), Client(stack.address) as client:
        client.generate_batch([PROMPT] * 16, concurrency=16, max_tokens=40, seed=1, ignore_eos=True)
    assert max(num_sessions for num_sessions, _ in steps) == 16
    assert {num_passes for _, num_passes in steps} <= {0, 1, 2}, "of blocks of three: as many as for one session"


def test_text_is_drafted_for_by_services_that_come_and_go(stack: InProcessStack, pair: tuple[Path, Path]) -> None:
    """Where it is chosen by name; the model goes on when they are gone."""
    address = f"127.0.0.1:{stack.services['verifier'].port}"
    with InProcessStack({"drafter": {"model": pair[1], "threads": 1, "metrics_port": 0}}) as other:
        peers = {"verifier": address, "drafter": f"127.0.0.1:{other.services['drafter'].port}"}
        gateway = {"speculation": "fixed", "num_speculative_tokens": 3, **peers}
        with slow_verifiers(), InProcessStack({"gateway": gateway}) as front, Client(front.address) as client:
            stream, has_drafted, was_killed = client.stream(PROMPT, max_tokens=50, ignore_eos=True), False, False
            for _ in stream:
                has_drafted = has_drafted or read_metric(other, "drafter", "blocks_sent") >= 2
                if has_drafted and not was_killed:
                    other.kill("drafter")
                    was_killed = True
            assert was_killed
    done = stream.completion
    assert (len(done.token_ids), done.statistics.num_drafters_lost) == (50, 1)
    assert read_metric(stack, "verifier", "local_draft_tokens", 'strategy="model"') > 0


def test_texts_go_on_when_the_model_fails_and_soon_without_it(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries = 0

    def fails(self: LanguageModelDrafter, draftings: list[Drafting]) -> DraftStep:
        nonlocal num_tries
        num_tries += 1
        raise MemoryError

    with InProcessStack(options_of(pair)) as running, Client(running.address) as client:
        monkeypatch.setattr(LanguageModelDrafter, "step", fails)
        done = client.generate(PROMPT, max_tokens=20, ignore_eos=True)
        assert (len(done.token_ids), done.statistics.num_draft_tokens) == (20, 0)
        assert client.generate(PROMPT, max_tokens=20, ignore_eos=True).statistics.num_verifiers_lost == 0
    assert num_tries == MOST_FAILURES


def test_long_text_is_read_beside_plain_rounds(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_drafts, "LARGEST_CHUNK", 8)
    monkeypatch.setattr(model_drafts, "PROMPT_TOKENS", 4)
    with InProcessStack(options_of(pair)) as running, Client(running.address) as client:
        first, *others = client.generate_batch([PROMPT] * 3, concurrency=3, max_tokens=50, ignore_eos=True)
    for statistics in (one.statistics for one in (first, *others)):
        assert statistics.num_rounds - statistics.num_drafts >= len(PROMPT) // 8, "one for each chunk"
        assert statistics.num_drafts > 0


def test_model_with_other_tokens_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", 3, tokens=["a", "b", "c"])
    with pytest.raises(UnavailableError, match="other has other tokens than the target"):
        InProcessStack(options_of((pair[0], other))).start()


def test_cache_of_both_models_is_measured(pair: tuple[Path, Path]) -> None:
    """Both have room for the same texts."""
    options = options_of(pair, kv_cache_tokens="auto", max_sessions=2)
    with InProcessStack(options) as running, Client(running.address) as client:
        done = client.generate_batch([PROMPT] * 2, concurrency=2, max_tokens=50, ignore_eos=True)
    assert all(one.statistics.num_accepted_tokens > 0 for one in done)
