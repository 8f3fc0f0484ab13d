"""Import paths, by which users name objects of their own."""

import importlib
import os
import sys
from collections.abc import Callable

from draftwire.errors import InvalidRequestError


def named_by(path: str) -> object:
    """Returns what an import path names: `package.module:Attribute` or `package.module.Attribute`.

    The current directory is searched first.

    Raises:
        InvalidRequestError: it cannot be imported; the message is one line.
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # a module may raise anything on import
        raise InvalidRequestError(f"cannot import {path!r}: {one_line(error)}") from error
    finally:
        sys.path.remove(os.getcwd())
    return found


def made_by(maker: Callable[..., object], path: str, what: str, *arguments: object) -> object:
    """Returns what a class or function that an import path names makes of some arguments; `what` is said in the error.

    Raises:
        InvalidRequestError: it raised something; the message is one line.
    """
    try:
        return maker(*arguments)
    except Exception as error:
        raise InvalidRequestError(f"cannot make a {what} of {path!r}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Returns the first line of an error's text, behind its type."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
