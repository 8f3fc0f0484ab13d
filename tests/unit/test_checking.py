"""The checker of rules: what is sound passes, and every mistake is seen for what it is."""

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import mutations
import pytest
import torch
from cases import every
from typer.testing import CliRunner

from draftwire.checking import Kind, Round, check, check_round, check_trees, checks, known_rules, load_rule, tree_checks
from draftwire.checking.all_blocks import all_blocks, sparse_rows
from draftwire.checking.checks import CheckPlan, Size
from draftwire.checking.coupling import race_law
from draftwire.checking.cube import LAST, edge_points, integrate
from draftwire.checking.emissions import encoded, largest_deviation, num_codes
from draftwire.checking.report import Findings, RuleReport
from draftwire.checking.theory import EXPECTATIONS
from draftwire.checking.toy_models import adversarial_pairs, random_pairs
from draftwire.cli.__main__ import app
from draftwire.errors import InvalidRequestError
from draftwire.method.distributions import race
from draftwire.options.trees.token_tree import TokenTree
from draftwire.requests.parameters import SamplingParams
from draftwire.verification import RULES, TREE_RULES, TreeRule, VerificationRule
from examples.rules.greedy_block import GreedyBlockRule
from examples.rules.k_seq import KSeqRule
from examples.rules.multi_round import MultiRoundRule, WithoutReplacementRule

SEEN = 1e-6
"""A deviation above this is no rounding."""


SMALL = CheckPlan(
    stated=(Size(3, ((2,),), num_random=2),),
    decided=(Size(3, ((2,),), num_random=2, is_adversarial=False),),
    coupled=(Size(3, ((2,),), num_random=1),),
    stateful=(Size(3, ((2,),), num_random=1),),
    sampled=(Size(3, ((2,),), num_random=1, is_adversarial=False),),
    edges=(1, 2),
)
"""Enough to see each planted mistake: blocks of two have a token before and one after the one that is judged."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few batches are enough, no planted mistake is one of an encoding, and the report's means, which decide nothing,
    may be of blocks of one."""
    monkeypatch.setattr(checks, "BATCH_REPEATS", 3)
    monkeypatch.setattr(checks, "COMPARED_LENGTH", 1)
    for of_encodings in ("_check_sparse", "_check_wire"):
        monkeypatch.setattr(checks, of_encodings, lambda rule, findings: None)
    monkeypatch.setattr("draftwire.checking.check", partial(check, plan=SMALL))  # which the command line asks for


FAST = CheckPlan(
    stated=(Size(3, ((0,), (1,), (3,), (2, 0, 3, 1))), Size(4, ((2,),))),
    decided=(Size(3, ((1,), (2,)), num_random=2),),
    coupled=(Size(3, ((1,), (2, 0, 1))),),
    stateful=(Size(3, ((1,), (2,), (3,)), num_random=1),),
    sampled=SMALL.sampled,
    edges=(1, 2, 3),
)
"""Blocks that are cut off, empty ones between others, and modifications that nest."""


TOY_NINTHS = {"token": 10, "block": 11, "coupled": 10, "greedy_block": 12, "typical": 18}
"""Mean numbers of accepted tokens in the example of Sun et al. 2024, section 2, times nine."""


@pytest.mark.slow
@every("rule", [*map(load_rule, known_rules()), GreedyBlockRule()])
def test_rules_of_the_product_and_greedy_block_pass(rule: VerificationRule) -> None:
    """Larger vocabularies and longer blocks: `make check-rules`."""
    report, name = check(rule, FAST), rule.name
    assert report.failures == ()
    assert report.name == name
    assert report.num_laws > 25
    assert report.toy_accepted == pytest.approx(TOY_NINTHS[name] / 9, abs=1e-11)
    if report.is_lossless:
        assert report.deviation < 1e-11
        assert report.accepted == pytest.approx(report.expected_accepted, abs=1e-11)
    else:
        assert report.deviation > 0.1, "a lossy rule passes with its deviation stated"


