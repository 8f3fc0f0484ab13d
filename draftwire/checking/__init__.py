"""Checks verification rules: enumerates the distribution of their output on small models, and compares it with the
target's.

`check` checks a rule of any kind, `check_trees` one for trees, `check_round` a whole round of drafting, sending and
verifying.
"""

from draftwire.checking.checks import check
from draftwire.checking.report import Failure, Kind, RuleReport, TreeReport
from draftwire.checking.stateful import StatefulRule
from draftwire.checking.tree_checks import check_trees
from draftwire.checking.whole_round import Round, RoundReport, check_round
from draftwire.verification.rule_loading import known_rules, load_rule

__all__ = [
    "Failure",
    "Kind",
    "Round",
    "RoundReport",
    "RuleReport",
    "StatefulRule",
    "TreeReport",
    "check",
    "check_round",
    "check_trees",
    "known_rules",
    "load_rule",
]
