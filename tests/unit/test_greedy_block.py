"""Greedy block verification: what it remembers from round to round. Its laws are proved in test_checking.py."""

import math
from contextlib import nullcontext

import pytest
import torch
from cases import every
from tiny_models import tiny_network, with_exact_norms
from torch import Tensor

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.local_loop import LocalRun, speculate
from draftwire.method.keys import DrawKey, Role, derive_key
from draftwire.method.quantization import Encoding, Quantization
from draftwire.method.sampling import probabilities
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoders import decoder_of
from draftwire.models.torch_models import torch_model
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import BlockBatch, FixedNoise, KeyedNoise, Outcome, verify
from examples.rules.greedy_block import GreedyBlockRule
from examples.rules.greedy_block_state import LARGEST_RATIO, Modifications, advance, modify

torch.set_num_threads(1)

GREEDY_BLOCK = "examples.rules.greedy_block:GreedyBlockRule"


def tensor(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def state_of(modifications: Modifications, row: int) -> tuple[tuple[float, int], ...]:
    """Returns what is in force for one text: ratio and tokens left."""
    pairs = zip(modifications.ratios[row].tolist(), modifications.left[row].tolist(), strict=True)
    return tuple((ratio, left) for ratio, left in pairs if left > 0)


def block_of(target: Tensor, draft: Tensor, tokens: list[int]) -> BlockBatch:
    return BlockBatch.padded(target[None], draft[None], torch.tensor([tokens]), torch.tensor([len(tokens)]))


# Texts of several rounds, which end before the modifications of their last round do.


@every("accepted", range(4))
def test_modification_lasts_until_the_block_is_as_long_as_drafted(accepted: int) -> None:
    """By hand: R = product of target over draft along the accepted tokens and the extra one."""
    target, draft = tensor([[0.2, 0.5, 0.3]] * 4), tensor([[0.4, 0.1, 0.5]] * 3)
    blocks = block_of(target, draft, [0, 2, 1])
    after = advance(modify(blocks, Modifications.none(1)), Outcome(torch.tensor([accepted]), torch.tensor([1])))
    left = 3 - accepted - 1
    assert len(state_of(after, 0)) == (left > 0)
    for ratio, still in state_of(after, 0):
        expected = math.prod([0.5, 0.6, 5.0][:accepted]) * 5.0
        assert (ratio, still) == (pytest.approx(expected, rel=1e-6), left)
        residual = (ratio * target[0] - draft[0]).clamp(min=0.0)
        rows = modify(blocks, after).blocks.padded_target_probs()[0]
        assert (rows[0] - residual / residual.sum()).abs().max() < 1e-12
        assert torch.equal(rows[left:], target[left:]), "later places are as they were"
        among_ended = Modifications(tensor([[0.0, ratio, 0.0]]), torch.tensor([[0, left, 0]]))
        assert torch.equal(modify(blocks, among_ended).blocks.padded_target_probs()[0], rows)
    impossible = block_of(target, tensor([[0.0, 0.1, 0.9]] * 3), [2, 2, 1])
    after = advance(modify(impossible, Modifications.none(1)), Outcome(torch.tensor([accepted]), torch.tensor([0])))
    assert state_of(after, 0) == (), "an extra token that the drafter cannot draw leaves the target as it is"
    assert torch.equal(modify(impossible, after).blocks.padded_target_probs()[0], target)


def test_texts_of_different_states_are_decided_in_a_batch_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(91)
    count, length, vocab_size = 20, 4, 4
    together, alone, states = GreedyBlockRule(), [GreedyBlockRule() for _ in range(count)], set()
    for _ in range(8):
        target, draft = (
            (1.5 * torch.randn(count, places, vocab_size, generator=generator).double()).softmax(-1)
            for places in (length + 1, length)
        )
        tokens = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).reshape(count, length)
        uniforms = torch.rand(count, 2, generator=generator, dtype=torch.float64)
        blocks = BlockBatch.padded(target, draft, tokens, torch.full((count,), length))
        outcome = verify(together, blocks, FixedNoise(uniforms))
        assert together.modifications is not None
        for row, rule in enumerate(alone):
            single = block_of(target[row], draft[row], tokens[row].tolist())
            expected = verify(rule, single, FixedNoise(uniforms[[row]]))
            assert int(outcome.num_accepted[row]) == int(expected.num_accepted)
            assert int(outcome.extra_tokens[row]) == int(expected.extra_tokens)
            assert rule.modifications is not None
            state, own = state_of(together.modifications, row), state_of(rule.modifications, 0)
            assert [left for _, left in state] == [left for _, left in own]
            assert [ratio for ratio, _ in state] == pytest.approx([ratio for ratio, _ in own], rel=1e-9)
            states.add(tuple(left for _, left in state))
    assert len(states) >= 6
    assert max(map(len, states)) >= 2