@pytest.mark.slow
@pytest.mark.usefixtures("_briefly")
@every(
    ("rule", "method", "tolerance"),
    [
        (mutations.TextbookToken, "decided", 1e-11),
        (mutations.TextbookBlock, "decided", 1e-11),
        (mutations.RacedToken, "stated", 1e-11),
        (mutations.Coupled, "coupled", 1e-11),
        (mutations.ExactMatchByRaces, "sampled", 0.05),
    ],
)
def test_sound_implementation_of_another_hand_passes(rule: Callable, method: str, tolerance: float) -> None:
    report = check(rule(), SMALL)
    assert (report.failures, report.method) == ((), method)
    assert report.deviation < tolerance
    name = {mutations.TextbookToken: "token", mutations.TextbookBlock: "block"}.get(rule)
    if name is not None:
        mean = sum(float(EXPECTATIONS[name](pair, checks.COMPARED_LENGTH)[-1]) for pair in random_pairs(3)) / len(
            random_pairs(3)
        )
        assert report.accepted == pytest.approx(mean, abs=1e-11)


M = mutations
FEW_SHAPES = (TokenTree((-1, -1)), TokenTree((-1, -1, 0, 0)))
WRONG_TREE_RULES = [
    (M.TraversalTwice, Kind.LAW),
    (M.TraversalWithoutLaw, Kind.NO_LAW),
    (M.TraversalDrawsOther, Kind.DRAWING),
    (M.WalkWithOneUniform, Kind.NOISE),
    (M.RaisesOnTrees, Kind.RAISED),
]
WRONG_RULES = [
    *((rule, Kind.LAW) for rule in M.OTHER_LAWS),
    (M.StatesNegativeProbabilities, Kind.NO_LAW),
    (M.LossyAtGreedyTarget, Kind.GREEDY),
    (M.AcceptsLess, Kind.ACCEPTED),
    (M.DrawsWithTheTestsUniform, Kind.DRAWING),
    (M.ForgetsItsRounds, Kind.DRAWING),
    (M.NotStrict, Kind.IMPOSSIBLE),
    (M.CoupledResidual, Kind.LAW),
    (M.CoupledLooksAhead, Kind.NOISE),
    (M.CoupledWithTolerance, Kind.NOISE),
    (M.EndOfTheLongestBlock, Kind.BATCH),
    (M.CoupledDependsOnTheBatch, Kind.BATCH),
]


@pytest.mark.slow
@pytest.mark.usefixtures("_briefly")
@every(("rule", "kind"), WRONG_RULES)
def test_mistake_in_a_rule_is_seen(rule: Callable, kind: Kind) -> None:
    report = check(rule(), SMALL)
    sizes = {failure.kind: failure.size for failure in report.failures}
    assert Kind.RAISED not in sizes
    assert sizes.get(kind, 0.0) > SEEN
    assert not report.passed


def test_sparse_rows_without_the_targets_other_mass_are_seen() -> None:
    kinds = [failure.kind for failure in check(M.ForgetsTheRest(), SMALL).failures]
    assert kinds == [Kind.SPARSE, Kind.WIRE]


def test_rule_that_raises_fails_and_says_what_it_raised() -> None:
    (failure, *_) = check(M.Raises(), SMALL).failures
    assert failure.kind is Kind.RAISED
    assert "ZeroDivisionError: no ratio" in failure.where


def test_worst_failure_of_each_kind_is_kept_and_nan_is_a_failure() -> None:
    cases = [([0.2, 0.4, 0.3], [0.4]), ([0.4, 0.3, 0.2], [0.4]), ([0.05, math.nan, 0.07], [math.nan]), ([0.1], [])]
    for sizes, kept in cases:
        findings = Findings()
        for size in sizes:
            findings.require(Kind.LAW, size, 0.1, "here")
        assert [failure.size for failure in findings.failures] == pytest.approx(kept, nan_ok=True)


