"""What the checker notes of a rule's mistakes, and what its command makes of several reports."""

import math

import mutations
import pytest
import torch
from typer.testing import CliRunner

import draftwire.checking
from draftwire.checking import Kind, check
from draftwire.checking.checks import QUICK
from draftwire.checking.report import Findings, RuleReport
from draftwire.cli.__main__ import app
from draftwire.verification import BlockBatch, Noise, Outcome, VerificationRule


def sizes_of(findings: Findings) -> list[float]:
    return [failure.size for failure in findings.failures]


def test_worst_failure_of_each_kind_is_kept_in_any_order() -> None:
    for sizes in ([0.1, 0.3, 0.2], [0.3, 0.2, 0.1]):
        findings = Findings()
        for size in sizes:
            findings.require(Kind.LAW, size, 0.01, "here")
        assert sizes_of(findings) == [0.3]


def test_what_is_no_number_is_a_failure() -> None:
    findings = Findings()
    for size in (0.5, math.nan, 0.7):
        findings.require(Kind.LAW, size, 1.0, "here")
    (size,) = sizes_of(findings)
    assert math.isnan(size)


def test_what_is_tolerated_is_no_failure() -> None:
    findings = Findings()
    findings.require(Kind.LAW, 0.01, 0.01, "here")
    assert findings.failures == ()


class CoupledDependsOnTheBatch(mutations.Coupled):
    """Accepts nothing where the batch has a certain size; the texts stay right."""

    def decide(self, blocks: BlockBatch, noise: Noise) -> Outcome:
        outcome = super().decide(blocks, noise)
        if blocks.batch_size != 17:
            return outcome
        p = blocks.padded_target_probs()[:, 0]
        rows = torch.arange(blocks.batch_size)
        times = noise.exponentials(rows, torch.zeros_like(rows), p.shape[1])
        return Outcome(torch.zeros_like(outcome.num_accepted), (p / times).argmax(dim=1))


def test_coupled_rule_that_depends_on_its_batch_is_seen() -> None:
    kinds = {failure.kind for failure in check(CoupledDependsOnTheBatch(), QUICK).failures}
    assert Kind.BATCH in kinds


@pytest.mark.parametrize(("wrong", "status"), [((), 0), (("block",), 1), (("token",), 1), (("block", "token"), 1)])
def test_command_fails_if_any_of_several_rules_does(
    monkeypatch: pytest.MonkeyPatch, wrong: tuple[str, ...], status: int
) -> None:
    def checked(rule: VerificationRule) -> RuleReport:
        findings = Findings()
        if rule.name in wrong:
            findings.require(Kind.LAW, 1.0, 0.0, "here")
        return RuleReport(rule.name, True, "stated", 1, 0.0, 1.0, None, 1.0, 1.0, findings.failures)

    monkeypatch.setattr(draftwire.checking, "check", checked)
    assert CliRunner().invoke(app, ["check-rule", "block", "token"]).exit_code == status
