"""What drafters say of themselves when they connect to a verifier, for tests."""

from dataclasses import replace
from typing import Any

from draftwire.method.rounds import DrafterIdentity
from draftwire_verifier.drafters import Greeting


def greet(identity: DrafterIdentity | None = None, origin: str = "certificate a", **changes: Any) -> Greeting:
    """Returns the greeting of a drafter that is new, or shows an identity."""
    return replace(Greeting("small", origin, 1, identity), **changes)
