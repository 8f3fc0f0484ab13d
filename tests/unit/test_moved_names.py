"""Names that are elsewhere now: whoever uses an old one is told the new one. docs/upgrade.md lists them."""

import importlib
from pathlib import Path

import pytest

UPGRADE = (Path(__file__).parents[2] / "docs" / "upgrade.md").read_text()


def read(path: str) -> object:
    """Returns what an import path names, `package.module.Name`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("old", "new"), [("draftwire.vllm.RemoteDrafter", "vllm_remote_drafter.RemoteDrafter")])
def test_old_name_says_the_new_one_which_is_there(old: str, new: str) -> None:
    module, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match=new):
        exec(f"from {module} import {name}")
    with pytest.raises(ImportError, match=new):
        read(old)
    assert read(new).__name__ == name  # type: ignore[attr-defined]
    assert any(f"`{old}`" in line and new in line for line in UPGRADE.splitlines())
    assert not hasattr(importlib.import_module(module), "Anything")
