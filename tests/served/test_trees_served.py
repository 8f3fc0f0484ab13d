"""Token trees through the services: what is asked for, what is counted, and that the text is the target's own."""

import math
from collections.abc import Iterator, Sequence

import pytest
from observing import read_metric

from benchmarks.law import CONTEXT_LENGTH, PROMPT, VOCAB_SIZE, draw_completions, stack_options
from draftwire.client import Client, Completion
from draftwire.errors import InvalidRequestError
from draftwire.method.token_source import TokenSource
from draftwire.requests.parameters import SamplingParams
from tests.in_process import InProcessStack

NUM_TOKENS = CONTEXT_LENGTH - len(PROMPT)
NODES = 12
"""Of the shared stack's trees at most; a request that wants more gets as many."""


@pytest.fixture(scope="module")
def greedy(stack: InProcessStack) -> Iterator[Completion]:
    with Client(stack.address) as client:
        yield complete(client, num_speculative_tokens=0)


def complete(client: Client, **options: object) -> Completion:
    given = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "seed": 1, "ignore_eos": True, **options}
    return client.generate(PROMPT, **given)


@pytest.mark.parametrize("rule", ["block", "token", "typical", "coupled"])
def test_greedy_text_with_trees_is_that_of_plain_decoding(
    stack: InProcessStack, client: Client, greedy: Completion, rule: str
) -> None:
    """Under every rule, and each round accepts a path. The tree ends where the text may."""
    trees_before = read_metric(stack, "verifier", "draft_trees_total")
    one = complete(client, num_speculative_tokens=5, num_draft_nodes=40, rejection_sample_method=rule)
    assert one.token_ids == greedy.token_ids
    numbers = one.statistics
    assert numbers.num_trees >= 3
    assert numbers.num_trees == numbers.num_drafts, "one-token ends too"
    assert numbers.num_rounds < greedy.statistics.num_rounds
    assert len(numbers.draft_length_histogram) <= NODES + 1
    assert numbers.num_draft_tokens > numbers.num_draft_positions
    assert len(numbers.num_accepted_tokens_per_pos) <= 5
    assert sum(numbers.num_accepted_tokens_per_pos) == numbers.num_accepted_tokens
    assert one.acceptance_rate == numbers.num_accepted_tokens / numbers.num_draft_positions
    assert numbers.draft_acceptance_rate == pytest.approx(one.acceptance_rate)
    assert sum(numbers.acceptance_histogram) == numbers.num_drafts
    assert read_metric(stack, "verifier", "draft_trees_total") - trees_before >= numbers.num_trees


def test_coupled_text_is_the_same_for_chains_and_trees(stack: InProcessStack) -> None:
    """At temperature 1, but for places where rounding decides, of which both tell."""
    chains, trees = (
        list(draw_completions(stack.address, "coupled", SamplingParams(), range(10), 4, nodes)) for nodes in (0, NODES)
    )
    for chain, tree in zip(chains, trees, strict=True):
        is_near = chain.statistics.num_near_ties and tree.statistics.num_near_ties
        assert chain.token_ids == tree.token_ids or is_near
    assert total(trees, "num_trees") > 10
    assert total(trees, "num_accepted_tokens") > 1.2 * total(chains, "num_accepted_tokens")


def total(completions: Sequence[Completion], name: str) -> int:
    return sum(getattr(one.statistics, name) for one in completions)


def test_what_was_cached_after_trees_is_the_text(client: Client) -> None:
    """A prompt that continues such a text has the log-probabilities of one that nothing is cached of."""
    salt = "trees"
    for rule, temperature in (("coupled", 1.0), ("block", 1.0), ("block", 0.0)):
        options = {"rejection_sample_method": rule, "temperature": temperature, "cache_salt": salt}
        first = complete(client, num_speculative_tokens=4, num_draft_nodes=NODES, max_tokens=30, **options)
        assert first.statistics.num_trees > 3
        text = [*PROMPT, *first.token_ids]
        asked = {"max_tokens": 1, "logprobs": VOCAB_SIZE, "temperature": 0.0, "ignore_eos": True}
        cached, fresh = (
            client.generate(text, cache_salt=own, **asked) for own in (salt, f"{salt} {rule} {temperature}")
        )
        assert cached.statistics.num_cached_prompt_tokens >= 32, "of a prompt of 20"
        assert fresh.statistics.num_cached_prompt_tokens == 0
        found, expected = (dict(one.logprobs[0].top) for one in (cached, fresh))
        assert found == pytest.approx(expected, abs=1e-4)


def test_details_of_tokens_are_those_of_the_accepted_path(client: Client) -> None:
    """Drawn trees tell what the drafter gave each token, walked ones nothing; both what the target did."""
    options = {"num_speculative_tokens": 3, "num_draft_nodes": NODES, "temperature": 1.0, "token_details": True}
    for rule, is_told in (("block", True), ("coupled", False)):
        one = complete(client, rejection_sample_method=rule, logprobs=1, **options)
        assert one.draft_logprobs is not None
        told = {source: [] for source in TokenSource}
        for source, value in zip(one.sources, one.draft_logprobs, strict=True):
            told[source].append(not math.isnan(value))
        assert told[TokenSource.ACCEPTED]
        assert set(told[TokenSource.ACCEPTED]) == set(told[TokenSource.RECOVERED]) == {is_told}
        assert not any(told[TokenSource.BONUS])
        for source, value in zip(one.sources, one.draft_logprobs, strict=True):
            assert source is not TokenSource.ACCEPTED or not is_told or value > -math.inf


def test_trees_are_refused_by_rules_without_them_and_chains_by_their_peers(
    client: Client, scripted_client: Client
) -> None:
    for rule in ("token", "typical"):
        with pytest.raises(InvalidRequestError, match=f"num_draft_nodes: rule {rule} takes no token trees"):
            complete(client, num_draft_nodes=4, rejection_sample_method=rule, temperature=1.0)
    with pytest.raises(InvalidRequestError, match=r"num_draft_nodes must be in 0\.\.64, not 65"):
        complete(client, num_draft_nodes=65)
    chain = scripted_client.generate("a", max_tokens=20, num_draft_nodes=8, num_speculative_tokens=2)
    assert chain.statistics.num_drafts > 0
    assert chain.statistics.num_trees == 0


def test_option_of_the_gateway_is_for_requests_that_do_not_say(pair: tuple) -> None:
    """With a stack of its own, whose default is trees, and which would draft ahead."""
    options = stack_options(*pair, max_tree_nodes=NODES)
    options["gateway"] |= {"num_draft_nodes": 6, "draft_ahead_rounds": 2, "speculation": "adaptive"}
    with InProcessStack(options) as running, Client(running.address) as client:
        said = complete(client, num_draft_nodes=0, num_speculative_tokens=3)
        unsaid = client.generate(PROMPT, max_tokens=NUM_TOKENS, rejection_sample_method="block", ignore_eos=True)
        other = complete(client, temperature=1.0, rejection_sample_method="token")
    assert said.statistics.num_trees == other.statistics.num_trees == 0
    assert said.statistics.num_drafts > 0
    assert unsaid.statistics.num_trees == unsaid.statistics.num_drafts > 0
    assert len(unsaid.statistics.draft_length_histogram) <= 7
    assert unsaid.statistics.num_ahead_hits == unsaid.statistics.num_ahead_misses == 0
