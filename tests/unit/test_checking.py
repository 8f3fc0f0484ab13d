"""The checker of rules: what is sound passes, and every mistake is seen for what it is."""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mutations
import pytest
import torch
from typer.testing import CliRunner

from draftwire.checking import Kind, Round, check, check_round, known_rules, load_rule
from draftwire.checking.blocks import all_blocks, sparse_rows
from draftwire.checking.checks import QUICK
from draftwire.checking.coupling import race_law
from draftwire.checking.cube import LAST, edge_points, integrate
from draftwire.checking.emissions import encoded, largest_deviation, num_codes
from draftwire.checking.models import adversarial_pairs, random_pairs, toy_pair
from draftwire.checking.theory import EXPECTATIONS
from draftwire.cli.__main__ import app
from draftwire.distributions import race
from draftwire.errors import InvalidRequestError
from draftwire.parameters import SamplingParams
from draftwire.verification import RULES

SEEN = 1e-6
"""A deviation above this is no rounding."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", known_rules())
def test_rules_of_the_product_pass(name: str) -> None:
    report = check(load_rule(name))
    assert report.failures == ()
    assert report.name == name
    assert report.num_laws > 50
    if report.is_lossless:
        assert report.deviation < 1e-11
        assert report.accepted == pytest.approx(report.expected_accepted, abs=1e-11)


@pytest.mark.parametrize(
    ("name", "ninths"), [("token", 10), ("block", 11), ("greedy_block", 12)], ids=["token", "block", "greedy_block"]
)
def test_toy_of_the_paper_has_its_means(name: str, ninths: int) -> None:
    assert float(EXPECTATIONS[name](toy_pair(), 2)[-1]) == pytest.approx(ninths / 9, abs=1e-14)


@pytest.mark.parametrize("rule", [mutations.TextbookToken, mutations.TextbookBlock])
def test_textbook_implementation_with_a_coin_for_each_token_passes(rule: Callable) -> None:
    report = check(rule())
    assert report.failures == ()
    assert report.method == "decided"
    assert report.deviation < 1e-11
    name = "token" if rule is mutations.TextbookToken else "block"
    mean = sum(float(EXPECTATIONS[name](pair, 3)[-1]) for pair in random_pairs(3)) / len(random_pairs(3))
    assert report.accepted == pytest.approx(mean, abs=1e-11)


def test_rule_that_cannot_be_integrated_is_sampled_and_passes_if_it_is_sound() -> None:
    report = check(mutations.ExactMatchByRaces(), QUICK)
    assert report.failures == ()
    assert report.method == "sampled"
    assert report.deviation < 0.05


def test_rule_that_states_its_law_and_draws_by_a_race_passes() -> None:
    report = check(mutations.RacedToken(), QUICK)
    assert report.failures == ()
    assert report.method == "stated"


def test_coupled_rule_of_another_hand_passes() -> None:
    report = check(mutations.Coupled())
    assert report.failures == ()
    assert report.method == "coupled"


M = mutations
WRONG_RULES = [
    (M.BlockBreaks, Kind.LAW),
    (M.StatedBreaks, Kind.LAW),
    (M.StatesNegativeProbabilities, Kind.NO_LAW),
    (M.RatioInverted, Kind.LAW),
    (M.TokenRatioInverted, Kind.LAW),
    (M.WeightsWithoutClamp, Kind.LAW),
    (M.ResidualOfRowBefore, Kind.LAW),
    (M.ResidualOfRowAfter, Kind.LAW),
    (M.TokenResidualOfRowBefore, Kind.LAW),
    (M.TokenResidualOfRowAfter, Kind.LAW),
    (M.TokenResidualInBlock, Kind.LAW),
    (M.EarlierWeightInResidual, Kind.LAW),
    (M.StatedEarlierWeight, Kind.LAW),
    (M.BonusOfResidual, Kind.LAW),
    (M.TokenBonusOfResidual, Kind.LAW),
    (M.WholeBlockByProduct, Kind.LAW),
    (M.TokenContinues, Kind.LAW),
    (M.EpsilonInRatio, Kind.LAW),
    (M.EpsilonInResidual, Kind.LAW),
    (M.Float16Ratios, Kind.LAW),
    (M.OneUniformForAllTests, Kind.LAW),
    (M.OneUniformForAllBlockTests, Kind.LAW),
    (M.ProductOfUniforms, Kind.LAW),
    (M.ProductOfUniformsInBlock, Kind.LAW),
    (M.CoupledWithNextPlace, Kind.LAW),
    (M.CoupledResidual, Kind.LAW),
    (M.CoupledLooksAhead, Kind.NOISE),
    (M.CoupledWithTolerance, Kind.NOISE),
    (M.DrawsWithTheTestsUniform, Kind.DRAWING),
    (M.NotStrict, Kind.IMPOSSIBLE),
    (M.NotStrictInBlock, Kind.IMPOSSIBLE),
    (M.DependsOnTheBatch, Kind.BATCH),
    (M.EndOfTheLongestBlock, Kind.BATCH),
    (M.ForgetsItsRounds, Kind.DRAWING),
    (M.AcceptsLess, Kind.ACCEPTED),
    (M.LossyAtGreedyTarget, Kind.GREEDY),
]


@pytest.mark.parametrize(("rule", "kind"), WRONG_RULES, ids=[rule.__name__ for rule, _ in WRONG_RULES])
def test_mistake_in_a_rule_is_seen(rule: Callable, kind: Kind) -> None:
    report = check(rule(), QUICK)
    sizes = {failure.kind: failure.size for failure in report.failures}
    assert Kind.RAISED not in sizes
    assert sizes[kind] > SEEN
    assert not report.passed


def test_rule_that_raises_fails_and_says_what_it_raised() -> None:
    (failure, *_) = check(M.Raises(), QUICK).failures
    assert failure.kind is Kind.RAISED
    assert "ZeroDivisionError: no ratio" in failure.where


def test_lossy_rule_passes_with_its_deviation_stated() -> None:
    report = check(RULES["typical"], QUICK)
    assert report.passed
    assert not report.is_lossless
    assert report.deviation > 0.1


PENALIZED = SamplingParams(repetition_penalty=1.8, presence_penalty=0.5, temperature=0.9)
SOUND_ROUNDS = [
    (Round, 2, None),
    (Round, 0, None),
    (Round, 2, PENALIZED),
    (Round, 2, SamplingParams(top_k=2, temperature=0.8)),
    (M.SparseRound, 2, SamplingParams(top_k=2)),
    (M.RedrawsAfresh, 1, None),
]
WRONG_ROUNDS = [
    (M.DrawsInBfloat16, 2, None),
    (M.TemperatureOnOneSide, 2, None),
    (M.TopKBeforeDrawing, 2, None),
    (M.DropsUnlikelyTokens, 1, None),
    (M.SharesNoise, 2, None),
    (M.RedrawsUnderTheSameKey, 1, None),
    (M.PenaltiesAtTheLastPlace, 2, PENALIZED),
    (M.PenaltiesOfThePromptAlone, 2, PENALIZED),
]


def rounds(cases: list) -> pytest.MarkDecorator:
    ids = [f"{kind.__name__}-{length}" + ("-processed" if sampling else "") for kind, length, sampling in cases]
    return pytest.mark.parametrize(("kind", "length", "sampling"), cases, ids=ids)


@rounds(SOUND_ROUNDS)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_whole_round_of_the_product_is_exact(kind: type, length: int, sampling: SamplingParams, rule: str) -> None:
    report = check_round(kind(RULES[rule], random_pairs(3)[2], length, sampling))
    assert report.is_exact
    assert report.deviation < 1e-11


@rounds(WRONG_ROUNDS)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_mistake_around_a_rule_is_seen(kind: type, length: int, sampling: SamplingParams, rule: str) -> None:
    report = check_round(kind(RULES[rule], random_pairs(3)[2], length, sampling))
    assert report.is_exact
    assert report.deviation > 1e-5


def test_residual_mass_of_sparse_drafts_that_forgets_the_targets_mass_elsewhere_is_seen() -> None:
    """Only the block rule asks for the mass, and only inside a block."""
    pair = adversarial_pairs(3)[1]
    assert pair.name == "drafter of smaller support"
    assert check_round(M.SparseRound(RULES["block"], pair, 2)).deviation < 1e-11
    report = check_round(M.ForgetfulSparseRound(RULES["block"], pair, 2))
    assert report.is_exact
    assert report.deviation > 1e-4


# --- the parts of the checker


def test_integral_of_tests_and_inverse_distribution_functions_is_exact() -> None:
    """Thresholds that depend on how other tests went, some of them tiny, none on a grid."""
    thresholds = torch.tensor([[1e-7, 0.3], [0.123456789, 1 - 1e-9]], dtype=torch.float64)

    def decision(cases: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        own = thresholds[cases]
        first = numbers[:, 0] < own[:, 0]
        second = numbers[:, 1] < torch.where(first, own[:, 1], own[:, 0] / 3)
        return 2 * first.long() + second.long()

    measure = integrate(decision, 2, 2, 4)
    assert measure.is_exact
    for case, (a, b) in enumerate(thresholds.tolist()):
        expected = torch.tensor([(1 - a) * (1 - a / 3), (1 - a) * a / 3, a * (1 - b), a * b], dtype=torch.float64)
        assert largest_deviation(measure.probs[case], expected) < 1e-11


def test_integral_over_a_curved_boundary_is_sampled() -> None:
    measure = integrate(lambda _, numbers: (numbers[:, 0] * numbers[:, 1] < 0.5).long(), 1, 2, 2)
    assert not measure.is_exact
    assert float(measure.probs[0, 1]) == pytest.approx(0.5 - 0.5 * math.log(0.5), abs=2e-3)


def test_small_corner_of_the_cube_is_found() -> None:
    measure = integrate(lambda _, numbers: (numbers < 1e-4).all(dim=1).long(), 1, 3, 2)
    assert measure.is_exact
    assert float(measure.probs[0, 1]) == pytest.approx(1e-12, abs=1e-15)


def test_edge_points_hold_both_ends() -> None:
    assert sorted(edge_points(1)[:, 0].tolist()) == [0.0, 0.5, LAST]
    assert len(edge_points(2)) == 9
    many = edge_points(12)
    assert (many == 0.0).all(dim=1).any()
    assert (many == LAST).all(dim=1).any()


def test_codes_count_all_texts_without_gaps() -> None:
    texts = [(counts, torch.cartesian_prod(*[torch.arange(3)] * counts).reshape(-1, counts)) for counts in (1, 2, 3)]
    codes = [
        encoded(torch.nn.functional.pad(text, (0, 3 - count)), torch.full((len(text),), count), 3)
        for count, text in texts
    ]
    assert torch.equal(torch.cat(codes), torch.arange(num_codes(3, 3)))


@pytest.mark.parametrize("vocab_size", [3, 5])
def test_law_of_coupled_races_has_the_models_laws_as_its_margins_and_its_witnesses_win(vocab_size: int) -> None:
    for pair in random_pairs(vocab_size) + adversarial_pairs(vocab_size):
        law = race_law(pair.target, pair.drafter)
        assert largest_deviation(law.probs.sum(dim=2), pair.drafter) < 1e-12
        assert largest_deviation(law.probs.sum(dim=1), pair.target) < 1e-12
        context, drafted, wanted = (law.probs > 1e-13).nonzero(as_tuple=True)
        for times in law.times[:, context, drafted, wanted]:
            assert torch.equal(race(pair.drafter[context], times).winners, drafted)
            assert torch.equal(race(pair.target[context], times).winners, wanted)


def test_law_of_coupled_races_equals_a_sample() -> None:
    """100,000 races: a cell is off by more than 0.01 with a chance below 1e-9."""
    pair = random_pairs(4)[2]
    times = torch.empty(100_000, 4, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(1))
    drafted, wanted = (race(table[-1:].expand(len(times), -1), times).winners for table in (pair.drafter, pair.target))
    counts = torch.bincount(drafted * 4 + wanted, minlength=16).reshape(4, 4) / len(times)
    assert largest_deviation(counts, race_law(pair.target, pair.drafter).probs[-1]) < 0.01


def test_sparse_rows_hold_the_same_distributions_with_places_unused() -> None:
    blocks = all_blocks(adversarial_pairs(4)[1], 2, sparse_rows)
    rows = blocks.batch.draft
    assert largest_deviation(rows.dense(), all_blocks(adversarial_pairs(4)[1], 2).batch.draft.dense()) == 0.0
    assert bool((rows.probs == 0.0).any())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tokn", "unknown rule 'tokn'; known: block, token"),
        ("no.such.module", "ModuleNotFoundError"),
        ("mutations:NoSuchRule", "AttributeError"),
        ("mutations:Textbook.name", "has no method decide"),
        ("mutations.ShiftedNoise", "cannot make a rule"),
        ("mutations.SamplingParams", "has no method decide"),
        ("mutations:torch.nn.Identity", "has no method decide"),
    ],
)
def test_name_of_no_rule_is_refused_in_one_line(name: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        load_rule(name)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mutations.TextbookToken", "mutations:TextbookToken"])
def test_users_rule_is_found_by_its_dotted_name(name: str) -> None:
    assert isinstance(load_rule(name), mutations.TextbookToken)


def test_command_line_prints_a_row_for_each_rule_and_exits_with_0() -> None:
    result = CliRunner().invoke(app, ["check-rule", "typical", "coupled"])
    assert result.exit_code == 0, result.output
    assert "lossy, as declared" in result.output
    assert "10/9" in result.output


def test_command_line_exits_with_1_for_a_wrong_rule_and_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_rules.py").write_text(
        "from draftwire.verification import StopLaw, TokenRule\n\n\n"
        "class Hasty(TokenRule):\n"
        "    name = 'hasty'\n\n"
        "    def stop_law(self, blocks):\n"
        "        law = super().stop_law(blocks)\n"
        "        return StopLaw(law.accepted_probs.flip(1), law.residual_scales)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    result = CliRunner().invoke(app, ["check-rule", "users_rules.Hasty"])
    assert result.exit_code == 1
    assert "failed" in result.output
    assert "not distributed as the target's" in result.output


def test_command_line_exits_with_2_for_an_unknown_rule() -> None:
    result = CliRunner().invoke(app, ["check-rule", "block", "tokn"])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "unknown rule 'tokn'" in result.output
