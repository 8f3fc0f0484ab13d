"""Names of what guesses tokens from tokens alone."""

SUFFIX, LOOKUP, RETRIEVAL = TEXT_DRAFTER_NAMES = ("suffix", "lookup", "retrieval")
JOINT = "+"
"""Separator of the names of several, of which the longest match counts."""


def parts_of(name: str) -> tuple[str, ...]:
    """Returns the names that a name joins."""
    return tuple(name.split(JOINT))


def are_text_drafters(name: str) -> bool:
    """Whether a name is one of `TEXT_DRAFTER_NAMES`, or joins some of them, each once."""
    parts = parts_of(name)
    return len(set(parts)) == len(parts) and all(part in TEXT_DRAFTER_NAMES for part in parts)