@every(("second", "fits"), [(0, False), (1, False), (2, True), (3, True), (5, True)])
def test_block_shorter_than_a_modification_in_force_is_refused(second: int, fits: bool) -> None:
    rule, target, draft = GreedyBlockRule(), tensor([[0.3, 0.3, 0.4]] * 6), tensor([[0.2, 0.6, 0.2]] * 5)
    first, after = (
        BlockBatch.padded(
            target[None, : length + 1],
            draft[None, :length],
            torch.ones(1, length, dtype=torch.int64),
            torch.tensor([length]),
        )
        for length in (3, second)
    )
    rejecting = FixedNoise(tensor([[0.0, 0.999]]))
    assert int(verify(rule, first, rejecting).num_accepted) == 0
    before = rule.modifications
    assert before is not None
    assert before.left.tolist() == [[2]]
    with nullcontext() if fits else pytest.raises(ValueError, match="constant length"):
        verify(rule, after, rejecting)
    assert fits or rule.modifications is before


def test_ratios_beyond_all_bounds_leave_finite_numbers() -> None:
    target, draft = tensor([[1.0 - 1e-9, 1e-9]] * 41), tensor([[1e-9, 1.0 - 1e-9]] * 40)
    law = GreedyBlockRule().stop_law(block_of(target, draft, [0] * 40))
    assert torch.isfinite(law.residual_scales).all()
    assert float(law.residual_scales.max()) == LARGEST_RATIO
    assert law.accepted_probs[0, 40] == 1.0


# Through the loop

VOCAB_SIZE = 5
PROMPT = [1, 3, 0, 2]


@pytest.fixture(scope="module")
def target() -> CachedModel:
    return torch_model(decoder_of(tiny_network("llama", VOCAB_SIZE, 96, seed=3)), 512)


@pytest.fixture(scope="module")
def drafter() -> LanguageModelDrafter:
    network = tiny_network("llama", VOCAB_SIZE, 96, seed=4)
    return LanguageModelDrafter(
        torch_model(decoder_of(network), 512), 96, quantization=Quantization(Encoding.DENSE_FLOAT32)
    )


@torch.inference_mode()
def test_loop_shows_the_rule_the_models_rows_and_carries_its_state(
    target: CachedModel, drafter: LanguageModelDrafter
) -> None:
    reference = with_exact_norms(tiny_network("llama", VOCAB_SIZE, 96, seed=3))
    counts, num_forgetful = set(), 0
    for seed in range(4):
        sampling, committed, rule = SamplingParams(1.2), list(PROMPT), GreedyBlockRule()
        run = LocalRun(sampling, 40, 4, GREEDY_BLOCK, seed, cuts_last_block=False)
        for number, done in enumerate(speculate(target, drafter, PROMPT, run)):
            tokens = done.blocks.draft_tokens[0].tolist()
            assert len(tokens) == 4, "also in the last round"
            logits = reference(input_ids=torch.tensor([committed + tokens]), use_cache=False).logits[0]
            expected = probabilities(logits[len(committed) - 1 :], sampling)
            assert (done.blocks.padded_target_probs()[0] - expected).abs().max() < 1e-9
            key = DrawKey(derive_key(seed, Role.VERIFYING), 0, number)
            noise = KeyedNoise([key], [len(committed)], torch.device("cpu"))
            outcome, forgetful = (verify(one, done.blocks, noise) for one in (rule, GreedyBlockRule()))
            assert done.token_ids == [*tokens[: int(outcome.num_accepted)], int(outcome.extra_tokens)]
            num_forgetful += done.token_ids != [*tokens[: int(forgetful.num_accepted)], int(forgetful.extra_tokens)]
            counts.add(done.num_accepted)
            committed += done.token_ids
    assert len(counts) >= 4
    assert num_forgetful >= 5, "the state decided some rounds"


def test_last_round_may_be_too_long_for_its_blocks_are_of_one_length(
    target: CachedModel, drafter: LanguageModelDrafter
) -> None:
    surplus = set()
    for seed in range(12):
        run = LocalRun(SamplingParams(), 10, 4, GREEDY_BLOCK, seed, cuts_last_block=False)
        rounds = list(speculate(target, drafter, PROMPT, run))
        counts = [len(done.token_ids) for done in rounds]
        assert sum(counts[:-1]) < 10 <= sum(counts)
        surplus.add(sum(counts) - 10)
    assert max(surplus) > 0
    assert max(surplus) <= 4


def test_each_run_forgets_the_one_before(target: CachedModel, drafter: LanguageModelDrafter) -> None:
    runs = [LocalRun(SamplingParams(), 20, 3, GREEDY_BLOCK, seed, cuts_last_block=False) for seed in (1, 2, 1)]
    texts = [[token for done in speculate(target, drafter, PROMPT, run) for token in done.token_ids] for run in runs]
    assert texts[0] == texts[2] != texts[1]
