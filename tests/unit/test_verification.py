"""The rules, proved by enumeration: no sampling, float64, every outcome."""

import json
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
import torch
from enumeration import largest_deviation, outcome_law, random_table, rows_along, sequence_law, speculative_law

from draftwire.errors import InvalidRequestError
from draftwire.verification import RULES, BlockBatch, VerificationRule, rule_named, verify
from draftwire.verification.block import block_weights

CHAIN = json.loads((Path(__file__).parents[1] / "vectors" / "chain.json").read_text())
EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def tensor(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def single_block(target: torch.Tensor, draft: torch.Tensor, tokens: list[int]) -> BlockBatch:
    return BlockBatch(
        target.unsqueeze(0),
        draft.unsqueeze(0),
        torch.tensor([tokens], dtype=torch.int64),
        torch.tensor([len(tokens)]),
    )


@EVERY_RULE
@pytest.mark.parametrize("case", CHAIN, ids=[case["name"] for case in CHAIN])
def test_outcome_law_equals_independently_computed_one(rule: VerificationRule, case: dict) -> None:
    law = outcome_law(rule, tensor(case["target_probs"]), tensor(case["draft_probs"]), tuple(case["draft_tokens"]))
    assert (law - tensor(case["outcomes"][rule.name])).abs().max() <= 1e-12


@pytest.mark.parametrize("case", CHAIN, ids=[case["name"] for case in CHAIN])
def test_block_weights_equal_independently_computed_ones(case: dict) -> None:
    blocks = single_block(tensor(case["target_probs"]), tensor(case["draft_probs"]), case["draft_tokens"])
    assert (block_weights(blocks)[0] - tensor(case["block_weights"])).abs().max() <= 1e-12


@pytest.mark.parametrize(("name", "expected"), [("token", 10 / 9), ("block", 11 / 9)])
def test_toy_example_of_the_paper_has_its_expected_accepted_tokens(name: str, expected: float) -> None:
    # Sun et al. 2024, section 2: target (1/3, 2/3), drafter (2/3, 1/3) whatever came before, blocks of two.
    target, draft = tensor([[1 / 3, 2 / 3]] * 3), tensor([[2 / 3, 1 / 3]] * 2)
    mean = 0.0
    for first in range(2):
        for second in range(2):
            law = RULES[name].stop_law(single_block(target, draft, [first, second]))
            mean += float(draft[0, first] * draft[1, second] * law.expected_accepted()[0])
    assert mean == pytest.approx(expected, abs=1e-12)


@EVERY_RULE
@pytest.mark.parametrize(
    ("vocab_size", "block_lengths", "length"),
    [(2, [2], 4), (3, [1], 4), (3, [2], 4), (3, [3], 5), (3, [2, 0, 3, 1], 5), (4, [2], 3), (5, [2], 3)],
)
@pytest.mark.parametrize("sharpness", [0.7, 3.0])
def test_rounds_emit_the_law_of_the_target(
    rule: VerificationRule, vocab_size: int, block_lengths: list[int], length: int, sharpness: float
) -> None:
    generator = torch.Generator().manual_seed(vocab_size * 100 + length)
    target, drafter = random_table(vocab_size, sharpness, generator), random_table(vocab_size, sharpness, generator)
    law = speculative_law(rule, target, drafter, block_lengths, length)
    assert largest_deviation(law, sequence_law(target, length)) < 1e-12


@EVERY_RULE
def test_rounds_emit_the_law_of_a_target_whose_support_is_smaller(rule: VerificationRule) -> None:
    generator = torch.Generator().manual_seed(5)
    target, drafter = random_table(4, 1.0, generator), random_table(4, 1.0, generator)
    target[:, 1] = 0.0
    target[2, 3] = 0.0
    target /= target.sum(-1, keepdim=True)
    law = speculative_law(rule, target, drafter, [3], 4)
    assert largest_deviation(law, sequence_law(target, 4)) < 1e-12
    assert all(1 not in tokens for tokens, mass in law.items() if mass > 0.0)


@EVERY_RULE
def test_rounds_emit_the_law_of_the_target_with_a_greedy_or_narrow_drafter(rule: VerificationRule) -> None:
    generator = torch.Generator().manual_seed(6)
    target, drafter = random_table(3, 1.0, generator), random_table(3, 1.0, generator)
    one_hot = torch.zeros_like(drafter).scatter_(1, drafter.argmax(1, keepdim=True), 1.0)
    narrow = drafter.clone()
    narrow[:, 0] = 0.0
    narrow /= narrow.sum(-1, keepdim=True)
    for table in (one_hot, narrow):
        law = speculative_law(rule, target, table, [3], 4)
        assert largest_deviation(law, sequence_law(target, 4)) < 1e-12


@EVERY_RULE
@pytest.mark.parametrize("greedy_drafter", [True, False])
def test_greedy_target_keeps_exactly_the_leading_matches(rule: VerificationRule, greedy_drafter: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(50):
        best = torch.randint(0, 3, (4,), generator=generator)
        target = torch.nn.functional.one_hot(best, 3).double()
        tokens = torch.randint(0, 3, (3,), generator=generator)
        draft = torch.nn.functional.one_hot(tokens, 3).double()
        if not greedy_drafter:
            draft = 0.5 * draft + 0.5 * random_table(3, 1.0, generator)[:3]
        matches = 0
        while matches < 3 and tokens[matches] == best[matches]:
            matches += 1
        law = outcome_law(rule, target, draft, tuple(tokens.tolist()))
        assert law[matches, best[matches]] == pytest.approx(1.0, abs=1e-12)


def reach_probs(rule: VerificationRule, target: torch.Tensor, drafter: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Returns P(at least len(prefix) tokens accepted | the block starts with prefix), for all prefixes up to three."""
    vocab_size = target.shape[1]
    reached: dict[tuple[int, ...], float] = defaultdict(float)
    drawn: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens in product(range(vocab_size), repeat=3):
        draft_rows = rows_along(drafter, (), tokens)[:-1]
        mass = float(torch.stack([draft_rows[i, token] for i, token in enumerate(tokens)]).prod())
        law = rule.stop_law(single_block(rows_along(target, (), tokens), draft_rows, list(tokens)))
        for length in (1, 2, 3):
            drawn[tokens[:length]] += mass
            reached[tokens[:length]] += mass * float(law.accepted_probs[0, length:].sum())
    return {prefix: reached[prefix] / drawn[prefix] for prefix in drawn}


def test_block_reaches_each_position_with_its_block_weight_and_so_no_less_than_token() -> None:
    """Lemma 3 of the paper: P(accepted >= i | first i draft tokens) = a_i, the most that any rule may have."""
    generator = torch.Generator().manual_seed(8)
    for case in range(8):
        target, drafter = (random_table(3, 0.5 + case / 2, generator) for _ in range(2))
        block, token = (reach_probs(RULES[name], target, drafter) for name in ("block", "token"))
        for prefix, reached in block.items():
            rows, draft_rows = rows_along(target, (), prefix), rows_along(drafter, (), prefix)[:-1]
            weight = float(block_weights(single_block(rows, draft_rows, list(prefix)))[0, -1])
            assert reached == pytest.approx(weight, abs=1e-12)
            assert reached >= token[prefix] - 1e-12


@EVERY_RULE
@pytest.mark.parametrize("batch_size", [2, 3, 17])
def test_result_for_a_block_does_not_depend_on_its_batch(rule: VerificationRule, batch_size: int) -> None:
    generator = torch.Generator().manual_seed(batch_size)
    vocab_size, max_len = 6, 5
    target = (2 * torch.randn(batch_size, max_len + 1, vocab_size, generator=generator)).softmax(-1)
    draft = (2 * torch.randn(batch_size, max_len, vocab_size, generator=generator)).softmax(-1)
    tokens = torch.randint(0, vocab_size, (batch_size, max_len), generator=generator)
    lengths = torch.randint(0, max_len + 1, (batch_size,), generator=generator)
    uniforms = torch.rand(batch_size, 2, generator=generator, dtype=torch.float64)
    together = verify(rule, BlockBatch(target, draft, tokens, lengths), uniforms)
    for row, length in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        alone = verify(
            rule,
            BlockBatch(target[one, : length + 1], draft[one, :length], tokens[one, :length], lengths[one]),
            uniforms[one],
        )
        assert int(alone.num_accepted[0]) == int(together.num_accepted[row])
        assert int(alone.extra_tokens[0]) == int(together.extra_tokens[row])


@EVERY_RULE
def test_verify_draws_from_the_law_of_the_rule(rule: VerificationRule) -> None:
    """A grid of 400 x 400 uniforms gives each outcome its probability up to the grid's resolution."""
    case = next(case for case in CHAIN if len(case["draft_tokens"]) == 3 and len(case["target_probs"][0]) >= 3)
    target, draft = tensor(case["target_probs"]), tensor(case["draft_probs"])
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    uniforms = torch.cartesian_prod(grid, grid)
    count = len(uniforms)
    blocks = BlockBatch(
        target.expand(count, -1, -1),
        draft.expand(count, -1, -1),
        torch.tensor(case["draft_tokens"]).expand(count, -1),
        torch.full((count,), len(case["draft_tokens"])),
    )
    outcome = verify(rule, blocks, uniforms)
    vocab_size = target.shape[1]
    counts = torch.bincount(outcome.num_accepted * vocab_size + outcome.extra_tokens, minlength=4 * vocab_size)
    expected = outcome_law(rule, target, draft, tuple(case["draft_tokens"]))
    assert (counts.reshape(4, vocab_size) / count - expected).abs().max() < 2 / 400


@EVERY_RULE
def test_empty_block_is_plain_decoding(rule: VerificationRule) -> None:
    target = tensor([[0.2, 0.5, 0.3]])
    law = outcome_law(rule, target, torch.zeros(0, 3, dtype=torch.float64), ())
    assert (law[0] - target[0]).abs().max() < 1e-15


@EVERY_RULE
def test_equal_distributions_accept_everything_and_draw_the_bonus_from_the_target(rule: VerificationRule) -> None:
    rows = tensor([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0.125, 0.375, 0.5]])
    law = outcome_law(rule, rows, rows[:2], (2, 0))
    assert (law[2] - rows[2]).abs().max() < 1e-12
    assert law[:2].sum() == 0.0


@EVERY_RULE
def test_disjoint_supports_reject_everything_and_draw_from_the_target(rule: VerificationRule) -> None:
    target = tensor([[0.0, 0.4, 0.6, 0.0]] * 3)
    draft = tensor([[0.5, 0.0, 0.0, 0.5]] * 2)
    law = outcome_law(rule, target, draft, (0, 3))
    assert (law[0] - target[0]).abs().max() < 1e-15


@EVERY_RULE
def test_token_that_cannot_have_been_drawn_cuts_the_block_before_it(rule: VerificationRule) -> None:
    generator = torch.Generator().manual_seed(11)
    target, draft = random_table(3, 1.0, generator), random_table(3, 1.0, generator)[:3]
    draft[1, 2] = 0.0
    law = outcome_law(rule, target, draft, (0, 2, 1))
    shorter = outcome_law(rule, target[:2], draft[:1], (0,))
    assert (law[:2] - shorter).abs().max() < 1e-15
    assert law[2:].sum() == 0.0
    uniforms = torch.rand(200, 2, generator=generator, dtype=torch.float64)
    tokens = torch.tensor([0, 2, 1])
    blocks = BlockBatch(
        target.expand(200, -1, -1), draft.expand(200, -1, -1), tokens.expand(200, -1), torch.full((200,), 3)
    )
    assert int(verify(rule, blocks, uniforms).num_accepted.max()) == 1


@EVERY_RULE
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_impossible_tokens_are_never_emitted_at_the_ends_of_the_uniforms(
    rule: VerificationRule, uniform: float
) -> None:
    target = torch.tensor([[0.0, 1.0 - 1e-7, 1e-7, 0.0]] * 3)
    draft = torch.tensor([[0.5, 1e-30, 0.5 - 1e-30, 0.0]] * 2)
    outcome = verify(rule, single_block(target, draft, [0, 0]), torch.full((1, 2), uniform, dtype=torch.float64))
    assert int(outcome.num_accepted[0]) == 0
    assert int(outcome.extra_tokens[0]) in (1, 2)


def test_unknown_rule_is_refused_with_the_known_names() -> None:
    with pytest.raises(InvalidRequestError, match="block, token"):
        rule_named("tokn")