PENALIZED = SamplingParams(repetition_penalty=1.8, presence_penalty=0.5, temperature=0.9)
SOUND_ROUNDS = [
    (Round, 2, None),
    (Round, 0, None),
    (Round, 2, PENALIZED),
    (Round, 2, SamplingParams(top_k=2, temperature=0.8)),
    (M.RedrawsAfresh, 1, None),
]
WRONG_ROUNDS = [
    (kind, 1 if kind is M.RedrawsUnderTheSameKey else 2, PENALIZED if kind is M.PenaltiesAtTheLastPlace else None)
    for kind in M.WRONG_ROUNDS
]


def rounds_are_judged(rule: str) -> None:
    cases = [(case, True) for case in SOUND_ROUNDS] + [(case, False) for case in WRONG_ROUNDS]
    for (kind, length, sampling), is_sound in cases:
        report = check_round(kind(RULES[rule], random_pairs(3)[2], length, sampling))
        assert report.is_exact, kind
        assert report.deviation < 1e-11 if is_sound else report.deviation > 1e-5, (kind, length, sampling)


@pytest.mark.slow
def test_whole_round_of_the_product_is_exact_and_a_mistake_is_seen() -> None:
    rounds_are_judged("block")


@pytest.mark.slow
def test_whole_round_of_the_token_rule_is_exact_and_a_mistake_is_seen() -> None:
    rounds_are_judged("token")


# --- the parts of the checker


def test_integral_of_tests_and_inverse_distribution_functions_is_exact() -> None:
    """Thresholds that depend on how other tests went, some of them tiny, none on a grid; and a small corner. What has
    a curved boundary is sampled."""
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
    curved = integrate(lambda _, numbers: (numbers[:, 0] * numbers[:, 1] < 0.5).long(), 1, 2, 2)
    corner = integrate(lambda _, numbers: (numbers < 1e-4).all(dim=1).long(), 1, 3, 2)
    assert (curved.is_exact, corner.is_exact) == (False, True)
    assert float(curved.probs[0, 1]) == pytest.approx(0.5 - 0.5 * math.log(0.5), abs=2e-3)
    assert float(corner.probs[0, 1]) == pytest.approx(1e-12, abs=1e-15)


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


@every("vocab_size", [3, 5])
def test_law_of_coupled_races_has_the_models_margins_and_witnesses_win(vocab_size: int) -> None:
    for pair in random_pairs(vocab_size) + adversarial_pairs(vocab_size):
        law = race_law(pair.target, pair.drafter)
        assert largest_deviation(law.probs.sum(dim=2), pair.drafter) < 1e-12
        assert largest_deviation(law.probs.sum(dim=1), pair.target) < 1e-12
        context, drafted, wanted = (law.probs > 1e-13).nonzero(as_tuple=True)
        for times in law.times[:, context, drafted, wanted]:
            assert torch.equal(race(pair.drafter[context], times).winners, drafted)
            assert torch.equal(race(pair.target[context], times).winners, wanted)
    pair = random_pairs(4)[2]  # 100,000 races: a cell is off by more than 0.01 with a chance below 1e-9
    times = torch.empty(100_000, 4, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(1))
    drafted, wanted = (race(table[-1:].expand(len(times), -1), times).winners for table in (pair.drafter, pair.target))
    counts = torch.bincount(drafted * 4 + wanted, minlength=16).reshape(4, 4) / len(times)
    assert largest_deviation(counts, race_law(pair.target, pair.drafter).probs[-1]) < 0.01


def test_sparse_rows_hold_the_same_distributions_with_places_unused() -> None:
    blocks = all_blocks(adversarial_pairs(4)[1], 2, sparse_rows)
    rows = blocks.batch.draft
    assert largest_deviation(rows.dense(), all_blocks(adversarial_pairs(4)[1], 2).batch.draft.dense()) == 0.0
    assert bool((rows.probs == 0.0).any())


