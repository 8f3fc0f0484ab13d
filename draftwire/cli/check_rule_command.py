"""`draftwire check-rule`: prove verification rules by enumeration."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from draftwire.cli.exits import FAILED, MISUSED, end
from draftwire.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.table import Table

    from draftwire.checking import RuleReport, TreeReport
    from draftwire.checking.report import Report

WIDTH = 104
"""Columns of the table; a narrower terminal wraps it rather than lose digits."""


def check_rule(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="A rule of the product, or package.module:Attribute of your own, for blocks or for trees.",
            show_default="all of the product",
        ),
    ] = None,
) -> None:
    """Prove verification rules by enumeration: compare all that they emit with the target's law.

    Small models, random and adversarial, float64, several rounds; decisions are integrated exactly over their random
    numbers. Exits with 1 if a rule is not what it says, with 2 if there is no such rule.
    """
    from rich.markup import escape

    from draftwire.cli.console import make_console

    try:
        import torch

        from draftwire.checking import check, check_trees
        from draftwire.checking.rules_to_check import load_rules
        from draftwire.checking.tree_checks import COMPARED_SHAPES
        from draftwire.options.trees.tree_choice import TREE_RULES
        from draftwire.verification import RULES
    except ImportError as error:
        end(MISUSED, f"checking rules needs torch: pip install 'draftwire[services]' ({error})")
    torch.set_num_threads(1)  # many small tensors
    try:
        rules, tree_rules = load_rules(names or [*RULES, *TREE_RULES])
    except InvalidRequestError as error:
        end(MISUSED, error)
    reports: list[RuleReport] = []
    tree_reports: list[TreeReport] = []
    with make_console(stderr=True).status("") as status:
        for rule in rules:
            status.update(f"checking {escape(rule.name)}")
            reports.append(check(rule))
        for tree_rule in tree_rules:
            status.update(f"checking {escape(tree_rule.name)} on trees")
            tree_reports.append(check_trees(tree_rule))
    console = make_console()
    console.width = max(console.width, WIDTH)
    if reports:
        headings = "accepted", "by theory", "at most", "toy"
        console.print(_table("rule", headings, reports, map(_numbers, reports)))
        console.print(
            "[dim]accepted: mean of 3 draft tokens in a round, random models; at most: what a lossless rule without "
            "memory can have\ntoy: Sun et al. 2024, section 2, of 2 draft tokens; 12/9 with full information[/dim]",
            soft_wrap=True,
        )
    if tree_reports:
        means = [["-" if mean is None else f"{mean:.3f}" for mean in report.accepted] for report in tree_reports]
        console.print(_table("rule for trees", COMPARED_SHAPES, tree_reports, means))
        console.print(
            "[dim]mean accepted of 6 draft tokens: on a chain, on 2 paths of 3, on 3 of 2, on a tree of 2 children "
            "each; drafts as each rule wants them[/dim]",
            soft_wrap=True,
        )
    everything: list[Report] = [*reports, *tree_reports]
    for report in everything:
        for failure in report.failures:
            console.print(f"[red]{escape(report.name)}[/red]: {escape(str(failure))}", soft_wrap=True)
    if not all(report.passed for report in everything):
        raise typer.Exit(FAILED)


def _table(
    kind: str, headings: Iterable[str], reports: "Sequence[Report]", numbers: Iterable[Iterable[str]]
) -> "Table":
    from rich.markup import escape

    from draftwire.cli.console import make_table

    table = make_table((kind, "law", "texts' laws", "deviation", *headings, "result"), texts=(kind, "law", "result"))
    for report, own in zip(reports, numbers, strict=True):
        facts = report.method, str(report.num_laws), f"{report.deviation:.1e}"
        table.add_row(escape(report.name), *facts, *own, _result(report))
    return table


def _numbers(report: "RuleReport") -> tuple[str, ...]:
    theory = "-" if report.expected_accepted is None else f"{report.expected_accepted:.6f}"
    return f"{report.accepted:.6f}", theory, f"{report.most_accepted:.6f}", f"{report.toy_accepted * 9:.4g}/9"


def _result(report: "Report") -> str:
    if not report.passed:
        return "[red]failed[/red]"
    return "[green]lossless[/green]" if report.is_lossless else "[yellow]lossy, as declared[/yellow]"
