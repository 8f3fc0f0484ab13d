"""Drafting strategies by name and by import path: the example runs in a whole drafter, and its texts have the law."""

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from observing import until
from test_drafter_core import FakeLink, make_calibration, make_spec

from draftwire.drafting.strategies import STRATEGIES, TEXTS, load_strategy
from draftwire.engine.ranks.place import Place
from draftwire.errors import InvalidRequestError
from draftwire.method.encoding import Claim, Supports, decode_one
from draftwire.options.heads.head_names import HEAD_NAMES
from draftwire.options.model_free.names import TEXT_DRAFTER_NAMES
from draftwire.runtime.settings import ModelSettings
from draftwire_drafter.config import DrafterConfig, DraftSettings
from draftwire_drafter.core import DrafterCore
from draftwire_drafter.strategy_context import ConfiguredContext
from examples.strategies.text_frequencies import TextFrequencies
from tests.enumerated.cases import tables
from tests.enumerated.scenes import BOUND, Scene
from tests.enumerated.tables import POSITIONS

EXAMPLE = "examples.strategies.text_frequencies:TextFrequencies"
ROOT = Path(__file__).parents[2]


def config_of(strategy: str, model: str = "scripted:") -> DrafterConfig:
    return DrafterConfig(ModelSettings(model), drafts=DraftSettings(strategy=strategy))


def load(strategy: str, model: str = "scripted:") -> Any:
    context = ConfiguredContext(config_of(strategy, model), SimpleNamespace(place=Place()))  # type: ignore[arg-type]
    return load_strategy(strategy, context)


async def test_example_drafts_in_a_drafter_that_is_told_its_import_path() -> None:
    link = FakeLink(lambda: None)
    core = DrafterCore(config_of(EXAMPLE), AsyncMock(return_value=link))
    await core.start()
    running = asyncio.create_task(core.run())
    lease_id, _ = core.open_lease()
    await asyncio.wait_for(core.open_session(make_spec(1), lease_id), 10.0)
    core.calibrate(make_calibration(1))
    await until(lambda: link.blocks, "no block came")
    running.cancel()
    core.stop()
    (block,) = link.blocks
    decoded = decode_one(Claim(block.token_ids, block.distributions), 320)
    assert isinstance(decoded, Supports)
    assert all(token in row for token, row in zip(block.token_ids, decoded.token_ids.tolist(), strict=True))


class TinyContext:
    """What the example reads of a drafter's configuration."""

    quantization = DraftSettings().quantization

    def __init__(self, vocab_size: int) -> None:
        self._described = SimpleNamespace(context_length=POSITIONS - 1, vocab_size=vocab_size)

    def require_no_weights(self, what: str) -> None:
        """Refuses nothing."""

    def load_card(self) -> Any:
        return SimpleNamespace(description=self._described)

    def limited(self, card: Any) -> Any:
        return card


@pytest.mark.parametrize(("rule", "vocab_size"), [("block", 3), ("token", 3), ("coupled", 2)])
def test_texts_that_the_example_drafts_for_have_the_law_of_the_target(rule: str, vocab_size: int) -> None:
    """Through the services' own code, enumerated over all random numbers."""
    scene = Scene(
        name="a strategy of one's own",
        **tables(2, 3, vocab_size=vocab_size),
        length=4,
        num_draft_tokens=2,
        rule=rule,
        network={"strategy": lambda _: TextFrequencies(TinyContext(vocab_size)), "max_tree_nodes": 0},
        happens=frozenset({"whole block", "rejection"}),
    )
    result = scene.enumerate()
    assert result.deviation < BOUND
    assert result.shown >= scene.happens


def test_names_of_the_librarys_strategies_are_those_of_their_kinds() -> None:
    assert TEXTS == TEXT_DRAFTER_NAMES
    assert {name for name, path in STRATEGIES.items() if ".heads." in path} == set(HEAD_NAMES)


OWN = """
class NoStep:
    context_length = 8
    def __init__(self, context): pass
    def open(self, token_ids, parameters): pass
class NoLength(NoStep):
    context_length = None
    def step(self, draftings): pass
def refuses(context):
    raise ValueError("first line\\nsecond line")
number = 3
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sufix", "unknown strategy 'sufix'; known: auto, suffix, lookup, retrieval, scripted, model, .* of your own"),
        ("suffix+suffix", "unknown strategy"),
        ("model+none", "unknown strategy"),
        ("no_such_module:Strategy", "cannot import 'no_such_module:Strategy': ModuleNotFoundError"),
        ("own_strategies.Missing", "cannot import 'own_strategies.Missing': AttributeError"),
        ("own_strategies:NoStep", r"is no drafting strategy: it has no method step\(draftings\)"),
        ("own_strategies:NoLength", r"is no drafting strategy: it has no context_length \(int\)"),
        (
            "own_strategies:refuses",
            "cannot make a drafting strategy of 'own_strategies:refuses': ValueError: first line$",
        ),
        ("own_strategies:number", "neither a class nor a function"),
    ],
)
def test_name_that_is_no_strategy_is_refused_in_one_line(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_strategies.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequestError, match=said) as refused:
        load(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["scripted", EXAMPLE])
def test_strategy_imports_no_other_one(name: str) -> None:
    code = f"""
import sys
from types import SimpleNamespace
from draftwire.drafting.strategies import load_strategy
from draftwire.engine.ranks.place import Place
from draftwire.runtime.settings import ModelSettings
from draftwire_drafter.config import DrafterConfig, DraftSettings
from draftwire_drafter.strategy_context import ConfiguredContext
config = DrafterConfig(ModelSettings("scripted:"), drafts=DraftSettings(strategy={name!r}))
load_strategy({name!r}, ConfiguredContext(config, SimpleNamespace(place=Place())))
print([name for name in sys.modules if name.startswith("draftwire.drafting.")])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(eval(done.stdout))
    strangers = ("cascade_drafter", "language_model", "model_free_drafter", "fed_head", "tree_drafting")
    assert not [module for module in loaded if module.endswith(strangers)]
