"""Names that are elsewhere now: whoever uses an old one is told the new one. docs/upgrade.md lists them."""

import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftwire.checking.rules_to_check import load_rules
from draftwire.cli.__main__ import app
from draftwire.errors import InvalidRequestError
from draftwire.options.trees.tree_choice import tree_rule_named
from draftwire.verification import MOVED_RULES, new_rule, rule_named
from draftwire.verification.rule_loading import load_rule

UPGRADE = (Path(__file__).parents[2] / "docs" / "upgrade.md").read_text()
RULES = {f"draftwire.verification.{place.rpartition(':')[2]}": place for place in MOVED_RULES.values()}
MOVED = {"draftwire.vllm.RemoteDrafter": "vllm_remote_drafter.RemoteDrafter", **RULES}


def read(path: str) -> object:
    """Returns what an import path names, `package.module.Name`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_old_name_says_the_new_one_which_is_there(old: str, new: str) -> None:
    module, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match=new):
        exec(f"from {module} import {name}")
    with pytest.raises(ImportError, match=new):
        read(old)
    assert read(new.replace(":", ".")).__name__ == name  # type: ignore[attr-defined]
    assert f"`{new}`" in UPGRADE
    assert not hasattr(importlib.import_module(module), "Anything")


@pytest.mark.parametrize(("name", "place"), MOVED_RULES.items())
def test_old_name_of_a_rule_says_where_it_is(name: str, place: str) -> None:
    for find in (rule_named, new_rule, tree_rule_named, load_rule):
        with pytest.raises(InvalidRequestError, match=f"{name} is now {place}"):
            find(name)
    result = CliRunner().invoke(app, ["check-rule", "block", name])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert place in result.output
    rules, tree_rules = load_rules([place])
    assert [rule.name for rule in (*rules, *tree_rules)] == [name]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--shape", "370m", "--out", "x", "more")])
def test_old_command_says_the_new_one(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["synth", *arguments])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "python -m tools.synth" in result.output
    assert "`python -m tools.synth`" in UPGRADE
    assert "synth" not in CliRunner().invoke(app, ["--help"]).output
