"""Loads rules by name: built-in rules, and custom rules by import path."""

from collections.abc import Iterable, Sequence
from typing import cast

from draftwire.errors import InvalidRequestError
from draftwire.requests.import_paths import made_by, named_by
from draftwire.verification import MOVED_RULES, RULES, no_such_rule
from draftwire.verification.rule import VerificationRule, facts_of, is_stateful

ATTRIBUTES = {"name": str, "is_lossless": bool, "needs_draft_probs": bool, "is_coupled": bool}
"""Attributes that a rule has to declare."""


def known_rules() -> tuple[str, ...]:
    """Returns the names of the built-in rules."""
    return tuple(RULES)


def load_rule(name: str) -> VerificationRule:
    """Returns a rule.

    Args:
        name: one of `known_rules`, or `package.module.Attribute` or `package.module:Attribute`: a rule, or a class or
            function that returns a rule without arguments. The current directory is searched first.

    Raises:
        InvalidRequestError: there is no such rule; the message is one line.
    """
    return RULES[name] if name in RULES else as_rule(name, imported(name, RULES))


def imported(name: str, known: Iterable[str]) -> object:
    """Returns what an import path names; of a class or function, what it makes."""
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if name in MOVED_RULES:
        raise no_such_rule(name, known)
    if not module_name or not attribute:
        raise InvalidRequestError(
            f"unknown rule {name!r}; known: {', '.join(known)}, or package.module.Attribute of your own"
        )
    found = named_by(name)
    is_rule = hasattr(found, "decide") or hasattr(found, "decide_trees")
    if isinstance(found, type) or (callable(found) and not is_rule):
        return made_by(found, name, "rule")
    return found


def served_rules(own: Sequence[str]) -> dict[str, VerificationRule]:
    """Returns the rules that a server offers, by name: built-in rules, then custom ones.

    Raises:
        InvalidRequestError: a rule cannot be loaded, or two rules have the same name.
    """
    rules = dict(RULES)
    for path in own:
        rule = load_rule(path)
        try:
            name = facts_of(rule).name
        except InvalidRequestError as error:
            raise InvalidRequestError(f"rules: {path}: {error}") from error
        if is_stateful(rule):
            raise InvalidRequestError(
                f"rules: {path} remembers what it decided, and one object decides for all sessions"
            )
        if name in rules:
            raise InvalidRequestError(f"rules: {path} calls itself {name!r}, as another rule does")
        rules[name] = rule
    return rules


def as_rule(name: str, found: object) -> VerificationRule:
    """Returns what an import path named as a rule for chains.

    Raises:
        InvalidRequestError: it is none.
    """
    if not callable(getattr(found, "decide", None)):
        raise InvalidRequestError(f"{name!r} is no verification rule: it has no method decide(blocks, noise)")
    check_attributes(name, found)
    return cast(VerificationRule, found)


def check_attributes(name: str, found: object) -> None:
    """Checks that a rule declares what it has to.

    Raises:
        InvalidRequestError: it does not.
    """
    for attribute, kind in ATTRIBUTES.items():
        if not isinstance(getattr(found, attribute, None), kind):
            raise InvalidRequestError(f"{name!r} is no verification rule: it has no {attribute} ({kind.__name__})")
    rule = cast(VerificationRule, found)
    if rule.is_coupled and rule.needs_draft_probs:
        raise InvalidRequestError(
            f"{name!r} is no verification rule: where drafts are coupled, no distributions travel that it could ask for"
        )
