"""Loads sources of blocks of users' own by import path."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import cast

from draftwire.engine.target_session import LocalSource
from draftwire.errors import InvalidRequestError
from draftwire.method.rounds import TargetSessionSpec
from draftwire.requests.import_paths import named_by

OpenSource = Callable[[TargetSessionSpec, str], LocalSource | None]
"""Opens the source of a strategy for a session; returns None if the strategy is of another kind.

Raises:
    InvalidRequestError: it is of no kind, and it is known why.
"""

MakeSource = Callable[[TargetSessionSpec, int], LocalSource]
"""Makes the source of one session, of its spec and the size of the target's vocabulary."""


def own_sources(paths: Sequence[str], vocab_size: int, taken: Collection[str]) -> dict[str, OpenSource]:
    """Returns how the sources that some import paths name are opened, by the names that requests have for them.

    Args:
        paths: `package.module:Class` each, a `LocalSource` with a `name`; the current directory is searched first.
        vocab_size: of the target.
        taken: names of other strategies.

    Raises:
        InvalidRequestError: a source cannot be loaded, or has no name of its own; the message is one line.
    """
    found: dict[str, OpenSource] = {}
    for path in paths:
        source = named_by(path)
        if not (isinstance(source, type) and issubclass(source, LocalSource)):
            raise InvalidRequestError(f"block_sources: {path} is no class derived from {LocalSource.__name__}")
        name = getattr(source, "name", None)
        if not isinstance(name, str) or not name.isidentifier():
            raise InvalidRequestError(f"block_sources: {path} has no name that is a Python identifier")
        if name in found or name in taken:
            raise InvalidRequestError(f"block_sources: {path} calls itself {name!r}, as another strategy does")
        found[name] = partial(_open, name, cast(MakeSource, source), vocab_size)
    return found


def _open(name: str, make: MakeSource, vocab_size: int, spec: TargetSessionSpec, strategy: str) -> LocalSource | None:
    return make(spec, vocab_size) if strategy == name else None