@every(
    ("name", "reason"),
    [
        ("tokn", "unknown rule 'tokn'; known: block, token"),
        ("no.such.module", "ModuleNotFoundError"),
        ("mutations:NoSuchRule", "AttributeError"),
        ("mutations:Textbook.name", "has no method decide"),
        ("mutations.ForgetfulRows", "cannot make a rule"),
        ("mutations:torch.nn.Identity", "has no method decide"),
    ],
)
def test_name_of_no_rule_is_refused_in_one_line(name: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        load_rule(name)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    for found in ("mutations.TextbookToken", "mutations:TextbookToken"):
        assert isinstance(load_rule(found), mutations.TextbookToken)


@pytest.mark.usefixtures("_briefly")
def test_command_line_prints_a_row_for_each_rule_and_exits_with_0_or_2() -> None:
    result = CliRunner().invoke(app, ["check-rule", "typical", "token"])
    assert result.exit_code == 0, result.output
    assert "lossy, as declared" in result.output
    assert "10/9" in result.output
    result = CliRunner().invoke(app, ["check-rule", "block", "tokn"])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "unknown rule 'tokn'" in result.output


@pytest.fixture
def _small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report's means, which decide nothing, may be of small trees and few samples, and few models do."""
    monkeypatch.setattr(tree_checks, "NUM_SAMPLES", 1000)
    monkeypatch.setattr(tree_checks, "MANY_NODES", 0)
    monkeypatch.setattr(tree_checks, "COMPARED_SHAPES", {"2": TokenTree.chain(2), "2, 0": FEW_SHAPES[1]})


@pytest.mark.usefixtures("_small_trees")
@every(
    "rule",
    [*TREE_RULES.values(), MultiRoundRule(), WithoutReplacementRule(), KSeqRule()],
)
def test_rules_for_trees_pass(rule: TreeRule) -> None:
    report, name = check_trees(rule, FEW_SHAPES), rule.name
    assert report.failures == ()
    assert (report.name, report.is_lossless) == (name, True)
    assert report.num_laws >= 2
    assert report.deviation < 1e-12
    chain, tree = report.accepted
    assert chain is not None
    assert 0.2 < chain < 1.0
    assert (tree is None) == (name == "k_seq")
    assert tree is None or 0.3 < tree < 2.0


@pytest.mark.usefixtures("_small_trees")
@every(("rule", "kind"), WRONG_TREE_RULES)
def test_mistake_in_a_rule_for_trees_is_seen_for_what_it_is(rule: Callable, kind: Kind) -> None:
    report = check_trees(rule(), FEW_SHAPES)
    assert not report.passed
    assert kind in {failure.kind for failure in report.failures}


@pytest.mark.usefixtures("_small_trees")
def test_command_line_prints_a_row_for_each_rule_for_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwire.checking.check_trees", partial(check_trees, shapes=FEW_SHAPES[:1]))
    result = CliRunner().invoke(app, ["check-rule", "traversal", "examples.rules.k_seq:KSeqRule"])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert [row[0] for row in rows if row[-1] == "lossless"] == ["traversal", "k_seq"]
    assert [row[-2] for row in rows if row[0] == "k_seq"] == ["-"]
    assert "toy" not in result.output
    monkeypatch.setattr("draftwire.checking.check_trees", lambda rule: check_trees(M.TraversalTwice(), FEW_SHAPES[:1]))
    assert CliRunner().invoke(app, ["check-rule", "traversal"]).exit_code == 1


@pytest.mark.usefixtures("_briefly")
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


@pytest.mark.parametrize(("wrong", "status"), [((), 0), (("block",), 1), (("token",), 1), (("block", "token"), 1)])
def test_command_fails_if_any_of_several_rules_does(
    monkeypatch: pytest.MonkeyPatch, wrong: tuple[str, ...], status: int
) -> None:
    def checked(rule: VerificationRule) -> RuleReport:
        findings = Findings()
        if rule.name in wrong:
            findings.require(Kind.LAW, 1.0, 0.0, "here")
        return RuleReport(rule.name, True, "stated", 1, 0.0, findings.failures, 1.0, None, 1.0, 1.0)

    monkeypatch.setattr("draftwire.checking.check", checked)
    assert CliRunner().invoke(app, ["check-rule", "block", "token"]).exit_code == status
