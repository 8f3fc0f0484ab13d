"""Greedy block verification: the most that a round can accept, and the law of whole texts, by enumeration."""

import json
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
import torch
from enumeration import largest_deviation, outcome_law, random_table, rows_along, sequence_law
from tiny_models import tiny_network, with_exact_norms
from torch import Tensor
from transformers import PreTrainedModel

from draftwire.drafting.language_model import LanguageModelDrafter
from draftwire.keys import Role, derive_key
from draftwire.local_loop import LocalRun, speculate
from draftwire.models.cached_model import CachedModel
from draftwire.models.decoder import decoder_of
from draftwire.parameters import SamplingParams
from draftwire.quantization import Encoding, Quantization
from draftwire.randomness import DrawKey
from draftwire.sampling import probabilities
from draftwire.verification import RULES, BlockBatch, FixedNoise, GreedyBlockRule, KeyedNoise, Outcome, verify
from draftwire.verification.greedy_block import LARGEST_RATIO, Modifications, advance, modify

torch.set_num_threads(1)

CHAIN = json.loads((Path(__file__).parents[1] / "vectors" / "chain.json").read_text())
Law = dict[tuple[int, ...], float]


def tensor(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def blocks_after(target: Tensor, drafter: Tensor, contexts: list[tuple[int, ...]], length: int) -> BlockBatch:
    """Returns all blocks of a length after each of the contexts."""
    blocks = [(context, tokens) for context in contexts for tokens in product(range(target.shape[1]), repeat=length)]
    return BlockBatch.padded(
        torch.stack([rows_along(target, context, tokens) for context, tokens in blocks]),
        torch.stack([rows_along(drafter, context, tokens)[:-1] for context, tokens in blocks]),
        torch.tensor([tokens for _, tokens in blocks]),
        torch.full((len(blocks),), length),
    )


def drawn_probs(blocks: BlockBatch) -> Tensor:
    """Returns the probability that the drafter draws each block, `[batch]`."""
    return blocks.draft_probs_of_drafts().prod(dim=1)


def part(blocks: BlockBatch, chosen: Tensor) -> BlockBatch:
    """Returns some of the blocks."""
    rows = blocks.padded_target_probs()[chosen], blocks.padded_draft_probs()[chosen]
    return BlockBatch.padded(*rows, blocks.draft_tokens[chosen], blocks.lengths[chosen])


def state_of(modifications: Modifications, row: int) -> tuple[tuple[float, int], ...]:
    """Returns what is in force for one text: ratio and tokens left."""
    pairs = zip(modifications.ratios[row].tolist(), modifications.left[row].tolist(), strict=True)
    return tuple((ratio, left) for ratio, left in pairs if left > 0)


def joined(states: list[tuple[tuple[float, int], ...]]) -> Modifications:
    """Returns what is in force for several texts, as one batch. Missing ones stand first, or in between."""
    most = max(map(len, states))
    padded = [((0.0, 0),) * (most - len(state)) + state for state in states]
    return Modifications(
        tensor([[ratio for ratio, _ in state] for state in padded]).reshape(len(states), most),
        torch.tensor([[left for _, left in state] for state in padded], dtype=torch.int64).reshape(len(states), most),
    )


def law_of_rounds(target: Tensor, drafter: Tensor, block_length: int, length: int) -> tuple[Law, int]:
    """Returns the law of the first `length` tokens, and how many modifications were in force at most.

    All texts of a round are one batch, with different states.
    """
    rule, vocab_size = GreedyBlockRule(), target.shape[1]
    finished: Law = defaultdict(float)
    growing: dict[tuple, float] = {((), ()): 1.0}
    deepest = 0
    while growing:
        following: dict[tuple, float] = defaultdict(float)
        contexts, states = [context for context, _ in growing], [state for _, state in growing]
        deepest = max(deepest, *map(len, states))
        per_context = vocab_size**block_length
        batch = blocks_after(target, drafter, contexts, block_length)
        mass = tensor(list(growing.values())).repeat_interleave(per_context) * drawn_probs(batch)
        possible = torch.nonzero(mass).flatten()
        origins = (possible // per_context).tolist()
        mass, batch = mass[possible], part(batch, possible)
        modified = modify(batch, joined([states[origin] for origin in origins]))
        law = rule.stop_law(modified.blocks)
        assert (law.accepted_probs >= 0.0).all()
        for accepted in range(block_length + 1):
            stop = torch.full((len(mass),), accepted)
            weights = rule.extra_weights(modified.blocks, law, stop)
            emitted = (mass * law.accepted_probs[:, accepted]).unsqueeze(1) * weights / weights.sum(1, keepdim=True)
            for extra in range(vocab_size):
                after = advance(modified, Outcome(stop, torch.full((len(mass),), extra)))
                for row, probability in enumerate(emitted[:, extra].tolist()):
                    if probability == 0.0:
                        continue
                    tokens = batch.draft_tokens[row, :accepted].tolist()
                    text = (*contexts[origins[row]], *tokens, extra)
                    if len(text) >= length:
                        finished[text[:length]] += probability
                    else:
                        following[text, state_of(after, row)] += probability
        growing = following
    return finished, deepest


@pytest.mark.parametrize("case", CHAIN, ids=[case["name"] for case in CHAIN])
def test_first_round_has_the_independently_computed_law(case: dict) -> None:
    target, draft = tensor(case["target_probs"]), tensor(case["draft_probs"])
    law = outcome_law(GreedyBlockRule(), target, draft, tuple(case["draft_tokens"]))
    assert (law - tensor(case["outcomes"]["greedy_block_first_round"])).abs().max() <= 1e-12


@pytest.mark.parametrize("vocab_size", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_first_round_accepts_the_mass_that_target_and_drafter_share_at_each_position(
    vocab_size: int, length: int
) -> None:
    """The most that any rule can accept in one round: sum over prefixes of min(P, Q), for every prefix."""
    generator = torch.Generator().manual_seed(10 * vocab_size + length)
    target, drafter = random_table(vocab_size, 1.2, generator), random_table(vocab_size, 1.2, generator)
    blocks = blocks_after(target, drafter, [()], length)
    drawn = drawn_probs(blocks)
    law = GreedyBlockRule().stop_law(blocks)
    reached: Law = defaultdict(float)
    for row, tokens in enumerate(blocks.draft_tokens.tolist()):
        for count in range(1, length + 1):
            reached[tuple(tokens[:count])] += float(drawn[row] * law.accepted_probs[row, count:].sum())
    shared = {
        prefix: min(sequence_law(target, len(prefix))[prefix], sequence_law(drafter, len(prefix))[prefix])
        for prefix in reached
    }
    assert reached == pytest.approx(shared, abs=1e-12)
    assert float(drawn @ law.expected_accepted()) == pytest.approx(sum(shared.values()), abs=1e-12)
    for name in ("block", "token"):
        others = float(drawn @ RULES[name].stop_law(blocks).expected_accepted())
        assert others <= sum(shared.values()) + 1e-12


def test_toy_example_of_the_paper_accepts_12_ninths() -> None:
    target, drafter = tensor([[1 / 3, 2 / 3]] * 3), tensor([[2 / 3, 1 / 3]] * 3)
    blocks = blocks_after(target, drafter, [()], 2)
    mean = drawn_probs(blocks) @ GreedyBlockRule().stop_law(blocks).expected_accepted()
    assert float(mean) == pytest.approx(12 / 9, abs=1e-12)


# Texts of several rounds, which end before the modifications of their last round do.
ROUNDS = [(2, 2, 5, 2), (3, 2, 4, 2), (2, 3, 6, 3), (3, 3, 4, 3), (2, 1, 4, 1), (2, 4, 5, 4)]


@pytest.mark.parametrize(("vocab_size", "block_length", "length", "depth"), ROUNDS)
@pytest.mark.parametrize("sharpness", [0.7, 2.5])
def test_rounds_emit_the_law_of_the_target_though_modifications_nest(
    vocab_size: int, block_length: int, length: int, depth: int, sharpness: float
) -> None:
    generator = torch.Generator().manual_seed(vocab_size * 100 + block_length * 10 + length)
    target, drafter = random_table(vocab_size, sharpness, generator), random_table(vocab_size, sharpness, generator)
    law, deepest = law_of_rounds(target, drafter, block_length, length)
    assert largest_deviation(law, sequence_law(target, length)) < 1e-12
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert deepest == depth - 1, "a round that rejects at once leaves so many modifications in force"


def test_rounds_without_the_modifications_do_not_emit_the_law_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the test above sees a modification that is missing: the paper's toy is 1/9 off."""
    target, drafter = tensor([[1 / 3, 2 / 3]] * 3), tensor([[2 / 3, 1 / 3]] * 3)
    assert largest_deviation(law_of_rounds(target, drafter, 2, 2)[0], sequence_law(target, 2)) < 1e-12
    monkeypatch.setitem(globals(), "advance", lambda modified, outcome: Modifications.none(len(outcome.num_accepted)))
    assert largest_deviation(law_of_rounds(target, drafter, 2, 2)[0], sequence_law(target, 2)) > 0.05


@pytest.mark.parametrize("narrow", ["drafter", "target", "both"])
def test_rounds_emit_the_law_of_the_target_where_ratios_are_zero_or_infinite(narrow: str) -> None:
    """A drafter that cannot draw the extra token makes its ratio infinite: the target is then in force as it is."""
    generator = torch.Generator().manual_seed(77)
    target, drafter = random_table(3, 1.0, generator), random_table(3, 1.0, generator)
    if narrow != "target":
        drafter[:, 0] = 0.0
        drafter[2] = tensor([0.0, 1.0, 0.0])
        drafter /= drafter.sum(-1, keepdim=True)
    if narrow != "drafter":
        target[:, 1] = 0.0
        target[0] = tensor([0.0, 0.0, 1.0])
        target /= target.sum(-1, keepdim=True)
    for block_length in (2, 3):
        law, _ = law_of_rounds(target, drafter, block_length, 4)
        assert largest_deviation(law, sequence_law(target, 4)) < 1e-12
        assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)


def test_extra_token_that_the_drafter_cannot_draw_leaves_the_target_as_it_is() -> None:
    target, draft = tensor([[0.2, 0.5, 0.3]] * 4), tensor([[0.0, 0.1, 0.9]] * 3)
    blocks = BlockBatch.padded(target[None], draft[None], torch.tensor([[2, 2, 1]]), torch.tensor([3]))
    modified = modify(blocks, Modifications.none(1))
    for accepted in range(3):
        after = advance(modified, Outcome(torch.tensor([accepted]), torch.tensor([0])))
        assert state_of(after, 0) == ()
        again = modify(blocks, after)
        assert torch.equal(again.blocks.padded_target_probs(), target[None])


@pytest.mark.parametrize("accepted", range(4))
def test_modification_lasts_until_the_block_is_as_long_as_drafted(accepted: int) -> None:
    """By hand: R = product of target over draft along the accepted tokens and the extra one."""
    target, draft = tensor([[0.2, 0.5, 0.3]] * 4), tensor([[0.4, 0.1, 0.5]] * 3)
    tokens = [0, 2, 1]
    blocks = BlockBatch.padded(target[None], draft[None], torch.tensor([tokens]), torch.tensor([3]))
    after = advance(modify(blocks, Modifications.none(1)), Outcome(torch.tensor([accepted]), torch.tensor([1])))
    ratios = [0.5, 0.6, 5.0]
    expected = torch.tensor(ratios[:accepted]).double().prod() * 5.0
    left = 3 - accepted - 1
    if left <= 0:
        assert state_of(after, 0) == ()
        return
    ((ratio, still),) = state_of(after, 0)
    assert (ratio, still) == (pytest.approx(float(expected), rel=1e-6), left)
    residual = (ratio * target[0] - draft[0]).clamp(min=0.0)
    rows = modify(blocks, after).blocks.padded_target_probs()[0]
    assert (rows[0] - residual / residual.sum()).abs().max() < 1e-12
    assert torch.equal(rows[left:], target[left:]), "later places are as they were"


def test_texts_of_different_states_are_decided_in_a_batch_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(91)
    count, rounds, length, vocab_size = 40, 8, 4, 4
    together, alone = GreedyBlockRule(), [GreedyBlockRule() for _ in range(count)]
    states = set()
    for _ in range(rounds):
        target = (1.5 * torch.randn(count, length + 1, vocab_size, generator=generator).double()).softmax(-1)
        draft = (1.5 * torch.randn(count, length, vocab_size, generator=generator).double()).softmax(-1)
        tokens = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).reshape(count, length)
        uniforms = torch.rand(count, 2, generator=generator, dtype=torch.float64)
        blocks = BlockBatch.padded(target, draft, tokens, torch.full((count,), length))
        outcome = verify(together, blocks, FixedNoise(uniforms))
        assert together.modifications is not None
        for row, rule in enumerate(alone):
            one = slice(row, row + 1)
            single = BlockBatch.padded(target[one], draft[one], tokens[one], torch.tensor([length]))
            expected = verify(rule, single, FixedNoise(uniforms[one]))
            assert int(outcome.num_accepted[row]) == int(expected.num_accepted)
            assert int(outcome.extra_tokens[row]) == int(expected.extra_tokens)
            assert rule.modifications is not None
            state = state_of(together.modifications, row)
            own = state_of(rule.modifications, 0)
            assert [left for _, left in state] == [left for _, left in own]
            assert [ratio for ratio, _ in state] == pytest.approx([ratio for ratio, _ in own], rel=1e-9)
            states.add(tuple(left for _, left in state))
    assert len(states) >= 6
    assert max(map(len, states)) >= 2


def test_modification_that_follows_one_that_has_ended_in_its_batch_keeps_its_own_numbers() -> None:
    target, draft = tensor([[0.2, 0.5, 0.3]] * 4), tensor([[0.4, 0.1, 0.5]] * 3)
    blocks = BlockBatch.padded(target[None], draft[None], torch.tensor([[0, 2, 1]]), torch.tensor([3]))
    expected = modify(blocks, joined([((1.7, 2),)]))
    padded = Modifications(tensor([[0.0, 1.7, 0.0]]), torch.tensor([[0, 2, 0]]))
    assert torch.equal(modify(blocks, padded).blocks.padded_target_probs(), expected.blocks.padded_target_probs())


@pytest.mark.parametrize(("second", "fits"), [(0, False), (1, False), (2, True), (3, True), (5, True)])
def test_block_shorter_than_a_modification_in_force_is_refused_and_a_longer_one_is_not(second: int, fits: bool) -> None:
    rule = GreedyBlockRule()
    target, draft = tensor([[0.3, 0.3, 0.4]] * 6), tensor([[0.2, 0.6, 0.2]] * 5)

    def blocks(length: int) -> BlockBatch:
        tokens = torch.ones(1, length, dtype=torch.int64)
        return BlockBatch.padded(target[None, : length + 1], draft[None, :length], tokens, torch.tensor([length]))

    rejecting = FixedNoise(tensor([[0.0, 0.999]]))
    assert int(verify(rule, blocks(3), rejecting).num_accepted) == 0
    before = rule.modifications
    assert before is not None
    assert before.left.tolist() == [[2]]
    if fits:
        verify(rule, blocks(second), rejecting)
        return
    with pytest.raises(ValueError, match="constant length"):
        verify(rule, blocks(second), rejecting)
    assert rule.modifications is before


def test_ratios_beyond_all_bounds_leave_finite_numbers() -> None:
    length = 40
    target, draft = tensor([[1.0 - 1e-9, 1e-9]] * (length + 1)), tensor([[1e-9, 1.0 - 1e-9]] * length)
    blocks = BlockBatch.padded(
        target[None], draft[None], torch.zeros(1, length, dtype=torch.int64), torch.tensor([length])
    )
    law = GreedyBlockRule().stop_law(blocks)
    assert torch.isfinite(law.residual_scales).all()
    assert float(law.residual_scales.max()) == LARGEST_RATIO
    assert law.accepted_probs[0, length] == 1.0


# Through the loop

VOCAB_SIZE = 5
PROMPT = [1, 3, 0, 2]


def target_network() -> PreTrainedModel:
    return tiny_network("llama", VOCAB_SIZE, 96, seed=3)


@pytest.fixture(scope="module")
def target() -> CachedModel:
    return CachedModel(decoder_of(target_network()), 512)


@pytest.fixture(scope="module")
def drafter() -> LanguageModelDrafter:
    network = tiny_network("llama", VOCAB_SIZE, 96, seed=4)
    return LanguageModelDrafter(
        CachedModel(decoder_of(network), 512), 96, quantization=Quantization(Encoding.DENSE_FLOAT32)
    )


@torch.inference_mode()
def test_loop_shows_the_rule_the_models_rows_and_carries_its_state_from_round_to_round(
    target: CachedModel, drafter: LanguageModelDrafter
) -> None:
    reference = with_exact_norms(target_network())
    counts, num_forgetful = set(), 0
    for seed in range(4):
        sampling, committed, rule = SamplingParams(1.2), list(PROMPT), GreedyBlockRule()
        for number, done in enumerate(speculate(target, drafter, PROMPT, LocalRun(sampling, 40, 4, rule.name, seed))):
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
        rounds = list(speculate(target, drafter, PROMPT, LocalRun(SamplingParams(), 10, 4, "greedy_block", seed)))
        counts = [len(done.token_ids) for done in rounds]
        assert sum(counts[:-1]) < 10 <= sum(counts)
        surplus.add(sum(counts) - 10)
    assert max(surplus) > 0
    assert max(surplus) <= 4


def test_each_run_forgets_the_one_before(target: CachedModel, drafter: LanguageModelDrafter) -> None:
    runs = [LocalRun(SamplingParams(), 20, 3, "greedy_block", seed) for seed in (1, 2, 1)]
    texts = [[token for done in speculate(target, drafter, PROMPT, run) for token in done.token_ids] for run in runs]
    assert texts[0] == texts[2] != texts[1]
