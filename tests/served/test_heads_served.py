"""Heads inside a verifier and away from it, through the services: names, metrics and losses. Their law is in
`test_law.py`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.law import PROMPT
from draftwire.client import Client
from draftwire.errors import InvalidRequestError
from tests.in_process import InProcessStack
from tests.observing import read_metric, read_metrics, wait_until
from tests.tiny_heads import EAGLE3, MEDUSA, REMOTE, head_options, save_tiny_head

KINDS = [
    EAGLE3,
    REMOTE,
    pytest.param(MEDUSA, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def head(pair: tuple[Path, Path], kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    of_kind = EAGLE3 if kind == REMOTE else kind
    return save_tiny_head(tmp_path_factory.mktemp("head") / of_kind, pair[0], of_kind)


@pytest.fixture(scope="module")
def stack(pair: tuple[Path, Path], kind: str, head: Path) -> Iterator[InProcessStack]:
    with InProcessStack(head_options(pair[0], head, kind)) as running:
        yield running


def test_head_has_a_name_that_requests_may_say_and_metrics_show(stack: InProcessStack, kind: str) -> None:
    if kind == REMOTE:
        with Client(stack.address) as client:
            assert list(client.server().drafter_names) == [EAGLE3], "the folder's name"
            drawn = client.generate(PROMPT, max_tokens=20, ignore_eos=True, drafter=EAGLE3, num_speculative_tokens=3)
        assert drawn.statistics.num_draft_tokens > 0
        assert read_metric(stack, "verifier", "feature_bytes") > 0
        audited = f'model_name="{EAGLE3}",span="total"'  # after the verdict, which ends the completion
        wait_until(lambda: any(read_metrics(stack, "verifier", "audit_draft_tokens", audited)), "drafts are audited")
        return
    with Client(stack.address) as client:
        assert list(client.server().drafter_names) == [kind, "suffix", "lookup"]
        drawn = client.generate(PROMPT, max_tokens=20, ignore_eos=True, drafter=kind, num_speculative_tokens=3)
        assert drawn.statistics.num_draft_tokens > 0
        with pytest.raises(InvalidRequestError, match="nothing drafts by the name 'hydra'"):
            client.generate(PROMPT, max_tokens=2, drafter="hydra")
    for name in ("local_draft_tokens", "local_accepted_tokens"):
        assert read_metric(stack, "verifier", name, f'strategy="{kind}"') > 0
    assert read_metric(stack, "verifier", "head_draft_seconds_count") > 0
    assert read_metric(stack, "verifier", "audit_draft_tokens", f'model_name="{kind}",span="total"') > 0


def test_drafter_after_a_lost_one_is_sent_the_features_again(pair: tuple[Path, Path], kind: str, head: Path) -> None:
    """From the target's cache: its session stays open, so that no prompt is read again."""
    if kind != REMOTE:
        pytest.skip("nothing is sent to a head beside the target")
    options = head_options(pair[0], head, kind)
    del options["gateway"]
    with InProcessStack(options) as running, InProcessStack({"drafter": options["drafter"]}) as spare:
        drafters = {"first": running, "second": spare}
        peers = {name: f"127.0.0.1:{running.services[name].port}" for name in ("verifier", "drafter")}
        peers["drafter"] += f",127.0.0.1:{spare.services['drafter'].port}"
        gateway = {"speculation": "fixed", "local_drafts": "none", "num_speculative_tokens": 3, **peers}
        with InProcessStack({"gateway": gateway}) as front, Client(front.address) as client:
            stream = client.stream(PROMPT, max_tokens=40, ignore_eos=True, drafter=EAGLE3)
            for _ in stream:
                sent = {name: read_metric(one, "drafter", "blocks_sent") for name, one in drafters.items()}
                busy = max(sent, key=lambda name: sent[name])
                if len(drafters) == 2 and sent[busy] >= 2:
                    drafters.pop(busy).kill("drafter")
            (left,) = drafters.values()
            assert read_metric(left, "drafter", "blocks_sent") > 0, "the other one has gone on"
            queried = read_metric(running, "verifier", "prefix_cache_queries")
    done = stream.completion.statistics
    assert (done.num_drafters_lost, done.num_verifiers_lost) == (1, 0)
    assert len(stream.completion.token_ids) == 40
    assert queried == len(PROMPT), "its prompt was read once"
